"""What is written for each setting: plausible values, sometimes odd ones, seldom wrong ones."""

from __future__ import annotations

from random import Random

from recipes import legal

# Settings that are not drawn, and why.
NOT_DRAWN = {
    **dict.fromkeys(
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
        "trackio_space_id trackio_bucket_id trackio_static_space_id".split(),
        "talks to the Hub",
    ),
    **dict.fromkeys("fit fit_only".split(), "starts processes of its own for a minute"),
    **dict.fromkeys("memory_limit measure".split(), "depends on the machine, or needs more steps"),
    **dict.fromkeys("model_name_or_path dataset_name config deepspeed".split(), "a part of the case"),
    **dict.fromkeys("fsdp fsdp_config".split(), "shards nothing on a CPU"),
    **dict.fromkeys("model_revision trust_remote_code dataset_config".split(), "is for the Hub"),
    **dict.fromkeys("verbose".split(), "only prints more"),
}

# name -> plausible values, odd or wrong ones. A setting that is not here gets values by its type.
_VALUES: dict[str, tuple[str, str]] = {
    "recipe": ("baseline standard fast memory", "memory_zero3 sharded turbo"),
    "output_dir": ("out runs/a", "out/b"),
    "per_device_train_batch_size": ("1 2 4", "3 0 -1 16"),
    "gradient_accumulation_steps": ("1 2 4", "3 0 16"),
    "global_batch_size": ("4 8 16", "12 15 1 0"),
    "per_device_eval_batch_size": ("1 4 8", "0"),
    "num_train_epochs": ("1 0.5 2", "0 -1"),
    "max_steps": ("1 2 3", "0 -1 -5"),
    "learning_rate": ("1e-4 1e-3 5e-5", "0 -1 1"),
    "lr_scheduler_kwargs": (
        '{} {"num_cycles":1} {"power":2.0} {"min_lr_rate":0.1} {"min_lr":1e-6} {"num_decay_steps":1}',
        '{"num_cicles":1} {"lr_end":1e-7} nowhere.json {"min_lr":1e-6,"min_lr_rate":0.1} {"num_cycles":"2"}',
    ),
    "warmup_steps": ("0 1 0.1 0.5", "2 5 1.0 1.5 -1"),
    "optim": (
        "adamw_torch adamw_torch_fused sgd adafactor adagrad rmsprop adamw_8bit lion_32bit adamw_bnb_8bit",
        "",  # any of all
    ),
    "optim_args": ("momentum=0.9 betas=0.9", "momentum rank=64,scale=0.5"),
    "optim_target_modules": ("all-linear q_proj", "attn mlp"),
    "weight_decay": ("0 0.01 0.1", "1 -0.1"),
    "adam_beta1": ("0.9 0.8", "0 1 1.0 -0.1"),
    "adam_beta2": ("0.999 0.95", "0 1"),
    "adam_epsilon": ("1e-8 1e-6", "0 -1 1"),
    "max_grad_norm": ("1 0.5 0", "-1 1e-9"),
    "label_smoothing_factor": ("0 0.1", "1 2 -0.1"),
    "gradient_checkpointing_kwargs": (
        '{"use_reentrant":false} {"use_reentrant":true}',
        '{"use_rentrant":true} {} x.json',
    ),
    "torch_compile_backend": ("eager aot_eager", "inductr"),
    "torch_compile_mode": ("default", "reduce-overhead fastest"),
    "liger_kernel_config": ('{"rope":true}', "true"),
    "neftune_noise_alpha": ("5 0.1", "0 -1"),
    "torch_empty_cache_steps": ("1 2", "0"),
    "logging_steps": ("1 2 0.5 10", "0 1.5 -1"),
    "include_num_input_tokens_seen": ("all non_padding no true", "some"),
    "log_level": ("info warning error passive", "loud"),
    "log_level_replica": ("info warning", "loud"),
    "report_to": ("none tensorboard", "wandb all tensorbord none,tensorboard"),
    "run_name": ("trial", "''"),
    "eval_steps": ("1 2 0.5", "0 1.5 -1 3"),
    "eval_delay": ("0 1", "-1 100"),
    "eval_accumulation_steps": ("1 2", "0"),
    "include_for_metrics": ("inputs loss", "labels"),
    "save_steps": ("1 2 0.5", "0 1.5 3 500"),
    "save_total_limit": ("1 2", "0 -1"),
    "metric_for_best_model": ("loss eval_loss accuracy", "f1 runtime"),
    "seed": ("0 1 42", "-1 4294967296"),
    "data_seed": ("0 7", "-1"),
    "accelerator_config": (
        '{"even_batches":true} {"split_batches":false} {"dispatch_batches":false} {"non_blocking":true}'
        ' {"use_seedable_sampler":false} {"gradient_accumulation_kwargs":{"sync_each_batch":true}}',
        '{"even_batches":false} {"split_batches":true} {"dispatch_batches":true} {"even_batchs":true}'
        ' {"gradient_accumulation_kwargs":{"num_steps":2}} {"use_configured_state":true} nowhere.json',
    ),
    "parallelism_config": ("", '{"tp_size":2} {"cp_size":2}'),
    "dataloader_num_workers": ("0 1 2", "-1"),
    "dataloader_prefetch_factor": ("2", "0"),
    "label_names": ("labels", "input_ids"),
    "length_column_name": ("length", "size"),
    "train_sampling_strategy": ("random sequential group_by_length", "batch_rebalance longest"),
    "ddp_bucket_cap_mb": ("1 25", "0"),
    "ddp_backend": ("gloo", "nccl mpi"),
    "ddp_timeout": ("60 1800", "0"),
    "debug": ("underflow_overflow", "loud"),
    "resume_from_checkpoint": ("true", "nowhere false"),
    "local_rank": ("-1", "0 1"),
    "early_stopping_patience": ("1 2", "0"),
    "attn_implementation": ("eager sdpa", "flash_attention_2 flex_attention spda flash_attention_3"),
    "lora_r": ("2 8", "0"),
    "lora_alpha": ("4 32", "0"),
    "lora_dropout": ("0 0.1", "1 -0.1"),
    "lora_target_modules": ("all-linear q_proj", "c_attn nowhere"),
    "dataset_train_split": ("train train[:32]", "train[:50%] test train[:0]"),
    "dataset_test_split": ("train[:8]", "test"),
    "dataset_text_field": ("text", "texts"),
    "dataset_label_field": ("label", "labels"),
    "max_length": ("64 32 128", "1 2 2048"),
    "activation_checkpointing": ("true false", ""),
    "use_cpu": ("true", "false"),
    "tf32": ("false", "true"),
}
_WRONG = {"bool": "maybe", "int": "many 1.5", "float": "many nan", "dict": "[1]"}


def words_for(name: str, random: Random, odd: float) -> list[str]:
    """The words after `--name`: an odd value with the probability `odd`."""
    plausible, unusual = _VALUES.get(name, _by_type(name))
    if random.random() < odd / 4:
        unusual = " ".join(_WRONG.get(kind, "") for kind in legal.settings()[name].types) or unusual
        return [random.choice(unusual.split() or ["true"])]
    if random.random() < odd:
        plausible = unusual or " ".join(legal.settings()[name].choices) or plausible
    return [random.choice((plausible or unusual).split())]


def _by_type(name: str) -> tuple[str, str]:
    field = legal.settings()[name]
    if field.choices:
        return " ".join(field.choices), f"{field.choices[0]}x"
    if "bool" in field.types:
        return "true false", "true"
    return "1", "0 -1"
