"""Global batch arithmetic: global = micro-batch x accumulation x data-parallel size.

The data-parallel size is the world size divided by the number of processes that share examples.
"""

from dataclasses import dataclass

from recipes.errors import mistake, plural
from recipes.run.engine import Parallelism

BATCH = "batch arithmetic"
_ALONE = Parallelism()  # each process trains on examples of its own


@dataclass(frozen=True)
class Batch:
    """The global batch as `micro` examples per process x `accumulation` x `data_parallel`.

    `data_parallel` is the number of processes, or groups of processes, with their own examples.
    `source` is `batch arithmetic`, or `fit.json` if `--fit` found the micro-batch.
    """

    micro: int
    accumulation: int
    data_parallel: int
    reason: str
    source: str = BATCH

    @property
    def total(self) -> int:
        """The global batch: examples per optimizer step over all processes."""
        return self.share * self.data_parallel

    @property
    def share(self) -> int:
        """The examples of each global batch that one process, or group of processes, gets."""
        return self.micro * self.accumulation

    @property
    def micro_batches(self) -> list[int]:
        """The micro-batches that keep the global batch, largest first."""
        return [size for size in range(self.share, 0, -1) if self.share % size == 0]

    def __str__(self) -> str:
        return f"{self.micro} x {self.accumulation} x {self.data_parallel} = {self.total}"


def split(
    total: int | None,
    world: int,
    cap: int,
    micro: int | None = None,
    accumulation: int | None = None,
    parallelism: Parallelism = _ALONE,
) -> Batch:
    """Split the global batch `total` over the processes, or the groups that share their examples.

    The micro-batch is the largest divisor of total/data_parallel up to `cap`. A given `micro` or
    `accumulation` wins over the cap. If both are given and `total` is None, the global batch is
    micro * accumulation * data_parallel. Raises `UserError` if no split keeps the global batch, or
    if the world size is not a multiple of the size of a group.
    """
    sharing = parallelism.sharing
    if world % sharing:
        what = f"{world} is not a multiple of {sharing}, the number of processes that share examples ({parallelism})"
        raise mistake("num_processes", what, f"--num_processes {_multiples(world, sharing)}")
    data_parallel = world // sharing
    if micro and accumulation:
        reason = "micro-batch and accumulation were both given: they set the global batch"
        batch = Batch(micro, accumulation, data_parallel, reason)
        if total not in (None, batch.total):
            what = f"{total} contradicts micro-batch x accumulation x data-parallel size = {batch}"
            fix = f"leave the micro-batch or the accumulation out, or write --global_batch_size {batch.total}"
            raise mistake("global_batch_size", what, fix)
        return batch
    assert total is not None
    processes = plural(data_parallel, "process")
    if sharing > 1:
        processes = f"{plural(data_parallel, 'group')} of {sharing} processes"
    given = micro or accumulation
    unit = (given or 1) * data_parallel
    if total % unit:
        over = f"{'micro-batch' if micro else 'accumulation'} {given} x {processes}" if given else processes
        what = f"{total} cannot be split over {over}, and the global batch never changes by itself"
        fix = f"--global_batch_size {_multiples(total, unit)}"
        if micro and micro > 1 and total % data_parallel == 0:
            near = max(size for size in range(1, micro) if total // data_parallel % size == 0)
            fix += f"; or --per_device_train_batch_size {near}"
        raise mistake("global_batch_size", what, fix)
    share = total // unit
    if micro:
        return Batch(micro, share, data_parallel, f"accumulation: {total} / ({micro} x {processes})")
    if accumulation:
        return Batch(share, accumulation, data_parallel, f"micro-batch: {total} / ({accumulation} x {processes})")
    micro = max(divisor for divisor in range(1, min(cap, share) + 1) if share % divisor == 0)
    reason = f"micro-batch {micro}: largest divisor of {share} = {total}/{data_parallel} that is at most {cap}"
    return Batch(micro, share // micro, data_parallel, reason)


def _multiples(number: int, unit: int) -> str:
    """Return the multiples of `unit` around a number, without 0. For 6 and unit 4: `4 or 8`."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
