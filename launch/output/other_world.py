"""Read checkpoints that another number of processes has written.

Checkpoints of one process, DDP and FSDP fit any number of processes. DeepSpeed's ZeRO keeps one
shard per process, which only the same number of processes can read. Such a checkpoint is converted
to DeepSpeed's universal format, which holds each weight in one piece. The converted copy lies
beside the checkpoints only until it has been read.
"""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from launch.host.processes import answer, ask, watch
from launch.host.world import World
from launch.output.checkpoints import manifest_of
from launch.terminal import console, memory_size, plural, print_note
from recipes.errors import Failure, mistake

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")
_ADAM = {"step", "exp_avg", "exp_avg_sq"}  # DeepSpeed converts no other optimizer's state
COPY = "converted-"  # how the name of a converted copy begins


def writers(checkpoint: Path) -> int | None:
    """Return how many processes wrote a checkpoint; None if manifest and RNG files are missing."""
    states = sum(1 for _ in checkpoint.glob("rng_state*.pth"))
    return manifest_of(checkpoint).get("world_size") or states or None


def stream_file(rank: int | str) -> str:
    """Return the name of the file that records where a rank continues in a stream of data."""
    return f"places_{rank}.json"


def note(checkpoint: Path, processes: int, workers: int) -> str | None:
    """Return a line on what changes when `processes` processes, each with `workers` data workers,
    resume from the checkpoint. None if nothing changes.
    """
    before, stream = writers(checkpoint), next(checkpoint.glob(stream_file("*")), None)
    if before and stream and (before, json.loads(stream.read_bytes())["workers"]) != (processes, max(1, workers)):
        return (
            f"{checkpoint.name} was written by another number of processes or workers: the weights and the schedule "
            "are kept; the stream begins its next epoch, and may repeat examples of the interrupted epoch"
        )
    if before in (None, processes):
        return None
    return (
        f"{checkpoint.name} was written by {plural(before, 'process')} and is resumed by {processes}: the data and its "
        "order stay the same; random numbers (dropout) and the rounding of sums differ"
    )


@dataclass(frozen=True)
class AnyWorld:
    """Reads DeepSpeed's checkpoints, whatever number of processes has written them.

    `ranks` is the number of processes, or groups of processes, that share the optimizer now.
    `folder` holds converted copies while they are needed.
    """

    folder: Path
    world: World
    ranks: int

    def prepare(self, checkpoint: Path | None) -> None:
        """Convert the checkpoint, if the present number of processes cannot read it as it is.

        All ranks call this. Raises `UserError` if the checkpoint cannot be converted, and `Failure`
        if the conversion fails.
        """
        conversion = iter(()) if checkpoint is None else self._conversion(checkpoint)
        # Rank 0 answers while it converts: a conversion may take longer than the other ranks wait.
        while self.world.decide(lambda: next(conversion, False)):
            pass

    def _conversion(self, checkpoint: Path) -> Iterator[bool]:
        """Convert a checkpoint if needed, on rank 0 only. Yields True while the conversion runs."""
        if not self._differs(checkpoint):
            return
        source, copy = checkpoint / (checkpoint / "latest").read_text().strip(), self._copy(checkpoint)
        size = sum(file.stat().st_size for file in source.iterdir())
        what = f"{checkpoint.name} is converted from {shards(checkpoint)} to {self.ranks} data-parallel ranks"
        print_note(f"{what}, which takes about {memory_size(3 * size)} of disk space for a while", console())
        copy.mkdir(exist_ok=True)
        with ask(__name__, [[str(source), str(copy / source.name)]]) as (child,):
            for _ in watch([child]):
                yield True
            reason, end = child.answer, child.end()
        if reason == "":
            return
        shutil.rmtree(copy, ignore_errors=True)
        if reason is None:
            raise Failure(f"{checkpoint} could not be converted for another number of processes: {end}")
        what = f"{checkpoint} cannot be converted for another number of processes: {reason}"
        fix = f"use --num_processes {writers(checkpoint)}, another --output_dir, or --fresh"
        raise mistake("num_processes", what, fix)

    def load(self, engine: DeepSpeedEngine, checkpoint: str, load_module_strict: bool = True) -> None:
        """Load a checkpoint, or load and delete its converted copy. All ranks call this."""
        import torch
        from transformers.integrations.deepspeed import deepspeed_load_checkpoint

        copy = self._copy(Path(checkpoint))
        if not self._differs(Path(checkpoint)):
            deepspeed_load_checkpoint(engine, checkpoint, load_module_strict)
            return
        # Set this for one call only: the best checkpoint, read at the end, may need no conversion.
        with patch.object(engine._config, "load_universal_checkpoint", True):
            deepspeed_load_checkpoint(engine, str(copy), load_module_strict)
        _complete(engine, copy)
        if self.world.size > 1:
            torch.distributed.barrier()  # all ranks have read the copy
        if self.world.is_main:
            shutil.rmtree(copy, ignore_errors=True)

    def _copy(self, checkpoint: Path) -> Path:
        return self.folder / f"{COPY}{checkpoint.name}"

    def _differs(self, checkpoint: Path) -> bool:
        return writers(checkpoint) != self.world.size and shards(checkpoint) not in (0, self.ranks)


def shards(checkpoint: Path) -> int:
    """Return the number of optimizer shards that DeepSpeed's ZeRO has saved; 0 without ZeRO."""
    names = (_SHARD.search(file.name) for file in checkpoint.glob("global_step*/*_optim_states.pt"))
    return max((int(name.group(1)) + 1 for name in names if name), default=0)


def _complete(engine: DeepSpeedEngine, copy: Path) -> None:
    """Restore state that DeepSpeed does not read from a universal checkpoint.

    ZeRO-3 gives all parameter groups the settings of the first group, so that groups without weight
    decay would get weight decay. With torch's Adam, all weights would share one step counter, and
    each would increase it. Buffers that training changes, such as BatchNorm's, are not read at all.
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

    # DeepSpeed pickles its own classes, and unpickles them in the same way.
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)


def main(asked: list[str], folder: str) -> None:
    """Convert the DeepSpeed checkpoint in a folder global_stepN. A child process calls this, so
    that DeepSpeed is imported for a CPU, and all memory is freed at the end.

    Answers with the reason why the conversion is impossible, or with an empty text when it is done.
    """
    source, target = asked
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
    return unknown and f"DeepSpeed converts only the state of Adam; this optimizer's state differs by {unknown}"
