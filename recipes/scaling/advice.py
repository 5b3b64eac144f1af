"""Advice: changes to make, the gain to expect from each change, and the flags that make the change.

Gains are predicted from measured times. A gain is the throughput after a change divided by the
throughput before. Changes that keep the global batch come first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, hypot
from statistics import median

from recipes.run import Settings
from recipes.scaling.analyse import Series, Size, Spread, spread
from recipes.scaling.causes import WORTH_NAMING, Cause, bus_bytes, megabytes, milliseconds
from recipes.scaling.timings import Timing, grouped, of_median

# The advised accumulation lowers communication to at most this share of a step.
_SMALL_COMMUNICATION = 0.10
_MOST_ACCUMULATION = 64
# Cause -> what to do less often, how many times less often, and the settings that say how often.
_LESS_OFTEN = {"logging": ("log", 10, "logging_steps"), "saving": ("save and evaluate", 5, "save_steps eval_steps")}
_AS_FAST = 1.02  # a smaller gain is printed as "as fast"
_CLOSE = 0.05  # a prediction counts as right if it is off by at most this share
BEFORE = "before"  # marks the runs without a change, with which the change is compared


@dataclass(frozen=True)
class Advice:
    """One change to a training, and the gain that is predicted for it."""

    key: str  # names the change in `scale run --apply KEY`
    title: str  # also the value of `applied` in the timings of runs that try the change
    why: str
    gain: float  # the throughput after the change divided by the throughput before
    flags: Settings  # with num_processes, if another world size is advised
    same_training: bool = True  # True if the global batch stays as it is


def advise(size: Size, series: Series) -> list[Advice]:
    """Return changes for a world size, sorted by gain; those that keep the global batch come first.

    If noise hides the causes, the only possible advice is a smaller world size.
    """
    row, step = size.typical, size.typical.step_time
    found = []
    if step and size.losses.undecided != "too noisy":
        for cause in size.losses.named:
            found += list(_for(row, cause))
        found += list(_larger_micro_batch(row, step))
    found += list(_fewer_processes(size, series))
    return sorted(found, key=lambda advice: (not advice.same_training, -advice.gain))


# --- For each cause ------------------------------------------------------------------------------


def _for(row: Timing, cause: Cause) -> Iterator[Advice]:
    lost, step = cause.seconds, cause.step
    if cause.key == "communication" and row.engine == "ddp":  # ZeRO and FSDP use other collectives
        yield from _communication(row, step, lost)
    elif cause.key == "contention":
        why = "`recipes doctor` shows cores, free memory and users of the GPUs; fewer processes per node also help"
        yield _shorter("uncontended", "give each process cores of its own", why, row, lost)
    elif cause.key == "straggler":
        why = "all processes wait for the slowest process: exclude or repair the node of that process"
        yield _shorter("straggler", "replace the slow process's device", why, row, lost)
    elif cause.key == "data":
        yield _faster_data(row, step, lost)
    elif cause.key in _LESS_OFTEN:
        words, times, names = _LESS_OFTEN[cause.key]
        flags = {name: steps * times for name in names.split() if (steps := getattr(row, name))}
        why = f"the cost of {milliseconds(lost)} per step falls to 1/{times}"
        yield _shorter(cause.key, f"{words} {times} times less often", why, row, lost * (1 - 1 / times), flags)


def _shorter(key: str, title: str, why: str, row: Timing, less: float, flags: Settings | None = None) -> Advice:
    """Return a change that saves `less` seconds of a step."""
    step = row.step_time or 0.0  # never 0: without a step time, `advise` looks for no change
    return Advice(key, title, why, step / max(step - less, step * 1e-3), flags or {})


def _communication(row: Timing, step: float, waits: float) -> Iterator[Advice]:
    if row.syncs and row.syncs > 1:
        flags = {"accelerator_config": '{"gradient_accumulation_kwargs": {"sync_each_batch": false}}'}
        why = f"a step synchronises gradients {row.syncs:.0f} times; once is enough, in the last backward pass"
        yield _shorter("sync_once", "exchange gradients once a step", why, row, waits * (1 - 1 / row.syncs), flags)
    whole = waits if row.overlap is None else waits / (1 - min(row.overlap, 0.9))  # with the hidden part
    if row.sync_bytes and _volume_bound(row, waits) and "ddp_comm_hook" not in row.command:
        hook = "fp16" if row.hardware.startswith("CPU") else "bf16"
        why = f"{hook} halves the {megabytes(row.sync_bytes)} that a step sends; the limit is bandwidth, not latency"
        title, less = f"compress gradients to {hook} on the wire", waits - max(0.0, waits - whole / 2)
        yield _shorter("compression", title, why, row, less, {"ddp_comm_hook": hook})
    yield from _accumulation(row, step, waits)


def _volume_bound(row: Timing, waits: float) -> bool:
    """True if sending a step's bytes takes over a quarter of `waits`, the seconds of waiting, and
    over twice the latency of all collectives. Busy cores can cause the rest of the wait.
    Bandwidth measured for small messages includes latency. False if a value is unknown.
    """
    if not row.sync_bytes or not row.link_bandwidth or row.collectives is None or row.link_latency is None:
        return False
    sending = bus_bytes(row.sync_bytes, row.num_processes) / row.link_bandwidth
    return max(2 * row.collectives * row.link_latency, waits / 4) < sending


def _accumulation(row: Timing, step: float, waits: float) -> Iterator[Advice]:
    """Yield the smallest accumulation that brings communication to a tenth of a step.

    The global batch grows with the accumulation. Yield nothing above `_MOST_ACCUMULATION` times the
    present accumulation, or if every micro-batch synchronises, so that accumulation saves nothing.
    """
    batch, accumulation, loading = row.global_batch, row.accumulation, row.data_wait or 0.0
    each = (row.syncs or 0) > 1 or '"sync_each_batch": true' in row.command
    if not batch or not accumulation or each:
        return
    passes = (row.forward or 0.0) + (row.backward or 0.0)
    if row.no_sync_step_max:  # of the slowest process
        passes = max(passes, row.no_sync_step_max - (row.optimizer or 0.0))
    micro_batches = passes + loading
    once = step - micro_batches  # the time spent once per step: all-reduces, the optimizer, logs
    if not micro_batches:
        return
    times = max(2, ceil((waits / _SMALL_COMMUNICATION - once) / micro_batches))
    if times <= _MOST_ACCUMULATION:
        longer = once + times * micro_batches
        flags: Settings = {
            "global_batch_size": batch * times,
            "gradient_accumulation_steps": accumulation * times,
            "per_device_train_batch_size": row.micro_batch,
        }
        why = f"one gradient synchronisation per {accumulation * times} micro-batches, not per {accumulation}, brings "
        why += f"communication to {waits / longer:.0%} of a step. This is a different training: the global "
        why += f"batch is {batch * times}, not {batch}, so tune the learning rate again"
        title, gain = f"{times} times the accumulation", times * step / longer
        yield Advice("accumulation", title, why, gain, flags, same_training=False)


def _faster_data(row: Timing, step: float, waits: float) -> Advice:
    workers, cores = row.workers or 0, row.cores
    if cores is not None and workers >= cores:
        why = f"loading does not keep up with the training (workers: {workers}, cores of the process: {cores})"
        return _shorter("preprocess", "preprocess the data before training", why, row, waits)
    more = min(max(2 * workers, 2), cores or 2 * workers or 2)
    # Workers that do not keep up are always busy: with n workers, each needs the time of n steps to
    # load the data of one step.
    loads = waits if workers == 0 else workers * step
    left = max(0.0, loads / more - (step - waits))
    why = f"loading takes {milliseconds(loads)} per step, and workers load while the step computes"
    title = f"{more} worker{'s' * (more > 1)} to load the data"
    return _shorter("workers", title, why, row, waits - left, {"dataloader_num_workers": more})


def _larger_micro_batch(row: Timing, step: float) -> Iterator[Advice]:
    """Yield a doubled micro-batch if halving the passes saves at least a tenth of the step time."""
    passes, micro, overhead = row.accumulation, row.micro_batch, row.pass_overhead
    if passes and passes % 2 == 0 and micro and overhead and passes / 2 * overhead >= WORTH_NAMING * step:
        flags = {"per_device_train_batch_size": 2 * micro, "gradient_accumulation_steps": passes // 2}
        why = f"each pass has a fixed cost of {milliseconds(overhead)}, and a step has {passes} passes; "
        why += "`recipes fit` finds the largest micro-batch that fits into memory"
        yield _shorter("micro_batch", "twice the micro-batch", why, row, passes / 2 * overhead, flags)


def _fewer_processes(size: Size, series: Series) -> Iterator[Advice]:
    """Yield the fastest world size if it is smaller than this size and at least as fast.

    Yield nothing in weak scaling, or if the repeats differ by more than the two sizes do.
    """
    best, gain = series.best, series.best.speedup.median / size.speedup.median
    smaller = series.scaling != "weak" and best.num_processes < size.num_processes
    if smaller and gain >= 1 + hypot(best.off, size.off):
        fast = "as fast" if gain < _AS_FAST else f"{gain:.2f} times as fast"
        processes = "1 process is" if best.num_processes == 1 else f"{best.num_processes} processes are"
        title, why = f"train on {best.num_processes}, not {size.num_processes}", "this model does not need more"
        yield Advice("fewer", title, f"{processes} {fast}: {why}", gain, {"num_processes": best.num_processes})


# --- Changes that were tried ---------------------------------------------------------------------


@dataclass(frozen=True)
class Applied:
    """A change that was tried, with its predicted and its measured gain."""

    title: str
    num_processes: int
    predicted: float
    measured: Spread  # the throughput with the change divided by the throughput without it
    off: float | None  # the relative uncertainty of `measured`; None for a single pair of runs

    @property
    def words(self) -> str:
        """The prediction, the measurement, and a verdict on the prediction, as a text."""
        measured, differs = self.measured, abs(self.measured.median / self.predicted - 1)
        quartiles = f" ({measured.low:.2f} to {measured.high:.2f})" if measured.low != measured.high else ""
        if differs <= _CLOSE:
            judged = f"within {_CLOSE:.0%}"
        elif self.off is None:
            judged = "not judged, because there is only a single pair of runs"
        elif differs <= self.off:
            judged = f"too noisy to judge, because the repeats leave an uncertainty of {self.off:.0%}. "
            judged += "Measure on a quiet machine, or with more repeats"
        else:
            judged = f"off by {differs:.0%}"
        text = f"predicted {self.predicted:.2f} times the throughput, measured {measured.median:.2f}"
        return f"{text}{quartiles}: {judged}"


def applied(rows: Sequence[Timing]) -> list[Applied]:
    """Return the tried changes, each compared with the interleaved runs without the change."""
    runs = grouped((row for row in rows if row.samples), lambda row: (row.name, row.recipe, row.applied))
    found = []
    for (name, recipe, title), after in runs.items():
        pairs = zip(runs.get((name, recipe, f"{BEFORE}: {title}"), []), after, strict=False)
        ratios = [_rate(new) / _rate(old) for old, new in pairs]
        if title and ratios:
            off = of_median(ratios) / median(ratios) if len(ratios) > 1 else None
            found.append(Applied(title, after[0].num_processes, after[0].predicted or 1.0, spread(ratios), off))
    return found


def _rate(row: Timing) -> float:
    return (row.samples or 0) / row.epoch_time
