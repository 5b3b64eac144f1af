"""When a training runs out of memory: what it asked for, what was planned, and what to try next.

The next attempt has the next smaller micro-batch at the same global batch, or else gradient
checkpointing. Both resume from the run's own checkpoints. out_of_memory.json in the output folder
holds the flags, for `--on_oom next`.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import traceback
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from launch.host import memory
from launch.host.launcher import launcher_argv
from launch.host.memory import Shortage
from launch.host.secrets import hide
from launch.host.signals import StopRequest, ignore_stop_requests
from launch.host.world import World
from launch.output import record
from launch.output.record import OUT_OF_MEMORY
from launch.terminal import memory_size
from recipes.errors import Failure, UserError
from recipes.rules.check import check
from recipes.run import COMMAND_LINE, Json, RunSpec, resolve, with_flags
from recipes.run.files import read_json


class OutOfMemory(Failure):
    """This rank ran out of memory. `first`: no other rank has reported it before."""

    def __init__(self, run: RunSpec, argv: list[str], facts: Json, first: bool) -> None:
        shortage = Shortage(facts["asked_bytes"], facts["free_bytes"])
        super().__init__(f"out of memory {_when(facts)}: {shortage_in_words(shortage)}")
        self.run = run
        self.argv = argv
        self.facts = facts
        self.first = first

    def explained(self) -> str:
        """The whole explanation from the first rank that reports it, one line from any other."""
        if not self.first:
            return str(self)
        lines = [f"{self}", *_memory_lines(self.run, self.facts["peak_bytes"]), *_saved_lines(self.facts)]
        return "\n".join([*lines, *_next_lines(self.run, self.argv, self.facts)])


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
        shortage = memory.shortage(error)  # before anything is freed
        facts: Json = {
            "rank": world.rank,
            "step": stop.step,
            "asked_bytes": shortage.asked_bytes,
            "free_bytes": shortage.free_bytes,
            "peak_bytes": memory.peak(run.hardware.cuda),
        }
        traceback.clear_frames(error.__traceback__)
        first = _is_first(run)
        if first:
            facts |= {"checkpoint": _newest_checkpoint(run), "next": next_attempt(run, argv)}
            record.note_out_of_memory(Path(run["output_dir"]), facts)
        raise OutOfMemory(run, argv, facts, first) from None


def next_flags(folder: Path) -> Json | None:
    """The flags of the next attempt for the run that just ended in a folder. None if unknown."""
    flags = (read_json(folder / OUT_OF_MEMORY)[0] or {}).get("next")
    return flags if isinstance(flags, dict) else None


def _newest_checkpoint(run: RunSpec) -> str | None:
    from launch.output.checkpoints import newest_valid

    newest, _ = newest_valid(run["output_dir"])
    return str(newest.path) if newest else None


def _is_first(run: RunSpec) -> bool:
    """Whether this rank reports it first. out_of_memory.json tells rank 0 why it lost this rank."""
    try:
        (Path(run["output_dir"]) / OUT_OF_MEMORY).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # the disk is full too: better reported twice than never
        pass
    return True


# --- The next attempt ----------------------------------------------------------------------------


def next_attempt(run: RunSpec, argv: list[str]) -> Json | None:
    """Flags for the same training in less memory, resumed from its checkpoints.

    None if no flags achieve that.

    A flag whose value is None is left out.
    """
    share = run.batch.micro * run.batch.accumulation
    smaller = (size for size in range(run.batch.micro - 1, 0, -1) if share % size == 0)
    attempts = [_split_like(run, size, share // size) for size in smaller]
    if not run["gradient_checkpointing"]:
        attempts.append({**_split_like(run, run.batch.micro, run.batch.accumulation), "gradient_checkpointing": True})
    candidates = ({**attempt, **_flags_to_resume(run)} for attempt in attempts)
    return next((flags for flags in candidates if _is_legal(run, argv, flags)), None)


def _split_like(run: RunSpec, micro: int, accumulation: int) -> Json:
    """Accumulation follows from the micro-batch, unless the user wrote it too."""
    if run.explicit("gradient_accumulation_steps"):
        return {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    return {"per_device_train_batch_size": micro}


def _flags_to_resume(run: RunSpec) -> Json:
    """Flags that prevent a resume from the newest checkpoint are left out, or overridden if a file
    sets them.
    """
    undone = {"fresh": False, "fit": False, "resume_from_checkpoint": "true"}
    named = {name: value for name, value in undone.items() if run.explicit(name) and run[name]}
    return {name: None if run.setting(name).source == COMMAND_LINE else value for name, value in named.items()}


def _is_legal(run: RunSpec, argv: list[str], flags: Json) -> bool:
    found = check(resolve(with_flags(argv, flags), run.place))
    return not any(problem.severity == "error" for problem in found)


def other_ways(run: RunSpec, checkpointed: bool = False) -> str:
    """What takes less memory but is another training or needs another engine, in words.

    `checkpointed`: the next attempt computes activations again, so gradient checkpointing is not
    proposed once more.
    """
    shorter = "a shorter --max_length, --optim adamw_bnb_8bit, or more memory"
    checkpointed |= bool(run["gradient_checkpointing"])
    checkpointing = "" if checkpointed else "--gradient_checkpointing true, "
    if not run.hardware.cuda:  # offloading needs RAM, which is what ran out
        return checkpointing + shorter.replace("--optim adamw_bnb_8bit, ", "")
    another = "with another --output_dir, since its checkpoints have another format"
    if run.world_size > 1 and run.engine.kind not in ("deepspeed", "fsdp"):
        return f"{checkpointing}--recipe sharded {another}, then memory and memory_zero3"
    if run.engine.kind != "deepspeed":
        return f"{checkpointing}--recipe memory {another}, then memory_zero3"
    if run.engine.zero_stage < 3:
        return f"{checkpointing}--recipe memory_zero3 {another}"
    return f"{checkpointing}more GPUs, or {shorter}"


# --- In words ------------------------------------------------------------------------------------


def shortage_in_words(shortage: Shortage) -> str:
    """`asked for 2.00 GiB, 512.0 MiB was free`, as far as it is known."""
    asked = "more" if shortage.asked_bytes is None else memory_size(shortage.asked_bytes)
    free = "" if shortage.free_bytes is None else f", {memory_size(shortage.free_bytes)} was free"
    return f"asked for {asked}{free}"


def _when(facts: Json) -> str:
    return f"after step {facts['step']}" if facts["step"] else "before the first step was done"


def _memory_lines(run: RunSpec, peak_bytes: int) -> list[str]:
    """The planner's table and the measured peak, one line each."""
    measured = f"measured  {memory_size(peak_bytes)} at most until then"
    measured += " (reserved on the GPU)" if run.hardware.cuda else " (the whole process, libraries included)"
    if run["memory_limit"]:
        measured += f", limited to {memory_size(round(run['memory_limit'] * 1e9))}"
    return [f"planned   {_planned(run)}", measured]


def _planned(run: RunSpec) -> str:
    from launch.training.model import load_config, load_tokenizer
    from recipes.planner.plan import plan_run

    try:
        parts = plan_run(run, load_config(run, load_tokenizer(run)), 0, as_it_is=True).components
    except UserError as error:
        return f"not: {error}"
    except Exception as error:  # the rest of the message matters more than this table
        return f"not: {type(error).__name__}"
    sizes = {field.name: getattr(parts, field.name) for field in fields(parts)}
    words = [f"{name} {memory_size(size)}" for name, size in sizes.items() if size]
    return f"{memory_size(parts.total)} at micro-batch {run.batch.micro}: {', '.join(words)}"


def _saved_lines(facts: Json) -> list[str]:
    return [f"saved     {facts['checkpoint']}" if facts["checkpoint"] else "saved     no checkpoint yet"]


def _next_lines(run: RunSpec, argv: list[str], facts: Json) -> list[str]:
    flags = facts["next"]
    if flags is None:
        return [f"next      {other_ways(run)}"]
    micro = flags["per_device_train_batch_size"]
    share = run.batch.micro * run.batch.accumulation
    batch = replace(run.batch, micro=micro, accumulation=share // micro)
    checkpointing = ", activations computed again" if "gradient_checkpointing" in flags else ""
    start = "from that checkpoint" if facts["checkpoint"] else "from the start"
    return [
        f"next      {batch}, the same global batch{checkpointing}, {start}:",
        f"          {_command(run, with_flags(argv, flags))}",
        f"then      {other_ways(run, 'gradient_checkpointing' in flags)}",
    ]


def _command(run: RunSpec, argv: list[str]) -> str:
    """The command of this rank's launcher with another `argv` for train.py.

    On several nodes the launchers' own arguments differ, so only train.py and its `argv` are shown.
    """
    if run.world_size > run.local_world_size:
        start = ["train.py"]
    else:
        words = launcher_argv()
        scripts = [place for place, word in enumerate(words) if Path(word).name == Path(sys.argv[0]).name]
        start = words[: scripts[0] + 1] if scripts else [sys.executable, sys.argv[0]]
        if scripts and run.engine.kind != "single":
            argv = [word.replace("$", "$$") for word in argv]  # torch elastic reads $$ as $
    return shlex.join([*start, *hide(argv, record.secrets_of(run))])
