"""`--fit`: the largest micro-batch that really runs here, at the same global batch.

Each rank starts one process for each candidate (`launch/fit/probe.py`) and holds nothing on the GPU
itself. The ranks tell each other how their probes ended: a micro-batch fits only if it runs on
every rank.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from launch import terminal
from launch.fit.board import Board, open_board
from launch.fit.probe import REQUEST, VERDICT
from launch.host import memory, processes
from launch.host.parent import THREADS, own_threads
from launch.host.world import World
from launch.output import record
from launch.terminal import memory_size
from launch.training.out_of_memory import other_ways
from recipes.errors import Failure, Problem, UserError, mistake
from recipes.run import FIT, Json, RunSpec, fitted

RESERVE = 0.05  # of the limit: lengths vary in a long run, and memory fragments
PROBE = "launch.fit.probe"
_GRACE = 10  # seconds: the rank that failed first has so long to say why before the ranks that lost it end


class ProbeFailed(Failure):
    """A probe failed for another reason than memory: its micro-batch may fit or not."""


def fit(run: RunSpec, argv: list[str], world: World) -> RunSpec:
    """The run at the largest micro-batch that runs, from fit.json if that holds. `--fit_only`
    always searches.

    `argv` are the arguments of train.py. Raises `UserError` if no micro-batch runs, `ProbeFailed`
    if a probe fails for another reason than memory.
    """
    board = open_board(world)
    content = board.decide("kept", lambda: {} if run["fit_only"] else _kept(run))
    if not content:
        content = _search(run, argv, world, board)
        board.decide("written", lambda: record.write(run["output_dir"], content, FIT))
        content["file"] = str(Path(run["output_dir"]) / FIT)
    batch = fitted.as_batch(run, content)  # as rank 0 found it: another node may have other devices
    terminal.console(world.is_main).print(f"fit   {batch}: {batch.reason}", highlight=False)
    return replace(run, batch=batch)


def _kept(run: RunSpec) -> Json:
    """The content of fit.json if it holds for this run, else an empty dict."""
    content = fitted.read(run["output_dir"])
    return content if fitted.batch(run, content) else {}


def _search(run: RunSpec, argv: list[str], world: World, board: Board) -> Json:
    """Go up from the planner's guess while probes run, or down until one does.

    Returns the content of fit.json.
    """
    share = run.batch.micro * run.batch.accumulation
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    limit, guess = board.decide("start", lambda: _start(run))
    _tokenize(run)
    out, probes = terminal.console(world.is_main), []

    def runs(size: int) -> bool:
        verdict = _probe_on_all_ranks(run, argv, board, size, limit)
        probes.append({"micro_batch": size, "accumulation": share // size, **verdict})
        outcome = "runs" if verdict["fits"] else f"does not fit: {verdict['words']}"
        peak = f", peak {memory_size(verdict['peak_bytes'])}" if verdict["peak_bytes"] else ""
        out.print(f"fit   micro {size} x accumulation {share // size}: {outcome}{peak}", highlight=False)
        return verdict["fits"]

    out.print(f"fit   up to {memory_size(limit)} per process, from micro {guess}", highlight=False)
    if runs(guess):
        for size in (size for size in sizes if size > guess):
            if not runs(size):
                break
    else:
        any(runs(size) for size in reversed(sizes) if size < guess)
    best = max((probe for probe in probes if probe["fits"]), key=lambda probe: probe["micro_batch"], default=None)
    if best is None:
        what = f"not even a micro-batch of 1 runs in {memory_size(limit)}: {probes[-1]['words']}"
        raise mistake("fit", what, other_ways(run))
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
    """The bytes a process may take, and the micro-batch to try first.

    Rank 0 asks before anything is on a GPU.
    """
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
    """The planner's micro-batch, or the recipe's own if this training cannot be planned."""
    from launch.training.model import load_config, load_tokenizer
    from recipes.planner.plan import plan_run

    usable = limit if run.hardware.cuda else limit - memory.resident()  # in RAM the libraries take their part
    try:
        return plan_run(run, load_config(run, load_tokenizer(run)), usable).micro_batch
    except Exception:  # this is only where to begin: the first probe says what is wrong with the run
        return run.batch.micro


def _require_writable(run: RunSpec) -> None:
    """Find out now and not after all probes."""
    try:
        Path(run["output_dir"]).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run["output_dir"]):
            return
    except OSError as error:
        what = f"{run['output_dir']} cannot be written: {error.strerror}"
        raise mistake("output_dir", what, "choose a writable folder", run.setting("output_dir").source) from None


def _tokenize(run: RunSpec) -> None:
    """Make the tokens that the probes will find, once what can be told before is told.

    Of a probe that tokenizes nobody sees how far it is, and if the kernel ended it for that, its
    micro-batch would count as too large.
    """
    from launch.data.mixture import tokens_of_parts
    from launch.output.resume import look_ahead
    from launch.training.model import load_tokenizer, with_model

    tokenizer = load_tokenizer(run)
    known, _ = with_model(run, tokenizer)
    if not run["fit_only"]:
        look_ahead(known)
    if run["dataset_name"] and not run["dataset_streaming"]:
        tokens_of_parts(known, tokenizer)


# --- One candidate, on all ranks ------------------------------------------------------------------


def _probe_on_all_ranks(run: RunSpec, argv: list[str], board: Board, size: int, limit: int) -> Json:
    """What became of a micro-batch on all ranks together: it fits if it ran on each."""
    accumulation = run.batch.micro * run.batch.accumulation // size
    request = {
        "argv": argv,
        "micro_batch": size,
        "accumulation": min(accumulation, 2),  # two micro-batches show the gradients that accumulation keeps
        "limit_bytes": round(limit * (1 - RESERVE)),
        "evaluates": run["eval_strategy"] != "no",
    }
    port = board.decide(f"{size}/port", processes.free_port)
    verdicts = board.all_ranks(f"{size}/verdict", _probe_here(request, port, board, size))
    short = [verdict for verdict in verdicts if verdict["kind"] == "out_of_memory"]
    if not short:
        _require_no_failure(verdicts, size)
    peak = max(verdict["peak_bytes"] or 0 for verdict in verdicts)
    ranks = [verdict["kind"] for verdict in verdicts]
    return {"fits": not short, "peak_bytes": peak, "words": short[0]["words"] if short else "", "ranks": ranks}


def _require_no_failure(verdicts: list[Json], size: int) -> None:
    mistaken = next((verdict for verdict in verdicts if verdict["kind"] == "mistake"), None)
    if mistaken:
        raise UserError(*(Problem(**problem) for problem in mistaken["problems"]))
    failed = [(rank, verdict["words"]) for rank, verdict in enumerate(verdicts) if verdict["kind"] != "fits"]
    if failed:
        # Prefer a rank with a reason of its own to one that only lost its connection to another
        # rank.
        rank, words = min(failed, key=lambda item: not item[1] or "onnection" in item[1])
        raise ProbeFailed(
            f"the probe of micro-batch {size} failed on rank {rank}, which says nothing about memory:\n{words}"
        )


def _probe_here(request: Json, port: int, board: Board, size: int) -> Json:
    """Run this rank's part of a probe, and end it when the part of another rank has failed."""
    with tempfile.TemporaryDirectory(prefix="fit-", ignore_cleanup_errors=True) as scratch:
        folder, deadline = Path(scratch), float("inf")
        (folder / REQUEST).write_text(json.dumps(request))
        with processes.group() as group:
            process = processes.start_module(PROBE, folder, log=folder / "log", environment=_environment(port))
            group.append(process)
            for _ in processes.watch(group):
                kind = board.read(f"{size}/ended")
                if kind is not None:
                    grace = 0 if kind == "out_of_memory" else _GRACE
                    deadline = min(deadline, time.monotonic() + grace)
                if time.monotonic() >= deadline:
                    break
            code = process.poll()
        verdict = _verdict_in(folder, code)
    if verdict["kind"] != "fits":
        board.post(f"{size}/ended", verdict["kind"])
    return verdict


def _environment(port: int) -> dict[str, str]:
    """The environment of a probe.

    The probes of several ranks form a world beside that of the ranks, at `port`.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if "RANK" in environment:
        environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if own_threads() is None:  # the launcher's 1, which a probe would take for a person's
        environment.pop(THREADS, None)
    return environment


def _verdict_in(folder: Path, code: int | None) -> Json:
    """The verdict of a probe that has exited with `code`, None if it was killed from here."""
    try:
        return json.loads((folder / VERDICT).read_text())
    except (OSError, ValueError):
        pass
    if code == -signal.SIGKILL:  # here SIGKILL means the kernel's OOM killer
        return {"kind": "out_of_memory", "peak_bytes": None, "words": "killed by the kernel's OOM killer"}
    if code is None:
        return {"kind": "stopped", "peak_bytes": None, "words": ""}
    lines = processes.last_lines(folder / "log", 15)
    if lines and memory.says_it_ran_out(lines[-1]):  # a library ended the process itself
        return {"kind": "out_of_memory", "peak_bytes": None, "words": lines[-1]}
    words = "\n".join([*lines, f"({processes.how_it_ended(code)})"])
    return {"kind": "failed", "peak_bytes": None, "words": words}
