"""Timings: a row for each epoch, or measured stretch, of a training, and the files that hold them.

`train.py --measure` and `recipes scale run` add rows to a .jsonl. Anyone else can write these files
too, also as .csv. A field of `Timing` is a column of a file.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from math import inf, sqrt
from pathlib import Path
from statistics import median
from typing import Any

from recipes.errors import Problem, UserError, mistake
from recipes.run import Settings

WARM_UP_STEPS = 3  # of each run, which are not timed


@dataclass(frozen=True)
class Timing:
    """One row. Times are in seconds, sizes in bytes.

    Only `num_processes` and `epoch_time` are required: a number is None if unknown, text is empty.
    """

    num_processes: int
    epoch_time: float
    name: str = "training"
    epoch: float | None = None
    samples: int | None = None  # examples of all processes in epoch_time
    accuracy: float | None = None
    recipe: str = ""
    scaling: str = ""  # "strong": the same global batch at every size, "weak": the same batch per process

    global_batch: int | None = None  # examples of an optimizer step
    micro_batch: int | None = None
    accumulation: int | None = None
    tokens: int | None = None  # in epoch_time
    loss: float | None = None  # of the evaluation
    step_time: float | None = None  # of an optimizer step, as are the times below

    # The parts of a step, in the order in which they happen: they add up to it, and are means over
    # the processes. Only `logging` and `saving` are those of the process that writes. The others
    # wait for it, and that wait is not counted as `other`.
    data_wait: float | None = None
    forward: float | None = None
    backward: float | None = None  # without the communication that it waits for
    communication: float | None = None  # exposed, without the wait for slower processes
    optimizer: float | None = None
    logging: float | None = None
    saving: float | None = None  # checkpoints and evaluations
    other: float | None = None
    data_wait_max: float | None = None  # of the slowest process

    # A step without exchange of gradients, of the median and of the slowest process. The median of
    # two is the faster one: their mean would count half of a slow process against both.
    no_sync_step: float | None = None
    no_sync_step_max: float | None = None
    pass_overhead: float | None = None  # of a forward and backward pass, whatever the number of its examples

    # What a process sends in a step, and the link between the processes while nothing else runs:
    # the bus bandwidth in bytes/s of an all-reduce as large as those of a step, and the time of one
    # of a few bytes.
    overlap: float | None = None  # share of the communication that the backward pass hides, 0 to 1
    syncs: float | None = None  # backward passes that exchanged gradients
    collectives: float | None = None
    sync_bytes: int | None = None
    link_bandwidth: float | None = None
    link_latency: float | None = None
    peak_memory: int | None = None  # of the process that needs most

    hardware: str = ""
    engine: str = ""  # "ddp", "deepspeed", ...
    workers: int | None = None  # dataloader_num_workers
    cores: int | None = None  # of each process
    logging_steps: int | None = None
    save_steps: int | None = None
    eval_steps: int | None = None
    command: str = ""  # train.py's flags
    applied: str = ""  # the recommendation that this run tries, or "before: ..." in the run beside it
    predicted: float | None = None  # throughput over the run before that the recommendation promised

    timed: str = ""  # what epoch_time covers, such as "20 steps"; empty for an epoch
    slowest_rank: int | None = None  # the process whose step without exchange takes longest
    slowest_host: str = ""
    slowest_device: str = ""
    data_wait_rank: int | None = None  # the process that waits most for data

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of those parts of a step that are known."""
        return {name: seconds for name in PARTS if (seconds := getattr(self, name)) is not None}


PARTS = ("data_wait", "forward", "backward", "communication", "optimizer", "logging", "saving", "other")
OF_ONE_PROCESS = ("slowest_rank", "slowest_host", "slowest_device", "data_wait_rank")
COLUMNS = {one.name: str(one.type) for one in fields(Timing)}  # with their types

_RATES = {"samples_per_second": "samples", "tokens_per_second": "tokens"}  # columns instead of epoch_time
_OF_A_RATE = 1000  # a throughput alone is the time of so many
_POSITIVE = ("num_processes", "epoch_time", "samples", "step_time", "global_batch", *_RATES)
_EXAMPLE = "a .csv whose first line is num_processes,epoch_time,samples, or the .jsonl of recipes scale run"


def name_of(run: Settings) -> str:
    """The name of a run's rows: its `run_name`, else the last part of its model's name."""
    model = run["model_name_or_path"]
    return run["run_name"] or (str(model).rstrip("/").rpartition("/")[2] if model else "demonstration")


# --- Reading -------------------------------------------------------------------------------------


def read(files: Iterable[str | Path]) -> list[Timing]:
    """The rows of all files; a row without a name gets the file's.

    Raises `UserError` with the first mistake of each row.
    """
    rows: list[Timing] = []
    problems: list[Problem] = []
    for file in map(Path, files):
        for number, cells in _cells(file):
            try:
                rows.append(parse_row({"name": file.stem, **cells}, f"{file}, line {number}"))
            except UserError as error:
                problems += error.problems
    if problems:
        raise UserError(*problems)
    if not rows:
        raise mistake("FILE", "holds no timings", _EXAMPLE)
    return rows


def _cells(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """The rows of a file that are not empty, with the numbers of their lines."""
    number = 0
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".jsonl":
            found = []
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    found.append((number, {**json.loads(line)}))
            return found
        lines = csv.DictReader(io.StringIO(text), skipinitialspace=True)
        rows = [(lines.line_num, {str(name).strip(): cell for name, cell in row.items()}) for row in lines]
    except (OSError, ValueError, TypeError, RecursionError, csv.Error) as error:
        at = f", line {number}," if number else ""
        raise mistake("FILE", f"{file}{at} cannot be read: {error}", _EXAMPLE) from None
    if rows and "num_processes" not in rows[0][1]:
        raise mistake("FILE", f"{file} has no column num_processes, but {', '.join(rows[0][1])[:200]}", _EXAMPLE)
    return [(number, row) for number, row in rows if any(row.values())]


def parse_row(row: Mapping[str, Any], source: str) -> Timing:
    """A row of a file as a Timing, without unknown columns. Raises `UserError`."""
    known = {*COLUMNS, *_RATES}
    values = {
        name: _value(name, value, source) for name, value in row.items() if name in known and value not in (None, "")
    }
    for rate_name, counted in _RATES.items():
        rate = values.pop(rate_name, None)
        if rate is None:
            continue
        if "epoch_time" not in values:
            if counted not in values:
                values |= {counted: _OF_A_RATE, "timed": f"{_OF_A_RATE} {counted}"}
            values["epoch_time"] = values[counted] / rate
        values.setdefault(counted, max(1, round(rate * values["epoch_time"])))
    for name in ("num_processes", "epoch_time"):
        if name not in values:
            or_rate = " or samples_per_second" if name == "epoch_time" else ""
            raise mistake(name, "is missing", f"a column {name}{or_rate}, filled in each row", source)
    if values.get("scaling") == "weak" and not (values.keys() & {"samples", "tokens"}):
        what = "is missing: in weak scaling the work grows with the processes, and nothing says how"
        raise mistake("samples", what, "a column samples: examples of all processes in epoch_time", source)
    return Timing(**values)


def _value(name: str, value: Any, source: str) -> Any:
    kind = COLUMNS.get(name, "float")
    if kind == "str":
        if name == "scaling" and value not in ("strong", "weak"):
            raise mistake(name, f"{value!r} is neither strong nor weak", "strong or weak", source)
        return str(value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise mistake(name, f"{value!r:.40} is not a number", "a number, such as 12.5", source) from None
    whole, positive = kind.startswith("int"), name in _POSITIVE
    if not 0 <= number < inf or (positive and not number) or (whole and number % 1):
        fix = f"a {'whole ' * whole}number {'above' if positive else 'of at least'} 0"
        raise mistake(name, f"{value!r} is not possible", fix, source)
    return int(number) if whole else number


# --- Writing -------------------------------------------------------------------------------------


def append(file: str | Path, rows: Iterable[Timing]) -> None:
    """Add rows to a .jsonl; makes it if missing. Raises `UserError` if it cannot be written."""
    require_room(file)
    with Path(file).open("a", encoding="utf-8") as stream:
        for row in rows:
            known = {name: value for name, value in vars(row).items() if value not in (None, "")}
            stream.write(json.dumps(known) + "\n")


def require_room(file: str | Path) -> None:
    """Begin a file of timings. Raises `UserError` if rows cannot be added to it."""
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).open("a").close()
    except OSError as error:
        raise mistake("FILE", f"{file} cannot be written: {error.strerror}", "choose a writable folder") from None


# --- The error that repeats leave ----------------------------------------------------------------

# The median of |x - y| of two normal values, in standard deviations.
_PAIR = 0.954
# The standard error of a median of n normal values is this times the deviation over sqrt(n).
_MEDIAN = 1.253
_SURE = 2  # standard errors: about 19 of 20 medians are nearer than that
_MOST = 50  # of the values are compared in pairs


def of_median(values: Sequence[float]) -> float:
    """The error that the median of these values may have; 0 if there are no repeats to say.

    Their scatter is a median too: one disturbed repeat does not hide what the others agree on.
    """
    few = sorted(values)[:: -(-len(values) // _MOST) or 1]
    pairs = [abs(one - other) for one, other in combinations(few, 2)]
    return _SURE * _MEDIAN * median(pairs) / _PAIR / sqrt(len(values)) if pairs else 0.0


def together(*parts: float | None) -> float | None:
    """The uncertainty of a sum or difference; None if nothing is known of any part."""
    known = [part for part in parts if part is not None]
    return sqrt(sum(part**2 for part in known)) if known else None
