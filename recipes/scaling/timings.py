"""Timings: a row for each epoch or measured part of a training, and the files that hold the rows.

`train.py --measure` and `recipes scale run` add rows to a .jsonl file. Other programs can write
such files too, also as .csv. Each field of `Timing` is a column of a file.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from math import inf, sqrt
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from recipes.errors import Problem, UserError, mistake, raise_errors
from recipes.run import Settings

K = TypeVar("K")
WARM_UP_STEPS = 3  # steps at the start of each run that are not timed


@dataclass(frozen=True)
class Timing:
    """One row. Times are in seconds, sizes in bytes.

    Only `num_processes` and `epoch_time` are required. Unknown numbers are None, unknown texts ''.
    """

    num_processes: int
    epoch_time: float
    name: str = "training"
    epoch: float | None = None
    samples: int | None = None  # examples of all processes in epoch_time
    accuracy: float | None = None
    recipe: str = ""
    scaling: str = ""  # "strong": the same global batch at every world size, "weak": the same batch per process

    global_batch: int | None = None  # examples of an optimizer step
    micro_batch: int | None = None
    accumulation: int | None = None
    tokens: int | None = None  # in epoch_time
    loss: float | None = None  # of the evaluation
    step_time: float | None = None  # of an optimizer step, like the times below

    # The parts of a step, in the order in which they happen. The parts add up to a step. Each is a
    # mean over the processes, except `communication`, `logging` and `saving`. The times of logging
    # and saving are those of the process that writes; `other` leaves out the wait for that process.
    data_wait: float | None = None
    forward: float | None = None
    backward: float | None = None  # without the wait for communication
    communication: float | None = None  # exposed, without the wait for slower processes
    optimizer: float | None = None
    logging: float | None = None
    saving: float | None = None  # checkpoints and evaluations
    other: float | None = None
    data_wait_max: float | None = None  # of the process that waits longest

    # The time of a step without gradient synchronisation, of the median and of the slowest process.
    # Of two processes, the faster one counts as the median: a mean would make both look slow.
    no_sync_step: float | None = None
    no_sync_step_max: float | None = None
    pass_overhead: float | None = None  # the fixed cost of a forward and backward pass, for any number of examples

    # The communication of a process in a step, and the link between processes while nothing else
    # runs: link_bandwidth is the bus bandwidth in bytes/s of an all-reduce as large as those of a
    # step, link_latency is the time of an all-reduce of a few bytes.
    overlap: float | None = None  # share of the communication that the backward pass hides, 0 to 1
    syncs: float | None = None  # backward passes that exchanged gradients
    collectives: float | None = None  # number per step
    sync_bytes: int | None = None
    link_bandwidth: float | None = None
    link_latency: float | None = None
    peak_memory: int | None = None  # of the process that needs the most memory

    hardware: str = ""
    engine: str = ""  # "ddp", "deepspeed", ...
    workers: int | None = None  # dataloader_num_workers
    cores: int | None = None  # of each process
    logging_steps: int | None = None
    save_steps: int | None = None
    eval_steps: int | None = None
    command: str = ""  # train.py's flags
    applied: str = ""  # the advice that this run tries, or "before: ..." in the run without the advice
    predicted: float | None = None  # the predicted gain: throughput with the advice over throughput without

    timed: str = ""  # the extent of epoch_time, such as "20 steps"; empty for an epoch
    slowest_rank: int | None = None  # the process whose step without gradient synchronisation takes longest
    slowest_host: str = ""
    slowest_device: str = ""
    data_wait_rank: int | None = None  # the process that waits longest for data

    @property
    def parts(self) -> dict[str, float]:
        """The known parts of a step, in seconds by name."""
        return {name: seconds for name in PARTS if (seconds := getattr(self, name)) is not None}


PARTS = ("data_wait", "forward", "backward", "communication", "optimizer", "logging", "saving", "other")
OF_ONE_PROCESS = ("slowest_rank", "slowest_host", "slowest_device", "data_wait_rank")
COLUMNS = {one.name: str(one.type) for one in fields(Timing)}  # each with its type

_RATES = {"samples_per_second": "samples", "tokens_per_second": "tokens"}  # columns that may replace epoch_time
_OF_A_RATE = 1000  # a row with only a throughput gets the time of this many samples or tokens
_POSITIVE = ("num_processes", "epoch_time", "samples", "step_time", "tokens", "global_batch", *_RATES)
_EXAMPLE = "give a .csv whose first line is num_processes,epoch_time,samples, or the .jsonl of `recipes scale run`"


def name_of(run: Settings) -> str:
    """Return the name for a run's rows: `run_name`, the model's short name, or `demonstration`."""
    model = run["model_name_or_path"]
    return run["run_name"] or (str(model).rstrip("/").rpartition("/")[2] if model else "demonstration")


def grouped(rows: Iterable[Timing], key: Callable[[Timing], K]) -> dict[K, list[Timing]]:
    groups: dict[K, list[Timing]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


# --- Reading -------------------------------------------------------------------------------------


def read(files: Iterable[str | Path]) -> list[Timing]:
    """Return the rows of all files. Rows without a column `name` get the name of their file.

    Raises `UserError` if a file cannot be read, if there are no rows, or if a row has a mistake.
    """
    rows: list[Timing] = []
    problems: list[Problem] = []
    for file in map(Path, files):
        for number, cells in _cells(file):
            try:
                rows.append(parse_row({**cells, "name": cells.get("name") or file.stem}, f"{file}, line {number}"))
            except UserError as error:
                problems += error.problems
    raise_errors(problems)
    if not rows:
        raise mistake("FILE", "holds no timings", _EXAMPLE)
    return rows


def _cells(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the non-empty rows of a file, each with its line number. Raises `UserError` if the
    file cannot be read, or if a .csv (any file but .jsonl) lacks the column num_processes.
    """
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
    except (OSError, ValueError, TypeError, csv.Error) as error:
        at = f", line {number}," if number else ""
        raise mistake("FILE", f"{file}{at} cannot be read: {error}", _EXAMPLE) from None
    if rows and "num_processes" not in rows[0][1]:
        raise mistake("FILE", f"{file} lacks num_processes; its columns: {', '.join(rows[0][1])[:200]}", _EXAMPLE)
    return [(number, row) for number, row in rows if any(row.values())]


def parse_row(row: Mapping[str, Any], source: str) -> Timing:
    """Parse a row; ignore unknown columns. Raises `UserError` for a wrong or missing value."""
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
            raise mistake(name, "is missing", f"add a column {name}{or_rate} with a value in every row", source)
    if values.get("scaling") == "weak" and not (values.keys() & {"samples", "tokens"}):
        what = "is missing: in weak scaling the work grows with the processes, and no column shows by how much"
        raise mistake("samples", what, "add `samples`, the examples of all processes during epoch_time", source)
    return Timing(**values)


def _value(name: str, value: Any, source: str) -> Any:
    kind = COLUMNS.get(name, "float")
    if kind == "str":
        if name == "scaling" and value not in ("strong", "weak"):
            raise mistake(name, f"{value!r} is neither strong nor weak", "write strong or weak", source)
        return str(value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise mistake(name, f"{value!r:.40} is not a number", "write a number, such as 12.5", source) from None
    whole, positive = kind.startswith("int"), name in _POSITIVE
    if not 0 <= number < inf or (positive and not number) or (whole and number % 1):
        fix = f"write a {'whole ' * whole}number {'above' if positive else 'of at least'} 0"
        raise mistake(name, f"{value!r} is not possible", fix, source)
    return int(number) if whole else number


# --- Writing -------------------------------------------------------------------------------------


def append(file: str | Path, rows: Iterable[Timing]) -> None:
    """Add rows to a .jsonl file, or create it. Raises `UserError` if the file cannot be written."""
    require_room(file)
    with Path(file).open("a", encoding="utf-8") as stream:
        for row in rows:
            known = {name: value for name, value in vars(row).items() if value not in (None, "")}
            stream.write(json.dumps(known) + "\n")


def require_room(file: str | Path) -> None:
    """Create the file, and its folder, if missing. Raises `UserError` if that is impossible."""
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).open("a").close()
    except OSError as error:
        raise mistake("FILE", f"{file} cannot be written: {error.strerror}", "choose a writable folder") from None


# --- The uncertainty that repeats show -----------------------------------------------------------

_PAIR = 0.954  # the median of |x - y| of two normal values, in standard deviations
_MEDIAN = 1.253  # the standard error of the median of n normal values: _MEDIAN * standard deviation / sqrt(n)
_SURE = 2  # standard errors: about 19 of 20 medians are off by less
_MOST = 50  # at most this many values are compared in pairs


def of_median(values: Sequence[float]) -> float:
    """Return the error that the median of these values may have; 0 for fewer than two values.

    The scatter of the values is computed as a median too, so that one bad repeat hardly matters.
    """
    few = sorted(values)[:: -(-len(values) // _MOST) or 1]
    pairs = [abs(one - other) for one, other in combinations(few, 2)]
    return _SURE * _MEDIAN * median(pairs) / _PAIR / sqrt(len(values)) if pairs else 0.0
