"""Wrong inputs: what a user writes, the name that the problem is about, and a part of the fix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.runs import BEST

_HEAD = "compute_environment: LOCAL_MACHINE\n"


@dataclass(frozen=True)
class Wrong:
    """`config`, `yaml` and `json` are the contents of --config, the Accelerate YAML, ds.json."""

    subject: str
    fix: str
    argv: str = ""
    config: str = ""
    yaml: str = ""
    json: Any = None
    world: int | None = 1
    gpu: tuple[int, int] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        written = self.argv or self.config or self.yaml.removeprefix(_HEAD) or str(self.json)
        return " ".join(written.split())[:70]


def _yaml(type_: str, *lines: str) -> str:
    processes = "" if any(line.startswith("num_processes") for line in lines) else "num_processes: 1\n"
    return f"{_HEAD}distributed_type: {type_}\n{processes}" + "\n".join(lines) + "\n"


def _section(type_: str, section: str, *lines: str) -> str:
    return _yaml(type_, f"{section}:", *(f"  {line}" for line in lines))


def _ds(*lines: str) -> str:
    return _section("DEEPSPEED", "deepspeed_config", *lines)


def _fsdp(*lines: str) -> str:
    return _section("FSDP", "fsdp_config", *lines)


def _json(subject: str, fix: str, argv: str = "", **content: Any) -> Wrong:
    return Wrong(subject, fix, f"--deepspeed ds.json {argv}", json={"zero_optimization": {"stage": 2}, **content})


_MISSPELT = [
    Wrong("learning_rat", "--learning_rate", "--learning_rat 1e-4"),
    Wrong("lerning_rate", "--learning_rate", "--lerning-rate 1e-4"),
    Wrong("num_train_epoch", "--num_train_epochs", "--num_train_epoch 1"),
    Wrong("per_device_batch_size", "per_device_train_batch_size", "--per_device_batch_size 4"),
    Wrong("gradient_accumulation", "--gradient_accumulation_steps", "--gradient_accumulation 4"),
    Wrong("global_batchsize", "--global_batch_size", "--global_batchsize 32"),
    Wrong("bf61", "--bf16", "--bf61"),
    Wrong("lora_rank", "lora_r", "--lora_rank 8"),
    Wrong("dataset", "dataset_name", "--dataset d.jsonl"),
    Wrong("ddp_bucket_cap", "--ddp_bucket_cap_mb", "--ddp_bucket_cap 25"),
    Wrong("save_step", "--save_steps", "--save_step 10"),
    Wrong("wieght_decay", "weight_decay", config="wieght_decay: 0.1\n"),
    Wrong("warmup_step", "warmup_steps", config="warmup_step: 10\n"),
    Wrong("xylophone", "--help", "--xylophone"),
    Wrong("train", "--name value", "train"),
    Wrong("--seed", "write it once", "--seed 1 --seed 2"),
    Wrong("recipe", "fast", "--recipe fsat"),
    Wrong("recipe", "one of baseline", "--recipe turbo"),
]

_RENAMED = [
    Wrong("evaluation_strategy", "eval_strategy", "--evaluation_strategy steps"),
    Wrong("overwrite_output_dir", "--fresh", "--overwrite_output_dir"),
    Wrong("save_safetensors", "always safetensors", "--save_safetensors"),
    Wrong("fp16_opt_level", "leave it out", "--fp16_opt_level O2"),
    Wrong("half_precision_backend", "--bf16", "--half_precision_backend auto"),
    Wrong("no_cuda", "use_cpu", "--no_cuda"),
    Wrong("per_gpu_train_batch_size", "per_device_train_batch_size", "--per_gpu_train_batch_size 4"),
    Wrong("adafactor", "optim: adafactor", "--adafactor"),
    Wrong("push_to_hub_token", "hub_token", "--push_to_hub_token x"),
    Wrong("group_by_length", "train_sampling_strategy", "--group_by_length"),
    Wrong("warmup_ratio", "warmup_steps", "--warmup_ratio 0.1"),
    Wrong("warmup_ratio", "warmup_steps", config="warmup_ratio: 0.1\n"),
    Wrong("logging_dir", "TENSORBOARD_LOGGING_DIR", "--logging_dir logs"),
    Wrong("split_batches", "accelerator_config", "--split_batches"),
    Wrong("max_seq_length", "max_length", "--max_seq_length 512"),
    Wrong("torch_dtype", "dtype", "--torch_dtype bfloat16"),
]

_ELSEWHERE = [
    Wrong("mixed_precision", "--bf16", "--mixed_precision bf16"),
    Wrong("static_graph", "ddp_static_graph", "--static_graph true"),
    Wrong("find_unused_parameters", "ddp_find_unused_parameters", "--find_unused_parameters false"),
    Wrong("bucket_cap_mb", "ddp_bucket_cap_mb", "--bucket_cap_mb 25"),
    Wrong("num_processes", "accelerate launch", "--num_processes 2"),
    Wrong("config_file", "--config", "--config_file standard.yaml"),
    Wrong("zero_stage", "deepspeed_config", "--zero_stage 3"),
    Wrong("gradient_clipping", "max_grad_norm", "--gradient_clipping 1.0"),
    Wrong("even_batches", "accelerator_config", "--even_batches true"),
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
    Wrong("lr_scheduler_type", "cosine", "--lr_scheduler_type cosin"),
    Wrong("eval_strategy", "one of no, steps, epoch", "--eval_strategy always"),
    Wrong("save_strategy", "best", "--save_strategy sometimes"),
    Wrong("train_sampling_strategy", "group_by_length", "--train_sampling_strategy by_length"),
    Wrong("ddp_backend", "gloo", "--ddp_backend mccll"),
    Wrong("task", "causal_lm", "--task translation"),
    Wrong("dtype", "bfloat16", "--dtype bf16"),
    Wrong("ddp_comm_hook", "fp16", "--ddp_comm_hook powersgd"),
    Wrong("hub_strategy", "every_save", "--hub_strategy never"),
    Wrong("log_level", "info", "--log_level loud"),
    Wrong("report_to", "tensorboard", "--report_to tensorbord"),
    Wrong("max_steps", "--max_steps 1000", "--dataset_name d --dataset_streaming"),
    Wrong(
        "metric_for_best_model",
        "loss",
        "--task sequence_classification --dataset_name x --prediction_loss_only --eval_strategy steps "
        "--metric_for_best_model accuracy",
    ),
    Wrong("report_to", "--report_to tensorboard mlflow", "--report_to tensorboard,mlflow"),
    Wrong("include_num_input_tokens_seen", "non_padding", "--include_num_input_tokens_seen some"),
]

_RANGES = [
    Wrong("global_batch_size", "from 1 up", "--global_batch_size 0"),
    Wrong("global_batch_size", "--global_batch_size", "--global_batch_size 15", world=2),
    Wrong(
        "global_batch_size",
        "leave one",
        "--global_batch_size 16 --per_device_train_batch_size 4 --gradient_accumulation_steps 2",
    ),
    Wrong("per_device_train_batch_size", "from 1 up", "--per_device_train_batch_size -1"),
    Wrong("gradient_accumulation_steps", "from 1 up", "--gradient_accumulation_steps 0"),
    Wrong("num_train_epochs", "above 0", "--num_train_epochs 0 --max_steps -1"),
    Wrong("max_steps", "-1", "--max_steps -5"),
    Wrong("learning_rate", "0 or more", "--learning_rate -1e-4"),
    Wrong("adam_beta1", "below 1", "--adam_beta1 1.0"),
    Wrong("adam_epsilon", "0 or more", "--adam_epsilon -1"),
    Wrong("weight_decay", "0 or more", "--weight_decay -0.1"),
    Wrong("warmup_steps", "0 or more", "--warmup_steps -1"),
    Wrong("label_smoothing_factor", "from 0 to 1", "--label_smoothing_factor 2"),
    Wrong("save_total_limit", "from 1 up", "--save_total_limit 0"),
    Wrong("logging_steps", "number of steps", "--logging_steps 0"),
    Wrong("logging_steps", "logging_steps 2", "--logging_steps 2.5"),
    Wrong("dataloader_num_workers", "0 or more", "--dataloader_num_workers -2"),
    Wrong("seed", "from 0", "--seed -1"),
    Wrong("max_length", "at least 2", "--max_length 1"),
    Wrong("lora_r", "from 1 up", "--use_peft --lora_r 0"),
    Wrong("lora_dropout", "below 1", "--use_peft --lora_dropout 1.0"),
    Wrong("ddp_bucket_cap_mb", "0 or more", "--ddp_bucket_cap_mb -1"),
    Wrong("early_stopping_patience", "from 1 up", "--early_stopping_patience 0 --eval_strategy steps"),
]

_COMBINATIONS = [
    Wrong("fp16", "--bf16 false", "--fp16 --bf16"),
    Wrong("bf16", "--fp16", "--bf16", gpu=(7, 5)),
    Wrong("tf32", "leave it out", "--tf32 true"),
    Wrong("dtype", "--dtype float32", "--dtype float16", gpu=(7, 5)),
    Wrong("use_cpu", "--use_cpu", "--use_cpu false", world=2),
    Wrong("ddp_static_graph", "accumulation is 1", "--ddp_static_graph true --gradient_accumulation_steps 4", world=2),
    Wrong(
        "gradient_checkpointing_kwargs",
        "use_reentrant",
        "--gradient_checkpointing --ddp_find_unused_parameters true"
        ' --gradient_checkpointing_kwargs {"use_reentrant":true}',
        world=2,
    ),
    Wrong("optim", "--optim adamw_torch", "--recipe memory --optim adamw_bnb_8bit"),
    Wrong("optim", "--optim adamw_torch", "--recipe memory_zero3 --optim sgd"),
    Wrong("load_in_4bit", "--use_peft", "--load_in_4bit"),
    Wrong("load_best_model_at_end", "--eval_strategy", "--load_best_model_at_end"),
    Wrong("load_best_model_at_end", "--save_strategy", f"{BEST} --eval_strategy epoch --save_strategy steps"),
    Wrong("load_best_model_at_end", "--save_steps", f"{BEST} --eval_strategy steps --eval_steps 3 --save_steps 5"),
    Wrong("save_strategy", "--eval_strategy", "--save_strategy best"),
    Wrong("early_stopping_patience", "--eval_strategy", "--early_stopping_patience 3"),
    Wrong("lr_scheduler_type", "--eval_strategy", "--lr_scheduler_type reduce_lr_on_plateau"),
    Wrong("lr_scheduler_type", "num_decay_steps", "--lr_scheduler_type warmup_stable_decay"),
    Wrong(
        "lr_scheduler_type",
        "min_lr_rate",
        '--lr_scheduler_type cosine_warmup_with_min_lr --lr_scheduler_kwargs {"min_lr":1e-6,"min_lr_rate":0.1}',
    ),
    Wrong("lr_scheduler_kwargs", "num_cycles", '--lr_scheduler_type cosine --lr_scheduler_kwargs {"num_cicles":2}'),
    Wrong("lr_scheduler_kwargs", "leave it out", '--lr_scheduler_type linear --lr_scheduler_kwargs {"num_cycles":2}'),
    Wrong("optim_args", "rank=64", "--optim sgd --optim_args momentum"),
    Wrong("dataloader_prefetch_factor", "workers", "--dataloader_prefetch_factor 2"),
    Wrong("dataloader_persistent_workers", "workers", "--dataloader_persistent_workers"),
    Wrong("auto_find_batch_size", "leave it out", "--auto_find_batch_size"),
    Wrong("padding_free", "--packing false", "--packing --padding_free"),
    Wrong("packing", "leave it out", "--task sequence_classification --dataset_name d.csv --packing"),
    Wrong("task", "--dataset_name", "--task sequence_classification"),
    Wrong("ddp_backend", "gloo", "--ddp_backend nccl", world=2),
    Wrong("ddp_comm_hook", "fp16", "--ddp_comm_hook bf16", world=2),
    Wrong("accelerator_config", "even_batches", '--accelerator_config {"even_batchs":true}'),
    Wrong(
        "gradient_checkpointing_kwargs",
        "use_reentrant",
        '--gradient_checkpointing --gradient_checkpointing_kwargs {"use_rentrant":false}',
    ),
    Wrong("fsdp", "leave one", "--recipe memory --fsdp full_shard"),
    Wrong("use_liger_kernel", "pip install", "--use_liger_kernel", gpu=(9, 0)),
    Wrong("resume_from_checkpoint", "automatic", "--resume_from_checkpoint outputs/checkpoint-99"),
    Wrong("num_processes", "--num_processes 1", world=2, gpu=(8, 0)),
    Wrong("torch_compile_mode", "leave torch_compile_mode out", "--torch_compile false --torch_compile_mode default"),
]

_YAML = [
    Wrong("zero_stge", "zero_stage", yaml=_ds("zero_stge: 3")),
    Wrong("offload_optimiser_device", "offload_optimizer_device", yaml=_ds("offload_optimiser_device: cpu")),
    Wrong("zero_stage", "0, 1, 2 or 3", yaml=_ds("zero_stage: 5")),
    Wrong("offload_optimizer_device", "none, cpu, nvme", yaml=_ds("offload_optimizer_device: gpu")),
    Wrong("zero3_save_16bit_model", "true or false", yaml=_ds("zero_stage: 3", "zero3_save_16bit_model: 'yes'")),
    Wrong("offload_param_device", "nvme_path", yaml=_ds("zero_stage: 3", "offload_param_device: nvme")),
    Wrong("gradient_accumulation_steps", "leave it out", yaml=_ds("gradient_accumulation_steps: 7")),
    Wrong("gradient_clipping", "leave it out", yaml=_ds("gradient_clipping: 0.5")),
    Wrong("deepspeed_config_file", "path", yaml=_ds("deepspeed_config_file: missing.json")),
    Wrong("deepspeed_config", "deepspeed_config_file", yaml=_yaml("DEEPSPEED", "deepspeed_config: ds.json")),
    Wrong("fsdp_verion", "fsdp_version", yaml=_fsdp("fsdp_verion: 2")),
    Wrong("fsdp_auto_wrap_polcy", "fsdp_auto_wrap_policy", yaml=_fsdp("fsdp_auto_wrap_polcy: NO_WRAP")),
    Wrong("fsdp_state_dict_type", "FULL_STATE_DICT", yaml=_fsdp("fsdp_state_dict_type: FULL")),
    Wrong("fsdp_version", "1, 2", yaml=_fsdp("fsdp_version: 3")),
    Wrong("fsdp_sync_module_states", "true", yaml=_fsdp("fsdp_sync_module_states: false")),
    Wrong("zero_stage", "deepspeed_config", yaml=_fsdp("zero_stage: 3")),
    Wrong("static_graph", "--ddp_static_graph", yaml=_yaml("MULTI_GPU", "static_graph: true")),
    Wrong("ddp_bucket_cap_mb", "--ddp_bucket_cap_mb", yaml=_yaml("MULTI_GPU", "ddp_bucket_cap_mb: 50")),
    Wrong(
        "gradient_accumulation_steps",
        "--gradient_accumulation_steps",
        yaml=_yaml("MULTI_GPU", "gradient_accumulation_steps: 4"),
    ),
    Wrong("zero_stage", "deepspeed_config", yaml=_yaml("DEEPSPEED", "zero_stage: 2")),
    Wrong("num_proceses", "num_processes", yaml=_yaml("MULTI_GPU", "num_proceses: 2")),
    Wrong("mixed_precison", "mixed_precision", yaml=_yaml("MULTI_GPU", "mixed_precison: bf16")),
    Wrong("distributed_type", "MULTI_GPU", yaml=_yaml("MULTI_GPUS")),
    Wrong("distributed_type", "MULTI_GPU", yaml=_yaml("multi_gpu")),
    Wrong("distributed_type", "MULTI_GPU", yaml=f"{_HEAD}num_processes: 2\n"),
    Wrong("distributed_type", "MULTI_GPU", yaml=_yaml("MULTI_CPU", "num_processes: 2"), world=2),
    Wrong("distributed_type", "MULTI_GPU", yaml=_yaml("'NO'"), world=2),
    Wrong("mixed_precision", "'no'", yaml=_yaml("MULTI_GPU", "mixed_precision: no")),
    Wrong("mixed_precision", "'bf16'", yaml=_yaml("MULTI_GPU", "mixed_precision: bfloat16")),
    Wrong("mixed_precision", "--bf16", yaml=_yaml("MULTI_GPU", "mixed_precision: bf16")),
    Wrong("mixed_precision", "--fp16", yaml=_yaml("MULTI_GPU", "mixed_precision: fp16"), gpu=(8, 0)),
    Wrong("compute_environment", "LOCAL_MACHINE", yaml="compute_environment: LAPTOP\ndistributed_type: 'NO'\n"),
    Wrong("num_processes", "without quotes", yaml=_yaml("'NO'", "num_processes: '2'"), world=None),
    Wrong("num_processes", "num_processes: 1", yaml=_yaml("MULTI_GPU", "num_processes: 0"), world=None),
    Wrong("num_processes", "--num_processes N", yaml=f"{_HEAD}distributed_type: MULTI_GPU\n", world=None),
    Wrong("num_machines", "num_machines: 1", yaml=_yaml("MULTI_GPU", "num_machines: two")),
    Wrong("machine_rank", "0 to 0", yaml=_yaml("MULTI_GPU", "machine_rank: 1")),
    Wrong(
        "num_processes",
        "num_processes: 4",
        yaml=_yaml("MULTI_GPU", "num_machines: 2"),
        world=3,
        argv="--global_batch_size 12",
    ),
    Wrong("gpu_ids", "gpu_ids: '0,1'", yaml=_yaml("MULTI_GPU", "gpu_ids: 0")),
    Wrong("gpu_ids", "'NO'", yaml=_yaml("MULTI_GPU", "gpu_ids: '0'")),
    Wrong("main_process_port", "29500", yaml=_yaml("MULTI_GPU", "main_process_port: 99999")),
    Wrong("use_cpu", "false", yaml=_yaml("MULTI_GPU", "use_cpu: maybe")),
    Wrong("dynamo_config", "--torch_compile", yaml=_section("MULTI_GPU", "dynamo_config", "dynamo_backend: inductor")),
    Wrong(
        "dynamo_backend",
        "INDUCTOR",
        yaml=_section("MULTI_GPU", "dynamo_config", "dynamo_backend: inductr"),
        argv="--torch_compile",
    ),
    Wrong("use_fulgraph", "use_fullgraph", yaml=_section("MULTI_GPU", "dynamo_config", "use_fulgraph: true")),
    Wrong("tp_size", "parallelism_config_tp_size", yaml=_section("FSDP", "parallelism_config", "tp_size: 2")),
]

_JSON = [
    Wrong("deepspeed", "path of a JSON file", "--deepspeed missing.json"),
    Wrong("deepspeed", "JSON object", "--deepspeed ds.json", json='{"zero_optimization": '),
    Wrong("deepspeed", "JSON object", "--deepspeed ds.json", json=[1, 2]),
    _json("gradient_cliping", "gradient_clipping", gradient_cliping=1.0),
    _json("zero_optimisation", "zero_optimization", zero_optimisation={"stage": 2}),
    _json("train_micro_batch_size_per_gpu", '"auto"', train_micro_batch_size_per_gpu=2),
    _json("gradient_accumulation_steps", '"auto"', gradient_accumulation_steps=2),
    _json("train_batch_size", '"auto"', train_batch_size=64),
    _json("gradient_clipping", '"auto"', gradient_clipping=0.3),
    _json("bf16.enabled", '"auto"', bf16={"enabled": True}),
    _json("fp16.enabled", '"auto"', fp16={"enabled": True}),
    _json("optimizer.params.lr", '"auto"', optimizer={"type": "AdamW", "params": {"lr": 0.1}}),
    _json(
        "scheduler.params.warmup_num_steps",
        '"auto"',
        "--warmup_steps 5",
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    ),
    Wrong("zero_optimization.stge", "stage", "--deepspeed ds.json", json={"zero_optimization": {"stge": 2}}),
    Wrong("zero_optimization.stage", "0, 1, 2 or 3", "--deepspeed ds.json", json={"zero_optimization": {"stage": 7}}),
    Wrong(
        "optim",
        "adamw_torch",
        "--deepspeed ds.json --optim adamw_bnb_8bit",
        json={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ),
    Wrong(
        "zero_stage",
        "in the JSON",
        json={"zero_optimization": {"stage": 2}},
        yaml=_ds("deepspeed_config_file: ds.json", "zero_stage: 2"),
    ),
    Wrong(
        "mixed_precision",
        "in the JSON",
        "--bf16",
        json={"zero_optimization": {"stage": 2}},
        yaml=_ds("deepspeed_config_file: ds.json") + "mixed_precision: bf16\n",
    ),
    Wrong(
        "zero_optimization",
        '"stage": 2',
        json={"bf16": {"enabled": "auto"}},
        yaml=_ds("deepspeed_config_file: ds.json"),
    ),
]

WRONG = [*_MISSPELT, *_RENAMED, *_ELSEWHERE, *_VALUES, *_RANGES, *_COMBINATIONS, *_YAML, *_JSON]
