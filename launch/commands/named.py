"""What a command is given by name: a recipe, resolved here, or a run."""

from __future__ import annotations

from pathlib import Path

from launch.terminal import plural
from recipes.catalog import RECIPES
from recipes.errors import UserError
from recipes.run import RunSpec, here, resolve


def is_run(name: str) -> bool:
    """Whether a name is a run's: a folder or a .json, there or not. Else it is a recipe's."""
    is_recipe = name in RECIPES or name.endswith((".yaml", ".yml")) or ".py" in name
    return not is_recipe and ("/" in name or name.endswith(".json") or Path(name).is_dir())


def resolve_recipe(
    name: str, processes: int | None, global_batch_size: int | None, demonstrate: bool = False
) -> RunSpec:
    """A recipe's run here. Raises `UserError` with every problem."""
    settings = {"recipe": name} | ({"global_batch_size": global_batch_size} if global_batch_size else {})
    run = resolve(place=here(processes, trained_by="train.py" if demonstrate else "nobody"), settings=settings)
    if run.problems:
        raise UserError(*run.problems)
    return run


def print_heading(run: RunSpec) -> None:
    print(f"{run.recipe.name}: {run.recipe.purpose}")
    world = plural(run.world_size, "process")
    print(f"on {run.hardware}, {world}, {run.engine_title} ({run.recipe.engine}), batch {run.batch}\n")
