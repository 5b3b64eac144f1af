"""`--fit`: the largest micro-batch that really runs here, at the same global batch, from probes in fresh processes.

Before training each rank starts one process a candidate (`launch/probe.py`), itself holding nothing on the GPU, and
the ranks tell each other what became of theirs: what one rank cannot run does not fit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch import terminal
from launch.fit.probe import REQUEST, VERDICT
from launch.host import memory
from launch.host.world import World
from launch.output import record
from launch.terminal import memory_size
from launch.training.out_of_memory import other_ways
from recipes.errors import Failure, Problem, UserError, mistake
from recipes.run import FIT, RunSpec, fitted

RESERVE = 0.05  # of the limit: lengths vary in a long run, and memory fragments
PROBE = Path(__file__).resolve().with_name("probe.py")
_PATIENCE = 10  # seconds: a rank that lost another one must not be heard before that one has said why


class ProbeFailed(Failure):
    """A probe failed for another reason than memory, so that nothing is known about its micro-batch."""


def fit(run: RunSpec, argv: list[str], world: World, again: bool = False) -> RunSpec:
    """The run at the largest micro-batch that runs, from its fit.json if that holds for it, unless `again`.

    `argv` are train.py's words. Raises `UserError` where none runs, `ProbeFailed` where that cannot be told.
    """
    board = _board(world)
    found = board.of_rank_0("kept", lambda: {} if again else _kept(run))
    if not found:
        found = _search(run, argv, world, board)
        board.of_rank_0("written", lambda: record.write(run["output_dir"], found, FIT))
        found["file"] = str(Path(run["output_dir"]) / FIT)
    batch = fitted.as_batch(found)  # rank 0's word: another node may have other devices
    terminal.console(world.is_main).print(f"fit   {batch}: {batch.reason}", highlight=False)
    return run.at_batch(batch, FIT)


def _kept(run: RunSpec) -> dict[str, Any]:
    found = fitted.read(run["output_dir"])
    return found if fitted.batch(run, found) else {}


def _search(run: RunSpec, argv: list[str], world: World, board: Board) -> dict[str, Any]:
    """Up from the planner's guess while it runs, or down until it does."""
    share = run.batch.micro * run.batch.accumulation
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    limit, guess = board.of_rank_0("start", lambda: _start(run))
    out, probes = terminal.console(world.is_main), []

    def runs(size: int) -> bool:
        verdict = _probed(run, argv, world, board, size, limit)
        probes.append({"micro_batch": size, "accumulation": share // size, **verdict})
        said = "runs" if verdict["fits"] else f"does not fit: {verdict['words']}"
        peak = f", peak {memory_size(verdict['peak_bytes'])}" if verdict["peak_bytes"] else ""
        out.print(f"fit   micro {size} x accumulation {share // size}: {said}{peak}", highlight=False)
        return verdict["fits"]

    out.print(f"fit   up to {memory_size(limit)} a process, from micro {guess}", highlight=False)
    if runs(guess):
        for size in (size for size in sizes if size > guess):
            if not runs(size):
                break
    else:
        any(runs(size) for size in reversed(sizes) if size < guess)
    best = max((probe for probe in probes if probe["fits"]), key=lambda probe: probe["micro_batch"], default=None)
    if best is None:
        raise _nothing_fits(run, limit, probes[-1]["words"])
    return {
        "micro_batch": best["micro_batch"],
        "accumulation": best["accumulation"],
        "world_size": world.size,
        "global_batch_size": run.batch.total,
        "peak_bytes": best["peak_bytes"],
        "limit_bytes": limit,
        "hardware": run.hardware.as_dict(),
        "found": record.now(),
        "probes": probes,
        "holds_for": fitted.identity(run),
    }


def _start(run: RunSpec) -> tuple[int, int]:
    """The bytes a process may take, and the micro-batch to try first. On rank 0, before it has anything on a GPU."""
    _require_writable(run)
    limit = round(run["memory_limit"] * 1e9) if run["memory_limit"] else _own_memory(run)
    if run.batch.micro * run.batch.accumulation == 1:
        return limit, 1
    return limit, _guess(run, limit)


def _own_memory(run: RunSpec) -> int:
    """Bytes for each process: all of a GPU, or its share of the RAM that is free."""
    if run.hardware.gpus:
        return min(gpu.memory_bytes for gpu in run.hardware.gpus)
    free = memory.free_ram()
    if free is None:
        raise mistake("fit", "the free memory of this machine is unknown", "--memory_limit with the GB of one process")
    return free // run.local_world_size


def _guess(run: RunSpec, limit: int) -> int:
    """The planner's, or the recipe's own where this training cannot be planned."""
    from launch.training.model import load_config, load_tokenizer
    from recipes.planner.plan import plan_run

    usable = limit if run.hardware.cuda else limit - memory.resident()  # in RAM the libraries take theirs
    try:
        return plan_run(run, load_config(run, load_tokenizer(run)), usable).micro_batch
    except Exception:  # it is only where to begin: what is wrong with the run, the first probe says
        return run.batch.micro


def _require_writable(run: RunSpec) -> None:
    """Not to be found out after all probes."""
    try:
        Path(run["output_dir"]).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run["output_dir"]):
            return
    except OSError as error:
        what = f"{run['output_dir']} cannot be written: {error.strerror}"
        fix = "--output_dir with a folder that can"
        raise mistake("output_dir", what, fix, run.setting("output_dir").source) from None


def _nothing_fits(run: RunSpec, limit: int, words: str) -> UserError:
    what = f"not even a micro-batch of 1 runs in {memory_size(limit)}: {words}"
    return mistake("fit", what, other_ways(run))


# --- One candidate, on all ranks -------------------------------------------------------------------------------------


def _probed(run: RunSpec, argv: list[str], world: World, board: Board, size: int, limit: int) -> dict[str, Any]:
    """What all ranks together say about a micro-batch: it fits where it ran on each."""
    accumulation = run.batch.micro * run.batch.accumulation // size
    request = {
        "argv": argv,
        "micro_batch": size,
        "accumulation": min(accumulation, 2),  # two are enough for gradients to stay from one to the next
        "limit_bytes": round(limit * (1 - RESERVE)),
        "parent": os.getpid(),
    }
    port = board.of_rank_0(f"{size}/port", _free_port)
    verdicts = board.all_ranks(f"{size}/verdict", _own_verdict(request, port, board, size))
    short = [verdict for verdict in verdicts if verdict["kind"] == "out_of_memory"]
    if not short:
        _require_no_failure(verdicts, size)
    peak = max(verdict["peak_bytes"] or 0 for verdict in verdicts)
    ranks = [verdict["kind"] for verdict in verdicts]
    return {"fits": not short, "peak_bytes": peak, "words": short[0]["words"] if short else "", "ranks": ranks}


def _require_no_failure(verdicts: list[dict[str, Any]], size: int) -> None:
    mistaken = next((verdict for verdict in verdicts if verdict["kind"] == "mistake"), None)
    if mistaken:
        raise UserError(*(Problem(**problem) for problem in mistaken["problems"]))
    failed = [(rank, verdict["words"]) for rank, verdict in enumerate(verdicts) if verdict["kind"] != "fits"]
    if failed:
        # A rank that only lost another one is not the one to listen to.
        rank, words = min(failed, key=lambda item: not item[1] or "onnection" in item[1])
        raise ProbeFailed(
            f"the probe of micro-batch {size} failed on rank {rank}, which says nothing about memory:\n{words}"
        )


def _own_verdict(request: dict[str, Any], port: int, board: Board, size: int) -> dict[str, Any]:
    """Run this rank's part of a probe, and end it when another rank's has failed."""
    with tempfile.TemporaryDirectory(prefix="fit-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        (folder / REQUEST).write_text(json.dumps(request))
        with (folder / "log").open("wb") as log, _started(folder, port, log) as process:
            heard = None
            while process.poll() is None and (heard is None or time.monotonic() < heard):
                kind = board.read(f"{size}/ended")
                if kind is not None and heard is None:
                    heard = time.monotonic() + (0 if kind == "out_of_memory" else _PATIENCE)
                time.sleep(0.1)
            code = process.poll()
        verdict = _left_in(folder, code)
    if verdict["kind"] != "fits":
        board.post(f"{size}/ended", verdict["kind"])
    return verdict


def _left_in(folder: Path, code: int | None) -> dict[str, Any]:
    """What a probe left behind; `code` is its exit code, None where it was ended from here."""
    try:
        return json.loads((folder / VERDICT).read_text())
    except (OSError, ValueError):
        pass
    if code == -signal.SIGKILL:  # nobody but the kernel kills so, and for memory alone
        return {"kind": "out_of_memory", "peak_bytes": None, "words": "killed by the system"}
    if code is None:
        return {"kind": "stopped", "peak_bytes": None, "words": ""}
    lines = (folder / "log").read_text(errors="replace").strip().splitlines()[-15:]
    if lines and memory.says_it_ran_out(lines[-1]):  # a library that ends the process itself
        return {"kind": "out_of_memory", "peak_bytes": None, "words": lines[-1]}
    return {"kind": "failed", "peak_bytes": None, "words": "\n".join([*lines, f"(exit code {code})"])}


@contextlib.contextmanager
def _started(folder: Path, port: int, log: Any):
    """A probe in a process group of its own, of which nothing is left at the end."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if "RANK" in environment:  # a world of the probes' own, beside that of the ranks
        environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    process = subprocess.Popen(
        [sys.executable, str(PROBE), str(folder)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


# --- What the ranks tell each other ----------------------------------------------------------------------------------


class Board:
    """Where the ranks post what the others must know, by name. One process posts to itself."""

    def __init__(self, world: World, store: Any) -> None:
        self.world = world
        self.store = store

    def post(self, name: str, value: Any) -> None:
        self.store.set(name, json.dumps(value))

    def read(self, name: str) -> Any:
        """None where nobody has posted it yet."""
        return json.loads(self.store.get(name)) if self.store.check([name]) else None

    def wait(self, name: str) -> Any:
        """Looks again and again: a signal can end that, and not a wait inside the store."""
        while not self.store.check([name]):
            time.sleep(0.05)
        return json.loads(self.store.get(name))

    def all_ranks(self, name: str, value: Any) -> list[Any]:
        """What each rank has posted under this name, in their order."""
        self.post(f"{name}/{self.world.rank}", value)
        return [self.wait(f"{name}/{rank}") for rank in range(self.world.size)]

    def of_rank_0(self, name: str, decide: Callable[[], Any]) -> Any:
        """What rank 0 decides, known to all; a `UserError` there is raised on every rank."""
        if self.world.rank == 0:
            try:
                self.post(name, {"value": decide()})
            except UserError as error:
                self.post(name, {"problems": [vars(problem) for problem in error.problems]})
        answer = self.wait(name)
        if "problems" in answer:
            raise UserError(*(Problem(**problem) for problem in answer["problems"]))
        return answer["value"]


class _Alone(dict):
    """A store of one process."""

    def set(self, name: str, value: str) -> None:
        self[name] = value

    def check(self, names: list[str]) -> bool:
        return all(name in self for name in names)


_kept_stores: list[Any] = []  # rank 0's serves the training that comes after, at the same address


def _board(world: World) -> Board:
    if world.size == 1:
        return Board(world, _Alone())
    from torch.distributed import PrefixStore, TCPStore

    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torch elastic serves one already
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=world.rank == 0 and not of_agent,
        wait_for_workers=False,
        multi_tenant=True,
    )
    _kept_stores.append(store)
    return Board(world, PrefixStore(f"fit-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store))
