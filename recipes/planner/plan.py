"""`plan_memory`: which recipe fits a GPU, at which micro-batch, and its memory, before it runs."""

from __future__ import annotations

import contextlib
import gc
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.errors import Problem, UserError, mistake, plural
from recipes.planner.fits import Estimator, Planned, Planner, asks_for_a_micro_batch
from recipes.planner.measured import Context, context_of, host_of
from recipes.planner.next_steps import NextStep, NextSteps, Request
from recipes.planner.sizes import description, is_size, read_config
from recipes.planner.speed import link_of, mfu_of, unknown_compute
from recipes.run import RunSpec, here, known_gpus, resolve, with_flags
from recipes.run.hardware import Gpu

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FASTEST_FIRST = ("fast", "standard", "sharded", "memory", "memory_zero3")


@dataclass(frozen=True)
class Plan:
    """Every requested recipe on one GPU, and the recommended one: the fastest that fits, or None.

    The fastest takes the least time in the parts of a step that are known; of equal ones it is the
    first that computes nothing twice. `choices` are the ways to split the global batch of the
    recommended recipe, or of the first one if none fits; in that case `next_steps` are the changes
    to try, in order. If only offload fits, they are what fits without it: other settings, and
    adapters. `short_of_ram`: nothing fits, and what was asked for lacks only RAM of the nodes.
    `command` is the whole one for the recommended recipe, empty if none fits, `advice` what
    `recipes check` says of it, or of what was asked for. `refused` maps the name of each recipe
    that is not legal with these flags to the reason. `length` is below `asked_length` if the model
    has fewer positions. `mfu` and `bandwidth` (bytes per second, None if unknown) are what the
    times assume, `mfu_source`, `link` and `host_source` where that comes from. `unknown_compute`
    says why times leave compute out, empty if they do not: then `mfu` has no effect. `shape`
    describes a model that was asked for by its size, empty for another.
    """

    model: str
    shape: str
    parameters: int
    trained: int
    gpu: str
    usable_bytes: int
    usable_host_bytes: int | None
    length: int
    asked_length: int
    recipes: tuple[Planned, ...]
    recommended: str | None
    command: str
    advice: tuple[Problem, ...]
    short_of_ram: bool
    choices: tuple[Planned, ...]
    next_steps: tuple[NextStep, ...]
    refused: dict[str, str]
    mfu: float
    mfu_source: str
    bandwidth: float | None
    link: str
    context: Context
    host_source: str
    unknown_compute: str


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
    mfu: float | None = None,
    bandwidth: float | None = None,
    host_memory: float | None = None,
) -> Plan:
    """Plan the memory of training `model`: a Hub id, a folder, a config.json, or a size (7B).

    Either `gpu` is the name of a card, or `gpu_memory` its usable GB (10^9 bytes). `num_processes`
    counts all GPUs. `recipe` limits the plan to one recipe; without it, all but baseline are
    planned. `argv` are flags of train.py. `accelerate_config` is an Accelerate YAML that replaces
    each recipe's own. Times assume the share `mfu` of the GPU's peak FLOP/s, and `bandwidth` in
    GB/s between GPUs; without them, what is published for such cards. `host_memory` is the RAM of
    one node in GB; without it, any amount is enough. Nothing but a config is downloaded, and no GPU
    is needed. Raises `UserError` if the request is wrong, or if no requested recipe is legal with
    these flags.
    """
    if num_processes % nodes:
        what = f"{plural(num_processes, 'process')} cannot be split evenly over {nodes} nodes"
        raise mistake("num_processes", what, f"a multiple of {nodes}")
    card = _card(gpu, gpu_memory)
    mfu, mfu_source = (mfu, "--mfu") if mfu else mfu_of(card.name)
    bytes_per_second, link = (
        link_of(card, num_processes, nodes) if bandwidth is None else (bandwidth * 1e9, "--bandwidth")
    )
    name = str(model) if isinstance(model, (str, Path)) else model.name_or_path
    request = Request(name, None, card, num_processes, nodes, tuple(argv), accelerate_config)
    names = _names(recipe, argv, accelerate_config, num_processes)
    legal, _ = _legal_runs(request, names)  # refuses before the imports, which take seconds
    config = read_config(name, legal[0]) if isinstance(model, (str, Path)) else model
    request = replace(request, config=config.to_dict())
    gc.freeze()  # else each collection goes through all of torch and transformers: a fifth of a plan's time
    estimator = Estimator(config)
    host = round(host_memory * 1e9) if host_memory else None
    planner = Planner(estimator, card.memory_bytes, host, mfu, bytes_per_second)
    legal, refused = _legal_runs(request, names)
    planned = [_made_to_fit(run, request, planner) for run in legal]
    fitting = [entry for entry in planned if entry.fits]
    fastest = min(fitting, key=lambda entry: (entry.time.known, "gradient_checkpointing" in entry.flags), default=None)
    best = fastest or planned[0]
    row = next((entry for entry in planned if entry.name == "standard"), planned[0])
    batch = {"per_device_train_batch_size": best.micro_batch, "gradient_accumulation_steps": None}
    weights, run = estimator.weights(best.run), best.run
    return Plan(
        model=name or config.model_type,
        shape=description(name) if is_size(name) else "",
        parameters=weights.total,
        trained=weights.trained,
        gpu=card.name,
        usable_bytes=planner.usable,
        usable_host_bytes=host,
        length=estimator.length(run),
        asked_length=run["max_length"],
        recipes=tuple(planned),
        recommended=fastest.name if fastest else None,
        command=request.command(best.name, **{**best.flags, **batch}) if fastest else "",
        advice=tuple(request.advice(run)),
        short_of_ram=fastest is None and row.fits_gpu,
        choices=tuple(planner.splits(best)),
        next_steps=tuple(NextSteps(request, planner, row).beside(fastest)),
        refused=refused,
        mfu=mfu,
        mfu_source=mfu_source,
        bandwidth=bytes_per_second,
        link=link,
        context=context_of(run),
        host_source=host_of(run)[1],
        unknown_compute=unknown_compute(run, config),
    )


def plan_run(run: RunSpec, config: PreTrainedConfig, usable_bytes: int | None = None) -> Planned:
    """A run at the largest micro-batch that fits `usable_bytes`, or without them at its own."""
    planner = Planner(Estimator(config), usable_bytes or sys.maxsize)
    return planner.best(run) if usable_bytes else planner.at(run, run.batch.micro)


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


def _made_to_fit(run: RunSpec, request: Request, planner: Planner) -> Planned:
    """The run as it fits best, with checkpointing if only that fits: it is faster than offload.

    All that is changed leaves the training as it is. A note says what was changed.
    """
    entry = planner.best(run)
    states = entry.total_bytes - entry.components.activations - entry.components.logits
    if not entry.fits and states <= planner.usable and not run.explicit("gradient_checkpointing"):
        flags = {"gradient_checkpointing": True}
        with contextlib.suppress(UserError):
            checkpointed = planner.best(request.run(run["recipe"], **flags))
            if checkpointed.fits:
                entry = replace(checkpointed, flags={**flags, **checkpointed.flags})
    notes = [f"with {shlex.join(with_flags([], entry.flags))}; without it, no micro-batch fits"] if entry.flags else []
    if entry.fits and asks_for_a_micro_batch(run) and entry.micro_batch < run.batch.micro:
        notes.append(f"micro-batch {run.batch.micro} does not fit: {entry.micro_batch} is the largest that does")
    return replace(entry, notes=(*notes, *entry.notes))


def _names(recipe: str | None, argv: Sequence[str], accelerate_config: str | None, processes: int) -> list[str]:
    """The recipes to plan: the requested one, here or in a --config, else all but baseline.

    With an Accelerate YAML, those that are made of an engine of their own are left out: it replaces
    that. One GPU has nothing to share, so that `sharded` is left out too.
    """
    if recipe:
        return [recipe]
    if any(word.startswith("--config") for word in argv):
        given = resolve(argv, here(trained_by="nobody", environment={})).given
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
    known = known_gpus.find(gpu)
    return Gpu(known.name, known.capability, known.torch_bytes)
