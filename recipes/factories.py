"""The recipes as functions that return TrainingArguments, for a training script of your own."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from recipes import legal
from recipes.errors import UserError, mistake
from recipes.quiet import silence
from recipes.rules.check import require_legal
from recipes.run import RunSpec, Settings, find_recipe, resolve
from recipes.run.engine import from_environment, launch_with

if TYPE_CHECKING:
    from transformers import TrainingArguments


def recipe(name: str):
    """The factory of a recipe: of a shipped one by its name, or of your own by its file.

    Raises `UserError` if there is none, or if something in the file is wrong.
    """
    chosen = find_recipe(name)

    def build(
        output_dir: str | None = None,
        *,
        args_class: type | None = None,
        num_processes: int | None = None,
        **overrides: Any,
    ) -> TrainingArguments:
        with silence():  # bitsandbytes remarks on a kernel that it did not find
            from transformers import TrainingArguments

        wanted = args_class or TrainingArguments
        given = {"output_dir": output_dir, **overrides} if output_dir is not None else overrides
        _require_a_place(wanted, given)
        own = {name: value for name, value in given.items() if _is_its_own(wanted, name, value)}
        run = resolve(
            settings={"recipe": name, **{name: value for name, value in given.items() if name not in own}},
            world_size=num_processes or int(os.environ.get("WORLD_SIZE", 1)),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or None,
            demonstrate=False,
            own_script=True,
        )
        try:
            require_legal(run)
        except UserError as error:
            raise UserError(*(replace(found, fix=as_keywords(found.fix)) for found in error.problems)) from None
        _warn_without_engine(run)
        return arguments_for(run, wanted, own)

    build.__name__ = build.__qualname__ = chosen.name
    build.__doc__ = f"""{chosen.purpose}

    Returns `args_class` (TrainingArguments or a subclass such as TRL's SFTConfig) for this machine.
    `num_processes` is the environment's WORLD_SIZE if not given. `global_batch_size` (16 examples
    per optimizer step over all processes if not given) is split into micro-batch and accumulation;
    any other keyword overrides the recipe. Raises `UserError` for settings that are not legal
    together, and for a setting that `args_class` has no field for. What only a script knows, such
    as its metrics, is not judged. Warns if no launcher has set up the recipe's engine. DDP settings
    such as `gradient_as_bucket_view` reach DDP by `launch.training.trainer.apply_ddp_settings(trainer, run)`.
    """
    return build


def _is_its_own(args_class: type, name: str, value: object) -> bool:
    """Whether only the subclass knows what a setting means: a field of its own, or a None of ours.

    TRL's `max_length=None`, for example, cuts nothing off.
    """
    return _has(args_class, name) and (name not in legal.settings() or (value is None and name in legal.run_flags()))


def as_keywords(fix: str) -> str:
    """A fix that names flags of train.py, with the keywords of a factory instead."""
    return re.sub(r"--(\w+)(?: (?!(?:with|and|or|in|out)\b)('[^']*'|[\w.+=,-]*\w))?", _keyword, fix)


def _keyword(flag: re.Match[str]) -> str:
    name, value = flag[1], flag[2]
    field = legal.settings().get(name)
    if field is None:
        return flag[0]  # of a launcher
    if "bool" in field.types and value not in ("true", "false"):
        return f"{name}=True" + flag[0].removeprefix(f"--{name}")
    if value is None:
        return name
    if "bool" in field.types:
        return f"{name}={value.capitalize()}"
    is_literal = value.startswith("'") or re.fullmatch(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?", value)
    return f"{name}={value if is_literal else repr(value)}"


def _warn_without_engine(run: RunSpec) -> None:
    """Without its launcher, Trainer silently trains a memory recipe unsharded and not offloaded.

    And `deepspeed` looks for MPI: `ModuleNotFoundError: No module named 'mpi4py'`.
    """
    own, launched = run.engine, from_environment(run.environment)
    own_json = bool(run["deepspeed"])
    if own.kind in ("single", "ddp") or run["fsdp"] or run.environment.get("RANK", "0") != "0":
        return
    if own_json:
        is_there = launched is not None and launched.kind != "single"
    else:
        is_there = launched is not None and (launched.kind, launched.zero_stage) == (own.kind, own.zero_stage)
    shards_nothing = own.kind == "fsdp" and not run.hardware.shards
    if is_there and not shards_nothing:
        return
    instead = "plain DDP" if is_there else launched.title if launched else "one process"
    what = f"the recipe {run.recipe.name} is made for {own.title}, and this script trains on {instead} instead"
    if own_json:
        what = "deepspeed needs a launcher, and this script has none"
    what += ": on a CPU it shards nothing" * shards_nothing
    file = "standard.yaml" if own_json else run.recipe.engine
    script = shlex.join(sys.argv) if sys.argv[0].endswith(".py") else "SCRIPT.py"
    command = f"{launch_with(file)} --num_processes {run.world_size} {script}"
    warnings.warn(f"{what}. Fix: {command}{', with GPUs' * shards_nothing}", stacklevel=3)


def _require_a_place(args_class: type, given: Iterable[str]) -> None:
    """Raises `UserError` for a setting that `args_class` has no field for: it would be ignored."""
    if not dataclasses.is_dataclass(args_class):
        raise mistake(
            "args_class", f"{args_class!r} is not a subclass of TrainingArguments", "a subclass of TrainingArguments"
        )
    for name in given:
        if name in legal.run_flags() and name != "global_batch_size" and not _has(args_class, name):
            what = f"{args_class.__name__} has no such field, so it would be ignored"
            raise mistake(name, what, "do it in your script, or train with `recipes train`")


def arguments_for(run: RunSpec, args_class: type, own: Settings | None = None) -> TrainingArguments:
    """An `args_class` with the values of a run. `own` are fields that only the subclass has."""
    extra = {name: setting.value for name, setting in run.chosen().items() if name not in legal.trainer_fields()}
    shared = {name: value for name, value in extra.items() if _has(args_class, name)}  # SFTConfig has packing, ...
    args = args_class(**{**run.training_arguments(), **shared, **(own or {})})
    # One process drives one GPU. If one process sees several, Trainer would use DataParallel, and
    # multiply the global batch by their number.
    args._n_gpu = min(args.n_gpu, 1)
    return args


def _has(args_class: type, name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(args_class))


baseline = recipe("baseline")
standard = recipe("standard")
fast = recipe("fast")
sharded = recipe("sharded")
memory = recipe("memory")
memory_zero3 = recipe("memory_zero3")
