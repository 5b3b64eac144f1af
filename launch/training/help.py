"""`train.py --help`, from the same legal names that the check uses. Imports nothing heavy."""

from __future__ import annotations

import textwrap

from recipes import legal
from recipes.catalog import RECIPES

_INTRODUCTION = """\
usage: recipes train [--num_processes N] [--recipe NAME|FILE] [--config FILE] [model and data flags] [Trainer flags]
       accelerate launch [--config_file YAML] [--num_processes N] train.py [the same flags]

With no model and data it trains a small byte-level decoder on the Python standard library's own source.
Precedence: command line > --config file > recipe > library default.

To stop a run with all saved, send SIGTERM, SIGUSR1 or SIGHUP to `recipes train`, to `recipes submit local` or to any
rank. `accelerate launch` and torchrun take SIGTERM and SIGHUP, and kill a rank that needs more than 30 seconds for its
step and its save (TORCH_ELASTIC_SHUTDOWN_TIMEOUT says how many); they die of SIGUSR1, and their ranks still save.
"""

_OWN = """\
  mine.yaml     one of your own: `base: fast`, a `purpose`, and `changes` with lines such as
                learning_rate: [5.0e-5, "the reason"]; `engine` and `micro_batch_cap` are optional
  mine.py:name  a function of your file that returns a recipes.catalog.Recipe"""


def train_help() -> str:
    recipes = "\n".join(f"  {name:<14}{recipe().purpose}" for name, recipe in RECIPES.items())
    own = "\n".join(_line(field) for field in legal.run_flags().values())
    theirs = textwrap.fill(
        ", ".join(f"--{name}" for name in legal.trainer_fields()),
        width=110,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    version = legal.version("transformers")
    return (
        f"{_INTRODUCTION}\nRecipes (recipes show NAME explains one):\n{recipes}\n{_OWN}\n\n"
        f"Run, model and data:\n{own}\n\n"
        f"Every field of TrainingArguments (transformers {version}):\n{theirs}\n"
    )


def _line(field: legal.Field) -> str:
    default = f" [{field.default}]" if field.default not in (None, False) else ""
    choices = f" ({', '.join(field.choices)})" if field.choices else ""
    return textwrap.fill(
        f"{field.help}{choices}{default}",
        width=110,
        initial_indent=f"  --{field.name:<26} ",
        subsequent_indent=" " * 31,
    )
