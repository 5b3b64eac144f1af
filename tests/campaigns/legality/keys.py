"""What is written into files and variables: key -> plausible, odd and wrong values."""

from __future__ import annotations

from typing import Any

from tests.campaigns.legality.case import REMOVED

YAML: dict[str, list[Any]] = {
    "compute_environment": [REMOVED, "LAPTOP"],
    "distributed_type": ["MULTI_GPU", "NO", "MULTI_CPU", False, REMOVED, "DDP", "multi_gpu"],
    "mixed_precision": ["no", "bf16", "fp16", REMOVED, False, "bfloat16", None],
    "num_processes": [1, 2, REMOVED, 0, "2", None],
    "num_machines": [1, REMOVED, 0, "1", None],
    "same_network": [True, REMOVED, False, "maybe"],
    "gpu_ids": ["all", REMOVED, "0,1", "0", 0],
    "use_cpu": [True, False, "maybe"],
    "debug": [True, False, "yes"],
    "enable_cpu_affinity": [False, "no"],
    "main_training_function": ["main", 3],
    "downcast_bf16": ["no", False, True],
    "gradient_accumulation_steps": [4],
    "ddp_bucket_cap_mb": [25],
    "num_proceses": [2],
    "dynamo_config.dynamo_backend": ["eager", "EAGER", "no", "inductr"],
    "dynamo_config.dynamo_mode": ["default", "fastest"],
    "dynamo_config.use_fulgraph": [True],
    "deepspeed_config": [{"zero_stage": 2}, "ds.json", None],
    "mpirun_config.mpirun_hostfile": ["hosts"],
    "fp8_config.backend": ["TE"],
}
DEEPSPEED_SECTION: dict[str, list[Any]] = {
    "zero_stage": [0, 1, 2, 3, "2", 4, REMOVED, True],
    "zero_stge": [3],
    "offload_optimizer_device": ["none", "cpu", REMOVED, "gpu", "nvme"],
    "offload_param_device": ["none", "cpu", REMOVED],
    "zero3_init_flag": [True, False, "yes", REMOVED],
    "zero3_save_16bit_model": [True, False, "yes", REMOVED],
    "gradient_accumulation_steps": [1, 2, 4, "auto"],
    "gradient_clipping": [1.0, 0.5, "auto", "much"],
    "deepspeed_multinode_launcher": ["pdsh", "standard", "srun"],
    "deepspeed_moe_layer_cls_names": ["LlamaMLP"],
    "deepspeed_config_file": ["ds.json"],
}
BATCH_SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
DEEPSPEED_FILE: dict[str, list[Any]] = {
    "zero_optimization": [{"stage": 2}, {"stage": 3}, {"stage": 1}, {"stge": 2}, 2],
    "zero_optimization.stage": [0, 1, 2, 3, 7, "2", "auto"],
    "zero_optimization.offload_optimizer.device": ["cpu", "none"],
    "zero_optimization.offload_param.device": ["cpu"],
    "zero_optimization.overlap_comm": [True, "yes"],
    "zero_optimization.reduce_bucket_size": ["auto", 5e8],
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": [True],
    "train_micro_batch_size_per_gpu": ["auto", 4, 2],
    "gradient_accumulation_steps": ["auto", 1, 4],
    "train_batch_size": ["auto", 16, 64],
    "gradient_clipping": ["auto", 1.0, 0.3],
    "gradient_cliping": [1.0],
    "bf16.enabled": ["auto", True, False],
    "fp16.enabled": ["auto", True],
    "optimizer": [{"type": "AdamW", "params": {"lr": "auto"}}, {"type": "Adam"}, {"params": {}}],
    "scheduler": [{"type": "WarmupLR", "params": {}}, {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}],
    "steps_per_print": [10, "many"],
    "wall_clock_breakdown": [False],
    "zero_force_ds_cpu_optimizer": [False],
    "zero_allow_untested_optimizer": [True],
}


USUAL_CHANGES = (
    "learning_rate lr_scheduler_type warmup_steps optim weight_decay max_grad_norm global_batch_size "
    "per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing packing max_length use_peft "
    "lora_r lora_target_modules bf16 attn_implementation eval_strategy save_strategy save_steps"
).split()
OWN_ODDITIES: dict[str, list[Any]] = {
    "base": ["turbo", "mine.yaml", 3],
    "purpose": ["", 5],
    "engine": ["single.yaml", "standard.yaml", "memory.yaml", "nowhere.yaml"],
    "micro_batch_cap": [1, 4, 0, "4"],
    "learning_rate": [[1e-4, "not below changes"]],
    "changes": [None, [], {"learning_rate": 1e-4}, {"lerning_rate": [1e-4, "a reason"]}],
}
WORLD_SIZES: dict[str, list[Any]] = {
    "dp_replicate_size": [1, 2],
    "dp_shard_size": [1, 2],
    "tp_size": [1, 2, 0, "2"],
    "cp_size": [1, 2, "two"],
    "sp_size": [1, 2],
}
PARALLELISM: dict[str, list[Any]] = {
    **{f"parallelism_config_{name}": values for name, values in WORLD_SIZES.items()},
    "parallelism_config_sp_backend": ["deepspeed", "ring"],
    "parallelism_config_cp_comm_strategy": ["allgather", "alltoall", "ring"],
    "parallelism_config_tpsize": [2],
    "tp_size": [2],
}
SHARING: dict[str, list[Any]] = {
    "tensor_parallel.autotp_size": [2, 2, 2, 1, 0, 3, "2"],
    "sequence_parallel_size": [1, 2],
    "tensor_parallel": [{}, 2],
}
VARIABLES: dict[str, list[Any]] = {
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
FSDP: dict[str, list[Any]] = {
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
FSDP_WORDS = ("full_shard", "full_shard", "true", "shard_grad_op", "full_shard auto_wrap", "hybrid_shard", "zero3")
