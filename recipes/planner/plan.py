"""`plan_memory`: which recipe fits a GPU, with which micro-batch, and what it keeps in memory, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.catalog import RECIPES
from recipes.errors import UserError, mistake
from recipes.planner.estimate import Estimator, read_config
from recipes.planner.footprint import Components
from recipes.planner.speed import ASSUMED_MFU, StepTime, step_time
from recipes.rules.check import require_legal
from recipes.run import RunSpec, gpus, resolve, with_flags
from recipes.run.engine import shipped
from recipes.run.hardware import Gpu, Hardware

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# A trace of a published run comes out up to 6 % low: kernels' workspaces and fragmentation are in none.
MARGIN = 0.06
CLOSED_FORM_MARGIN = 0.25  # what is not traced is only estimated


@dataclass(frozen=True)
class Planned:
    """One recipe on the GPU that was asked about. `margin_bytes` is what stays free, negative where it does not fit.

    It `fits` where it `fits_gpu`, and the RAM of a node if that is known.

    `micro_batch` and `accumulation` keep the global batch; where nothing fits they are those of one sequence.
    `traced` is false where the model could not be traced and a closed form, with its wider margin, stands in.
    """

    name: str
    fits: bool
    micro_batch: int
    accumulation: int
    components: Components
    margin_bytes: int
    host_bytes_per_node: int
    traced: bool = True
    fits_gpu: bool = True

    @property
    def total_bytes(self) -> int:
        return self.components.total


@dataclass(frozen=True)
class Choice:
    """A split of the recommended recipe's global batch, with what it takes in memory and in time."""

    micro_batch: int
    accumulation: int
    total_bytes: int
    fits: bool
    time: StepTime


@dataclass(frozen=True)
class NextStep:
    """What to change where nothing fits, at micro-batch 1: `saves_bytes` of the GPU's memory compared to `standard`."""

    words: str
    total_bytes: int
    saves_bytes: int
    fits: bool
    host_bytes_per_node: int
    slowdown: str


@dataclass(frozen=True)
class Usable:
    """Bytes of a GPU, and of a node's RAM; None where nobody says how much that is."""

    gpu: int
    host: int | None = None


@dataclass(frozen=True)
class Plan:
    """Every recipe on one GPU, and the one to take: the first in order of speed that fits, or None.

    `choices` are the ways to split the global batch for that one, or for the first where none fits; then there are
    `next_steps` too, in the order to try them. `refused` says why a recipe is not legal with these flags, by its name.
    `asked_length` was lowered to `length` where the model numbers no more tokens. `mfu` and `bandwidth` (bytes per
    second) are what times were told with.
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
    recommended: str | None
    choices: tuple[Choice, ...]
    next_steps: tuple[NextStep, ...]
    refused: dict[str, str]
    mfu: float
    bandwidth: float | None


_FASTEST_FIRST = ("fast", "standard", "memory", "memory_zero3")


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
    """Plan a training of `model`: a Hub id, a folder, a config.json, or a size such as 7B.

    `gpu` is a card's name, or `gpu_memory` its usable GB (10^9 bytes); `num_processes` counts all GPUs; `argv` are
    train.py's flags; `accelerate_config` is an Accelerate YAML instead of each recipe's own. Without `recipe` all but
    baseline are planned. `host_memory` is the RAM of a node in GB; without it any is enough. Times suppose `mfu` of the
    GPU's peak, and `bandwidth` in GB/s between GPUs. Nothing is downloaded but a config, and no GPU is needed.
    Raises `UserError` for what would not be legal to run.
    """
    _require_sizes(num_processes=num_processes, nodes=nodes)
    _require_sizes(gpu_memory=gpu_memory, mfu=mfu, bandwidth=bandwidth, host_memory=host_memory)
    if num_processes % nodes:
        raise mistake("num_processes", f"{num_processes} are not the same number on {nodes} nodes", "a multiple of it")
    if isinstance(argv, str):
        raise mistake("argv", "is one string", "a list of words, such as those of shlex.split")
    config = model if not isinstance(model, (str, Path)) else read_config(str(model))
    card = _card(gpu, gpu_memory)
    world = _World(str(model), card, num_processes, nodes, tuple(argv), accelerate_config)
    usable = Usable(card.memory_bytes, round(host_memory * 1e9) if host_memory else None)
    estimator = Estimator(config)
    runs, refused = _legal_runs(world, _names(recipe, argv, accelerate_config))
    planned = [largest_that_fits(run, estimator, usable) for run in runs]
    recommended = next((entry.name for entry in planned if entry.fits), None)
    chosen = next((run for run in runs if run.recipe.name == recommended), runs[0])
    speed = bandwidth * 1e9 if bandwidth else None
    return Plan(
        str(model),
        estimator.weights(chosen).total,
        estimator.weights(chosen).trained,
        card.name,
        usable.gpu,
        usable.host,
        estimator.length(chosen),
        chosen["max_length"],
        tuple(planned),
        recommended,
        tuple(_choices(chosen, estimator, usable, mfu, speed)),
        () if recommended else tuple(_next_steps(world, estimator, usable)),
        refused,
        mfu,
        speed,
    )


@dataclass(frozen=True)
class _World:
    """What a plan is asked about: the model's name, the card, how many of it, and train.py's own words."""

    model: str
    card: Gpu
    num_processes: int
    nodes: int
    argv: tuple[str, ...]
    accelerate_config: str | None

    def run(self, recipe: str, **flags: Any) -> RunSpec:
        """The recipe's run with these flags changed. Raises `UserError` where it is not legal."""
        local = self.num_processes // self.nodes
        own = str(shipped(RECIPES[recipe]().engine)) if recipe in RECIPES else None
        run = resolve(
            ["--recipe", recipe, "--model_name_or_path", self.model, *with_flags(self.argv, flags)],
            world_size=self.num_processes,
            local_world_size=local,
            hardware=Hardware((self.card,) * local, cores=8 * local),
            accelerate_config=self.accelerate_config or own,
            environment={},
            demonstrate=False,
            elsewhere=frozenset(),
        )
        require_legal(run)
        return run


def _require_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        whole = name in ("num_processes", "nodes")
        right = isinstance(size, int) if whole else isinstance(size, (int, float)) and math.isfinite(size)
        if size is not None and not (right and size > 0):
            fix = "a whole number of at least 1" if whole else "a number above 0"
            raise mistake(name, f"is {size!r}", fix)


def _names(recipe: str | None, argv: Sequence[str], accelerate_config: str | None) -> list[str]:
    """The recipes to plan: the one that is named, here or in a --config, or all that bring no engine of their own."""
    if recipe:
        return [recipe]
    if any(word.startswith("--config") for word in argv):
        given = resolve(argv, demonstrate=False, environment={}).given
        if "recipe" in given:
            return [given["recipe"].value]
    of_ddp = [name for name in _FASTEST_FIRST if not name.startswith("memory")]
    return of_ddp if accelerate_config else list(_FASTEST_FIRST)


def _legal_runs(world: _World, names: list[str]) -> tuple[list[RunSpec], dict[str, str]]:
    """The runs that are legal, and why the others are not. Raises the first one's `UserError` where none is legal."""
    runs: list[RunSpec] = []
    refused: dict[str, UserError] = {}
    for name in names:
        try:
            runs.append(world.run(name))
        except UserError as error:
            refused[name] = error
    if not runs:
        raise next(iter(refused.values()))
    return runs, {name: str(error) for name, error in refused.items()}


def _choices(
    run: RunSpec, estimator: Estimator, usable: Usable, mfu: float, bandwidth: float | None
) -> Iterator[Choice]:
    weights, length = estimator.weights(run), estimator.length(run)
    for micro in _divisors(run.batch.micro * run.batch.accumulation):
        entry = _at(run, micro, estimator, usable)
        time = step_time(run, weights, estimator.config, length, micro, mfu, bandwidth)
        yield Choice(micro, entry.accumulation, entry.total_bytes, entry.fits, time)


# --- Where nothing fits ----------------------------------------------------------------------------------------------

_CHECKPOINTED = {"gradient_checkpointing": True}
_LORA = {**_CHECKPOINTED, "use_peft": True}
_QLORA = {**_LORA, "load_in_4bit": True}
_HALF_LENGTH = "half of --max_length"
_RECOMPUTED = "a third more compute: the forward runs twice"

# In the order to try them: the recipe, what is changed of it, and what it costs.
_STEPS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("standard", _CHECKPOINTED, _RECOMPUTED),
    # Hugging Face's guide to training on a single GPU: 10.35 samples/s with 8-bit Adam, 10.09 without, on a V100.
    ("standard", {**_CHECKPOINTED, "optim": "adamw_bnb_8bit"}, "that; 8-bit Adam itself was no slower where published"),
    ("memory", {"optim": None}, "that, and Adam on the host: {pcie}"),
    ("memory_zero3", {"optim": None}, "that, and the parameters over PCIe twice a micro-batch"),
    ("standard", _LORA, "none: the second forward takes what the missing weight gradients save"),
    ("standard", _QLORA, "weights are unpacked at each use; not measured"),
    ("standard", {**_QLORA, "max_length": _HALF_LENGTH}, "none, and half the context"),
)
_PCIE = 32e9  # bytes per second, PCI-SIG: 4.0, 16 lanes, one way


def _next_steps(world: _World, estimator: Estimator, usable: Usable) -> Iterator[NextStep]:
    """What is left to do, each step at micro-batch 1; one that changes nothing, or is not legal here, is left out."""
    one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": None}
    base = world.run("standard", **one)
    last = before = _at(base, 1, estimator, usable).total_bytes
    for recipe, changes, slowdown in _STEPS:
        changes = dict(changes)
        if "max_length" in changes:
            changes["max_length"] = max(2, estimator.length(base) // 2)
        try:
            run = world.run(recipe, **one, **changes)
            entry = _at(run, 1, estimator, usable)
        except UserError:
            continue
        if entry.total_bytes == last:
            continue
        last = entry.total_bytes
        words = " ".join(with_flags(["--recipe", recipe], changes))
        dropped = [name for name, value in changes.items() if value is None and base.explicit(name)]
        words += "".join(f", without --{name}" for name in dropped)
        crossing = 2 * 2 * estimator.weights(run).trained / world.num_processes / _PCIE  # gradients, then weights
        cost = slowdown.format(pcie=f"at least {crossing:.1g} s a step, over PCIe 4.0 x16")
        saved = before - entry.total_bytes
        yield NextStep(words, entry.total_bytes, saved, entry.fits, entry.host_bytes_per_node, cost)
    yield from _larger_card(world, before)


def _larger_card(world: _World, before: int) -> Iterator[NextStep]:
    cards = sorted(gpus.CATALOGUE, key=lambda card: card.torch_bytes)
    for card in cards:
        if card.torch_bytes > world.card.memory_bytes and before * (1 + MARGIN) <= card.torch_bytes:
            yield NextStep(f"--recipe standard on {card.name}", before, 0, True, 0, "none")
            return


# --- One recipe ------------------------------------------------------------------------------------------------------


def largest_that_fits(run: RunSpec, estimator: Estimator, usable: Usable) -> Planned:
    """The recipe at the largest micro-batch that fits, which is one that a run may have at its global batch."""
    entries = (_at(run, micro, estimator, usable) for micro in _micro_batches(run))
    entry = next(entries)
    while not entry.fits:
        smaller = next(entries, None)
        if smaller is None:
            break
        entry = smaller
    return entry


def _micro_batches(run: RunSpec) -> list[int]:
    """Micro-batches that keep the global batch, the largest first; the one that was asked for, if one was."""
    if run.explicit("per_device_train_batch_size") or run.explicit("gradient_accumulation_steps"):
        return [run.batch.micro]
    return _divisors(run.batch.micro * run.batch.accumulation)


def _divisors(share: int) -> list[int]:
    return [size for size in range(share, 0, -1) if share % size == 0]


def _at(run: RunSpec, micro: int, estimator: Estimator, usable: Usable) -> Planned:
    needed, was_traced = estimator.need(run, micro)
    accumulation = run.batch.micro * run.batch.accumulation // micro
    free = usable.gpu - needed.gpu.total
    fits = needed.gpu.total * (1 + (MARGIN if was_traced else CLOSED_FORM_MARGIN)) <= usable.gpu
    host = needed.host_bytes_per_node
    on_host = usable.host is None or host * (1 + MARGIN) <= usable.host
    name = run.recipe.name
    return Planned(name, fits and on_host, micro, accumulation, needed.gpu, free, host, was_traced, fits)


def _card(gpu: str | None, gpu_memory: float | None) -> Gpu:
    if bool(gpu) == (gpu_memory is not None):
        raise mistake("gpu", "one card is planned for", "gpu (--gpu NAME), or gpu_memory (--gpu_memory GB)")
    if gpu_memory is not None:
        return Gpu(f"a GPU of {gpu_memory:g} GB", (8, 0), round(gpu_memory * 1e9))
    assert gpu
    known = gpus.find(gpu)
    return Gpu(known.name, known.capability, known.torch_bytes)


# --- A run that is there ---------------------------------------------------------------------------------------------


def plan_run(run: RunSpec, config: PreTrainedConfig, usable_bytes: int, as_it_is: bool = False) -> Planned:
    """A run of this model at the largest micro-batch that fits into `usable_bytes`, or `as_it_is`."""
    estimator, usable = Estimator(config), Usable(usable_bytes)
    return _at(run, run.batch.micro, estimator, usable) if as_it_is else largest_that_fits(run, estimator, usable)
