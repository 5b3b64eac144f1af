"""Global batch arithmetic: global = micro-batch x accumulation x world size, on any hardware."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.errors import mistake


@dataclass(frozen=True)
class Batch:
    """`micro` examples per process, `accumulation` micro-batches per step, `world` processes."""

    micro: int
    accumulation: int
    world: int
    reason: str

    @property
    def total(self) -> int:
        """The global batch: examples per optimizer step over all processes."""
        return self.micro * self.accumulation * self.world

    def __str__(self) -> str:
        return f"{self.micro} x {self.accumulation} x {self.world} = {self.total}"


def split(
    total: int,
    world: int,
    cap: int,
    micro: int | None = None,
    accumulation: int | None = None,
    total_is_explicit: bool = True,
) -> Batch:
    """Split the global batch `total` over `world` processes.

    The micro-batch is the largest divisor of total/world up to `cap`. A given `micro` or
    `accumulation` wins over the cap; both together set the global batch, unless that is given too.
    Raises `UserError` if no split keeps the global batch.
    """
    if micro and accumulation:
        return _both_given(total, world, micro, accumulation, total_is_explicit)
    if micro:
        _require(total % (micro * world) == 0, total, micro * world, f"micro-batch {micro} x {world} processes")
        return Batch(micro, total // (micro * world), world, f"accumulation: {total} / ({micro} x {world} processes)")
    if accumulation:
        _require(
            total % (accumulation * world) == 0,
            total,
            accumulation * world,
            f"accumulation {accumulation} x {world} processes",
        )
        share = total // (accumulation * world)
        return Batch(share, accumulation, world, f"micro-batch: {total} / ({accumulation} x {world} processes)")
    _require(total % world == 0, total, world, f"{world} processes")
    share = total // world
    micro = max(divisor for divisor in range(1, min(cap, share) + 1) if share % divisor == 0)
    return Batch(
        micro, share // micro, world, f"micro-batch {micro}: largest divisor of {total}/{world} = {share} up to {cap}"
    )


def _both_given(total: int, world: int, micro: int, accumulation: int, total_is_explicit: bool) -> Batch:
    batch = Batch(micro, accumulation, world, "micro-batch and accumulation were both given: they set the global batch")
    if total_is_explicit and batch.total != total:
        raise mistake(
            "global_batch_size",
            f"{total} contradicts micro-batch x accumulation x world size = {batch}",
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
