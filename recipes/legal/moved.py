"""Names of settings that were renamed or removed, or belong elsewhere, each with its fix.

The tables omit legal names, and names such as `num_workers`, for which `nearest` finds the fix.
"""

_GONE_5_0 = "was removed in transformers 5.0"
_OTHER = "has another name here"
_FLASH = (_OTHER, "attn_implementation: flash_attention_2")
_SPLIT = (
    "is no flag here: the data to evaluate on is a split of --dataset_name",
    "give --dataset_name a folder with train.csv and test.csv (or .jsonl)",
)

# old name -> (what happened, what to write instead): Trainer's old names, and names in other tools
RENAMED: dict[str, tuple[str, str]] = {
    "evaluation_strategy": ("was renamed before transformers 4.57", "eval_strategy"),
    "overwrite_output_dir": (_GONE_5_0, "leave it out; --fresh starts over without deleting anything"),
    "save_safetensors": (_GONE_5_0, "leave it out; checkpoints are always safetensors"),
    "no_cuda": (_GONE_5_0, "use_cpu"),
    "include_tokens_per_second": (_GONE_5_0, "leave it out; the summary always has tokens per second"),
    "adafactor": (_GONE_5_0, "optim: adafactor"),
    "push_to_hub_token": (_GONE_5_0, "hub_token"),
    "group_by_length": ("was removed in transformers 5.2", "train_sampling_strategy with the value group_by_length"),
    "warmup_ratio": ("was removed in transformers 5.15", "warmup_steps with a value below 1, such as 0.03"),
    "logging_dir": ("was removed in transformers 5.15", "set the environment variable TENSORBOARD_LOGGING_DIR"),
    "dispatch_batches": ("was moved before transformers 4.57", 'accelerator_config: {"dispatch_batches": ...}'),
    "split_batches": ("was moved before transformers 4.57", 'accelerator_config: {"split_batches": ...}'),
    "torch_dtype": ("has another name here, as in transformers 5", "dtype"),
    "tokenizer_name": ("is not needed: the tokenizer comes with the model", "leave it out"),
    **dict.fromkeys("data train_file".split(), (_OTHER, "dataset_name")),
    **dict.fromkeys("block_size cutoff_len".split(), (_OTHER, "max_length")),
    "accumulation_steps": (_OTHER, "gradient_accumulation_steps"),
    "bnb_4bit_use_double_quant": ("has TRL's name here", "use_bnb_nested_quant"),
    "eos_token": ("is not needed: a model stops where its chat template ends an answer", "leave it out"),
    "pad_token": ("is not needed: padding is never learned", "leave it out"),
    "val_set_size": (_OTHER, "dataset_test_split with the value train[90%:]"),
    **dict.fromkeys("validation_file test_file eval_file eval_dataset".split(), _SPLIT),
    "padding_free": ("is not needed: packed rows have little padding", "packing"),
    **dict.fromkeys("lora use_lora".split(), (_OTHER, "use_peft")),
    "use_qlora": (_OTHER, "load_in_4bit, with use_peft"),
    "use_rslora": ("is LoRA with a larger lora_alpha", "multiply lora_alpha by sqrt(lora_r), and round it"),
    **dict.fromkeys("modules_to_save lora_modules_to_save".split(), ("is set to all new layers here", "leave it out")),
    "lora_rank": ("has another name here, as in peft", "lora_r"),
    "dataset": ("has TRL's name here", "dataset_name"),
    "model": (_OTHER, "model_name_or_path"),
    **dict.fromkeys("per_device_batch_size micro_batch_size".split(), (_OTHER, "per_device_train_batch_size")),
    "eval_batch_size": (_OTHER, "per_device_eval_batch_size"),
    **dict.fromkeys("flash_attn flash_attention use_flash_attn use_flash_attention_2".split(), _FLASH),
    **dict.fromkeys("epochs max_epochs".split(), (_OTHER, "num_train_epochs")),
    "lr": (_OTHER, "learning_rate"),
    "resume": ("is not needed: resuming is automatic", "leave it out, or set resume_from_checkpoint: FOLDER"),
}

_LAUNCHER = "write it after `accelerate launch`, before train.py"
_DEEPSPEED = "set it in deepspeed_config of the Accelerate YAML"

# name -> what to write instead, or where
ELSEWHERE: dict[str, str] = {
    "mixed_precision": "--bf16 or --fp16; mixed_precision is a key of the Accelerate YAML",
    "num_processes": "`recipes train --num_processes N`, or write it after `accelerate launch`, before train.py",
    **dict.fromkeys("num_machines machine_rank main_process_ip main_process_port".split(), _LAUNCHER),
    "accelerate_config": "`recipes train --accelerate_config FILE` or `accelerate launch --config_file FILE`, "
    "or `recipes submit slurm --accelerate_config FILE -- FLAGS`",
    "config_file": "`accelerate launch --config_file` for an Accelerate YAML; --config for settings of the run",
    "distributed_type": "set it in the Accelerate YAML",
    "deepspeed_config": "set it in the Accelerate YAML",
    **dict.fromkeys("zero_stage offload_optimizer_device offload_param_device".split(), _DEEPSPEED),
    "gradient_clipping": "max_grad_norm",
    "fsdp_transformer_layer_cls_to_wrap": 'fsdp_config: {"transformer_layer_cls_to_wrap": [...]}',
    "fsdp_version": "set it in fsdp_config of the Accelerate YAML",
    "even_batches": 'accelerator_config: {"even_batches": ...}',
    "sync_each_batch": 'accelerator_config: {"gradient_accumulation_kwargs": {"sync_each_batch": true}}',
    **dict.fromkeys("train_batch_size batch_size".split(), "--global_batch_size, or --per_device_train_batch_size"),
    "gpu_ids": "set it in the Accelerate YAML, or set the environment variable CUDA_VISIBLE_DEVICES",
    "dynamo_backend": "torch_compile, with torch_compile_backend",
}
