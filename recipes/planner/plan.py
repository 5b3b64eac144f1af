"""`plan_memory`: which recipe fits a GPU, at which micro-batch, and its memory, before it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.errors import UserError, mistake
from recipes.planner.estimate import Estimator, read_config
from recipes.planner.fits import BatchSplit, Planned, Usable, at_micro_batch, batch_splits, largest_that_fits, time_of
from recipes.planner.next_steps import NextStep, adapters_that_fit, next_steps
from recipes.planner.request import Request
from recipes.planner.speed import ASSUMED_MFU, StepTime
from recipes.run import RunSpec, gpus, resolve
from recipes.run.hardware import Gpu

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FASTEST_FIRST = ("fast", "standard", "sharded", "memory", "memory_zero3")


@dataclass(frozen=True)
class Plan:
    """Every requested recipe on one GPU, and the recommended one: the fastest that fits, or None.

    `times` are those of a step of each recipe, by name. The fastest takes the least time in the
    parts of a step that are known; of equal ones it is the first.
    `choices` are the ways to split the global batch of the recommended recipe, or of the first one
    if none fits; in that case `next_steps` are the changes to try, in order. If only offload fits,
    they are at most one: adapters that fit without it. `command` are the flags of train.py for the
    recommended recipe, empty if none fits. `refused` maps the name of each recipe that is not legal
    with these flags to the reason. `length` is below
    `asked_length` if the model has fewer positions. `mfu` and `bandwidth` (bytes per second, None
    if unknown) are what the times assume.
    """

    model: str
    parameters: int
    trained: int
    gpu: str
    usable_bytes: int
    usable_host_bytes: int | None
    length: int
    asked_length: int
    recipes: tuple[Planned, ...]
    times: dict[str, StepTime]
    recommended: str | None
    command: str
    choices: tuple[BatchSplit, ...]
    next_steps: tuple[NextStep, ...]
    refused: dict[str, str]
    mfu: float
    bandwidth: float | None


def plan_memory(
    model: str | Path | PreTrainedConfig,
    *,
    gpu: str | None = None,
    gpu_memory: float | None = None,
    num_processes: int = 1,
    nodes: int = 1,
    recipe: str | None = None,
    argv: Sequence[str] = (),
    accelerate_config: str | None = None,
    mfu: float = ASSUMED_MFU,
    bandwidth: float | None = None,
    host_memory: float | None = None,
) -> Plan:
    """Plan the memory of training `model`: a Hub id, a folder, a config.json, or a size (7B).

    Either `gpu` is the name of a card, or `gpu_memory` its usable GB (10^9 bytes). `num_processes`
    counts all GPUs. `recipe` limits the plan to one recipe; without it, all but baseline are
    planned. `argv` are flags of train.py. `accelerate_config` is an Accelerate YAML that replaces
    each recipe's own. Times assume the share `mfu` of the GPU's peak FLOP/s, and `bandwidth` in
    GB/s between GPUs. `host_memory` is the RAM of one node in GB; without it, any amount is enough.
    Nothing but a config is downloaded, and no GPU is needed. Raises `UserError` if the request is
    wrong, or if no requested recipe is legal with these flags.
    """
    _require_sizes(num_processes=num_processes, nodes=nodes)
    _require_sizes(gpu_memory=gpu_memory, mfu=mfu, bandwidth=bandwidth, host_memory=host_memory)
    if num_processes % nodes:
        what = f"{num_processes} processes cannot be split evenly over {nodes} nodes"
        raise mistake("num_processes", what, f"a multiple of {nodes}")
    if isinstance(argv, str):
        raise mistake("argv", "is one string", "a list of strings, as shlex.split returns it")
    config = model if not isinstance(model, (str, Path)) else read_config(str(model))
    name = str(model) if isinstance(model, (str, Path)) else config.name_or_path
    card = _card(gpu, gpu_memory)
    bytes_per_second = bandwidth * 1e9 if bandwidth else None
    request = Request(
        name, config.to_dict(), card, num_processes, nodes, tuple(argv), accelerate_config, mfu, bytes_per_second
    )
    usable = Usable(card.memory_bytes, round(host_memory * 1e9) if host_memory else None)
    estimator = Estimator(config)
    legal, refused = _legal_runs(request, _names(recipe, argv, accelerate_config, num_processes))
    candidates = [_checkpointed_if_needed(run, request, estimator, usable) for run in legal]
    runs, planned = [run for run, _ in candidates], [entry for _, entry in candidates]
    times = {entry.name: time_of(run, estimator, entry.micro_batch, mfu, bytes_per_second) for run, entry in candidates}
    fitting = [entry.name for entry in planned if entry.fits]
    recommended = min(fitting, key=lambda name: times[name].known, default=None)
    chosen = next((run for run in runs if run["recipe"] == recommended), runs[0])
    return Plan(
        model=name or config.model_type,
        parameters=estimator.weights(chosen).total,
        trained=estimator.weights(chosen).trained,
        gpu=card.name,
        usable_bytes=usable.gpu,
        usable_host_bytes=usable.host,
        length=estimator.length(chosen),
        asked_length=chosen["max_length"],
        recipes=tuple(planned),
        times=times,
        recommended=recommended,
        command=next((_command(request, entry) for entry in planned if entry.name == recommended), ""),
        choices=tuple(batch_splits(chosen, estimator, usable, mfu, bytes_per_second)),
        next_steps=_steps(chosen, recommended, request, estimator, usable),
        refused=refused,
        mfu=mfu,
        bandwidth=bytes_per_second,
    )


def plan_run(run: RunSpec, config: PreTrainedConfig, usable_bytes: int, as_it_is: bool = False) -> Planned:
    """A run at the largest micro-batch that fits `usable_bytes`, or at its own if `as_it_is`."""
    estimator, usable = Estimator(config), Usable(usable_bytes)
    if as_it_is:
        return at_micro_batch(run, run.batch.micro, estimator, usable)
    return largest_that_fits(run, estimator, usable)


def _command(request: Request, entry: Planned) -> str:
    """The command for this entry, with its micro-batch and all that it needs to fit."""
    batch = {"per_device_train_batch_size": entry.micro_batch, "gradient_accumulation_steps": None}
    return request.command(entry.name, **{**entry.flags, **batch})


def _legal_runs(request: Request, names: list[str]) -> tuple[list[RunSpec], dict[str, str]]:
    """The legal runs, and why the others are not. Raises the first `UserError` if none is legal."""
    runs: list[RunSpec] = []
    refused: dict[str, UserError] = {}
    for name in names:
        try:
            runs.append(request.run(name))
        except UserError as error:
            refused[name] = error
    if not runs:
        raise next(iter(refused.values()))
    return runs, {name: str(error) for name, error in refused.items()}


def _steps(
    chosen: RunSpec, recommended: str | None, request: Request, estimator: Estimator, usable: Usable
) -> tuple[NextStep, ...]:
    """What to try if nothing fits. If only offload does: adapters without it, if they fit."""
    if recommended is None:
        return tuple(next_steps(request, estimator, usable))
    if chosen.engine.offload_optimizer == "none" or chosen["use_peft"]:
        return ()
    return tuple(adapters_that_fit(request, estimator, usable))


def _checkpointed_if_needed(
    run: RunSpec, request: Request, estimator: Estimator, usable: Usable
) -> tuple[RunSpec, Planned]:
    """The run as it is, or with activation checkpointing if only that fits: faster than offload."""
    entry = largest_that_fits(run, estimator, usable)
    states = entry.total_bytes - entry.components.activations - entry.components.logits
    if entry.fits or states > usable.gpu or run.explicit("gradient_checkpointing"):
        return run, entry
    flags = {"gradient_checkpointing": True}
    try:
        other = request.run(run["recipe"], **flags)
    except UserError:
        return run, entry
    checkpointed = largest_that_fits(other, estimator, usable)
    return (other, replace(checkpointed, flags=flags)) if checkpointed.fits else (run, entry)


def _names(recipe: str | None, argv: Sequence[str], accelerate_config: str | None, processes: int) -> list[str]:
    """The recipes to plan: the requested one, here or in a --config, else all but baseline.

    With an Accelerate YAML, those that are made of an engine of their own are left out: it replaces
    that. One GPU has nothing to share, so that `sharded` is left out too.
    """
    if recipe:
        return [recipe]
    if any(word.startswith("--config") for word in argv):
        given = resolve(argv, demonstrate=False, environment={}).given
        if "recipe" in given:
            return [given["recipe"].value]
    own_engine = [name for name in _FASTEST_FIRST if accelerate_config and name not in ("fast", "standard")]
    nothing_to_share = ["sharded"] if processes == 1 else []
    return [name for name in _FASTEST_FIRST if name not in (*own_engine, *nothing_to_share)]


def _card(gpu: str | None, gpu_memory: float | None) -> Gpu:
    if bool(gpu) == (gpu_memory is not None):
        what = "is given, and gpu_memory too" if gpu else "is missing"
        raise mistake("gpu", what, "either gpu (--gpu NAME) or gpu_memory (--gpu_memory GB)")
    if gpu_memory is not None:
        return Gpu(f"a GPU of {gpu_memory:g} GB", (8, 0), round(gpu_memory * 1e9))
    assert gpu
    known = gpus.find(gpu)
    return Gpu(known.name, known.capability, known.torch_bytes)


def _require_sizes(**sizes: float | None) -> None:
    for name, size in sizes.items():
        whole = name in ("num_processes", "nodes")
        right = isinstance(size, int) if whole else isinstance(size, (int, float)) and math.isfinite(size)
        if size is not None and not (right and size > 0):
            fix = "a whole number of at least 1" if whole else "a number above 0"
            raise mistake(name, f"is {size!r}", fix)
