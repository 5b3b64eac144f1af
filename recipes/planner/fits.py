"""Which micro-batches fit on a GPU at the same global batch, with their memory and time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from recipes.planner.estimate import Estimator
from recipes.planner.footprint import Components
from recipes.planner.speed import StepTime, step_time
from recipes.run import RunSpec

# Of the published readings in tests/benchmarks/published.py, traces come out up to 6 % low: they
# hold neither the workspaces of kernels nor fragmentation.
MARGIN = 0.06
CLOSED_FORM_MARGIN = 0.25  # for a model that cannot be traced; a choice, not a measurement


@dataclass(frozen=True)
class Usable:
    """Bytes of one GPU, and of one node's RAM (None if unknown: then any amount is enough)."""

    gpu: int
    host: int | None = None


@dataclass(frozen=True)
class Planned:
    """One recipe on the requested GPU, under the name that --recipe takes.

    `fits_gpu` is about the GPU alone, `fits` about the RAM of a node too, if that is known.
    `margin_bytes` is what stays free on the GPU, negative if the plan exceeds it. `micro_batch` and
    `accumulation` keep the global batch; if nothing fits, they are those of the smallest
    micro-batch. `traced` is false if the model could not be traced: then a closed form with a wider
    margin replaces the trace. `flags` are what the recipe needs in order to fit: checkpointing.
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
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return self.components.total


@dataclass(frozen=True)
class BatchSplit:
    """One way to split the global batch, with its memory on each GPU and its time per step."""

    micro_batch: int
    accumulation: int
    total_bytes: int
    fits: bool
    time: StepTime


def largest_that_fits(run: RunSpec, estimator: Estimator, usable: Usable) -> Planned:
    """The run at the largest micro-batch that fits, or at the smallest one if none fits."""
    entries = (at_micro_batch(run, micro, estimator, usable) for micro in _micro_batches(run))
    entry = next(entries)
    while not entry.fits:
        smaller = next(entries, None)
        if smaller is None:
            break
        entry = smaller
    return entry


def at_micro_batch(run: RunSpec, micro: int, estimator: Estimator, usable: Usable) -> Planned:
    """The run at this micro-batch and its own global batch, whether that fits or not."""
    needed, was_traced = estimator.need(run, micro)
    total, host = needed.gpu.total, needed.host_bytes_per_node
    fits_gpu = total * (1 + (MARGIN if was_traced else CLOSED_FORM_MARGIN)) <= usable.gpu
    fits_host = usable.host is None or host * (1 + MARGIN) <= usable.host
    return Planned(
        name=run["recipe"],
        fits=fits_gpu and fits_host,
        micro_batch=micro,
        accumulation=_share(run) // micro,
        components=needed.gpu,
        margin_bytes=usable.gpu - total,
        host_bytes_per_node=host,
        traced=was_traced,
        fits_gpu=fits_gpu,
    )


def batch_splits(
    run: RunSpec, estimator: Estimator, usable: Usable, mfu: float, bandwidth: float | None
) -> Iterator[BatchSplit]:
    """Every split of the global batch, largest micro-batch first. `bandwidth`: bytes per second."""
    for micro in _divisors(_share(run)):
        entry = at_micro_batch(run, micro, estimator, usable)
        time = time_of(run, estimator, micro, mfu, bandwidth)
        yield BatchSplit(micro, entry.accumulation, entry.total_bytes, entry.fits, time)


def time_of(run: RunSpec, estimator: Estimator, micro: int, mfu: float, bandwidth: float | None) -> StepTime:
    """One optimizer step at this micro-batch. `bandwidth` is in bytes per second."""
    return step_time(run, estimator.weights(run), estimator.config, estimator.length(run), micro, mfu, bandwidth)


def _micro_batches(run: RunSpec) -> list[int]:
    """Micro-batches that keep the global batch, largest first; only the user's, if there is one."""
    if run.explicit("per_device_train_batch_size") or run.explicit("gradient_accumulation_steps"):
        return [run.batch.micro]
    return _divisors(_share(run))


def _share(run: RunSpec) -> int:
    """Examples that one process takes of each global batch."""
    return run.batch.micro * run.batch.accumulation


def _divisors(share: int) -> list[int]:
    return [size for size in range(share, 0, -1) if share % size == 0]
