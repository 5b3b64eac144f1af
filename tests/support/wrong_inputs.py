"""Wrong inputs: what a user writes, the name that the problem is about, and a part of the fix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wrong:
    """`config` is the content of --config."""

    subject: str
    fix: str
    argv: str = ""
    config: str = ""
    world: int | None = 1

    @property
    def title(self) -> str:
        return " ".join((self.argv or self.config).split())[:70]


_MISSPELT = [
    Wrong("learning_rat", "--learning_rate", "--learning_rat 1e-4"),
    Wrong("gradient_accumulation", "--gradient_accumulation_steps", "--gradient_accumulation 4"),
    Wrong("lora_rank", "lora_r", "--lora_rank 8"),
    Wrong("dataset", "dataset_name", "--dataset d.jsonl"),
    Wrong("wieght_decay", "weight_decay", config="wieght_decay: 0.1\n"),
    Wrong("xylophone", "--help", "--xylophone"),
    Wrong("train", "--name value", "train"),
    Wrong("--seed", "write it once", "--seed 1 --seed 2"),
    Wrong("recipe", "fast", "--recipe fsat"),
]

_RENAMED = [
    Wrong("evaluation_strategy", "eval_strategy", "--evaluation_strategy steps"),
    Wrong("overwrite_output_dir", "--fresh", "--overwrite_output_dir"),
    Wrong("per_gpu_train_batch_size", "per_device_train_batch_size", "--per_gpu_train_batch_size 4"),
    Wrong("group_by_length", "train_sampling_strategy", "--group_by_length"),
    Wrong("warmup_ratio", "warmup_steps", "--warmup_ratio 0.1"),
    Wrong("warmup_ratio", "warmup_steps", config="warmup_ratio: 0.1\n"),
    Wrong("max_seq_length", "max_length", "--max_seq_length 512"),
]

_ELSEWHERE = [
    Wrong("mixed_precision", "--bf16", "--mixed_precision bf16"),
    Wrong("static_graph", "ddp_static_graph", "--static_graph true"),
    Wrong("num_processes", "accelerate launch", "--num_processes 2"),
    Wrong("zero_stage", "deepspeed_config", "--zero_stage 3"),
    Wrong("batch_size", "global_batch_size", "--batch_size 8"),
    Wrong("deepspeed_config", "Accelerate YAML", config="deepspeed_config:\n  zero_stage: 2\n"),
    Wrong("config", "leave it out", config="config: other.yaml\n"),
]

_VALUES = [
    Wrong("learning_rate", "a number", "--learning_rate fast"),
    Wrong("seed", "a whole number", "--seed 1.5"),
    Wrong("bf16", "true or false", "--bf16 maybe"),
    Wrong("max_steps", "a whole number", config="max_steps: many\n"),
    Wrong("num_train_epochs", "a number", config="num_train_epochs: true\n"),
    Wrong("save_steps", "a number", config="save_steps: [1, 2]\n"),
    Wrong("accelerator_config", "JSON", "--accelerator_config {even_batches:1}"),
    Wrong("optim", "adamw_torch_fused", "--optim adam"),
    Wrong("eval_strategy", "one of no, steps, epoch", "--eval_strategy always"),
    Wrong("ddp_comm_hook", "fp16", "--ddp_comm_hook powersgd"),
    Wrong(
        "metric_for_best_model",
        "loss",
        "--task sequence_classification --dataset_name x --prediction_loss_only --eval_strategy steps "
        "--metric_for_best_model accuracy",
    ),
]

_BATCH = [
    Wrong("global_batch_size", "--global_batch_size", "--global_batch_size 15", world=2),
    Wrong(
        "global_batch_size",
        "leave one",
        "--global_batch_size 16 --per_device_train_batch_size 4 --gradient_accumulation_steps 2",
    ),
]

WRONG = [*_MISSPELT, *_RENAMED, *_ELSEWHERE, *_VALUES, *_BATCH]
