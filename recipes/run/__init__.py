"""One run: what the user wrote, the recipe, the machine and the engine, put together."""

from recipes.run.command_line import nearest, with_flags
from recipes.run.engine import Json
from recipes.run.fitted import with_fit
from recipes.run.own_recipe import find_recipe
from recipes.run.resolve import resolve
from recipes.run.spec import BATCH, BEST_MODEL, COMMAND_LINE, FIT, HIDDEN, LIBRARY, RunSpec, Setting, Settings, shown

__all__ = [
    "BATCH",
    "BEST_MODEL",
    "COMMAND_LINE",
    "FIT",
    "HIDDEN",
    "LIBRARY",
    "Json",
    "RunSpec",
    "Setting",
    "Settings",
    "find_recipe",
    "nearest",
    "resolve",
    "shown",
    "with_fit",
    "with_flags",
]
