"""Runs that failed or were interrupted: the message, how to resume, and the exit code.

When memory runs out, the message says what was asked for, what was planned, and the next attempt:
the next smaller micro-batch at the same global batch, or else gradient checkpointing. Both resume
from the run's own checkpoints. out_of_memory.json in the output folder holds the flags, for
`--on_oom next`.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from launch.host import memory
from launch.host.files import StorageFailure, storage_failure
from launch.host.heartbeat import RankHangs
from launch.host.launcher import is_spoken_for, launcher_argv, write_error_file
from launch.host.memory import Shortage
from launch.host.secrets import hide
from launch.host.signals import EXIT_CODE, Preempted, StopRequest, ignore_stop_requests
from launch.host.world import World
from launch.output import record
from launch.output.checkpoints import newest_complete, newest_valid
from launch.output.record import OUT_OF_MEMORY
from launch.terminal import console, memory_size, print_note, print_problems
from recipes.errors import Failure, Problem, StreamBroke, UserError, one_line
from recipes.rules.check import check
from recipes.run import COMMAND_LINE, Json, RunSpec, resolve, with_flags
from recipes.run.files import read_json

# A library's own words for a run that it cannot train, the flag that asks for it, and the Fix.
_CANNOT_TRAIN = (
    ("AutoTP|HuggingFace tp_plan", "tensor_parallel", "leave tensor_parallel out of the DeepSpeed JSON"),
    (r"mixed dtype \(CPU\)", "dtype", "--dtype float32"),  # LayerNorm's; RMSNorm takes both
    (r"does not support \w+ checkpointing", "gradient_checkpointing", "--gradient_checkpointing false"),
)


class NotANumber(Failure):
    """The loss or a weight is NaN or infinite."""


class OutOfMemory(Failure):
    """This rank ran out of memory. `is_first`: no other rank has reported it before."""

    def __init__(self, message: str, is_first: bool) -> None:
        super().__init__(message)
        self.is_first = is_first


def untrainable(error: BaseException) -> list[Problem]:
    """The mistake in a run that a library refuses while it trains; empty for any other error."""
    found = [(flag, fix) for words, flag, fix in _CANNOT_TRAIN if re.search(words, str(error))]
    return [Problem(flag, one_line(error), fix) for flag, fix in found]


# --- The report -----------------------------------------------------------------------------------


@contextlib.contextmanager
def explained_by(run: RunSpec) -> Iterator[None]:
    """An error that leaves this block is reported as one of this run: with the sources of its
    values, and what its folder holds. Of blocks in each other the innermost counts.
    """
    try:
        yield
    except BaseException as error:
        vars(error).setdefault("run", run)
        raise


@contextlib.contextmanager
def only_noted(doing: str, world: World) -> Iterator[None]:
    """For what follows a finished training. A failure is one line, and the run stays finished."""
    try:
        yield
    except Exception as error:
        same_everywhere = isinstance(error, UserError)
        reason = str(error) if same_everywhere else f"{type(error).__name__}: {one_line(error)}"
        text = f"{_rank(world)}the run is finished, but {doing} failed: {reason}"
        print_note(text, console(world.is_main or not same_everywhere, stderr=True))


def report(error: BaseException, world: World) -> int:
    """Print what went wrong. Returns the exit code. Raises `error` again if it is a bug of ours."""
    run, since = vars(error).get("run"), time.time()  # None if it was not resolved
    ignore_stop_requests()
    storage = _storage_failure(error, run)
    if problems := _mistakes(error, run, storage):
        if _is_reporter(world):
            print_problems(problems, console(stderr=True))
            write_error_file("\n".join(f"{problem.severity}  {problem}" for problem in problems))
        return 2
    message = _explained(error, run, storage)
    if message is None:
        if not world.is_local_main and is_spoken_for():  # or all ranks print the same traceback
            return 1
        write_error_file(f"{type(error).__name__}: {error}")
        raise error
    if _prints(error, world, storage):
        text = f"{_rank(world)}{message}"
        console(stderr=True).print(escape(text), style="red", highlight=False)
        is_consequence = _lost_a_rank(error) or (isinstance(error, OutOfMemory) and not error.is_first)
        if not is_consequence:
            write_error_file(text, since=since)
    if isinstance(error, Preempted):
        return EXIT_CODE
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _is_reporter(world: World) -> bool:
    """True on the rank that prints an error that all ranks of its node should meet: the first one,
    or one whose launcher does not end it, because the first has not met the error.
    """
    return world.is_local_main or not is_spoken_for(met_by_all=True)


def _mistakes(error: BaseException, run: RunSpec | None, storage: StorageFailure | None) -> list[Problem]:
    """The errors that the user can correct; empty if the run failed otherwise."""
    if isinstance(error, UserError):
        found = [] if storage else [*error.problems]
    else:
        found = [] if isinstance(error, Failure) else untrainable(error)
    return [run.with_source(problem) if run else problem for problem in found]


def _storage_failure(error: BaseException, run: RunSpec | None) -> StorageFailure | None:
    """What the machine did to a file. A parser's error can also be the user's mistake."""
    if isinstance(error, (OutOfMemory, NotANumber)) or not isinstance(error, Exception):
        return None
    if isinstance(error, UserError) and error.problems[0].subject == "output_dir":
        return None  # nothing was written there yet: another folder helps
    folder = Path(run["output_dir"]) if run and run["output_dir"] else None
    if folder and isinstance(error, UserError) and not folder.exists():
        folder = None  # data is read before it is made
    return storage_failure(error, folder)


def _explained(error: BaseException, run: RunSpec | None, storage: StorageFailure | None) -> str | None:
    """A failure of the machine and how to resume. None for any other error: a bug of ours."""
    what, remedy = str(error), ""
    if storage:
        what, remedy = storage.what, storage.remedy
    elif isinstance(error, NotANumber):
        what += "; a lower learning rate or fp32 usually helps"
    elif isinstance(error, KeyboardInterrupt):
        what = "interrupted"
    elif isinstance(error, Failure) and not isinstance(error, (RankHangs, StreamBroke)):
        return what  # nothing was trained, or the message says how to resume
    elif not isinstance(error, (Preempted, Failure)):
        if not _lost_a_rank(error):
            return None
        what = "another rank failed: see the error that it printed"
    again = f"{remedy or 'To resume'}, {'then ' if remedy else ''}run the same command again"
    newest = newest_complete(run["output_dir"]) if run else None
    if newest:
        return f"{what}. Saved: {newest}. {again}: it takes the newest valid checkpoint."
    unsaved = f"{what}. Saved: no checkpoint yet." if run else what
    return f"{unsaved.rstrip('.')}. {again}." if remedy else unsaved


def _lost_a_rank(error: BaseException) -> bool:
    if any(words in str(error) for words in ("closed by peer", "reset by peer", "Broken pipe")):
        return True  # of gloo
    # Importing it takes seconds, and without it the error is not torch's.
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return False
    return isinstance(error, (torch.distributed.DistBackendError, torch.distributed.DistNetworkError))


def _prints(error: BaseException, world: World, storage: StorageFailure | None) -> bool:
    """True on the rank that failed. What happens to all ranks together is printed by one alone."""
    of_one_rank = isinstance(error, (OutOfMemory, NotANumber, StreamBroke))
    own = of_one_rank or not isinstance(error, (KeyboardInterrupt, Preempted, Failure))
    if isinstance(error, RankHangs):
        own = error.is_reporter
    if not (world.is_main or own) or (_lost_a_rank(error) and is_spoken_for()):
        return False
    return storage is None or _is_reporter(world)


def _rank(world: World) -> str:
    return "" if world.is_main else f"rank {world.rank}: "


# --- Out of memory --------------------------------------------------------------------------------


@contextlib.contextmanager
def catch_out_of_memory(run: RunSpec, argv: list[str], world: World, stop: StopRequest) -> Iterator[None]:
    """Turn every error that means that memory ran out into `OutOfMemory`.

    `argv` are train.py's arguments. `stop` knows the last step that has ended.
    """
    try:
        yield
    except Exception as error:
        if not memory.ran_out(error):
            raise
        ignore_stop_requests()
        shortage, peak = memory.shortage(error), memory.peak(run.hardware.cuda)  # before anything is freed
        traceback.clear_frames(error.__traceback__)
        when = f"after step {stop.step}" if stop.step else "before the first step was done"
        message, is_first = f"out of memory {when}: {shortage_in_words(shortage)}", _is_first(run)
        if is_first:
            newest, _ = newest_valid(run["output_dir"])
            checkpoint, attempt = str(newest.path) if newest else None, next_attempt(run, argv)
            facts = {"rank": world.rank, "step": stop.step, "peak_bytes": peak, **vars(shortage)}
            facts |= {"checkpoint": checkpoint, "next": attempt}
            record.note_out_of_memory(Path(run["output_dir"]), facts)
            message = "\n".join([message, *_explanation(run, argv, peak, checkpoint, attempt)])
        raise OutOfMemory(message, is_first) from None


def _is_first(run: RunSpec) -> bool:
    """True on the rank that reports it first. out_of_memory.json tells rank 0 why it lost it."""
    try:
        (Path(run["output_dir"]) / OUT_OF_MEMORY).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # the disk is full too: better reported twice than never
        pass
    return True


def _explanation(run: RunSpec, argv: list[str], peak: int, checkpoint: str | None, attempt: Json | None) -> list[str]:
    of_whom = "reserved on the GPU" if run.hardware.cuda else "the whole process, libraries included"
    limited = f", limited to {memory_size(round(run['memory_limit'] * 1e9))}" if run["memory_limit"] else ""
    lines = [
        f"planned   {_planned(run)}",
        f"measured  {memory_size(peak)} at most until then ({of_whom}){limited}",
        f"saved     {checkpoint or 'no checkpoint yet'}",
    ]
    if attempt is None:
        return [*lines, f"next      {other_ways(run)}"]
    micro = attempt["per_device_train_batch_size"]
    batch = replace(run.batch, micro=micro, accumulation=run.batch.micro * run.batch.accumulation // micro)
    checkpointing = ", activations computed again" if "gradient_checkpointing" in attempt else ""
    start = "from that checkpoint" if checkpoint else "from the start"
    return [
        *lines,
        f"next      {batch}, the same global batch{checkpointing}, {start}:",
        f"          {_command(run, with_flags(argv, attempt))}",
        f"then      {other_ways(run, bool(checkpointing))}",
    ]


def next_flags(folder: Path) -> Json | None:
    """The flags of the next attempt for the run that just ended in a folder. None if unknown."""
    flags = (read_json(folder / OUT_OF_MEMORY)[0] or {}).get("next")
    return flags if isinstance(flags, dict) else None


def next_attempt(run: RunSpec, argv: list[str]) -> Json | None:
    """Flags for the same training in less memory, resumed from its checkpoints.

    None if no flags achieve that. A flag whose value is None is left out.
    """
    micro, share = run.batch.micro, run.batch.micro * run.batch.accumulation
    attempts: list[Json] = [
        {"per_device_train_batch_size": size} for size in range(micro - 1, 0, -1) if not share % size
    ]
    if not run["gradient_checkpointing"]:
        attempts.append({"per_device_train_batch_size": micro, "gradient_checkpointing": True})
    # What prevents a resume from the newest checkpoint is left out, or overridden if a file has it.
    resumed = {
        name: None if run.setting(name).source == COMMAND_LINE else value
        for name, value in {"fresh": False, "fit": False, "resume_from_checkpoint": "true"}.items()
        if run.explicit(name) and run[name]
    }
    for flags in attempts:
        if run.explicit("gradient_accumulation_steps"):  # else it follows from the micro-batch
            flags["gradient_accumulation_steps"] = share // flags["per_device_train_batch_size"]
        flags |= resumed
        found = check(resolve(with_flags(argv, flags), run.place))
        if not any(problem.severity == "error" for problem in found):
            return flags
    return None


def other_ways(run: RunSpec, checkpointed: bool = False) -> str:
    """What takes less memory but is another training or needs another engine, in words.

    `checkpointed`: the next attempt computes activations again, so gradient checkpointing is not
    proposed once more.
    """
    checkpointing = "" if checkpointed or run["gradient_checkpointing"] else "--gradient_checkpointing true, "
    if not run.hardware.cuda:  # offloading needs RAM, which is what ran out
        return f"{checkpointing}a shorter --max_length, or more memory"
    another = "with another --output_dir, since its checkpoints have another format"
    if run.world_size > 1 and run.engine.kind not in ("deepspeed", "fsdp"):
        return f"{checkpointing}--recipe sharded {another}, then memory and memory_zero3"
    if run.engine.kind != "deepspeed":
        return f"{checkpointing}--recipe memory {another}, then memory_zero3"
    if run.engine.zero_stage < 3:
        return f"{checkpointing}--recipe memory_zero3 {another}"
    return f"{checkpointing}more GPUs, or a shorter --max_length, --optim adamw_bnb_8bit, or more memory"


def shortage_in_words(shortage: Shortage) -> str:
    """`asked for 2.00 GiB, 512.0 MiB was free`, as far as it is known."""
    asked = "more" if shortage.asked_bytes is None else memory_size(shortage.asked_bytes)
    free = "" if shortage.free_bytes is None else f", {memory_size(shortage.free_bytes)} was free"
    return f"asked for {asked}{free}"


def _planned(run: RunSpec) -> str:
    from launch.training.model import load_config, load_tokenizer
    from recipes.planner.plan import plan_run

    try:
        parts = plan_run(run, load_config(run, load_tokenizer(run))).components
    except Exception as error:  # the rest of the message matters more than this table
        return f"not: {type(error).__name__}"
    words = [f"{name} {memory_size(size)}" for name, size in vars(parts).items() if size]
    return f"{memory_size(parts.total)} at micro-batch {run.batch.micro}: {', '.join(words)}"


def _command(run: RunSpec, argv: list[str]) -> str:
    """The command of this rank's launcher with another `argv` for train.py.

    On several nodes the launchers' own arguments differ, so only train.py and its `argv` are shown.
    """
    start = ["train.py"]
    if run.world_size == run.local_world_size:
        words = launcher_argv()
        scripts = [place for place, word in enumerate(words) if Path(word).name == Path(sys.argv[0]).name]
        start = words[: scripts[0] + 1] if scripts else [sys.executable, sys.argv[0]]
        if scripts and run.engine.kind != "single":
            argv = [word.replace("$", "$$") for word in argv]  # torch elastic reads $$ as $
    return shlex.join([*start, *hide(argv, record.secrets_of(run))])
