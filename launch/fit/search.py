"""`--fit`: find the largest micro-batch that really runs here, at the same global batch.

For each candidate micro-batch, every rank starts a process, the probe. On copies of the longest
example, the probe takes two steps of at most two micro-batches each. The rank itself holds nothing
on the GPU. A micro-batch fits if it runs on all ranks. The ranks share results through a store: a
process group would need GPU memory (NCCL) or a network interface that gloo finds.
"""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil

from launch.host import memory, processes
from launch.host.files import require_writable, writing
from launch.host.launcher import THREADS, own_threads
from launch.host.world import World, early_store, launched, prepare_process, process_group
from launch.output import record
from launch.terminal import console, memory_size
from launch.training.failure import OTHER_WAYS
from recipes.errors import Failure, Problem, UserError, mistake
from recipes.quiet import quiet_libraries
from recipes.run import FIT, Json, RunSpec, fitted, resolve
from recipes.run.batch import Batch

PROBE = __name__
RESERVE = 0.05  # the share of the limit to keep free: in a long run lengths vary and memory fragments
_GRACE = 3  # seconds after the first failure in which other ranks may report their failures
_STEPS = 2  # the optimizer has its state from the second step on

# A probe saves and reports nothing, and its schedule needs no evaluation.
_SETTINGS = {
    "max_steps": _STEPS, "save_strategy": "no", "eval_strategy": "no", "eval_on_start": False,
    "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {}, "logging_strategy": "no", "report_to": "none",
    "load_best_model_at_end": False, "early_stopping_patience": None, "resume_from_checkpoint": None,
    "push_to_hub": False, "fresh": False, "fit": False, "disable_tqdm": True,
}  # fmt: skip


# --- The search -----------------------------------------------------------------------------------


def fit(run: RunSpec, argv: list[str], world: World) -> RunSpec:
    """Return the run with the largest micro-batch that fits. The search writes fit.json; a fit.json
    that is valid for this run replaces the search, except with `--fit_only`.

    `argv` holds train.py's arguments. Raises `UserError` for a mistake of the user, or if no
    micro-batch fits, and `Failure` if a probe fails for a reason other than memory.
    """
    start = world.decide(lambda: _start(run))
    found = start.get("kept") or _search(run, argv, world, start)
    if world.is_main and "kept" not in start:
        record.write(run["output_dir"], found, FIT)
    batch = fitted.as_batch(run, found)  # from rank 0: other nodes may have other devices
    next_run = "\nnext  `recipes train` with the same flags uses this micro-batch" if run["fit_only"] else ""
    words = f"micro {batch.micro} x accumulation {batch.accumulation}: {batch.reason}{next_run}"
    console(world.is_main).print(f"fit   {words}", highlight=False)
    return replace(run, batch=batch)


def _start(run: RunSpec) -> Json:
    """Return a dict: a valid fit.json as `kept`, or else the inputs of a search: `limit` (bytes per
    process), `guess` (first micro-batch), `port`. Raises `UserError` for a read-only folder.
    """
    folder, kept = Path(run["output_dir"]), {} if run["fit_only"] else fitted.read(run["output_dir"])
    if fitted.batch(run, kept):
        return {"kept": kept}
    with writing(folder):  # check the folder now, not after all probes
        folder.mkdir(parents=True, exist_ok=True)
        require_writable(folder)
    limit = psutil.virtual_memory().available // run.local_world_size
    if run.hardware.gpus:
        limit = min(gpu.memory_bytes for gpu in run.hardware.gpus)
    if run["memory_limit"]:
        limit = round(run["memory_limit"] * 1e9)
    return {"limit": limit, "guess": _guess(run, limit), "port": processes.free_port()}


def _guess(run: RunSpec, limit: int) -> int:
    """Return the planner's micro-batch, or the run's own if the planner cannot plan this run."""
    from launch.training.model import load_config, load_tokenizer
    from recipes.planner.fits import Planner, estimator_of

    usable = limit if run.hardware.cuda else limit - psutil.Process().memory_info().rss  # libraries take the rest
    try:
        return Planner(estimator_of(load_config(run, load_tokenizer(run))), usable).best(run).micro_batch
    except Exception:  # a guess need not be good, and the first probe reports what is wrong with the run
        return run.batch.micro


def _search(run: RunSpec, argv: list[str], world: World, start: Json) -> Json:
    """Try the guess. If it fits, try larger micro-batches, else smaller. Return fit.json's data."""
    _tokenize(run)
    share, limit, guess, sizes = run.batch.share, start["limit"], start["guess"], run.batch.micro_batches
    out, probes = console(world.is_main), []

    def runs(size: int) -> bool:
        # With two micro-batches, a probe holds the gradients that accumulation keeps in memory.
        request = {"argv": argv, "micro_batch": size, "accumulation": min(share // size, 2)}
        found = _probe({**request, "limit_bytes": round(limit * (1 - RESERVE))}, world, start["port"])
        probes.append({"micro_batch": size, "accumulation": share // size, **found})
        outcome = "runs" if found["fits"] else f"does not fit: {found['words']}"
        peak = f", peak {memory_size(found['peak_bytes'])}" if found["peak_bytes"] else ""
        out.print(f"fit   micro {size} x accumulation {share // size}: {outcome}{peak}", highlight=False, markup=False)
        return found["fits"]

    out.print(f"fit   limit {memory_size(limit)} per process, first try: micro {guess}", highlight=False)
    if runs(guess):
        all(runs(size) for size in reversed(sizes) if size > guess)
    else:
        any(runs(size) for size in sizes if size < guess)
    best = max((probe for probe in probes if probe["fits"]), key=lambda probe: probe["micro_batch"], default=None)
    if best is None:
        what = f"not even a micro-batch of 1 fits in {memory_size(limit)}: {probes[-1]['words']}"
        subject, first = ("memory_limit", "raise --memory_limit; or ") if run["memory_limit"] else ("fit", "")
        second = "" if run["gradient_checkpointing"] else "set --gradient_checkpointing; or "
        raise mistake(subject, what, f"{first}{second}{OTHER_WAYS}")
    return {
        **best,
        "limit_bytes": limit,
        "found": record.now(),
        "probes": probes,
        "holds_for": fitted.identity(run),
    }


def _tokenize(run: RunSpec) -> None:
    """Tokenize the data for all probes, after the checks that need no tokens. Probes must not
    tokenize: if tokenizing filled the RAM, a micro-batch would seem too large.
    """
    from launch.data.tokens import of_parts
    from launch.output.resume import look_ahead
    from launch.training.model import load_tokenizer, with_model

    tokenizer = load_tokenizer(run)
    known, _ = with_model(run, tokenizer)
    if not run["fit_only"]:
        look_ahead(known)
    if run["dataset_name"] and not run["dataset_streaming"]:
        of_parts(known, tokenizer)


# --- One candidate, on all ranks ------------------------------------------------------------------


def _probe(request: Json, world: World, port: int) -> Json:
    """Try a micro-batch on all ranks, and return the joint result. Raises `UserError` if a rank
    reports a user's mistake, and `Failure` if a rank fails while no rank is out of memory.
    """
    verdicts = world.gather(_probe_here(request, world, port))
    for problems in (verdict["problems"] for verdict in verdicts if verdict["kind"] == "mistake"):
        raise UserError(*(Problem(**problem) for problem in problems))
    short = [verdict for verdict in verdicts if verdict["kind"] == "out_of_memory"]
    failed = [(rank, verdict["words"]) for rank, verdict in enumerate(verdicts) if verdict["kind"] != "fits"]
    if failed and not short:
        # Prefer a rank with its own reason over a rank that only lost its connection to another.
        rank, words = min(failed, key=lambda item: not item[1] or "onnection" in item[1])
        what = f"micro-batch {request['micro_batch']} failed on rank {rank}, with an error other than out of memory"
        raise Failure(f"{what}:\n{words}")
    return {
        "fits": not short,
        "peak_bytes": max(verdict.get("peak_bytes", 0) for verdict in verdicts),
        "words": short[0]["words"] if short else "",
        "ranks": [verdict["kind"] for verdict in verdicts],
    }


def _probe_here(request: Json, world: World, port: int) -> Json:
    """Run this rank's probe and return its verdict. End the probe if another rank's probe fails."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if "RANK" in environment:  # the probes form a process group of their own
        environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if own_threads() is None:  # else a probe takes the launcher's 1 for the user's choice
        environment.pop(THREADS, None)
    store, failed = early_store(world), f"micro-batch {request['micro_batch']} has failed"
    with processes.ask(PROBE, [request], environment) as (child,):
        for _ in processes.watch([child]):
            if store.check([failed]):
                time.sleep(_GRACE)
                break
        verdict = child.answer or _without_answer(child)
    if verdict["kind"] != "fits":
        store.set(failed, "")
    return verdict


def _without_answer(child: processes.Child) -> Json:
    if child.process.poll() is None:
        return {"kind": "stopped", "words": ""}
    if child.process.returncode == -signal.SIGKILL:  # here SIGKILL means the kernel's OOM killer
        return {"kind": "out_of_memory", "words": "killed by the kernel's OOM killer"}
    last = child.end().splitlines()[0]
    if memory.says_it_ran_out(last):  # a library ended the process itself
        return {"kind": "out_of_memory", "words": last}
    return {"kind": "failed", "words": child.end(15)}


# --- A probe, in a process of its own -------------------------------------------------------------


def main(request: Json, folder: str) -> None:
    """Take two steps of the requested run, and answer with the result on this rank. If memory runs
    out, the process ends at once, because leaving the process group would wait for other ranks,
    which wait for this rank.
    """
    from launch.data.load import load_data
    from launch.training.model import known_classes, load_tokenizer, with_model

    world = launched()
    run = _requested(request, world, folder)
    quiet_libraries(run["verbose"])
    prepare_process(run)
    try:
        tokenizer = load_tokenizer(run)
        known, _ = with_model(run, tokenizer)
        data = load_data(known, tokenizer, known_classes(known, tokenizer))
        with process_group(known, world) as args:
            try:
                _train_on_longest(known, args, tokenizer, data, request["limit_bytes"])
            except Exception as error:
                if not memory.ran_out(error):
                    raise
                words, peak = memory.shortage(error), memory.peak(run.hardware.cuda)
                processes.answer(folder, {"kind": "out_of_memory", "peak_bytes": peak, "words": words})
                os._exit(1)
        verdict = {"kind": "fits", "peak_bytes": memory.peak(run.hardware.cuda)}
    except UserError as error:
        verdict = {"kind": "mistake", "problems": [vars(run.with_source(problem)) for problem in error.problems]}
    processes.answer(folder, verdict)


def _requested(request: Json, world: World, folder: str) -> RunSpec:
    run = resolve(request["argv"], world.place(), {**_SETTINGS, "output_dir": folder})
    batch = Batch(request["micro_batch"], request["accumulation"], run.batch.data_parallel, "a probe of --fit", "--fit")
    return replace(run, batch=batch)


def _train_on_longest(run: RunSpec, args, tokenizer, data, limit_bytes: int) -> None:
    """Take two steps on copies of the longest example, in at most `limit_bytes` of memory."""
    from launch.data.load import repeated_longest
    from launch.training.callbacks import StopOnNotANumber
    from launch.training.model import load_model
    from launch.training.trainer import build_trainer

    memory.limit(limit_bytes, run.hardware.cuda)
    model = load_model(run, tokenizer, data.labels, data.problem_type)
    data.train = repeated_longest(data.train, _STEPS * run.batch.total)
    trainer = build_trainer(run, args, model, tokenizer, data, console(is_main=False))
    trainer.remove_callback(StopOnNotANumber)  # the loss of a repeated example means nothing
    trainer.train()
    trainer.accelerator.free_memory()
