"""Use accelerate-recipes in a script: `from recipes import fast; args = fast(output_dir="out")`.

Importing this package imports neither torch nor transformers. Calling a recipe imports both.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from recipes.errors import Problem, UserError

if TYPE_CHECKING:
    from recipes.factories import baseline, fast, memory, memory_zero3, recipe, sharded, standard
    from recipes.planner.plan import plan_memory

__all__ = [
    "Problem",
    "UserError",
    "baseline",
    "fast",
    "memory",
    "memory_zero3",
    "plan_memory",
    "recipe",
    "sharded",
    "standard",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import factories and planner only on first use, because `recipes list` needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module("recipes.planner.plan" if name == "plan_memory" else "recipes.factories")
    return getattr(module, name)
