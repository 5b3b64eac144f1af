"""What to change, the gain to expect from measured times, and the flags for it.

Changes that leave the training as it is come first. A gain is a ratio: throughput after over
throughput before.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from recipes.run import Settings, with_flags
from recipes.scaling.causes import WORTH_NAMING, Cause, megabytes, milliseconds, volume_bound
from recipes.scaling.noise import of_median, together
from recipes.scaling.row import Timing
from recipes.scaling.sizes import Size, Spread, spread
from recipes.scaling.verdicts import Series

# Accumulation is advised until communication is at most this share of a step.
_SMALL_COMMUNICATION = 0.10
_MOST_ACCUMULATION = 64
_MIB = 2**20
# How many times less often to log, and to save.
_LOG_LESS, _SAVE_LESS = 10, 5
_AS_FAST = 1.02  # a smaller gain cannot be told from the noise of repeats
_SYNC_EACH = '"sync_each_batch": true'
_OF_DATA = ("workers", "preprocess")  # keys of what makes loading itself faster
_HARDLY = 0.02  # share of a step: workers that let it wait longer hardly keep up
TOO_NOISY = "too noisy to judge"
CLOSE = 0.05  # a prediction is held to be right within this share
BEFORE = "before"  # a run with the present settings, beside one that tries a change


@dataclass(frozen=True)
class Advice:
    """One change. `gain` is the ratio of throughputs; `key` is its name for `scale run --apply`.

    `same_training`: the global batch stays as it is. Timings of runs that try the change hold its
    `title`: a run with another title is not compared with earlier ones.
    """

    key: str
    title: str
    why: str
    gain: float
    num_processes: int
    flags: Settings = field(default_factory=dict)
    same_training: bool = True

    @property
    def shown_flags(self) -> str:
        """The flags as they are written on the command line; empty if there are none."""
        return shlex.join(with_flags([], self.flags))


@dataclass(frozen=True)
class Applied:
    """A change that was tried.

    `measured` is the ratio of its throughput to that of the runs beside it, and `off` by which
    share the repeats leave that and the prediction open; None for a single pair. `since`: the
    throughput of the present settings, over what it was when the gain was predicted.
    """

    title: str
    num_processes: int
    predicted: float
    measured: Spread
    off: float | None = None
    since: float = 1.0

    @property
    def judged(self) -> str:
        """The prediction in a word or two: what became of it, or why these runs cannot tell."""
        differs = abs(self.measured.median / self.predicted - 1)
        if differs <= CLOSE:
            return f"within {CLOSE:.0%}"
        if self.off is None:
            return "a single pair"
        if abs(self.since - 1) > CLOSE or differs <= self.off:
            return TOO_NOISY
        return f"off by {differs:.0%}"

    @property
    def words(self) -> str:
        text = f"predicted {self.predicted:.2f} times the throughput, measured {self.measured.median:.2f}"
        if self.measured.low != self.measured.high:
            text += f" ({self.measured.low:.2f} to {self.measured.high:.2f})"
        text += f": {self.judged}"
        if self.judged != TOO_NOISY:
            return text
        if abs(self.since - 1) > CLOSE:
            text += f", the present settings are {self.since:.2f} times as fast as when that was predicted"
        return f"{text}; the repeats leave {self.off:.0%} open. Measure both on a quiet machine, or more often"


def advise(size: Size, series: Series) -> list[Advice]:
    """What to change at this size: the same training first, then by gain.

    Empty if no loss is worth naming, or the repeats differ by more.
    """
    row, step = size.typical, size.typical.step_time
    found = []
    verdict = next(one for one in series.verdicts if one.num_processes == size.num_processes)
    if step and verdict.undecided != "noise":
        for cause in verdict.named:
            found += list(_FOR[cause.key](row, step, cause))
        found += list(_larger_micro_batch(row, step))
        found = _at_the_workers_pace(found, row, step, series)
    found += _fewer_processes(size, series)
    return sorted(found, key=lambda advice: (not advice.same_training, -advice.gain))


def _at_the_workers_pace(found: list[Advice], row: Timing, step: float, series: Series) -> list[Advice]:
    """The advice without what it cannot gain because the workers load no faster.

    How fast they load is seen at any size that waits for them.
    """
    loading = [
        one.step_time * one.num_processes / one.batch.total
        for one in (size.typical for size in series.sizes)
        if one.step_time and one.batch.total and one.setup.workers and _waits_for_data(one)
    ]
    if not loading or not row.batch.total or not row.setup.workers:
        return found
    fastest = step / (max(loading) * row.batch.total / row.num_processes)
    capped = []
    for advice in found:
        if advice.key not in _OF_DATA and advice.gain > fastest:
            why = f"{advice.why}; no faster, since the workers then set the pace"
            advice = replace(advice, gain=fastest, why=why)
        if advice.gain >= _AS_FAST:
            capped.append(advice)
    return capped


def _waits_for_data(row: Timing) -> bool:
    return (row.parts.data_wait or 0.0) >= _HARDLY * (row.step_time or 0.0)


def _gain(step: float, less: float) -> float:
    """The ratio of throughputs if a step of `step` seconds takes `less` seconds less."""
    return step / max(step - less, step * 1e-3)


# --- One function per cause: from a row, the seconds of its step and what it loses ---------------


def _communication(row: Timing, step: float, cause: Cause) -> Iterator[Advice]:
    """Only DDP's exchange can be changed by these flags; ZeRO and FSDP have their own."""
    if row.setup.engine != "ddp":
        return
    yield from _sync_once(row, step, cause.seconds)
    yield from _compression(row, step, cause.seconds)
    yield from _bucket_size(row, step, cause.seconds)
    yield from _accumulation(row, step, cause.seconds)


def _sync_once(row: Timing, step: float, waits: float) -> Iterator[Advice]:
    syncs = row.exchange.syncs if row.exchange else None
    if syncs and syncs > 1:
        flags = {"accelerator_config": '{"gradient_accumulation_kwargs": {"sync_each_batch": false}}'}
        why = f"{syncs:.0f} exchanges per step where one is enough: none is needed between micro-batches"
        gain = _gain(step, waits * (1 - 1 / syncs))
        yield Advice("sync_once", "exchange gradients once a step", why, gain, row.num_processes, flags)


def _compression(row: Timing, step: float, waits: float) -> Iterator[Advice]:
    if row.exchange and row.exchange.bytes and volume_bound(row) and "ddp_comm_hook" not in row.setup.command:
        whole = _with_hidden(row, waits)
        left = max(0.0, whole / 2 - (whole - waits))
        hook = "fp16" if row.setup.hardware.startswith("CPU") else "bf16"
        why = f"{hook} halves the {megabytes(row.exchange.bytes)} per step, and sending them takes most of the time"
        title = f"compress gradients to {hook} on the wire"
        yield Advice("compression", title, why, _gain(step, waits - left), row.num_processes, {"ddp_comm_hook": hook})


def _with_hidden(row: Timing, waits: float) -> float:
    """Seconds of a step's whole exchange, with the part that the backward pass hides."""
    overlap = row.exchange.overlap if row.exchange else None
    return waits if overlap is None else waits / (1 - min(overlap, 0.9))


def _bucket_size(row: Timing, step: float, waits: float) -> Iterator[Advice]:
    """With b buckets the first is sent after 1/b of the backward pass; each costs the latency."""
    exchange, link, backward, accumulation = row.exchange, row.link, row.parts.backward, row.batch.accumulation
    if not exchange or not exchange.bytes or not exchange.syncs or not link or not link.latency:
        return
    if not backward or not accumulation:
        return
    whole = _with_hidden(row, waits)
    last_backward, latency = backward / accumulation, link.latency

    def exposed(buckets: int) -> float:
        sends = whole + (buckets - 1) * latency
        return max(sends / buckets, sends - last_backward * (1 - 1 / buckets))

    best = min(range(1, 33), key=exposed)
    if best == 1 or exposed(best) > (1 - WORTH_NAMING) * waits:
        return
    size = max(1, round(exchange.bytes / exchange.syncs / best / _MIB))
    why = f"about {best} buckets: the first are sent while the backward pass goes on"
    gain, flags = _gain(step, waits - exposed(best)), {"ddp_bucket_cap_mb": size}
    yield Advice("bucket_size", f"buckets of {size} MiB", why, gain, row.num_processes, flags)


def _accumulation(row: Timing, step: float, waits: float) -> Iterator[Advice]:
    """The fewest micro-batches that bring the exchange to a tenth of a step.

    The global batch grows with them. Only where a step exchanges gradients once: more micro-batches
    would bring more exchanges. And not where workers hardly keep up with the present pace.
    """
    batch, accumulation, exchange = row.batch.total, row.batch.accumulation, row.exchange
    if not batch or not accumulation or (exchange and exchange.syncs and exchange.syncs > 1):
        return
    if _SYNC_EACH in row.setup.command or (row.setup.workers and _waits_for_data(row)):
        return
    micro_batches = _of_micro_batches(row)
    once = step - micro_batches  # the exchange, the optimizer, logs, agreeing on the number of items
    for times in range(2, _MOST_ACCUMULATION + 1):
        longer = once + times * micro_batches
        if waits <= _SMALL_COMMUNICATION * longer:
            flags: dict[str, object] = {"global_batch_size": batch * times}
            flags |= {"gradient_accumulation_steps": accumulation * times}
            flags |= {"per_device_train_batch_size": row.batch.micro}
            why = f"one exchange for {accumulation * times} micro-batches, not {accumulation}, brings communication to "
            why += f"{waits / longer:.0%} of a step. This is a different training: the global "
            why += f"batch is {batch * times}, not {batch}, so tune the learning rate again"
            if row.setup.workers:
                faster = 1 - longer / times / step
                why += f". The workers must load {faster:.0%} faster than now, or they set the pace"
            gain = times * step / longer
            title = f"{times} times the accumulation"
            yield Advice("accumulation", title, why, gain, row.num_processes, flags, same_training=False)
            return


def _of_micro_batches(row: Timing) -> float:
    """Seconds of a step that grow with its micro-batches, of the slowest process."""
    parts = row.parts
    passes = (parts.forward or 0.0) + (parts.backward or 0.0)
    if row.no_sync and row.no_sync.slowest:
        passes = max(passes, row.no_sync.slowest - (parts.optimizer or 0.0))
    return passes + (parts.data_wait or 0.0)


def _data(row: Timing, step: float, cause: Cause) -> Iterator[Advice]:
    workers, cores = row.setup.workers or 0, row.setup.cores
    if cores is not None and workers >= cores:
        why = f"{workers} workers on {cores} cores do not keep up with the training"
        gain = _gain(step, cause.seconds)
        yield Advice("preprocess", "preprocess the data before training", why, gain, row.num_processes)
        return
    more = min(max(2 * workers, 2), cores or 2 * workers or 2)
    works = step - cause.seconds
    # Workers that do not keep up are always busy: each loads the data of one of as many steps as
    # there are workers.
    loads = cause.seconds if workers == 0 else workers * step
    left = max(0.0, loads / more - works)
    why = f"loading takes {milliseconds(loads)} per step, and workers load while the step computes"
    title = f"{more} worker{'s' * (more > 1)} to load the data"
    flags = {"dataloader_num_workers": more}
    yield Advice("workers", title, why, _gain(step, cause.seconds - left), row.num_processes, flags)


def _contention(row: Timing, step: float, cause: Cause) -> Iterator[Advice]:
    why = "cores, memory or the GPUs' host are shared: `recipes doctor` lists what else runs there; "
    why += "fewer processes per node help too"
    gain = _gain(step, cause.saves)
    yield Advice("uncontended", "give each process cores of its own", why, gain, row.num_processes)


def _straggler(row: Timing, step: float, cause: Cause) -> Iterator[Advice]:
    why = "all processes wait for the slowest: `recipes doctor` finds its device; exclude or repair its node"
    yield Advice("straggler", "replace the slow process's device", why, _gain(step, cause.saves), row.num_processes)


def _work(row: Timing, step: float, cause: Cause) -> Iterator[Advice]:
    setup = row.setup
    if setup.hardware and not setup.hardware.startswith("CPU") and "torch_compile" not in setup.command:
        why = "fewer and larger kernels; this gain is the most that it can save"
        flags = {"torch_compile": True, "packing": True}
        yield Advice("compile", "compile the model", why, _gain(step, cause.saves), row.num_processes, flags)


def _larger_micro_batch(row: Timing, step: float) -> Iterator[Advice]:
    """The fixed cost of a pass is paid once for each micro-batch of a step."""
    passes, micro, overhead = row.batch.accumulation, row.batch.micro, row.pass_overhead
    if not passes or passes % 2 or not micro or overhead is None:
        return
    spared = passes / 2 * overhead
    if spared < WORTH_NAMING * step:
        return
    flags = {"per_device_train_batch_size": 2 * micro, "gradient_accumulation_steps": passes // 2}
    why = f"each pass has a fixed cost of {milliseconds(overhead)}, and a step has {passes} passes; "
    why += "`recipes fit` finds the largest micro-batch that fits into memory"
    yield Advice("micro_batch", "twice the micro-batch", why, _gain(step, spared), row.num_processes, flags)


def _logging(row: Timing, step: float, cause: Cause) -> Iterator[Advice]:
    yield _rarer(row, step, cause, "logging", f"log {_LOG_LESS} times less often", ("logging_steps",), _LOG_LESS)


def _saving(row: Timing, step: float, cause: Cause) -> Iterator[Advice]:
    names = ("save_steps", "eval_steps")
    yield _rarer(row, step, cause, "saving", f"save and evaluate {_SAVE_LESS} times less often", names, _SAVE_LESS)


def _rarer(row: Timing, step: float, cause: Cause, key: str, title: str, names: tuple[str, ...], times: int) -> Advice:
    flags = {name: steps * times for name in names if (steps := getattr(row.setup, name))}
    why = f"it then takes 1/{times} of {milliseconds(cause.seconds)} per step"
    return Advice(key, title, why, _gain(step, cause.seconds * (1 - 1 / times)), row.num_processes, flags)


_FOR = {
    "communication": _communication,
    "contention": _contention,
    "data": _data,
    "work": _work,
    "straggler": _straggler,
    "logging": _logging,
    "saving": _saving,
}


def _fewer_processes(size: Size, series: Series) -> list[Advice]:
    """The fastest world size, if it is smaller than this one and at least as fast.

    Not where the repeats differ by more than the two sizes do.
    """
    best = max(series.sizes, key=lambda other: other.speedup.median)
    if size.num_processes == series.sizes[0].num_processes or series.scaling == "weak":
        return []
    leaves_open = together(best.off, size.off) or 0.0
    if best.num_processes < size.num_processes and best.speedup.median >= size.speedup.median * (1 + leaves_open):
        gain = best.speedup.median / size.speedup.median
        fast = "as fast" if gain < _AS_FAST else f"{gain:.2f} times as fast"
        processes = "1 process is" if best.num_processes == 1 else f"{best.num_processes} processes are"
        title = f"train on {best.num_processes}, not {size.num_processes}"
        return [Advice("fewer", title, f"{processes} {fast}: this model does not need more", gain, best.num_processes)]
    return []


def applied(rows: Sequence[Timing]) -> list[Applied]:
    """The changes that were tried, each compared with the runs that were interleaved with it."""
    tried = dict.fromkeys(
        (row.name, row.recipe, row.applied) for row in rows if row.applied and not row.applied.startswith(BEFORE)
    )
    return [found for key in tried if (found := _applied(key, rows))]


def _applied(key: tuple[str, str, str], rows: Sequence[Timing]) -> Applied | None:
    name, recipe, title = key
    after = [row for row in rows if (row.name, row.recipe, row.applied) == key]
    before = [row for row in rows if (row.name, row.recipe, row.applied) == (name, recipe, f"{BEFORE}: {title}")]
    earlier = [row for row in rows if not row.applied and _setting(row) == _setting(before[0])] if before else []
    rates = [_rates(some) for some in (earlier, before, after)]
    ratios = [new / old for old, new in zip(rates[1], rates[2], strict=False)]
    if not ratios:
        return None
    measured, off = spread(ratios), None
    if len(ratios) > 1:
        off = together(*(of_median(values) / median(values) for values in (ratios, rates[0]) if len(values) > 1))
    since = median(rates[1]) / median(rates[0]) if rates[0] else 1.0
    return Applied(title, after[0].num_processes, after[0].predicted or 1.0, measured, off, since)


def _setting(row: Timing) -> tuple:
    return row.name, row.recipe, row.scaling, row.num_processes, row.batch.total


def _rates(rows: Sequence[Timing]) -> list[float]:
    return [row.samples / row.epoch_time for row in rows if row.samples]
