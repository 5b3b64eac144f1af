"""Draws runs for machines with GPUs, where the engines are that a CPU cannot try."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from tests.campaigns.legality.case import REMOVED, Case, Change
from tests.campaigns.legality.draw import changed_keys, draw
from tests.campaigns.legality.values import words_for

_FSDP: dict[str, list[Any]] = {
    "fsdp_config.fsdp_version": [1, 2, "2", REMOVED, 3],
    "fsdp_config.fsdp_reshard_after_forward": [True, False, "FULL_SHARD", REMOVED],
    "fsdp_config.fsdp_sharding_strategy": ["FULL_SHARD", "HYBRID_SHARD", 1],
    "fsdp_config.fsdp_auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", REMOVED],
    "fsdp_config.fsdp_min_num_params": [1000, "many"],
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "GPT2Block"],
    "fsdp_config.fsdp_state_dict_type": ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", REMOVED],
    "fsdp_config.fsdp_offload_params": [True, False],
    "fsdp_config.fsdp_backward_prefetch": ["BACKWARD_PRE", "NO_PREFETCH"],
    "fsdp_config.fsdp_forward_prefetch": [True, False],
    "fsdp_config.fsdp_use_orig_params": [True, False],
    "fsdp_config.fsdp_sync_module_states": [True, False],
    "fsdp_config.fsdp_cpu_ram_efficient_loading": [True, False, REMOVED],
    "fsdp_config.fsdp_activation_checkpointing": [True, False],
    "fsdp_config.fsdp_activation_checkpointing_offload": [True],
    "fsdp_config.fsdp_ignored_modules": ["lm_head"],
}
_PARALLEL: dict[str, list[Any]] = {
    "parallelism_config.parallelism_config_dp_replicate_size": [1, 2],
    "parallelism_config.parallelism_config_dp_shard_size": [1, 2, 8],
    "parallelism_config.parallelism_config_tp_size": [1, 2],
    "parallelism_config.parallelism_config_cp_size": [1, 2],
    "parallelism_config.parallelism_config_sp_size": [1, 2],
    "parallelism_config.parallelism_config_sp_backend": ["deepspeed", "ring"],
    "parallelism_config.parallelism_config_cp_comm_strategy": ["allgather", "alltoall", "ring"],
}
_OTHER: dict[str, list[Any]] = {
    "mixed_precision": ["no", "bf16", "fp16", "fp8"],
    "fp8_config.backend": ["TE", "AO", "MSAMP"],
    "dynamo_config.dynamo_backend": ["inductor", "eager"],
    "dynamo_config.dynamo_mode": ["default", "reduce-overhead", "max-autotune"],
    "gpu_ids": ["all", "0", "0,1"],
}
_FLAGS = (
    "bf16 fp16 tf32 dtype attn_implementation torch_compile torch_compile_mode ddp_backend ddp_comm_hook optim "
    "gradient_checkpointing use_peft load_in_4bit save_only_model padding_free packing use_liger_kernel"
).split()


def draw_card(random: Random) -> Case:
    """A case on 1, 2 or 8 GPUs of one kind. The same `random` draws the same case."""
    plain = draw(random)
    count = random.choice((1, 2, 8))
    file = random.choice(
        ("sharded.yaml", "sharded.yaml", "sharded.yaml", "standard.yaml", "memory.yaml", "memory_zero3.yaml")
    )
    keys = {**_OTHER, **(_FSDP if file == "sharded.yaml" else {}), **(_PARALLEL if random.random() < 0.4 else {})}
    changes = [
        Change("flag", name, words_for(name, random, 0.2)) for name in random.sample(_FLAGS, random.choice((0, 1, 2)))
    ]
    changes += [change for change in plain.of("flag") if change.name not in {*_FLAGS, "use_cpu", "deepspeed", "task"}][
        :3
    ]
    changes += changed_keys(keys, "yaml", random, random.choice((0, 1, 1, 2)))
    machine = f"{random.choice(('H100', 'A100', 'T4'))}:{count}"
    return replace(
        plain,
        launcher="accelerate",
        processes=count,
        yaml=file,
        machine=machine,
        model="llama",
        data="texts.jsonl",
        changes=tuple(changes),
    )
