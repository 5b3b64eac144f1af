"""Draws a case: a launch, a model and its data, flags that belong together, and any others.

Most runs that are drawn are nearly right: what is wrong on its own, the tests try already.
"""

from __future__ import annotations

from random import Random
from typing import Any

import yaml

from recipes import legal
from recipes.run.files import shipped
from tests.campaigns.legality.case import DEEPSPEED_JSON, DEMONSTRATION, REMOVED, Case, Change
from tests.campaigns.legality.tried import LAUNCHERS_OWN
from tests.campaigns.legality.values import NOT_DRAWN, words_for

_ODD = 0.06  # how often a value is odd
# Flags that people write together: each of them is written half of the time.
_THEMES = [
    "eval_strategy eval_steps save_strategy save_steps load_best_model_at_end metric_for_best_model "
    "greater_is_better early_stopping_patience dataset_test_split",
    "eval_strategy eval_steps per_device_eval_batch_size eval_accumulation_steps prediction_loss_only "
    "batch_eval_metrics eval_on_start eval_do_concat_batches bf16_full_eval fp16_full_eval dataset_test_split "
    "include_for_metrics",
    "save_strategy save_steps save_total_limit save_only_model enable_jit_checkpoint fresh",
    "use_peft lora_r lora_alpha lora_dropout lora_target_modules load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant",
    "gradient_checkpointing gradient_checkpointing_kwargs ddp_find_unused_parameters ddp_static_graph use_peft",
    "optim optim_args optim_target_modules learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm",
    "lr_scheduler_type lr_scheduler_kwargs warmup_steps num_train_epochs max_steps eval_strategy dataset_test_split",
    "global_batch_size per_device_train_batch_size gradient_accumulation_steps accelerator_config dataloader_drop_last",
    "dataloader_num_workers dataloader_prefetch_factor dataloader_persistent_workers dataloader_pin_memory "
    "dataloader_multiprocessing_context",
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_static_graph gradient_as_bucket_view ddp_comm_hook ddp_backend "
    "ddp_timeout ddp_broadcast_buffers",
    "bf16 fp16 tf32 dtype bf16_full_eval fp16_full_eval",
    "packing padding_free max_length attn_implementation assistant_only_loss completion_only_loss",
    "torch_compile torch_compile_backend torch_compile_mode packing",
    "logging_strategy logging_steps logging_first_step report_to disable_tqdm log_level include_num_input_tokens_seen",
    "train_sampling_strategy length_column_name remove_unused_columns label_names data_seed full_determinism",
]
_IN_TURN = {"eval_strategy": "steps steps epoch no", "load_best_model_at_end": "true", "use_peft": "true true false"}
_CLASSIFIERS = ("bert-classifier", "bert", "llama", "gpt2")
_MODELS = ("llama", "llama", "llama", "llama", "gpt2", "gpt2", "opt", "llama-tied")
_UNFIT_MODELS = ("llama-short", "bert", "t5", "adapters", "empty", "nowhere")
_DATA = ("texts.jsonl",) * 4 + ("texts.txt", "pairs.jsonl", "chats.jsonl", "few.jsonl")
_UNFIT_DATA = ("labels.csv", "nowhere.jsonl")


def draw(random: Random) -> Case:
    """A case at random. The same `random` draws the same case."""
    launcher, processes, yaml_file = _launch(random)
    changes: list[Change] = []
    if random.random() < 0.6:
        changes.append(_flag("recipe", random))
    model = random.choice(_MODELS if random.random() > _ODD / 2 else _UNFIT_MODELS)
    data = random.choice(_DATA if random.random() > _ODD / 2 else _UNFIT_DATA)
    task = random.random()
    if task < 0.2:
        changes.append(Change("flag", "task", ["sequence_classification"]))
        model = random.choice(_CLASSIFIERS) if random.random() < 0.9 else model
        data = "labels.csv" if random.random() < 0.9 else data
    elif task < 0.25:
        model = data = DEMONSTRATION
    names = _flags(random)
    changes += [_flag(name, random) for name in names if name not in {change.name for change in changes}]
    if "eval_strategy" in names and "dataset_test_split" not in names and random.random() < 0.9:
        changes.append(Change("flag", "dataset_test_split", ["train[:8]"]))
    compiles = {"torch_compile", "torch_compile_mode"} & set(names)
    if compiles and "torch_compile_backend" not in names:  # the default takes a minute to compile
        changes.append(Change("flag", "torch_compile_backend", [random.choice(("eager", "aot_eager"))]))
    changes = [_in_file(change, random) for change in changes]
    if yaml_file and random.random() < 0.25:
        changes += _yaml_changes(yaml_file, random)
    if random.random() < 0.06:
        changes += [Change("flag", "deepspeed", [DEEPSPEED_JSON]), *_json_changes(random)]
    return Case(launcher, processes, yaml_file, model, data, changes=tuple(changes))


def _launch(random: Random) -> tuple[str, int | None, str]:
    """Mostly one process, and DeepSpeed now and then: two ranks and DeepSpeed take longer."""
    kind = random.random()
    if kind < 0.5:
        return "python", None, ""
    if kind < 0.62:
        return "torchrun", random.choice((1, 2, 2, 2)), ""
    files = ("standard.yaml",) * 4 + ("single.yaml",) * 2 + ("", "", "fast.yaml", "memory.yaml", "memory_zero3.yaml")
    return "accelerate", random.choice((None, 1, 1, 2, 2, 2)), random.choice(files)


def _flags(random: Random) -> list[str]:
    """The names of the flags that are written, each once."""
    names: list[str] = []
    for theme in random.sample(_THEMES, random.choice((0, 1, 1, 2))):
        names += [name for name in theme.split() if random.random() < 0.5]
    everything = sorted(set(legal.settings()) - set(NOT_DRAWN) - {"recipe", "task"})
    names += random.sample(everything, random.choice((0, 1, 2, 3)))
    return list(dict.fromkeys(names))


def _flag(name: str, random: Random) -> Change:
    if name in _IN_TURN and random.random() > _ODD:
        return Change("flag", name, [random.choice(_IN_TURN[name].split())])
    if random.random() < 0.01:
        return Change("flag", _misspelt(name, random), words_for(name, random, _ODD))
    return Change("flag", name, words_for(name, random, _ODD))


def _in_file(change: Change, random: Random) -> Change:
    """The same setting in a --config file, sometimes: with the types of YAML."""
    if random.random() < 0.9 or len(change.value) != 1:
        return change
    try:
        value = yaml.safe_load(change.value[0])
    except yaml.YAMLError:
        return change
    return Change("config", change.name, value)


def _misspelt(name: str, random: Random) -> str:
    place = random.randrange(len(name))
    return name[:place] + name[place + 1 :] or f"{name}s"


# --- Files ----------------------------------------------------------------------------------------

_TOP: dict[str, list[Any]] = {
    "compute_environment": [REMOVED, "LAPTOP"],
    "distributed_type": ["MULTI_GPU", "NO", "MULTI_CPU", False, REMOVED, "DDP", "multi_gpu"],
    "mixed_precision": ["no", "bf16", "fp16", REMOVED, False, "bfloat16", None],
    "num_processes": [1, 2, REMOVED, 0, "2", None],
    "num_machines": [1, REMOVED, 0, "1", None],
    "machine_rank": [0, REMOVED, 1, "0"],
    "main_process_port": [0, 29511, 99999, "29512"],
    "rdzv_backend": ["static", "c10d", REMOVED, "none"],
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
_DEEPSPEED: dict[str, list[Any]] = {
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
_SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
JSON_KEYS: dict[str, list[Any]] = {
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


def _yaml_changes(file: str, random: Random) -> list[Change]:
    """Keys of the Accelerate YAML that are changed, dropped, misspelt or of another type."""
    keys = {**_TOP}
    if "deepspeed_config" in yaml.safe_load(shipped(file).read_text(encoding="utf-8")):
        keys |= {f"deepspeed_config.{name}": values for name, values in _DEEPSPEED.items()}
    changes = changed_keys(keys, "yaml", random, random.choice((1, 1, 2)))
    if any(change.name.endswith("deepspeed_config_file") for change in changes):
        changes += _json_changes(random)
    return changes


def _json_changes(random: Random) -> list[Change]:
    start = [Change("json", "zero_optimization", {"stage": random.choice((2, 2, 1, 3))})]
    if random.random() < 0.7:  # as most people write it
        start += [Change("json", name, "auto") for name in _SIZES]
    return [*start, *changed_keys(JSON_KEYS, "json", random, random.choice((0, 1, 2)))]


def changed_keys(keys: dict[str, list[Any]], where: str, random: Random, count: int) -> list[Change]:
    names = [name for name in sorted(keys) if name not in LAUNCHERS_OWN or random.random() < 0.2]
    return [Change(where, key, random.choice(keys[key])) for key in random.sample(names, count)]
