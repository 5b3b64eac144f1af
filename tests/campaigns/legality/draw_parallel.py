"""Draws runs whose processes share a model or its examples, wherever that is written."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from tests.campaigns.legality.case import DEEPSPEED_JSON, REMOVED, Case, Change
from tests.campaigns.legality.draw import JSON_KEYS, changed_keys, draw

_SIZES: dict[str, list[Any]] = {
    "dp_replicate_size": [1, 2],
    "dp_shard_size": [1, 2],
    "tp_size": [1, 2, 0, "2"],
    "cp_size": [1, 2, "two"],
    "sp_size": [1, 2],
}
_SECTION: dict[str, list[Any]] = {
    **{f"parallelism_config_{name}": values for name, values in _SIZES.items()},
    "parallelism_config_sp_backend": ["deepspeed", "ring"],
    "parallelism_config_cp_comm_strategy": ["allgather", "alltoall", "ring"],
    "parallelism_config_tpsize": [2],
    "tp_size": [2],
}
_SHARING: dict[str, list[Any]] = {
    "tensor_parallel.autotp_size": [2, 2, 2, 1, 0, 3, "2"],
    "sequence_parallel_size": [1, 2],
    "tensor_parallel": [{}, 2],
}
_VARIABLES: dict[str, list[Any]] = {
    "ACCELERATE_MIXED_PRECISION": ["no", "bf16", "fp16"],
    "ACCELERATE_DYNAMO_BACKEND": ["EAGER", "NO"],
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ["4"],
    "ACCELERATE_USE_DEEPSPEED": ["true", "false"],
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ["1", "2", "3"],
    "ACCELERATE_USE_FSDP": ["true", "false"],
    "ACCELERATE_USE_CPU": ["true", "false"],
    "FSDP_VERSION": ["2", "1"],
    "ACCELERATE_USE_PARALLELISM_CONFIG": ["true", "false"],
}


def draw_parallel(random: Random) -> Case:
    """A run of one or two ranks. The same `random` draws the same case."""
    plain = draw(random)
    own = {"deepspeed", "use_cpu", "ddp_backend"}
    kept = [change for change in plain.of("flag") if change.name not in own]
    changes = random.sample(kept, min(len(kept), random.choice((0, 1, 3))))
    changes += [change for change in kept if change.name in ("task", "torch_compile_backend") and change not in changes]
    draw_one = random.choice((_tensor_parallel, _tensor_parallel, _section, _exported))
    launcher, processes, file, more, lifted = draw_one(random)
    return replace(plain, launcher=launcher, processes=processes, yaml=file, lifted=lifted, changes=(*changes, *more))


def _tensor_parallel(random: Random):
    changes = [Change("json", "zero_optimization", {"stage": random.choice((0, 1, 2, 2, 3))})]
    changes.append(Change("json", "train_micro_batch_size_per_gpu", "auto"))
    changes += changed_keys(_SHARING, "json", random, random.choice((1, 1, 1, 2)))
    changes += changed_keys(JSON_KEYS, "json", random, random.choice((0, 0, 1)))
    processes = random.choice((1, 2, 2, 2))
    if random.random() < 0.5:
        return "torchrun", processes, "", [Change("flag", "deepspeed", [DEEPSPEED_JSON]), *changes], False
    named = [Change("yaml", "deepspeed_config", {"deepspeed_config_file": DEEPSPEED_JSON})]
    named.append(Change("yaml", "mixed_precision", REMOVED))
    return "accelerate", processes, "memory.yaml", [*named, *changes], False


def _section(random: Random):
    file = random.choice(("standard.yaml", "memory.yaml", "sharded.yaml", "sharded.yaml"))
    keys = {f"parallelism_config.{name}": values for name, values in _SECTION.items()}
    changes = changed_keys(keys, "yaml", random, random.choice((1, 1, 2)))
    return "accelerate", random.choice((None, 1, 2, 2)), file, changes, file == "sharded.yaml"


def _exported(random: Random):
    """Variables of a launcher that are found in the environment already."""
    keys = {**_VARIABLES, **{f"PARALLELISM_CONFIG_{name.upper()}": [1, 2] for name in _SIZES}}
    changes = changed_keys(keys, "variable", random, random.choice((1, 1, 2, 3)))
    if any(change.name.startswith("PARALLELISM") for change in changes) and random.random() < 0.8:
        changes.append(Change("variable", "ACCELERATE_USE_PARALLELISM_CONFIG", "true"))
    places = (("python", None, ""), ("torchrun", 2, ""), ("accelerate", 2, "standard.yaml"))
    return *random.choice(places), changes, False
