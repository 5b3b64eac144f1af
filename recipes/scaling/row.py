"""A row of timings: one epoch, or one measured stretch, of one training.

Times are in seconds, sizes in bytes. A file of timings is flat: `COLUMNS` says which field of which
object each of its columns is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


def _column(name: str) -> Any:
    """A field that is None if unknown, and that files call `name`."""
    return field(default=None, metadata={"column": name})


@dataclass(frozen=True)
class Batch:
    """Examples of an optimizer step and of a micro-batch, and micro-batches of a step.

    Each is None if unknown.
    """

    total: int | None = _column("global_batch")
    micro: int | None = _column("micro_batch")
    accumulation: int | None = None


@dataclass(frozen=True)
class Parts:
    """The parts of an optimizer step, in the order in which they happen. Each is None if unknown.

    They add up to the step, and are means over the processes. Only `logging` and `saving` are
    those of the process that writes: the others wait for it, and that wait is not counted as
    `other`.
    """

    data_wait: float | None = None
    forward: float | None = None
    backward: float | None = None  # without the communication that it waits for
    communication: float | None = None  # exposed, without the wait for slower processes
    optimizer: float | None = None
    logging: float | None = None
    saving: float | None = None  # checkpoints and evaluations
    other: float | None = None

    def known(self) -> dict[str, float]:
        return {name: seconds for name, seconds in vars(self).items() if seconds is not None}


PARTS = [part.name for part in dataclasses.fields(Parts)]


@dataclass(frozen=True)
class NoSync:
    """A step without exchange of gradients, of the median and of the slowest process.

    The median of two processes is the faster one: their mean would count half of a slow process
    against both.
    """

    median: float | None = _column("no_sync_step")
    slowest: float | None = _column("no_sync_step_max")


@dataclass(frozen=True)
class Exchange:
    """What a process sends in an optimizer step, counted."""

    overlap: float | None = None  # share of the communication that the backward pass hides, 0 to 1
    syncs: float | None = None  # backward passes that exchanged gradients
    collectives: float | None = None
    bytes: int | None = _column("sync_bytes")


@dataclass(frozen=True)
class Link:
    """The link between the processes while nothing else runs.

    `bandwidth` is the bus bandwidth in bytes/s of an all-reduce as large as those of a step,
    `latency` the time of an all-reduce of a few bytes.
    """

    bandwidth: float | None = _column("link_bandwidth")
    latency: float | None = _column("link_latency")


@dataclass(frozen=True)
class Setup:
    """What trained, and how. Text is empty and a number None if unknown."""

    hardware: str = ""
    engine: str = ""  # "ddp", "deepspeed", ...
    workers: int | None = None  # dataloader_num_workers
    cores: int | None = None  # of each process
    logging_steps: int | None = None
    save_steps: int | None = None
    eval_steps: int | None = None
    command: str = ""  # train.py's flags


@dataclass(frozen=True)
class Slowest:
    """The process whose step without exchange takes longest, and the one that waits most for data.

    `rank` and `data_rank` are ranks. Text is empty if unknown.
    """

    rank: int | None = _column("slowest_rank")
    host: str = field(default="", metadata={"column": "slowest_host"})
    device: str = field(default="", metadata={"column": "slowest_device"})
    data_rank: int | None = _column("data_wait_rank")


@dataclass(frozen=True)
class Timing:
    """One row. Only `num_processes` and `epoch_time` are required; the rest is None if unknown.

    `no_sync`, `exchange` and `link` come from `train.py --measure`, each as a whole. Batches,
    parts and the setup may be known in part.
    """

    num_processes: int
    epoch_time: float
    name: str = "training"
    epoch: float | None = None
    samples: int | None = None  # examples of all processes in epoch_time
    accuracy: float | None = None
    recipe: str = ""
    scaling: str = ""  # "strong": the same global batch at every size, "weak": the same batch per process

    batch: Batch = Batch()
    tokens: int | None = None  # in epoch_time
    loss: float | None = None  # of the evaluation

    step_time: float | None = None  # of an optimizer step, as are the times below
    parts: Parts = Parts()
    data_wait_max: float | None = None  # of the slowest process
    no_sync: NoSync | None = None
    pass_overhead: float | None = None  # of a forward and backward pass, whatever the number of its examples
    exchange: Exchange | None = None
    link: Link | None = None
    peak_memory: int | None = None  # of the process that needs most

    setup: Setup = Setup()
    applied: str = ""  # the recommendation that this run tries, or "before: ..." in the run beside it
    predicted: float | None = None  # throughput over the run before that the recommendation promised

    timed: str = ""  # what epoch_time covers, such as "20 steps"; empty for an epoch
    step_p50: float | None = None  # seconds: half of the steps were faster, and 99 of 100 than the next
    step_p99: float | None = None
    other_load: float | None = None  # cores that other programs of the machine kept busy meanwhile
    slowest: Slowest | None = None


# --- The columns of a file -----------------------------------------------------------------------


class Column(NamedTuple):
    """`group` is the field of Timing whose object holds the column, empty for Timing itself."""

    group: str
    field: str
    kind: str  # as it is annotated: "int", "float | None", ...
    default: object


Cells = Mapping[str, Any]  # a row as it is in a file: values by the names of its columns

_GROUPS: dict[str, type] = {
    "batch": Batch,
    "parts": Parts,
    "no_sync": NoSync,
    "exchange": Exchange,
    "link": Link,
    "setup": Setup,
    "slowest": Slowest,
}


def _columns_of(kind: type, group: str = "") -> dict[str, Column]:
    found: dict[str, Column] = {}
    for one in dataclasses.fields(kind):
        if not group and one.name in _GROUPS:
            found |= _columns_of(_GROUPS[one.name], one.name)
        else:
            name = one.metadata.get("column", one.name)
            found[name] = Column(group, one.name, str(one.type), one.default)
    return found


COLUMNS = _columns_of(Timing)  # in the order of a new .csv


def to_columns(row: Timing) -> Cells:
    """Every column of a row, None or empty if unknown."""
    objects = {"": row, **{group: getattr(row, group) for group in _GROUPS}}
    return {name: getattr(objects[one.group], one.field, None) for name, one in COLUMNS.items()}


def from_columns(values: Cells) -> Timing:
    """The row whose columns have these values; those that are left out, or None, are unknown."""
    objects: dict[str, dict[str, Any]] = {group: {} for group in ("", *_GROUPS)}
    for name, value in values.items():
        if value is not None:
            objects[COLUMNS[name].group][COLUMNS[name].field] = value
    own = objects.pop("")
    return Timing(**own, **{group: _GROUPS[group](**known) for group, known in objects.items() if known})


def with_columns(row: Timing, **values: object) -> Timing:
    """The row with other values in some columns."""
    return from_columns({**to_columns(row), **values})
