"""A model of data-parallel training in closed form, and the timings that it would give.

Processes, a link and loaders, without any code of the verdicts. Each effect can be switched off, so
the cause of a slow step is known: the effect without which the step at the largest size is fastest.
"""

import math
from dataclasses import dataclass
from random import Random
from statistics import fmean, median_low

from recipes.scaling.timings import Timing

EPOCH = 50  # steps


@dataclass(frozen=True)
class Training:
    """What is trained, and on what. Times are in seconds, sizes in bytes, rates per second."""

    global_batch: int
    largest_micro_batch: int
    forward: float  # of a sample
    backward: float
    launch: float = 0.0  # of a micro-batch, whatever its size: the host's work
    optimizer: float = 0.0  # of a step, whatever its size

    gradients: float = 1e6
    buckets: int = 1
    bandwidth: float = math.inf
    latency: float = 0.0  # of a hop; a ring has two for each other process
    overlapped: bool = True
    every_micro_batch: bool = False  # gradients are exchanged after each, not once a step

    contention: float = 0.0  # by which each other process slows a process down
    loading: float = 0.0  # of a sample, by one worker
    workers: int = 2  # 0: the process loads by itself, and waits
    slow_computing: float = 1.0  # factor of the slow process
    slow_rank: int = 0
    log: float = 0.0
    log_every: int = 10
    checkpoint: float = 0.0
    save_every: int = 20

    def passes(self, samples: float) -> int:
        return math.ceil(samples / self.largest_micro_batch)

    def collective(self, world: int, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes in a ring."""
        return 2 * (world - 1) * self.latency + 2 * (world - 1) / world * size / self.bandwidth


@dataclass
class Step:
    """Seconds of a step and its parts; `own`: forward, backward and optimizer of each process."""

    step: float
    own: list[float]
    wait: float  # for data
    logging: float
    saving: float


def train(training: Training, world: int, batch: int, fed: bool = False) -> Step:
    """A step of `world` processes. `fed`: from memory, with neither logs nor checkpoints."""
    samples = batch / world
    passes = training.passes(samples)
    once = training.launch + samples / passes * (training.forward + training.backward)
    pace = [1 + training.contention * (world - 1)] * world
    if training.slow_rank < world:
        pace[training.slow_rank] *= training.slow_computing
    own = [each * (passes * once + training.optimizer) for each in pace]
    exchanges = (passes if training.every_micro_batch else 1) if world > 1 else 0
    # Buckets but the last travel while the backward pass of the slowest process computes the next.
    takes = training.collective(world, training.gradients / training.buckets)
    backward = max(pace) * once * training.backward / (training.forward + training.backward)
    hidden = backward / training.buckets if training.overlapped else 0.0
    exposed = takes + (training.buckets - 1) * max(0.0, takes - hidden)
    busy = max(own) + exchanges * exposed
    if fed:
        return Step(busy, own, 0.0, 0.0, 0.0)
    loading = samples * training.loading / max(1, training.workers)
    wait = max(0.0, loading - busy) if training.workers else loading  # logs and saves outlast what is prefetched
    logging, saving = training.log / training.log_every, training.checkpoint / training.save_every
    return Step(busy + wait + logging + saving, own, wait, logging, saving)


def measured(
    training: Training, largest: int, repeats: int, random: Random, noise: float = 0.03, within: float = 0.01
) -> list[Timing]:
    """Strong and weak rows; runs differ by `noise`, the measurements of one by `within`."""
    found = []
    for scaling in ("strong", "weak"):
        for world in (world for world in (1, 2, 4, 8) if world <= largest):
            batch = training.global_batch if scaling == "strong" else training.global_batch // largest * world
            for _ in range(repeats):
                slowed = random.lognormvariate(0, noise) * (random.uniform(1.3, 2) if random.random() < 0.03 else 1)
                off = [slowed * random.lognormvariate(0, within) for _ in range(3)]
                found.append(_row(training, scaling, world, batch, off))
    return found


def _row(training: Training, scaling: str, world: int, batch: int, off: list[float]) -> Timing:
    """The row of a run. It measures the training, and a step from memory with and without exchange,
    each of which takes so many times as long as it should.
    """
    trained, synced = train(training, world, batch), train(training, world, batch, fed=True)
    passes, first, several = training.passes(batch / world), off[0], world > 1
    beside = first * (1 + training.contention * (world - 1))
    parts = {
        "data_wait": first * trained.wait,
        "forward": beside * batch / world * training.forward,
        "optimizer": beside * training.optimizer,
        "logging": first * trained.logging,
        "saving": first * trained.saving,
    }
    parts["backward"] = first * fmean(trained.own) - parts["forward"] - parts["optimizer"]
    left = max(0.0, first * trained.step - sum(parts.values()))
    slowest = off[2] * max(trained.own)
    communication = min(left, max(0.0, off[1] * synced.step - slowest)) if several else 0.0
    syncs = (passes if training.every_micro_batch else 1) if several else 0
    bucket = training.gradients / training.buckets  # whose all-reduce, and one of a few bytes, measure the link
    return Timing(
        num_processes=world,
        epoch_time=first * trained.step * EPOCH,
        samples=batch * EPOCH,
        scaling=scaling,
        global_batch=batch,
        micro_batch=batch // world // passes,
        accumulation=passes,
        step_time=sum(parts.values()) + left,
        communication=communication,
        other=left - communication,
        data_wait_max=first * trained.wait,
        no_sync_step=off[2] * median_low(trained.own),
        no_sync_step_max=slowest,
        syncs=syncs,
        collectives=syncs * training.buckets,
        sync_bytes=round(syncs * training.gradients),
        link_bandwidth=2 * (world - 1) / world * bucket / training.collective(world, bucket) if several else None,
        link_latency=training.collective(world, 0) if several else None,
        workers=training.workers,
        **parts,
    )
