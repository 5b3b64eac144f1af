"""train.py with FSDP2 on CPU ranks: all is real, but accelerate's refusal of a CPU is lifted.

accelerate looks at FSDP only where it has found a GPU. Here it believes that it has found one, so
that its own plugin and `fully_shard` shard the model over gloo.
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from launch import train
from launch.training import timing
from recipes.run.hardware import Hardware


def lift_the_refusal() -> None:
    """Where FSDP is asked for, accelerate sees GPUs, and train.py believes that it shards here."""
    build_state = AcceleratorState.__init__

    def build_as_on_gpus(self, *args, **kwargs) -> None:
        shared = PartialState._shared_state
        fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        if fsdp and shared.get("distributed_type") == DistributedType.MULTI_CPU:
            shared["distributed_type"] = DistributedType.MULTI_GPU
        build_state(self, *args, **kwargs)

    AcceleratorState.__init__ = build_as_on_gpus
    mock.patch.object(Hardware, "can_shard", property(lambda self: True)).start()  # fails if the name has gone


def count_what_each_rank_holds() -> None:
    """Writes held-RANK.json beside the results: local bytes of parameters and of the optimizer."""
    of_run = timing.results

    def counted(run, trainer, metrics):
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        held = {
            "parameters": sum(map(local_bytes, trainer.model.parameters())),
            "optimizer": sum(map(local_bytes, states)),
        }
        rank = trainer.accelerator.process_index
        Path(run["output_dir"], f"held-{rank}.json").write_text(json.dumps(held))
        return of_run(run, trainer, metrics)

    timing.results = counted


def local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size() if local.dim() else 0


if __name__ == "__main__":
    lift_the_refusal()
    count_what_each_rank_holds()
    sys.exit(train.main())
