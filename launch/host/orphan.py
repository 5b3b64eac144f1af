"""A rank whose launcher has ended: it completes its step, saves and ends as if told to stop.

No launcher that is killed tells its ranks, and `accelerate launch` dies of SIGUSR1. A thread looks
once a second whether the launcher is still there. Then a step that does not end is given up: the
ranks that it waits for may have been killed too, and nobody is left who would end it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from launch.host.heartbeat import place
from launch.host.parent import launcher
from launch.host.signals import StopRequest, end_with_parent

_LOOK_SECONDS = 1.0

_parent = os.getpid(), os.getppid()  # this process, and what started it


def end_with_launcher(stop: StopRequest, rank: int) -> None:
    """From now on: stop when the launcher ends. Nothing happens in a run that none has started."""
    if not _is_launched():  # a shell may exit and leave the run in the background
        return
    end_with_parent(signal.SIGCONT)  # a rank that is stopped would never see it
    threading.Thread(target=_watch, args=(stop, rank), daemon=True).start()


def _is_launched() -> bool:
    """Also if the launcher has ended since this process began."""
    if _has_parent():
        return launcher() is not None
    own, _ = _parent
    return own == os.getpid() and bool({"RANK", "ACCELERATE_MIXED_PRECISION"} & set(os.environ))


def _has_parent() -> bool:
    """Whether the process that started this one is still there."""
    return os.getppid() == _parent[1]


def _watch(stop: StopRequest, rank: int) -> None:
    while _has_parent():
        time.sleep(_LOOK_SECONDS)
    stop.request("the end of its launcher")
    _end_if_stuck(stop, rank)


def _end_if_stuck(stop: StopRequest, rank: int) -> None:
    """End this process once no step has ended for `stop.patience` seconds."""
    step, since = stop.step, time.monotonic()
    while time.monotonic() - since <= stop.patience:
        time.sleep(_LOOK_SECONDS)
        if stop.step != step:
            step, since = stop.step, time.monotonic()
    what = f"rank {rank}: the launcher has ended, and nothing after step {step} within {stop.patience} s (ddp_timeout)"
    print(f"{what}. It was in {place()}", file=sys.stderr, flush=True)
    os._exit(1)
