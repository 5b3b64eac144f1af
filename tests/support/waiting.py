"""Waiting for what another process does, with a limit that no busy machine reaches."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 1200  # seconds; only a failure takes as long, on however many cores


def wait_for(what: str, happened: Callable[[], T]) -> T:
    """The first true result of `happened`. After PATIENCE the test fails and names `what`."""
    deadline = time.monotonic() + PATIENCE
    while not (result := happened()):
        assert time.monotonic() < deadline, f"waited {PATIENCE} s in vain for {what}"
        time.sleep(0.05)
    return result
