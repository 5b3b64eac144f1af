"""What `recipes doctor` is asked, and one line of what it answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from recipes.run.hardware import Hardware

Numbers = dict[str, dict[str, float | str]]  # by name: a value and its unit


@dataclass(frozen=True)
class Check:
    """One line of the report.

    `status` is ok, warning or error, `found` the finding, `fix` what to do about it, `numbers`
    what was measured. After an error that is `fatal`, ranks would only say the same later.
    """

    status: str
    title: str
    found: str
    fix: str = ""
    numbers: Numbers = field(default_factory=dict)
    fatal: bool = False


def numbers(**values: tuple[float, str]) -> Numbers:
    """`numbers(free=(8e9, "bytes"))` as a check holds them."""
    return {name: {"value": value, "unit": unit} for name, (value, unit) in values.items()}


@dataclass(frozen=True)
class Request:
    """The machine and the world that it should train in.

    Rank 0 of several nodes listens at `address` and `port`. `timeout` is in seconds, for all
    checks together from `began` on (of time.monotonic()).
    """

    hardware: Hardware
    nodes: int
    machine_rank: int
    processes_per_node: int
    address: str
    port: int
    timeout: int
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return self.began + self.timeout - time.monotonic()

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def backend(self) -> str:
        return "nccl" if self.hardware.cuda else "gloo"
