"""`plan_memory`: which recipe fits a GPU, with which micro-batch, and what it keeps in memory, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipes import gpus
from recipes.catalog import RECIPES
from recipes.check import require_legal
from recipes.engine import shipped
from recipes.errors import UserError, mistake
from recipes.estimate import Estimator, read_config
from recipes.footprint import Components
from recipes.hardware import Gpu, Hardware
from recipes.run import RunSpec, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# A trace of a published run comes out up to 6 % low: kernels' workspaces and fragmentation are in none.
MARGIN = 0.06
CLOSED_FORM_MARGIN = 0.25  # what is not traced is only estimated


@dataclass(frozen=True)
class Planned:
    """One recipe on the GPU that was asked about. `margin_bytes` is what stays free, negative where it does not fit.

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

    @property
    def total_bytes(self) -> int:
        return self.components.total


@dataclass(frozen=True)
class Plan:
    """Every recipe on one GPU, and the one to take: the first in order of speed that fits, or None."""

    model: str
    parameters: int
    gpu: str
    usable_bytes: int
    length: int
    recipes: tuple[Planned, ...]
    recommended: str | None


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
) -> Plan:
    """Plan a training of `model`: a Hub id, a folder, a config.json, or a size such as 7B.

    `gpu` is a card's name, or `gpu_memory` its usable GB (10^9 bytes); `num_processes` counts all GPUs; `argv` are
    train.py's flags. Without `recipe` all but baseline are planned. Nothing is downloaded but a config, and no GPU is
    needed. Raises `UserError` for what would not be legal to run.
    """
    config = model if not isinstance(model, (str, Path)) else read_config(str(model))
    card = _card(gpu, gpu_memory)
    if num_processes % nodes:
        raise mistake("num_processes", f"{num_processes} are not the same number on {nodes} nodes", "a multiple of it")
    hardware = Hardware((card,) * (num_processes // nodes), cores=8 * num_processes // nodes)
    names = [recipe] if recipe else list(_FASTEST_FIRST)
    estimator = Estimator(config)
    planned, refused = [], []
    for name in names:
        run = resolve(
            ["--recipe", name, "--model_name_or_path", str(model), *argv],
            world_size=num_processes,
            local_world_size=num_processes // nodes,
            hardware=hardware,
            accelerate_config=str(shipped(RECIPES[name]().engine)) if name in RECIPES else None,
            environment={},
            demonstrate=False,
            elsewhere=frozenset(),
        )
        try:
            require_legal(run)
        except UserError as error:
            refused.append(error)
            continue
        planned.append(_planned(run, estimator, card.memory_bytes))
    if not planned:
        raise refused[0]
    recommended = next((entry.name for entry in planned if entry.fits), None)
    length = estimator.length(run)
    return Plan(
        str(model), estimator.weights(run).total, card.name, card.memory_bytes, length, tuple(planned), recommended
    )


def _planned(run: RunSpec, estimator: Estimator, usable: int) -> Planned:
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
    share = run.batch.micro * run.batch.accumulation
    return [size for size in range(share, 0, -1) if share % size == 0]


def _at(run: RunSpec, micro: int, estimator: Estimator, usable: int) -> Planned:
    needed, was_traced = estimator.need(run, micro)
    accumulation = run.batch.micro * run.batch.accumulation // micro
    free = usable - needed.gpu.total
    fits = needed.gpu.total * (1 + (MARGIN if was_traced else CLOSED_FORM_MARGIN)) <= usable
    return Planned(run.recipe.name, fits, micro, accumulation, needed.gpu, free, needed.host_bytes_per_node, was_traced)


def _card(gpu: str | None, gpu_memory: float | None) -> Gpu:
    if gpu_memory is not None:
        return Gpu(f"a GPU of {gpu_memory:g} GB", (8, 0), round(gpu_memory * 1e9))
    known = gpus.find(gpu or "A100 80GB")
    return Gpu(known.name, known.capability, known.torch_bytes)


# --- A run that is there ---------------------------------------------------------------------------------------------


def plan_run(run: RunSpec, config: PreTrainedConfig, usable_bytes: int, as_it_is: bool = False) -> Planned:
    """A run of this model at the largest micro-batch that fits into `usable_bytes`, or `as_it_is`."""
    estimator = Estimator(config)
    return _at(run, run.batch.micro, estimator, usable_bytes) if as_it_is else _planned(run, estimator, usable_bytes)
