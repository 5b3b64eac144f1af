"""When memory runs out in training all the same: what was asked for, what was planned, what was saved, and what next.

The next rung is the next smaller micro-batch of the same global batch, then gradient checkpointing: both go on from
the run's own checkpoints. out_of_memory.json in the output folder says which it is, for `--on_oom next`.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import traceback
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from launch.host import memory
from launch.host.memory import Shortage, in_words
from launch.host.signals import launchers_words
from launch.host.world import World
from launch.output import record
from launch.output.record import OUT_OF_MEMORY
from recipes.errors import UserError
from recipes.rules.check import check
from recipes.run import COMMAND_LINE, RunSpec, resolve, with_flags


class OutOfMemory(RuntimeError):
    """Memory ran out on this rank. `first` where no other rank has said so before."""

    def __init__(self, run: RunSpec, argv: list[str], facts: dict[str, Any], first: bool) -> None:
        super().__init__(f"out of memory {_when(facts)}: {Shortage(facts['asked_bytes'], facts['free_bytes'])}")
        self.run = run
        self.argv = argv
        self.facts = facts
        self.first = first

    def explained(self) -> str:
        """All there is to say, by the rank that says it first."""
        if not self.first:
            return str(self)
        lines = [f"{self}", *_memory_lines(self.run, self.facts["peak_bytes"]), *_saved_lines(self.facts)]
        return "\n".join([*lines, *_next_lines(self.run, self.argv, self.facts)])


class Watch:
    """Where the training is: its Trainer, once there is one."""

    trainer: Any = None

    @property
    def step(self) -> int:
        return self.trainer.state.global_step if self.trainer is not None else 0


@contextlib.contextmanager
def noticed(run: RunSpec, world: World, argv: list[str]) -> Iterator[Watch]:
    """Turns whatever says that memory ran out into `OutOfMemory`. `argv` are train.py's words."""
    watch = Watch()
    try:
        yield watch
    except Exception as error:
        if not memory.ran_out(error):
            raise
        found = memory.shortage(error)  # before anything is let go
        facts: dict[str, Any] = {
            "rank": world.rank,
            "step": watch.step,
            "asked_bytes": found.asked_bytes,
            "free_bytes": found.free_bytes,
            "peak_bytes": memory.peak(run.hardware.cuda),
        }
        traceback.clear_frames(error.__traceback__)
        first = _is_first(run)
        if first:
            facts |= {"checkpoint": _newest_checkpoint(run), "next": next_rung(run, argv)}
            _note(run, facts)
        raise OutOfMemory(run, argv, facts, first) from None


def next_flags(folder: Path) -> dict[str, Any] | None:
    """The flags of the next rung for the run that has just ended in a folder; None where there is no such thing."""
    try:
        content = json.loads((folder / OUT_OF_MEMORY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    flags = content.get("next") if isinstance(content, dict) else None
    return flags if isinstance(flags, dict) else None


def _newest_checkpoint(run: RunSpec) -> str | None:
    from launch.output.checkpoints import newest_valid

    newest, _ = newest_valid(run["output_dir"])
    return str(newest.path) if newest else None


def _is_first(run: RunSpec) -> bool:
    """Whether no other rank was here before. From now on a rank that this one is lost to knows why."""
    try:
        (Path(run["output_dir"]) / OUT_OF_MEMORY).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # a disk that is full too: better said twice than never
        pass
    return True


def _note(run: RunSpec, facts: dict[str, Any]) -> None:
    """For `--on_oom next`, and in the record, should rank 0 only hang until it is killed."""
    folder = Path(run["output_dir"])
    with contextlib.suppress(OSError):
        record.write(folder, facts, OUT_OF_MEMORY)
        content = record.read(folder)
        if content.get("status") == "running":
            record.write(folder, {**content, "status": "out_of_memory"})


# --- The next rung ---------------------------------------------------------------------------------------------------


def next_rung(run: RunSpec, argv: list[str]) -> dict[str, Any] | None:
    """Flags for the same training in less memory, going on from its checkpoints; None where there are none.

    A flag of None is to be left out.
    """
    share = run.batch.micro * run.batch.accumulation
    smaller = (size for size in range(run.batch.micro - 1, 0, -1) if share % size == 0)
    rungs = [_split_like(run, size, share // size) for size in smaller]
    if not run["gradient_checkpointing"]:
        rungs.append({**_split_like(run, run.batch.micro, run.batch.accumulation), "gradient_checkpointing": True})
    again = _to_go_on(run)
    return next(({**rung, **again} for rung in rungs if _is_legal(run, argv, {**rung, **again})), None)


def _split_like(run: RunSpec, micro: int, accumulation: int) -> dict[str, Any]:
    """Accumulation follows from the micro-batch, unless it was written down too."""
    if run.explicit("gradient_accumulation_steps"):
        return {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    return {"per_device_train_batch_size": micro}


def _to_go_on(run: RunSpec) -> dict[str, Any]:
    """What would not go on from the newest checkpoint is left out, or taken back where a file says it."""
    undone = {"fresh": False, "fit": False, "resume_from_checkpoint": "true"}
    named = {name: value for name, value in undone.items() if run.explicit(name) and run[name]}
    return {name: None if run.setting(name).source == COMMAND_LINE else value for name, value in named.items()}


def _is_legal(run: RunSpec, argv: list[str], flags: dict[str, Any]) -> bool:
    other = resolve(
        with_flags(argv, flags),
        world_size=run.world_size,
        local_world_size=run.local_world_size,
        hardware=run.hardware,
        engine=run.engine,
        environment=run.environment,
    )
    return not any(problem.severity == "error" for problem in check(other))


def other_ways(run: RunSpec, checkpointed: bool = False) -> str:
    """What takes less memory but is another training, or another engine, in words; `checkpointed` by the next rung."""
    shorter = "a shorter --max_length, --optim adamw_bnb_8bit, or more memory"
    checkpointed |= bool(run["gradient_checkpointing"])
    checkpointing = "" if checkpointed else "--gradient_checkpointing true, "
    if not run.hardware.cuda:  # what offloading takes to, is what is missing
        return checkpointing + shorter.replace("--optim adamw_bnb_8bit, ", "")
    another = "with another --output_dir, as its checkpoints are of another kind"
    if run.engine.kind != "deepspeed":
        return f"{checkpointing}--recipe memory {another}, then memory_zero3"
    if run.engine.zero_stage < 3:
        return f"{checkpointing}--recipe memory_zero3 {another}"
    return f"{checkpointing}more GPUs, or {shorter}"


# --- In words --------------------------------------------------------------------------------------------------------


def _when(facts: dict[str, Any]) -> str:
    return f"after step {facts['step']}" if facts["step"] else "before the first step was done"


def _memory_lines(run: RunSpec, peak_bytes: int) -> list[str]:
    """The planner's table beside what was measured."""
    measured = f"measured  {in_words(peak_bytes)} at most until then"
    measured += " (reserved on the GPU)" if run.hardware.cuda else " (the whole process, libraries included)"
    if run["memory_limit"]:
        measured += f", limited to {in_words(round(run['memory_limit'] * 1e9))}"
    return [f"planned   {_planned(run)}", measured]


def _planned(run: RunSpec) -> str:
    from launch.training.model import load_config, load_tokenizer
    from recipes.planner.plan import plan_run

    try:
        parts = plan_run(run, load_config(run, load_tokenizer(run)), 0, as_it_is=True).components
    except UserError as error:
        return f"not: {error}"
    except Exception as error:  # the message matters more than why its table is missing
        return f"not: {type(error).__name__}"
    sizes = {field.name: getattr(parts, field.name) for field in fields(parts)}
    words = [f"{name} {in_words(size)}" for name, size in sizes.items() if size]
    return f"{in_words(parts.total)} at micro-batch {run.batch.micro}: {', '.join(words)}"


def _saved_lines(facts: dict[str, Any]) -> list[str]:
    return [f"saved     {facts['checkpoint']}" if facts["checkpoint"] else "saved     no checkpoint yet"]


def _next_lines(run: RunSpec, argv: list[str], facts: dict[str, Any]) -> list[str]:
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
    """This rank's launcher with other words for train.py; over several nodes only those words are the same."""
    if run.world_size > run.local_world_size:
        start = ["train.py"]
    else:
        launcher = launchers_words()
        scripts = [place for place, word in enumerate(launcher) if Path(word).name == Path(sys.argv[0]).name]
        start = launcher[: scripts[0] + 1] if scripts else [sys.executable, sys.argv[0]]
        if scripts and run.engine.kind != "single":
            argv = [word.replace("$", "$$") for word in argv]  # which torch elastic reads as $
    return shlex.join([*start, *(record.shown_word(run, word) for word in argv)])
