"""Draws runs that shard with FSDP2 on CPU ranks, where accelerate's refusal of a CPU is lifted.

Only version 2 without offload: accelerate's plugin of version 1 itself asks for a GPU, and torch
for the device that parameters come back to. Both are drawn for GPUs (draw_cards).
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from tests.campaigns.legality.case import FSDP_JSON, REMOVED, Case, Change
from tests.campaigns.legality.draw import changed_keys, draw

_KEYS: dict[str, list[Any]] = {
    "version": [2, "2", 3],
    "reshard_after_forward": [True, False, "true", "FULL_SHARD", REMOVED],
    "sharding_strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "ZERO2", 1],
    "auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", "BY_LAYER", REMOVED],
    "min_num_params": [0, 1000, 10**9, "many"],
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "GPT2Block", "LlamaDecoderLayer,LlamaMLP", "Layer"],
    "state_dict_type": ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "FULL", REMOVED],
    "offload_params": [False, "maybe"],
    "cpu_offload": [False],
    "backward_prefetch": ["BACKWARD_PRE", "NO_PREFETCH", "BACKWARD"],
    "forward_prefetch": [True, False, "maybe"],
    "use_orig_params": [True, False, "maybe"],
    "sync_module_states": [True, False, "maybe"],
    "limit_all_gathers": [True],
    "cpu_ram_efficient_loading": [True, False, "yes", REMOVED],
    "activation_checkpointing": [True, False, "true"],
    "activation_checkpointing_offload": [True, False],
    "ignored_modules": ["lm_head"],
    "reshard_after_foward": [True],
    "state_dict": ["FULL_STATE_DICT"],
}
_WORDS = ("full_shard", "full_shard", "true", "shard_grad_op", "full_shard auto_wrap", "hybrid_shard", "zero3")


def draw_sharded(random: Random) -> Case:
    """A run of one or two ranks, mostly with the shipped YAML. The same `random` draws the same."""
    plain = draw(random)
    own = {"recipe", "deepspeed", "use_cpu", "fsdp", "fsdp_config", "parallelism_config"}
    kept = [change for change in plain.of("flag") if change.name not in own]
    changes = random.sample(kept, min(len(kept), random.choice((0, 1, 3, 6))))
    changes += [change for change in kept if change.name in ("task", "torch_compile_backend") and change not in changes]
    count = random.choice((0, 1, 1, 2))
    kind = random.random()
    if kind < 0.65:
        launcher, processes, file = "accelerate", random.choice((None, 1, 2, 2)), "sharded.yaml"
        keys = {f"fsdp_config.fsdp_{key}": values for key, values in _KEYS.items()}
        changes += changed_keys(keys, "yaml", random, count)
    elif kind < 0.75:
        launcher, processes, file = "python", None, ""
    else:
        launcher, processes, file = random.choice((("torchrun", 2, ""), ("accelerate", 2, "standard.yaml")))
        changes.append(Change("flag", "fsdp", [random.choice(_WORDS)] if random.random() < 0.7 else []))
        changes += _config_of_arguments(random, count)
    if random.random() < 0.6 or launcher == "python":
        changes.append(Change("flag", "recipe", ["sharded"]))
    changes = [change for change in changes if change.where != "flag" or change.name not in ("ddp_backend",)]
    return replace(plain, launcher=launcher, processes=processes, yaml=file, lifted=True, changes=tuple(changes))


def _config_of_arguments(random: Random, count: int) -> list[Change]:
    """Trainer's own `--fsdp_config`, which is a JSON file."""
    prefix = random.choice(("", "", "fsdp_"))
    keys = {prefix + key: [one for one in values if one != REMOVED] for key, values in _KEYS.items()}
    found = changed_keys(keys, "fsdp", random, count)
    return [Change("flag", "fsdp_config", [FSDP_JSON]), *found] if found else []
