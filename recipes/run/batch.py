"""Global batch arithmetic: global = micro-batch x accumulation x data-parallel size, anywhere.

The data-parallel size is the world size, divided by the processes that share their examples.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.errors import mistake, plural
from recipes.run.parallelism import Parallelism


@dataclass(frozen=True)
class Batch:
    """`micro` examples per process, `accumulation` micro-batches per step.

    `data_parallel` counts the processes, or groups of them, with examples of their own.
    """

    micro: int
    accumulation: int
    data_parallel: int
    reason: str

    @property
    def total(self) -> int:
        """The global batch: examples per optimizer step over all processes."""
        return self.micro * self.accumulation * self.data_parallel

    def __str__(self) -> str:
        return f"{self.micro} x {self.accumulation} x {self.data_parallel} = {self.total}"


def data_parallel_size(world: int, parallelism: Parallelism) -> int:
    """The groups of a world's processes that get examples of their own.

    Raises `UserError` if the processes that share examples do not divide the world.
    """
    sharing = parallelism.sharing
    if world % sharing:
        below = world // sharing * sharing
        nearest = " or ".join(str(size) for size in (below, below + sharing) if size)
        what = f"{world} cannot be divided by {parallelism}: each group of {sharing} processes shares its examples"
        raise mistake("num_processes", what, f"--num_processes {nearest}")
    return world // sharing


def split(
    total: int,
    data_parallel: int,
    cap: int,
    micro: int | None = None,
    accumulation: int | None = None,
    total_is_explicit: bool = True,
    sharing: int = 1,
) -> Batch:
    """Split the global batch `total` over `data_parallel` processes, or groups of `sharing` each.

    The micro-batch is the largest divisor of total/data_parallel up to `cap`. A given `micro` or
    `accumulation` wins over the cap; both together set the global batch, unless that is given too.
    Raises `UserError` if no split keeps the global batch.
    """
    count = data_parallel
    processes = plural(count, "process") if sharing == 1 else f"{plural(count, 'group')} of {sharing} processes"
    if micro and accumulation:
        return _both_given(total, count, micro, accumulation, total_is_explicit)
    if micro:
        _require(total % (micro * count) == 0, total, micro * count, f"micro-batch {micro} x {processes}")
        return Batch(micro, total // (micro * count), count, f"accumulation: {total} / ({micro} x {processes})")
    if accumulation:
        unit = accumulation * count
        _require(total % unit == 0, total, unit, f"accumulation {accumulation} x {processes}")
        return Batch(total // unit, accumulation, count, f"micro-batch: {total} / ({accumulation} x {processes})")
    _require(total % count == 0, total, count, processes)
    share = total // count
    micro = max(divisor for divisor in range(1, min(cap, share) + 1) if share % divisor == 0)
    return Batch(
        micro, share // micro, count, f"micro-batch {micro}: largest divisor of {total}/{count} = {share} up to {cap}"
    )


def _both_given(total: int, count: int, micro: int, accumulation: int, total_is_explicit: bool) -> Batch:
    batch = Batch(micro, accumulation, count, "micro-batch and accumulation were both given: they set the global batch")
    if total_is_explicit and batch.total != total:
        raise mistake(
            "global_batch_size",
            f"{total} contradicts micro-batch x accumulation x data-parallel size = {batch}",
            f"leave one of the three out, or write --global_batch_size {batch.total}",
        )
    return batch


def _require(divides: bool, total: int, unit: int, what: str) -> None:
    if divides:
        return
    below, above = total // unit * unit, (total // unit + 1) * unit
    nearest = " or ".join(str(size) for size in (below, above) if size)
    raise mistake(
        "global_batch_size",
        f"{total} cannot be split over {what}, and the global batch never changes by itself",
        f"--global_batch_size {nearest}",
    )
