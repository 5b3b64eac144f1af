"""Report a run that failed or was interrupted: print why and how to resume, return the exit code.

When memory runs out, the message names the failed allocation and the next attempt: the next
smaller micro-batch at the same global batch or, if there is none, gradient checkpointing. Both
attempts resume from the run's own checkpoints. out_of_memory.json in the output folder holds the
flags of the next attempt, for `--on_oom next`.
"""

import contextlib
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from rich.markup import escape

from launch.host import memory
from launch.host.files import storage_failure
from launch.host.signals import EXIT_CODE, Preempted, StopRequest, ignore_stop_requests, is_spoken_for
from launch.host.world import RankHangs, World
from launch.output import record
from launch.output.checkpoints import newest_complete, newest_valid
from launch.output.record import OUT_OF_MEMORY
from launch.terminal import console, memory_size, print_note, print_problems
from recipes.errors import Failure, StreamBroke, UserError, one_line
from recipes.rules.check import check
from recipes.run import COMMAND_LINE, Json, RunSpec, resolve, with_flags

# Printed if no attempt is left, here or in --fit. These ways change training, engine or machine.
OTHER_WAYS = (
    "use a recipe that shards or offloads, with another --output_dir; or lower --max_length; or use "
    "GPUs with more memory (see `recipes plan`)"
)
_UNUSED_PARAMETERS = ("DDP waits for parameters that get no gradient", "Add --ddp_find_unused_parameters true")


class NotANumber(Failure):
    """The loss or a weight is NaN or infinite."""


class OutOfMemory(Failure):
    """This rank ran out of memory."""


# --- The report -----------------------------------------------------------------------------------


@contextlib.contextmanager
def explained_by(run: RunSpec) -> Iterator[None]:
    """Attach the run to an error that leaves this block, so that `report` prints the sources of the
    run's settings and the run's newest checkpoint. In nested blocks, the innermost run is kept.
    """
    try:
        yield
    except BaseException as error:
        vars(error).setdefault("run", run)
        raise


@contextlib.contextmanager
def only_noted(world: World) -> Iterator[None]:
    """Print a failure in this block as one note, because the training is already finished."""
    try:
        yield
    except Exception as error:
        same_everywhere = isinstance(error, UserError)
        reason = str(error) if same_everywhere else f"{type(error).__name__}: {one_line(error)}"
        text = f"{_rank(world)}the run is finished, but its report is incomplete: {reason}"
        print_note(text, console(world.is_main or not same_everywhere, stderr=True))


def report(error: BaseException, world: World) -> int:
    """Print `error`, unless another rank does, and return the exit code. A bug is raised again."""
    run = vars(error).get("run")  # None if the run was not resolved
    ignore_stop_requests()
    if isinstance(error, UserError):
        if _prints(error, world, met_by_all=True):
            problems = [run.with_source(problem) if run else problem for problem in error.problems]
            print_problems(problems, console(stderr=True))
        return 2
    folder = Path(run["output_dir"]) if run and run["output_dir"] else None
    is_known = isinstance(error, (KeyboardInterrupt, Preempted, Failure)) or _lost_a_rank(error)
    unused = _UNUSED_PARAMETERS if "parameters that were not used in producing loss" in str(error) else None
    remedied = None if is_known else unused or storage_failure(error, folder)
    if _prints(error, world, met_by_all=remedied is not None):
        if not is_known and remedied is None:
            raise error  # a bug of this project
        message = f"{_rank(world)}{_explained(error, remedied, folder)}"
        console(stderr=True).print(escape(message), style="red", highlight=False)
    if isinstance(error, Preempted):
        return EXIT_CODE
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _explained(error: BaseException, remedied: tuple[str, str] | None, folder: Path | None) -> str:
    """Describe a failure or an interruption, the newest saved checkpoint, and how to resume."""
    what, remedy = remedied or (str(error), "")
    if isinstance(error, NotANumber):  # the last checkpoint may hold NaN too, and a resume keeps the rate
        return f"{what}. Start again with --fresh, and a lower --learning_rate or --bf16 false --fp16 false"
    if isinstance(error, KeyboardInterrupt):
        what = "interrupted"
    elif isinstance(error, Failure) and not isinstance(error, (RankHangs, StreamBroke)):
        return what  # nothing was trained, or the message says how to resume
    elif _lost_a_rank(error):
        what = "another rank failed: see the error that it printed"
    again = f"{remedy}, then run the same command again" if remedy else "To resume, run the same command again"
    if newest := newest_complete(str(folder)) if folder else None:
        return f"{what}. Saved: {newest}. {again}: it resumes from the newest valid checkpoint."
    if not folder:
        return f"{what.rstrip('.')}. {again}." if remedy else what
    then = f". {again}" if remedy else ": the same command starts over"
    return f"{what}. No checkpoint was saved{then}."


def _lost_a_rank(error: BaseException) -> bool:
    if any(words in str(error) for words in ("closed by peer", "reset by peer", "Broken pipe")):
        return True  # messages of gloo
    # Importing torch takes seconds. If torch is not imported, the error cannot come from torch.
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return False
    return isinstance(error, (torch.distributed.DistBackendError, torch.distributed.DistNetworkError))


def _prints(error: BaseException, world: World, met_by_all: bool) -> bool:
    """True if this rank should print its error. Each rank prints its own `RankHangs`, `OutOfMemory`
    or `StreamBroke`. Rank 0 alone prints a stop or another kind of `Failure`. A node's first rank
    prints all its other errors, except a lost connection. In the remaining cases, a rank prints its
    error unless another rank's earlier failure explains it (`is_spoken_for`) or, without torch
    elastic, all ranks meet the error (`met_by_all`).
    """
    if isinstance(error, (RankHangs, OutOfMemory, StreamBroke)):
        return True
    if isinstance(error, (KeyboardInterrupt, Preempted, Failure)):
        return world.is_main
    is_first_of_node = world.rank % world.local_size == 0
    return (is_first_of_node and not _lost_a_rank(error)) or not is_spoken_for(met_by_all)


def _rank(world: World) -> str:
    return "" if world.is_main else f"rank {world.rank}: "


# --- Out of memory --------------------------------------------------------------------------------


@contextlib.contextmanager
def catch_out_of_memory(run: RunSpec, argv: list[str], world: World, stop: StopRequest) -> Iterator[None]:
    """Raise `OutOfMemory` if memory ran out. The first rank that ran out writes out_of_memory.json.

    `argv` holds train.py's arguments. `stop.step` is the last completed step.
    """
    try:
        yield
    except Exception as error:
        if not memory.ran_out(error):
            raise
        ignore_stop_requests()
        shortage, peak = memory.shortage(error), memory.peak(run.hardware.cuda)  # before anything is freed
        traceback.clear_frames(error.__traceback__)
        when = f"after step {stop.step}" if stop.step else "before the first step was complete"
        limit = f", within --memory_limit {run['memory_limit']:g}" if run["memory_limit"] else ""
        message = f"out of memory {when}{limit}: {shortage}"
        if _is_first(run):
            newest, _ = newest_valid(run["output_dir"])
            checkpoint, attempt = str(newest.path) if newest else None, next_attempt(run, argv)
            facts = {"rank": world.rank, "step": stop.step, "peak_bytes": peak, "error": shortage}
            facts |= {"checkpoint": checkpoint, "next": attempt}
            record.note_out_of_memory(Path(run["output_dir"]), facts)
            message += f"\nmeasured  a peak of {memory_size(peak)}\nsaved     {checkpoint or 'no checkpoint yet'}"
            message += f"\nnext      {_in_words(run, attempt, checkpoint) if attempt else OTHER_WAYS}"
        raise OutOfMemory(message) from None


def _is_first(run: RunSpec) -> bool:
    """Create out_of_memory.json. True unless another rank has already created the file."""
    try:
        (Path(run["output_dir"]) / OUT_OF_MEMORY).touch(exist_ok=False)
    except OSError as error:  # if the disk is full too, better reported twice than never
        return not isinstance(error, FileExistsError)
    return True


def _in_words(run: RunSpec, attempt: Json, checkpoint: str | None) -> str:
    micro = attempt["per_device_train_batch_size"]
    start = "from that checkpoint" if checkpoint else "from the start"
    without = "".join(f" without --{name}" for name, value in attempt.items() if value is None)
    command = f"the same command with {shlex.join(with_flags([], attempt))}{without}"
    return f"micro-batch {micro} at the same global batch, {start}: {command}"


def next_flags(folder: Path) -> Json | None:
    """Return the flags of the next attempt after the run in `folder`; None if there is none."""
    flags = record.read(folder, OUT_OF_MEMORY).get("next")
    return flags if isinstance(flags, dict) else None


def next_attempt(run: RunSpec, argv: list[str]) -> Json | None:
    """Return flags that resume the same training in less memory, from its checkpoints.

    None if there are no such flags. A flag with the value None must be left out of the command.
    """
    micro, smaller = run.batch.micro, [size for size in run.batch.micro_batches if size < run.batch.micro]
    attempts: list[Json] = [{"per_device_train_batch_size": size} for size in smaller]
    if not run["gradient_checkpointing"]:
        attempts.append({"per_device_train_batch_size": micro, "gradient_checkpointing": True})
    # Drop a typed flag, or override a file's, if it prevents a resume from the newest checkpoint.
    resumed = {
        name: None if run.setting(name).source == COMMAND_LINE else value
        for name, value in {"fresh": False, "fit": False, "resume_from_checkpoint": "true"}.items()
        if run.explicit(name) and run[name]
    }
    for flags in attempts:
        if run.explicit("gradient_accumulation_steps"):  # else the micro-batch determines the accumulation
            flags["gradient_accumulation_steps"] = run.batch.share // flags["per_device_train_batch_size"]
        flags |= resumed
        found = check(resolve(with_flags(argv, flags), run.place))
        if not any(problem.severity == "error" for problem in found):
            return flags
    return None
