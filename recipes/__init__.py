"""TrainingArguments with reasons: `from recipes import fast; args = fast(output_dir="out")`.

Importing this package imports neither torch nor transformers. Calling a recipe imports both.
"""

from recipes.errors import Problem, UserError
from recipes.factories import baseline, fast, memory, memory_zero3, standard
from recipes.planner.plan import plan_memory

__all__ = ["Problem", "UserError", "baseline", "fast", "memory", "memory_zero3", "plan_memory", "standard"]
__version__ = "0.1.0"
