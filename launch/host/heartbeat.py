"""Names the rank that the others wait for in vain: one that hangs, or that a signal has stopped.

A thread of each rank gives signs of life in the store of torch.distributed, and says where its main
thread is: through an evaluation, a save or a compilation too, and at no cost for a step. Without it
gloo only says that it timed out, and a GPU's rank that is stopped is missed after half an hour, by
no name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from recipes.errors import Failure
from recipes.run import Json

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 60.0  # then it is noted; a library that reads data may hold Python for some seconds

# Here Python waits for other ranks: in a collective, in DDP's backward, or to name one of them.
_WAITING = ("distributed/", "autograd/graph.py", "host/heartbeat.py")
_TIMED_OUT = ("Timed out waiting", "wait timeout after", "Application timeout")  # gloo's words, and the store's


class RankHangs(Failure):
    """Ranks that did not answer within `ddp_timeout`. `is_reporter`: this rank says so."""

    def __init__(self, message: str, is_reporter: bool) -> None:
        super().__init__(message)
        self.is_reporter = is_reporter


@contextlib.contextmanager
def heartbeat(rank: int, size: int, timeout: int) -> Iterator[None]:
    """Tell the other ranks of `size` that this one is alive, and note if the next one is not.

    Raises `RankHangs`, which names the ranks that did not answer, for an error that means that an
    exchange took longer than `timeout` seconds.
    """
    if size == 1:
        yield
        return
    from torch.distributed import distributed_c10d

    with _beating(distributed_c10d._get_default_store(), rank, (rank + 1) % size) as store:
        try:
            yield
        except RuntimeError as error:
            if not any(words in str(error) for words in _TIMED_OUT):
                raise
            raise _explained(store, rank, size, f"within {timeout} s (ddp_timeout)") from error


@contextlib.contextmanager
def meeting(rank: int, size: int, timeout: float) -> Iterator[None]:
    """Before the process group: each rank does in it what may take hours longer than on another,
    and then waits for all of them.

    They meet in the store of torchrun or `accelerate launch`; without one it does nothing. Raises
    `Failure` if a rank gives no sign of life for `timeout` seconds.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield
        return
    with _beating(early_store("meeting", rank, size), rank) as store:
        yield
        store.set(f"here/{rank}", "")
        for other in range(size):
            last, since = Json(), time.monotonic()
            while not store.check([f"here/{other}"]):
                time.sleep(0.5)
                if (beat := _last(store, other)) != last:
                    last, since = beat, time.monotonic()
                elif time.monotonic() - since > timeout:
                    raise Failure(f"rank {other} has given no sign of life for {timeout:.0f} s (ddp_timeout)")


def early_store(name: str, rank: int, size: int) -> Store:
    """A store for all ranks before their process group: the launcher's; without one, rank 0's at
    the address where the training will meet.
    """
    from torch.distributed import HashStore, PrefixStore, TCPStore

    if size == 1:
        return HashStore()
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=serves, wait_for_workers=False, multi_tenant=True)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # what a failed one has left there is not of this one
    return PrefixStore(f"{name}/{attempt}", store)


_exchanges = itertools.count()
_kept = functools.cache(early_store)  # rank 0's also serves the training that follows, at the same address


def exchange(own: T, rank: int, size: int) -> list[T]:
    """What every rank passes here, in the order of ranks, before their process group."""
    store, number = _kept("exchange", rank, size), next(_exchanges)
    store.set(f"{number}/{rank}", pickle.dumps(own))
    while not store.check([f"{number}/{other}" for other in range(size)]):
        time.sleep(0.05)  # no signal interrupts a wait inside the store
    found = [pickle.loads(store.get(f"{number}/{other}")) for other in range(size)]
    store.add(f"{number}/heard", 1)
    while rank == 0 and store.add(f"{number}/heard", 0) < size:
        time.sleep(0.05)  # it may serve the store, and end at once
    return found


# --- Signs of life --------------------------------------------------------------------------------


@contextlib.contextmanager
def _beating(store: Store, rank: int, watched: int | None = None) -> Iterator[Store]:
    """Give signs of life in the block, and watch another rank's. A store for both threads."""
    store, left = store.clone(), threading.Event()  # the main thread may wait in the original
    thread = threading.Thread(target=_beat, args=(store, rank, watched, left), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        left.set()
        thread.join(_BEAT_SECONDS)  # otherwise its last message could be a sign of life


def _beat(store: Store, rank: int, watched: int | None, left: threading.Event) -> None:
    """Until this rank leaves, or its launcher ends, which holds the store."""
    parent, number, last, since = os.getppid(), 0, Json(), time.monotonic()
    name = f"rank {rank} (pid {os.getpid()} on {socket.gethostname()})"
    with contextlib.suppress(RuntimeError):
        while not left.is_set() and os.getppid() == parent:
            number += 1
            store.set(f"heartbeat/{rank}", json.dumps({"number": number, "name": name, "place": _place()}))
            seen = _last(store, watched) if watched is not None else {}
            if seen != last or not seen:
                last, since = seen, time.monotonic()
            elif time.monotonic() - since > _SILENT_SECONDS:
                line = f"{seen['name']} has not answered for {_SILENT_SECONDS:.0f} s: is it stopped?"
                print(line, file=sys.stderr, flush=True)
                since = float("inf")  # said once in a silence
            left.wait(_BEAT_SECONDS)
        store.set(f"heartbeat/{rank}", "{}")  # it has left


def _place() -> str:
    """Where the main thread is: the function, and the line of its file."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    file = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name}, {file.parent.name}/{file.name} line {frame.f_lineno}"


def _last(store: Store, rank: int) -> Json:
    """The last sign of life of a rank, empty if it has given none or has left."""
    key = f"heartbeat/{rank}"
    return json.loads(store.get(key)) if store.check([key]) else {}


def _explained(store: Store, rank: int, size: int, limit: str) -> RankHangs:
    """Look at all ranks twice: one that is alive has answered in between."""
    try:
        beats = {other: beat for other in range(size) if (beat := _last(store, other))}
        time.sleep(2 * _BEAT_SECONDS + 1)
        silent = [other for other, beat in beats.items() if _last(store, other) == beat]
    except RuntimeError:  # the store is gone
        return RankHangs(f"another rank did not answer {limit}", True)
    busy = [other for other, beat in beats.items() if not any(part in beat["place"] for part in _WAITING)]
    message = f"an exchange between the ranks did not end {limit}, though all of them are alive and wait for it"
    if silent:
        who = " and ".join(beats[other]["name"] for other in silent)
        message = f"{who} did not answer {limit}: stopped, or on a machine that is"
    elif busy:
        who = " and ".join("{name} in {place}".format(**beats[other]) for other in busy)
        message = f"the other ranks waited in vain {limit} for {who}"
    return RankHangs(message, rank == min({*range(size)} - {*(silent or busy)}, default=rank))
