"""A small simulator of data-parallel training, and the timings that it would give.

It simulates processes, a link and loaders, and shares no code with the verdicts. Each effect can be
switched off, so the cause of a slow step is known: the effect without which the step at the largest
size is fastest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from statistics import fmean, median_low

from recipes.scaling.timings import Timing

WARM_UP, STEPS = 20, 20  # simulated steps; logs and checkpoints come every so many that divide 20
EPOCH = 50  # steps


@dataclass(frozen=True)
class Training:
    """What is trained, and on what. Times are in seconds, sizes in bytes, rates per second."""

    global_batch: int
    largest_micro_batch: int
    forward: float  # of a sample
    backward: float
    launch: float  # of a micro-batch, whatever its size: the host's work
    optimizer: float  # of a step, whatever its size
    asynchronous: bool  # the device computes while the host launches, as a GPU does
    shared_out: bool = False  # ideal: what is fixed shrinks with the number of processes, as the samples do

    gradients: float = 1e6
    buckets: int = 1
    bandwidth: float = math.inf
    latency: float = 0.0  # of a hop; a ring has two for each other process
    overlapped: bool = True
    every_micro_batch: bool = False  # gradients are exchanged after each, not once a step

    contention: float = 0.0  # by which each other process slows a process down

    loading: float = 0.0  # of a sample, by one worker
    workers: int = 2  # 0: the process loads by itself, and waits
    storage: float = math.inf  # samples that all processes together can read
    slow_loading: float = 1.0  # factor of the slow process
    slow_computing: float = 1.0
    slow_rank: int = 0

    log: float = 0.0
    log_every: int = 10
    checkpoint: float = 0.0
    evaluation: float = 0.0  # by one process; more share it out
    save_every: int = 20

    jitter: float = 0.0  # by which a process's steps differ, as a standard deviation


# --- What happens --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stretch:
    """Means over the steps of a stretch, in seconds."""

    step: float
    waits: list[float]
    own: list[float]  # forward, backward and optimizer, of each process
    forward: float
    optimizer: float
    logging: float
    saving: float


def train(
    training: Training, world: int, batch: int, random: Random, exchange: bool = True, fed: bool = False
) -> Stretch:
    """Steps of `world` processes, one event after the other.

    `fed`: from memory, with neither logs nor checkpoints.
    """
    samples = batch / world
    micro_batches = math.ceil(samples / training.largest_micro_batch)
    once = _micro_batch(training, samples / micro_batches, _fixed_share(training, world, batch, micro_batches))
    part = training.forward / (training.forward + training.backward)
    optimizer = training.optimizer / (world if training.shared_out else 1)
    syncing = micro_batches if training.every_micro_batch else 1
    pace = _paces(training, world)
    loaders = [_Loader(training, world, samples, micro_batches, rank) for rank in range(world)]

    now = [0.0] * world
    waits, own, logging, saving, begun = [0.0] * world, [0.0] * world, 0.0, 0.0, 0.0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            begun, waits, own, logging, saving = max(now), [0.0] * world, [0.0] * world, 0.0, 0.0
        if not fed:
            taken = [loader.take(time) for loader, time in zip(loaders, now, strict=True)]
            waits = [wait + after - before for wait, after, before in zip(waits, taken, now, strict=True)]
            now = taken
        slowness = [slow * max(0.5, random.gauss(1, training.jitter)) for slow in pace]
        now = [time + slow * once * (micro_batches - syncing) for time, slow in zip(now, slowness, strict=True)]
        for _ in range(syncing):
            now = [time + slow * once for time, slow in zip(now, slowness, strict=True)]
            if exchange and world > 1:
                backwards = [slow * once * (1 - part) for slow in slowness]
                now = [_exchanged(training, world, now, backwards)] * world
        now = [time + slow * optimizer for time, slow in zip(now, slowness, strict=True)]
        own = [total + slow * (once * micro_batches + optimizer) for total, slow in zip(own, slowness, strict=True)]
        if fed:
            continue
        if step % training.log_every == 0:
            now = [max(now) + training.log] * world
            logging += training.log
        if step % training.save_every == 0:
            cost = training.checkpoint + training.evaluation / world
            now = [max(now) + cost] * world
            saving += cost
    return Stretch(
        (max(now) - begun) / STEPS,
        [wait / STEPS for wait in waits],
        [time / STEPS for time in own],
        fmean(pace) * once * micro_batches * part,
        fmean(pace) * optimizer,
        logging / STEPS,
        saving / STEPS,
    )


def _fixed_share(training: Training, world: int, batch: int, micro_batches: int) -> float:
    if not training.shared_out:
        return 1.0
    return math.ceil(batch / training.largest_micro_batch) / (world * micro_batches)


def _micro_batch(training: Training, samples: float, fixed_share: float) -> float:
    """Seconds of its forward and backward pass."""
    computing, launching = samples * (training.forward + training.backward), training.launch * fixed_share
    return max(computing, launching) if training.asynchronous else computing + launching


def _paces(training: Training, world: int) -> list[float]:
    """How many times as long as alone each process takes."""
    beside = 1 + training.contention * (world - 1)
    return [beside * (training.slow_computing if rank == training.slow_rank else 1) for rank in range(world)]


def _exchanged(training: Training, world: int, ends: list[float], backwards: list[float]) -> float:
    """When all processes have all gradients. A bucket is sent when the last process has it."""
    takes = _collective(training, world, training.gradients / training.buckets)
    end, backward = max(zip(ends, backwards, strict=True))  # the last process is last with each bucket
    between = backward / training.buckets if training.overlapped else 0.0
    ready = free = end - between * (training.buckets - 1)
    for _ in range(training.buckets):
        free = max(free, ready) + takes
        ready += between
    return free


def _collective(training: Training, world: int, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes in a ring."""
    return 2 * (world - 1) * training.latency + 2 * (world - 1) / world * size / training.bandwidth


class _Loader:
    """The workers of a process. Each loads two micro-batches ahead, then waits for the process."""

    def __init__(self, training: Training, world: int, samples: float, micro_batches: int, rank: int):
        slow = training.slow_loading if rank == training.slow_rank else 1.0
        alone = training.loading * slow / max(1, training.workers)
        self.takes = samples * max(alone, world / training.storage)
        self.ahead = training.workers > 0
        steps = max(1, 2 * training.workers // micro_batches)
        self.taken: deque[float] = deque([0.0] * steps, maxlen=steps)
        self.loaded = 0.0

    def take(self, now: float) -> float:
        """The time at which a process that asks now gets its next batch."""
        if not self.ahead:
            return now + self.takes
        self.loaded = max(self.loaded, self.taken[0]) + self.takes
        now = max(now, self.loaded)
        self.taken.append(now)
        return now


# --- What causes it ------------------------------------------------------------------------------

IDEAL = {
    "communication": {"bandwidth": math.inf, "latency": 0.0},
    "contention": {"contention": 0.0},
    "data": {"loading": 0.0, "storage": math.inf},
    "work": {"shared_out": True},
    "straggler": {"slow_computing": 1.0},
    "logging": {"log": 0.0},
    "saving": {"checkpoint": 0.0, "evaluation": 0.0},
}
HEALTHY, CLEAR, TIMES_THE_NEXT = 0.08, 0.15, 1.5
ALL_HEALTHY = 0.20  # without all effects together: two may hide each other


def gains(training: Training, world: int) -> dict[str, float]:
    """The share of a step at that size that is saved without each effect."""
    still = replace(training, jitter=0.0)
    step = _step(still, world)
    return {cause: 1 - _step(replace(still, **ideal), world) / step for cause, ideal in IDEAL.items()}


def _step(training: Training, world: int) -> float:
    return train(training, world, training.global_batch, Random(0)).step


def known_cause(training: Training, world: int, found: dict[str, float] | None = None) -> str | None:
    """One of `IDEAL`, or "healthy"; None if it is not clear. `found` are its gains, if known."""
    found = found or gains(training, world)
    first, second = sorted(found, key=lambda cause: -found[cause])[:2]
    if found[first] <= HEALTHY:
        ideal = {name: value for change in IDEAL.values() for name, value in change.items()}
        still = replace(training, jitter=0.0)
        together = 1 - _step(replace(still, **ideal), world) / _step(still, world)
        return "healthy" if together <= ALL_HEALTHY else None
    clear = found[first] >= CLEAR and found[first] >= TIMES_THE_NEXT * found[second]
    return first if clear else None


# --- What is measured ----------------------------------------------------------------------------


def measured(
    training: Training, largest: int, repeats: int, random: Random, noise: float = 0.03, within: float = 0.01
) -> list[Timing]:
    """Strong and weak rows; runs differ by `noise`, stretches of one by `within` (deviations)."""
    worlds = [world for world in (1, 2, 4, 8) if world <= largest]
    share = training.global_batch // largest
    kinds = [("strong", world, training.global_batch) for world in worlds]
    kinds += [("weak", world, share * world) for world in worlds]
    return [row for kind in kinds for row in _rows(training, *kind, repeats, random, (noise, within))]


def _rows(
    training: Training, scaling: str, world: int, batch: int, repeats: int, random: Random, noise: tuple[float, float]
) -> Iterator[Timing]:
    """Three stretches per run: the training, and a step from memory with and without exchange."""
    trained = train(training, world, batch, random)
    synced = train(training, world, batch, random, fed=True)
    alone = train(training, world, batch, random, exchange=False, fed=True)
    for _ in range(repeats):
        slowed = random.lognormvariate(0, noise[0]) * (random.uniform(1.3, 2) if random.random() < 0.03 else 1)
        off = tuple(slowed * random.lognormvariate(0, noise[1]) for _ in range(3))
        yield _row(training, scaling, world, batch, (trained, synced, alone), off)


def _row(
    training: Training,
    scaling: str,
    world: int,
    batch: int,
    stretches: tuple[Stretch, Stretch, Stretch],
    off: tuple[float, ...],
) -> Timing:
    """The row of a run whose three stretches take `off` times as long as they should."""
    trained, synced, alone = stretches
    first, second, third = off
    step = first * trained.step
    waits = first * fmean(trained.waits)
    backward = first * (fmean(trained.own) - trained.forward - trained.optimizer)
    writing = first * (trained.logging + trained.saving)
    known = waits + first * (trained.forward + trained.optimizer) + backward + writing
    left = max(0.0, step - known)
    slowest = third * max(alone.own)
    communication = min(left, max(0.0, second * synced.step - slowest)) if world > 1 else 0.0
    micro_batches = math.ceil(batch / world / training.largest_micro_batch)
    syncs = (micro_batches if training.every_micro_batch else 1) if world > 1 else 0
    return Timing(
        num_processes=world,
        epoch_time=step * EPOCH,
        samples=batch * EPOCH,
        scaling=scaling,
        global_batch=batch,
        micro_batch=batch // world // micro_batches,
        accumulation=micro_batches,
        step_time=known + left,
        data_wait=waits,
        forward=first * trained.forward,
        backward=backward,
        communication=communication,
        optimizer=first * trained.optimizer,
        logging=first * trained.logging,
        saving=first * trained.saving,
        other=left - communication,
        data_wait_max=first * max(trained.waits),
        no_sync_step=third * median_low(alone.own),
        no_sync_step_max=slowest,
        syncs=syncs,
        collectives=syncs * training.buckets,
        sync_bytes=round(syncs * training.gradients),
        workers=training.workers,
        **(_link(training, world) if world > 1 else {}),
    )


def _link(training: Training, world: int) -> dict[str, float]:
    """The link as an all-reduce of a bucket's size and one of a few bytes measure it."""
    bucket = training.gradients / training.buckets
    bandwidth = 2 * (world - 1) / world * bucket / _collective(training, world, bucket)
    return {"link_bandwidth": bandwidth, "link_latency": _collective(training, world, 0)}


# --- What is tried -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Set:
    """Timings with their known cause at the largest size, one of `IDEAL` or "healthy"."""

    seed: int
    cause: str
    training: Training
    largest: int
    rows: list[Timing]

    @property
    def at(self) -> tuple[Training, int]:
        return self.training, self.largest


def sets(of_each: int, first_seed: int = 0) -> Iterator[Set]:
    """Sets with clear causes, `of_each` cause and healthy ones; the same for the same seed."""
    wanted = dict.fromkeys([*IDEAL, "healthy"], of_each)
    for seed in count(first_seed):
        random = Random(seed)
        training, largest = draw(random)
        cause = known_cause(training, largest)
        if cause is None or not wanted[cause]:
            continue
        wanted[cause] -= 1
        yield Set(seed, cause, training, largest, measured(training, largest, random.randint(3, 5), random))
        if not any(wanted.values()):
            return


def draw(random: Random, effects: int | None = None) -> tuple[Training, int]:
    """A random training and largest size: `effects` are large (by default none to three)."""
    largest = random.choice([2, 4, 8])
    large = random.sample(list(IDEAL), random.choice([0, 1, 1, 2, 2, 3]) if effects is None else effects)
    each = random.choice([1, 2, 4, 8, 16, 32])  # samples of a process at the largest size
    sample = _between(random, 2e-4, 5e-2)
    work = each * sample

    def size(cause: str, low: float, high: float) -> float:
        """Seconds, against the computing of a process at the largest size."""
        return work * (_between(random, low, high) if cause in large else _between(random, 0.003, 0.06))

    micro_limit = random.choice([each, 2 * each, each * largest, max(1, each // 4)])
    micro_batches = math.ceil(each / micro_limit)
    fixed, in_launch = size("work", 0.3, 5), random.random()
    asynchronous = random.random() < 0.5
    gradients, buckets = _between(random, 2e6, 8e9), random.choice([1, 2, 5, 12, 40])
    every = random.random() < 0.2
    exchanging, in_latency = size("communication", 0.3, 4) / (micro_batches if every else 1), random.random() ** 3
    workers = random.choice([0, 2, 4])
    if workers and "data" not in large:
        loading = work * _between(random, 0.03, 0.7)  # behind the computing
    elif workers:
        loading = work * _between(random, 1.2, 4)
    else:
        loading = size("data", 0.3, 3)
    uneven = random.random() < 0.2
    from_storage = workers > 0 and not uneven and random.random() < 0.3
    slower = _between(random, 1.3, 4) if uneven else 1.0
    log_every, save_every = random.choice([1, 2, 5, 10]), random.choice([5, 10, 20])
    saving, in_evaluation = size("saving", 0.3, 3) * save_every, random.choice([0.0, random.random()])
    return Training(
        global_batch=each * largest,
        largest_micro_batch=micro_limit,
        forward=sample / 3,
        backward=sample * 2 / 3,
        launch=fixed * in_launch / micro_batches + (work / micro_batches if asynchronous and "work" in large else 0.0),
        optimizer=fixed * (1 - in_launch),
        asynchronous=asynchronous,
        gradients=gradients,
        buckets=buckets,
        bandwidth=2 * (largest - 1) / largest * gradients / (exchanging * (1 - in_latency)),
        latency=exchanging * in_latency / buckets / (2 * (largest - 1)),
        overlapped=random.random() < 0.6,
        every_micro_batch=every,
        contention=size("contention", 0.25, 3) / work / (largest - 1),
        loading=0.0 if from_storage else loading / each * max(1, workers) / slower,
        workers=workers,
        storage=largest * each / loading if from_storage else math.inf,
        slow_loading=slower,
        slow_computing=1 + size("straggler", 0.25, 2) / work,
        slow_rank=random.randrange(largest),
        log=size("logging", 0.3, 3) * log_every,
        log_every=log_every,
        checkpoint=saving * (1 - in_evaluation),
        evaluation=saving * in_evaluation * largest,
        save_every=save_every,
        jitter=random.uniform(0.005, 0.03),
    ), largest


def _between(random: Random, low: float, high: float) -> float:
    """A number between the two; each order of magnitude is equally likely."""
    return math.exp(random.uniform(math.log(low), math.log(high)))
