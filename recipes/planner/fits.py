"""Which micro-batches fit on a GPU at the same global batch, with their memory and time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recipes.planner.estimate import Estimator
from recipes.planner.notes import notes
from recipes.planner.shapes import EVALUATION, TRAINING, Components, Need
from recipes.planner.speed import StepTime, step_time
from recipes.run import RunSpec

# Of the readings in tests/benchmarks/published.py and reserved.py two lie 3.5 % and 7.8 % above the
# plan, the others at most 2 %: what their allocator reserved, not what was allocated.
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
    margin replaces the trace. `flags` are what the recipe needs in order to fit: checkpointing, or
    a smaller evaluation. `moment` needs most on the GPU (footprint.py). If that is EVALUATION and
    does not fit, `evaluation_batch` is the largest --per_device_eval_batch_size that does, if any.
    `notes` say what it has that other plans have not, and what is not counted.
    `varied_bytes` is what the process may come to take on this GPU if lengths vary: above the
    total, it is memory that torch keeps though nothing needs it, and gives back when it runs out.
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
    moment: str = TRAINING
    evaluation_batch: int | None = None
    notes: tuple[str, ...] = ()
    varied_bytes: int = 0

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
    return _largest_of(run, _micro_batches(run), estimator, usable)


def at_any_micro_batch(run: RunSpec, estimator: Estimator, usable: Usable) -> Planned:
    """The same, whatever micro-batch the run itself has."""
    sizes = divisors(_share(run)) if _fits(*estimator.need(run, 1), usable)[0] else [1]
    return _largest_of(run, sizes, estimator, usable)


def _largest_of(run: RunSpec, sizes: list[int], estimator: Estimator, usable: Usable) -> Planned:
    for micro in sizes[:-1]:
        # What torch caches beside its allocations takes longer to find out, and only adds to them.
        if not _fits(*estimator.need(run, micro), usable)[0]:
            continue
        entry = at_micro_batch(run, micro, estimator, usable)
        if entry.fits:
            return entry
    return at_micro_batch(run, sizes[-1], estimator, usable)


def with_smaller_evaluation(
    run: RunSpec, entry: Planned, estimator: Estimator, usable: Usable
) -> tuple[RunSpec, Planned]:
    """The run with an evaluation batch that fits, if it is the evaluation that does not.

    It is a half, a quarter, and so on, of what it was: the result of an evaluation does not depend
    on it. If the user has written it, the run stays as it is, and the entry says which one fits.
    """
    if entry.fits or entry.moment != EVALUATION:
        return run, entry
    batch = run["per_device_eval_batch_size"]
    while batch > 1:
        batch //= 2
        other = run.given_too(per_device_eval_batch_size=batch)
        found = largest_that_fits(other, estimator, usable)
        if found.fits:
            if run.explicit("per_device_eval_batch_size"):
                return run, replace(entry, evaluation_batch=batch)
            return other, replace(found, flags={"per_device_eval_batch_size": batch})
        if found.moment != EVALUATION:
            break
    return run, entry


def at_micro_batch(
    run: RunSpec, micro: int, estimator: Estimator, usable: Usable, lengths_vary: bool = True
) -> Planned:
    """The run at this micro-batch and its own global batch, whether that fits or not.

    `lengths_vary` is false to leave out what shorter batches do to a run whose lengths vary. It
    takes more traces, and only matters if the longest one fits.
    """
    limit = int(usable.gpu / (1 + (MARGIN if estimator.traced(run, micro)[1] else CLOSED_FORM_MARGIN)))
    needed, was_traced = estimator.process(run, micro, limit, lengths_vary=False)
    if lengths_vary and _fits(needed, was_traced, usable)[0]:
        needed, _ = estimator.process(run, micro, limit)
    total, host = needed.gpu.total, needed.host_bytes_per_node
    fits_gpu, fits_host = _fits(needed, was_traced, usable)
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
        moment=needed.moment,
        varied_bytes=needed.varied_bytes,
        notes=notes(run, estimator.traced(run, micro)[0], was_traced, estimator.has_liger(run), needed.moment),
    )


def if_it_fits(run: RunSpec, micro: int, estimator: Estimator, usable: Usable) -> Planned | None:
    """As `at_micro_batch`, None if it does not fit."""
    if not _may_fit(run, micro, estimator, usable):
        return None
    entry = at_micro_batch(run, micro, estimator, usable)
    return entry if entry.fits else None


def any_if_it_fits(run: RunSpec, estimator: Estimator, usable: Usable) -> Planned | None:
    """As `at_any_micro_batch`, None if none fits."""
    if not _may_fit(run, 1, estimator, usable):
        return None
    entry = at_any_micro_batch(run, estimator, usable)
    return entry if entry.fits else None


def _may_fit(run: RunSpec, micro: int, estimator: Estimator, usable: Usable) -> bool:
    """Whether what is quickly known fits. Often what takes no trace is too much already."""
    without_trace = _fits(estimator.at_least(run, micro), True, usable)
    return all(without_trace) and _fits(*estimator.need(run, micro), usable)[0]


def _fits(needed: Need, was_traced: bool, usable: Usable) -> tuple[bool, bool]:
    """Whether there is enough memory on the GPU, and on the node."""
    margin = MARGIN if was_traced else CLOSED_FORM_MARGIN
    on_host = usable.host is None or needed.host_bytes_per_node * (1 + MARGIN) <= usable.host
    return needed.gpu.total * (1 + margin) <= usable.gpu, on_host


def batch_splits(
    run: RunSpec, planned: Planned, estimator: Estimator, usable: Usable, mfu: float, bandwidth: float | None
) -> Iterator[BatchSplit]:
    """Every split of the global batch, largest micro-batch first. `bandwidth`: bytes per second.

    `planned` is the one that is known already.
    """
    for micro in divisors(_share(run)):
        known = micro == planned.micro_batch
        entry = planned if known else at_micro_batch(run, micro, estimator, usable, lengths_vary=False)
        time = time_of(run, estimator, micro, mfu, bandwidth)
        yield BatchSplit(micro, entry.accumulation, entry.total_bytes, entry.fits, time)


def time_of(run: RunSpec, estimator: Estimator, micro: int, mfu: float, bandwidth: float | None) -> StepTime:
    """One optimizer step at this micro-batch. `bandwidth` is in bytes per second."""
    return step_time(run, estimator.weights(run), estimator.config, estimator.length(run), micro, mfu, bandwidth)


def _micro_batches(run: RunSpec) -> list[int]:
    """Micro-batches that keep the global batch, largest first; only the user's, if there is one."""
    return [run.batch.micro] if asks_for_a_micro_batch(run) else divisors(_share(run))


def asks_for_a_micro_batch(run: RunSpec) -> bool:
    """Whether the user has written one, or what it follows from."""
    return run.explicit("per_device_train_batch_size") or run.explicit("gradient_accumulation_steps")


def _share(run: RunSpec) -> int:
    """Examples that one process takes of each global batch."""
    return run.batch.micro * run.batch.accumulation


def divisors(share: int) -> list[int]:
    return [size for size in range(share, 0, -1) if share % size == 0]
