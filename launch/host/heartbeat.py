"""Names the rank that the others wait for in vain: one that hangs, or that a signal has stopped.

Each rank has a thread that tells the others, through the store of torch.distributed, that it is
alive and where its main thread is. It costs a step nothing, and goes on through an evaluation, a
save or a compilation, however long they take. Without it gloo only says that it timed out, and a
GPU's rank that is stopped is missed after half an hour, by no name.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from recipes.errors import Failure

if TYPE_CHECKING:
    from torch.distributed import Store

_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 60.0  # then it is noted; a library that reads data may hold Python for some seconds

# Here Python waits for what other ranks have to send: in a collective, or in DDP's backward.
_EXCHANGES = ("torch/distributed/", "torch/autograd/graph.py")


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

    beats = _Beats(rank, size, distributed_c10d._get_default_store())
    thread = threading.Thread(target=beats.go_on, daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        if not _timed_out(error):
            raise
        raise beats.explained(timeout) from error
    finally:
        beats.left.set()
        thread.join(_BEAT_SECONDS)  # or the last it says might be that it is here


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
    store, left = _launchers_store(timeout), threading.Event()
    thread = threading.Thread(target=_beat_until, args=(left, store.clone(), rank), daemon=True)
    thread.start()
    try:
        yield
        store.set(f"here/{rank}", "")
        for other in range(size):
            _wait_for(store, other, timeout)
    finally:
        left.set()
        thread.join(_BEAT_SECONDS)


def _launchers_store(timeout: float) -> Store:
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # what a failed one has left there is not of this one
    return PrefixStore(f"meeting/{attempt}", store)


def _beat_until(left: threading.Event, store: Store, rank: int) -> None:
    with contextlib.suppress(RuntimeError):  # the launcher that holds the store has ended
        store.add(str(rank), 1)
        while not left.wait(_BEAT_SECONDS):
            store.add(str(rank), 1)


def _wait_for(store: Store, rank: int, timeout: float) -> None:
    beats, since = 0, time.monotonic()
    while not store.check([f"here/{rank}"]):
        time.sleep(0.5)
        before, beats = beats, store.add(str(rank), 0)
        if beats != before:
            since = time.monotonic()
        elif time.monotonic() - since > timeout:
            raise Failure(f"rank {rank} has given no sign of life for {timeout:.0f} s (ddp_timeout)")


def limit_waits(seconds: int) -> None:
    """Have gloo wait so long for a rank and no longer. Call it before the process group is made.

    With `use_cpu` Trainer hands `ddp_timeout` on to nobody, and torch's own limit is half an hour.
    """
    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = timedelta(seconds=seconds)


def _timed_out(error: Exception) -> bool:
    """In gloo's words, and in those of the store."""
    words = ("Timed out waiting", "wait timeout after", "Application timeout")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


@dataclass(frozen=True)
class _Beat:
    """What a rank last said of itself. `number` counts its beats."""

    number: int = 0
    rank: str = ""
    place: str = ""
    waits: bool = False  # for other ranks
    has_left: bool = False


class _Beats:
    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank, self.size = rank, size
        self.store = store.clone()  # the main thread may be waiting in the original
        self.parent = os.getppid()
        self.left = threading.Event()
        self.explaining = False
        self.number = 0

    def go_on(self) -> None:
        """Until this rank leaves, or its launcher ends, which holds the store."""
        watched, last, since = (self.rank + 1) % self.size, _Beat(), time.monotonic()
        noted = False
        with contextlib.suppress(RuntimeError):
            self._beat()
            while not self.left.wait(_BEAT_SECONDS) and os.getppid() == self.parent:
                self._beat()
                beat = self._last(watched)
                if beat != last or beat.has_left:
                    last, since, noted = beat, time.monotonic(), False
                elif time.monotonic() - since > _SILENT_SECONDS and not noted:
                    noted = True
                    _say(f"{_named(watched, last)} has not answered for {_SILENT_SECONDS:.0f} s: is it stopped?")
            if self.left.is_set():
                self._beat(has_left=True)

    def explained(self, timeout: int) -> RankHangs:
        """Look at all ranks twice: one that is alive has answered in between."""
        self.explaining = True
        ranks = range(self.size)
        try:
            before = [self._last(rank) for rank in ranks]
            time.sleep(2 * _BEAT_SECONDS + 1)
            silent = [rank for rank in ranks if not before[rank].has_left and self._last(rank) == before[rank]]
        except RuntimeError:  # the store is gone
            return RankHangs(f"another rank did not answer within {timeout} s (ddp_timeout)", True)
        busy = [rank for rank in ranks if not before[rank].waits and not before[rank].has_left]
        hanging = silent or busy
        first = min((rank for rank in ranks if rank not in hanging), default=self.rank)
        return RankHangs(_message(before, silent, busy, timeout), first == self.rank)

    def _beat(self, has_left: bool = False) -> None:
        self.number += 1
        name = f"pid {os.getpid()} on {socket.gethostname()}"
        beat = _Beat(self.number, name, place(), self.explaining or waits_for_others(), has_left)
        self.store.set(f"heartbeat/{self.rank}", json.dumps(asdict(beat)))

    def _last(self, rank: int) -> _Beat:
        key = f"heartbeat/{rank}"
        return _Beat(**json.loads(self.store.get(key))) if self.store.check([key]) else _Beat()


def _message(beats: list[_Beat], silent: list[int], busy: list[int], timeout: int) -> str:
    limit = f"within {timeout} s (ddp_timeout)"
    if silent:
        names = " and ".join(_named(rank, beats[rank]) for rank in silent)
        return f"{names} did not answer {limit}: stopped, or on a machine that is"
    if busy:
        names = " and ".join(f"{_named(rank, beats[rank])} in {beats[rank].place}" for rank in busy)
        return f"the other ranks waited in vain {limit} for {names}"
    return f"an exchange between the ranks did not end {limit}, though all of them are alive and wait for it"


def _named(rank: int, beat: _Beat) -> str:
    return f"rank {rank} ({beat.rank})" if beat.rank else f"rank {rank}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- Where the main thread is, as another thread sees it ------------------------------------------


def place() -> str:
    """The function, and the line of its file."""
    frame = next(_frames())
    file = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name}, {file.parent.name}/{file.name} line {frame.f_lineno}"


def waits_for_others() -> bool:
    return any(part in frame.f_code.co_filename for frame in _frames() for part in _EXCHANGES)


def _frames() -> Iterator[FrameType]:
    """From the innermost outwards."""
    frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None:
        yield frame
        frame = frame.f_back
