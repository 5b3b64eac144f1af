"""Checkpoints that another number of processes has written.

Those of one process, DDP and FSDP fit any number. DeepSpeed's ZeRO keeps one shard per process,
which only as many processes can read: it is converted to DeepSpeed's universal format, which holds
each weight whole. The converted copy lies beside the checkpoints only until it has been read.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.host.processes import answer, ask, request
from launch.host.world import World
from launch.output.checkpoints import manifest_of
from launch.terminal import memory_size, plural
from recipes.errors import Failure, mistake

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")
_ADAM = {"step", "exp_avg", "exp_avg_sq"}  # DeepSpeed converts no other optimizer's state
_POLL_SECONDS = 10
COPY = "converted-"  # how the name of a converted copy begins


def writers(checkpoint: Path) -> int | None:
    """The processes that wrote a checkpoint. None if neither manifest nor random states tell."""
    states = sum(1 for _ in checkpoint.glob("rng_state*.pth"))
    return manifest_of(checkpoint).get("world_size") or states or None


def stream_file(rank: int | str) -> str:
    """The file of a checkpoint that says where a rank goes on in a stream of data."""
    return f"places_{rank}.json"


def readers_of(checkpoint: Path) -> tuple[int, int] | None:
    """The processes that wrote a checkpoint of a run that streams, and the workers of each that
    read the data. None if it holds no place in a stream.
    """
    file = next(checkpoint.glob(stream_file("*")), None)
    before = writers(checkpoint)
    return None if file is None or before is None else (before, json.loads(file.read_bytes())["workers"])


def note(checkpoint: Path, processes: int, workers: int = 0) -> str | None:
    """What a resume by this number of processes, each with so many workers that load data, cannot
    carry over exactly, in one line.
    """
    before = writers(checkpoint)
    if readers_of(checkpoint) not in (None, (processes, max(1, workers))):
        return (
            f"{checkpoint.name} was written by another number of processes or workers: the weights and the schedule "
            "are kept; the stream begins another round, in which examples of the last may come again"
        )
    if before in (None, processes):
        return None
    return (
        f"{checkpoint.name} was written by {plural(before, 'process')}, {processes} resume: same data in the same "
        "order; random numbers (dropout) and the rounding of sums differ"
    )


@dataclass(frozen=True)
class AnyWorld:
    """Reads the checkpoints of a run on DeepSpeed, whatever number of processes has written them.

    `ranks` is the number of processes, or groups of them, that share the optimizer now. `folder` is
    where converted copies are kept while they are needed; `say` takes a line for a person.
    """

    folder: Path
    world: World
    ranks: int
    say: Callable[[str], None]

    def prepare(self, checkpoint: Path | None) -> None:
        """Convert a checkpoint, if there is one that only another number of processes could read.

        All ranks call it. Raises `UserError` if it cannot be converted, `Failure` if the conversion
        failed.
        """
        conversion = iter(()) if checkpoint is None else self._conversion(checkpoint)
        # Rank 0 answers every few seconds: no process group waits as long as this may take.
        while self.world.decide(lambda: next(conversion, False)):
            pass

    def _conversion(self, checkpoint: Path) -> Iterator[bool]:
        """Convert a checkpoint if that is needed. Rank 0 alone runs it, True while it lasts."""
        if not self._differs(checkpoint):
            return
        source, copy = checkpoint / (checkpoint / "latest").read_text().strip(), self._copy(checkpoint)
        size = sum(file.stat().st_size for file in source.iterdir())
        self.say(
            f"{checkpoint.name} is converted from {shards(checkpoint)} to {self.ranks} data-parallel ranks, "
            f"which takes about {memory_size(3 * size)} of the disk for a while"
        )
        copy.mkdir(exist_ok=True)
        with ask(__name__, [[str(source), str(copy / source.name)]]) as (child,):
            while child.process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(_POLL_SECONDS)
                yield True
            reason, end = child.answer, child.end()
        if reason == "":
            return
        shutil.rmtree(copy, ignore_errors=True)
        if reason is None:
            raise Failure(f"{checkpoint} could not be converted for another number of processes: {end}")
        what = f"{checkpoint} cannot be shared among other processes: {reason}"
        fix = f"--num_processes {writers(checkpoint)}, another --output_dir, or --fresh"
        raise mistake("num_processes", what, fix)

    def load(self, engine: DeepSpeedEngine, checkpoint: str, load_module_strict: bool = True) -> None:
        """As transformers' `deepspeed_load_checkpoint`. All ranks call it."""
        import torch
        from transformers.integrations.deepspeed import deepspeed_load_checkpoint

        copy = self._copy(Path(checkpoint))
        if not self._differs(Path(checkpoint)):
            deepspeed_load_checkpoint(engine, checkpoint, load_module_strict)
            return
        # Not in DeepSpeed's configuration: the best checkpoint, read at the end, may be another's.
        engine._config.load_universal_checkpoint = True
        try:
            deepspeed_load_checkpoint(engine, str(copy), load_module_strict)
        finally:
            engine._config.load_universal_checkpoint = False
        _complete(engine, copy)
        if self.world.size > 1:
            torch.distributed.barrier()  # all have read it
        if self.world.is_main:
            shutil.rmtree(copy, ignore_errors=True)

    def _copy(self, checkpoint: Path) -> Path:
        return self.folder / f"{COPY}{checkpoint.name}"

    def _differs(self, checkpoint: Path) -> bool:
        return writers(checkpoint) != self.world.size and shards(checkpoint) not in (0, self.ranks)


@contextlib.contextmanager
def read_by(reader: AnyWorld | None) -> Iterator[None]:
    """Have Trainer load DeepSpeed's checkpoints by `reader`: it calls a function of its module."""
    from transformers import trainer

    theirs = trainer.deepspeed_load_checkpoint
    trainer.deepspeed_load_checkpoint = reader.load if reader else theirs
    try:
        yield
    finally:
        trainer.deepspeed_load_checkpoint = theirs


def shards(checkpoint: Path) -> int:
    """The data-parallel ranks among which DeepSpeed's ZeRO has parted the optimizer; 0 if none."""
    names = (_SHARD.search(file.name) for file in checkpoint.glob("global_step*/*_optim_states.pt"))
    return max((int(name.group(1)) + 1 for name in names if name), default=0)


def _complete(engine: DeepSpeedEngine, copy: Path) -> None:
    """What DeepSpeed leaves out when it reads a universal checkpoint.

    ZeRO-3 gives all groups of weights the settings of the first, so that those without weight decay
    would get it, and torch's Adam one count of steps for all, which each of them would increase.
    And buffers that training changes, as BatchNorm's, are not read at all.
    """
    import torch

    optimizer = engine.optimizer.optimizer
    source = copy / (copy / "latest_universal").read_text().strip()
    saved = _load(source / "zero" / "optimizer_state.pt")["param_groups"]
    for now, then in zip(optimizer.param_groups, saved, strict=True):
        now.update({name: value for name, value in then.items() if name != "params"})
    on_device = any(group.get("fused") or group.get("capturable") for group in saved)
    for weight, state in optimizer.state.items():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone().to(weight.device if on_device else "cpu")
    weights = _load(min(source.glob("*_model_states.pt")))["module"]
    with torch.no_grad():
        for name, buffer in engine.module.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])


def _load(file: Path) -> dict[str, Any]:
    import torch

    # DeepSpeed pickles its own classes, and reads them the same way.
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)


def main(folder: str) -> None:
    """Convert the DeepSpeed checkpoint in a folder global_stepN: in a process of its own, because
    it imports DeepSpeed for a CPU, and its memory is free again afterwards.

    Answers with why that is not possible; empty if it was done.
    """
    source, target = request(folder)
    why_not = _cannot(Path(source))
    if not why_not:
        from deepspeed.checkpoint import ds_to_universal

        options = {"num_extract_workers": 1, "num_merge_workers": 1}  # one shard in memory at a time
        options |= {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
        ds_to_universal.main(Namespace(input_folder=source, output_folder=target, **options))
    answer(folder, why_not)


def _cannot(source: Path) -> str:
    content = _load(min(source.glob("*_optim_states.pt")))["optimizer_state_dict"]
    state = (content.get("base_optimizer_state") or content["optimizer_state_dict"])["state"]
    groups = state.values() if isinstance(state, dict) else state
    unknown = ", ".join(sorted({name for group in groups for name in group} ^ _ADAM))
    return unknown and f"DeepSpeed converts the state of Adam only, this optimizer's differs by {unknown}"
