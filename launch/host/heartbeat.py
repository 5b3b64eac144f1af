"""Waits of ranks for each other, with an end and a name.

A thread of each rank gives signs of life in a store of torch.distributed: through an evaluation, a
save or a compilation too, and at no cost for a step. Without them gloo only says that it timed out,
and a GPU's rank that is stopped is missed after half an hour, by no name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from recipes.errors import Failure

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 60.0  # then it is noted; a library that reads data may hold Python for some seconds

# Here Python waits for other ranks: in a collective, in DDP's backward, or to name one of them.
_WAITING = ("distributed/", "autograd/graph.py", "host/heartbeat.py")
_TIMED_OUT = ("Timed out waiting", "wait timeout after", "Application timeout")  # gloo's words, and the store's


class RankHangs(Failure):
    """Ranks did not answer within `ddp_timeout`. The first of those that waited raises it."""


@contextlib.contextmanager
def heartbeat(rank: int, size: int, timeout: int) -> Iterator[None]:
    """In a process group: tell the other ranks that this one is alive, and note if the next is not.

    Raises `RankHangs` with the names of those that did not answer, on one rank, and `Failure` on
    others, for an error that means that an exchange took longer than `timeout` seconds.
    """
    if size == 1:
        yield
        return
    from torch.distributed import distributed_c10d

    with beating(distributed_c10d._get_default_store(), rank, size) as store:
        try:
            yield
        except RuntimeError as error:
            if not any(words in str(error) for words in _TIMED_OUT):
                raise
            missing = _missing(store, size)
            who = " and ".join(missing.values()) or "the network between the ranks"
            reporter = min({*range(size)} - {*missing}, default=rank)
            kind = RankHangs if rank == reporter else Failure
            raise kind(f"{who} did not answer within {timeout} s (ddp_timeout)") from error


# --- Before the process group ---------------------------------------------------------------------


@functools.cache  # rank 0's also serves the training that follows, at the same address
def early_store(rank: int, size: int) -> Store:
    """A store for all ranks before their process group: that of torchrun or `accelerate launch`;
    without one, rank 0's at the address where the training will meet.
    """
    from torch.distributed import HashStore, PrefixStore, TCPStore

    if size == 1:
        return HashStore()
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=serves, wait_for_workers=False, multi_tenant=True)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # what a failed one has left there is not of this one
    return PrefixStore(f"early/{attempt}", store)


_exchanges = itertools.count()


def exchange(own: T, rank: int, size: int, timeout: float = math.inf) -> list[T]:
    """What every rank passes here, in the order of ranks, before their process group.

    Raises `Failure` if a rank neither comes nor gives a sign of life for `timeout` seconds.
    """
    store, number = early_store(rank, size), next(_exchanges)
    store.set(f"{number}/{rank}", pickle.dumps(own))
    for other in range(size):
        last, since = list[Any](), time.monotonic()
        while not store.check([f"{number}/{other}"]):
            time.sleep(0.05)  # no signal interrupts a wait inside the store
            if (beat := _last(store, other)) != last:
                last, since = beat, time.monotonic()
            elif time.monotonic() - since > timeout:
                raise Failure(f"rank {other} has given no sign of life for {timeout:.0f} s (ddp_timeout)")
    found = [pickle.loads(store.get(f"{number}/{other}")) for other in range(size)]
    store.add(f"{number}/heard", 1)
    while rank == 0 and store.add(f"{number}/heard", 0) < size:
        time.sleep(0.05)  # it may serve the store, and end at once
    return found


# --- Signs of life --------------------------------------------------------------------------------


@contextlib.contextmanager
def beating(store: Store, rank: int, size: int) -> Iterator[Store]:
    """Give signs of life in the block, and note if the next rank gives none. A store for both
    threads.
    """
    store, left = store.clone(), threading.Event()  # the main thread may wait in the original
    thread = threading.Thread(target=_beat, args=(store, rank, (rank + 1) % size, left), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        left.set()
        thread.join(_BEAT_SECONDS)  # otherwise its last message could be a sign of life


def _beat(store: Store, rank: int, watched: int, left: threading.Event) -> None:
    """Until this rank leaves, or its launcher ends, which holds the store."""
    parent, last, since = os.getppid(), list[Any](), time.monotonic()
    name = f"rank {rank} (pid {os.getpid()} on {socket.gethostname()})"
    with contextlib.suppress(RuntimeError):
        for number in itertools.count():
            if left.wait(_BEAT_SECONDS if number else 0) or os.getppid() != parent:
                break
            store.set(f"heartbeat/{rank}", json.dumps([number, f"{name} in {_place()}"]))
            seen = _last(store, watched)
            if seen != last or not seen:
                last, since = seen, time.monotonic()
            elif time.monotonic() - since > _SILENT_SECONDS:
                line = f"{seen[1]}: no answer for {_SILENT_SECONDS:.0f} s. Is it stopped?"
                print(line, file=sys.stderr, flush=True)
                since = math.inf  # said once in a silence
        store.set(f"heartbeat/{rank}", "[]")  # it has left


def _place() -> str:
    """Where the main thread is. Its frame must not outlive this call: it would hold its tensors."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return f"{frame.f_code.co_name}, {frame.f_code.co_filename} line {frame.f_lineno}"


def _missing(store: Store, size: int) -> dict[int, str]:
    """The ranks that the others wait for, with their names and where they are: those that give no
    sign of life between two looks, or else those that do not wait themselves.
    """
    try:
        beats = {rank: beat for rank in range(size) if (beat := _last(store, rank))}
        time.sleep(2 * _BEAT_SECONDS + 1)
        silent = [rank for rank, beat in beats.items() if _last(store, rank) == beat]
    except RuntimeError:  # the store is gone
        return {}
    busy = [rank for rank, beat in beats.items() if not any(part in beat[1] for part in _WAITING)]
    return {rank: beats[rank][1] for rank in silent or busy}


def _last(store: Store, rank: int) -> list[Any]:
    """The last sign of life of a rank, its number and words; empty if it has given none or left."""
    key = f"heartbeat/{rank}"
    return json.loads(store.get(key)) if store.check([key]) else []
