"""Functions that return a recipe's TrainingArguments, for your own script."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import warnings
from typing import TYPE_CHECKING, Any

from recipes import legal
from recipes.errors import mistake
from recipes.quiet import silence
from recipes.rules.check import require_legal
from recipes.rules.probe import arguments_for
from recipes.run import RunSpec, find_recipe, here, resolve
from recipes.run.engine import from_environment
from recipes.run.files import launch_with

if TYPE_CHECKING:
    from transformers import TrainingArguments


def recipe(name: str):
    """Return a function that builds the TrainingArguments of a recipe, shipped or the user's own.

    Raises `UserError` if there is no such recipe, or if its file has a mistake.
    """
    chosen = find_recipe(name)

    def build(
        output_dir: str | None = None,
        *,
        args_class: type | None = None,
        num_processes: int | None = None,
        **overrides: Any,
    ) -> TrainingArguments:
        with silence():  # bitsandbytes logs that it found no kernel
            from transformers import TrainingArguments

        wanted = args_class or TrainingArguments
        given = {"output_dir": output_dir, **overrides} if output_dir is not None else overrides
        if not dataclasses.is_dataclass(wanted):
            raise mistake("args_class", f"{wanted!r} is no dataclass", "pass a subclass of TrainingArguments")
        fields = {field.name for field in dataclasses.fields(wanted)}
        for missing in sorted(given.keys() & legal.run_flags().keys() - fields - {"global_batch_size"}):
            what = f"{wanted.__name__} has no such field, so the value would be ignored"
            raise mistake(missing, what, "handle it in your script, or train with `recipes train`")
        # Two kinds of values go to the subclass unchecked: a value for a field that we do not know,
        # and None for one of our flags. TRL's `max_length=None`, for example, cuts nothing off.
        own = {
            name: value
            for name, value in given.items()
            if name in fields and (name not in legal.settings() or (value is None and name in legal.run_flags()))
        }
        run = resolve(
            place=here(
                num_processes or int(os.environ.get("WORLD_SIZE", 1)),
                local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or None,
                trained_by="script",
            ),
            settings={"recipe": name, **{name: value for name, value in given.items() if name not in own}},
        )
        require_legal(run)
        _warn_without_engine(run)
        added = fields - legal.trainer_fields().keys()  # SFTConfig also has packing, ...
        shared = {name: setting.value for name, setting in run.chosen().items() if name in added}
        return arguments_for(run, wanted, {**shared, **own})

    build.__name__ = build.__qualname__ = chosen.name
    build.__doc__ = f"""{chosen.purpose}

    Returns `args_class` (TrainingArguments or a subclass such as TRL's SFTConfig) for this machine.
    `num_processes` is the environment's WORLD_SIZE if not given. `global_batch_size` (16 examples
    per optimizer step over all processes if not given) is split into micro-batch and accumulation;
    any other keyword overrides the recipe. Raises `UserError` for illegal settings or combinations,
    and for a setting that `args_class` refuses or lacks. What only the script knows, such as
    its metrics, is not checked. Warns if no launcher has set up the recipe's engine. To give DDP
    settings such as `gradient_as_bucket_view`, call `launch.training.trainer.apply_ddp_settings(trainer,
    {{"gradient_as_bucket_view": True, "ddp_comm_hook": "no"}})`.
    """
    return build


def _warn_without_engine(run: RunSpec) -> None:
    """Warn if no launcher has set up the recipe's engine, because Trainer then silently trains
    without sharding and offload. If the argument `deepspeed` or `fsdp` is given, Trainer itself
    sets up the engine in the launched processes, so there is no warning.
    """
    wanted, launched = run.engine, from_environment(run.place.environment)
    if wanted.kind in ("single", "ddp") or run["fsdp"] or run["deepspeed"]:
        return
    is_there = launched is not None and (launched.kind, launched.zero_stage) == (wanted.kind, wanted.zero_stage)
    if is_there or run.place.environment.get("RANK", "0") != "0":
        return
    what = f"{wanted.title} needs a launcher: this script trains with {launched.title if launched else 'one process'}"
    script = shlex.join(sys.argv) if sys.argv[0].endswith(".py") else "SCRIPT.py"
    command = f"{launch_with(run.recipe.engine)} --num_processes {run.world_size} {script}"
    warnings.warn(f"{what} instead. Fix: {command}", stacklevel=3)


baseline = recipe("baseline")
standard = recipe("standard")
fast = recipe("fast")
sharded = recipe("sharded")
memory = recipe("memory")
memory_zero3 = recipe("memory_zero3")
