"""Every rule, with a case in which it fires and the nearest run in which it does not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.catalog import RECIPES
from recipes.rules import facts
from recipes.rules.check import RULES, check
from recipes.run import resolve
from recipes.run.engine import shipped
from recipes.run.hardware import Gpu, Hardware

CPU = Hardware()
T4 = Gpu("Tesla T4", (7, 5), 16 << 30)
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80 << 30)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30)
LOCAL = "compute_environment: LOCAL_MACHINE\n"


def machine(gpu: Gpu, count: int = 1, liger: bool = True) -> Hardware:
    return Hardware((gpu,) * count, cores=8 * count, liger=liger)


@dataclass(frozen=True)
class Run:
    """What a user writes. `yaml` is a shipped file's name or a text, `files` are written where the run looks."""

    argv: str = ""
    world: int = 1
    hardware: Hardware = CPU
    yaml: str = ""
    environment: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    def resolve(self, folder: Path, monkeypatch):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(facts, "installed", lambda package: package not in self.missing)
        for name, content in self.files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8")
        return resolve(
            self.argv.split(),
            world_size=self.world,
            hardware=self.hardware,
            accelerate_config=self._config(folder),
            environment=self.environment,
        )

    def _config(self, folder: Path) -> str | None:
        if not self.yaml or "\n" not in self.yaml:
            return str(shipped(self.yaml)) if self.yaml else None
        file = folder / "accelerate.yaml"
        file.write_text(self.yaml, encoding="utf-8")
        return str(file)


def yaml(type_: str, *lines: str, processes: int | None = 1) -> str:
    head = f"{LOCAL}distributed_type: {type_}\n" + (f"num_processes: {processes}\n" if processes is not None else "")
    return head + "\n".join(lines) + "\n"


def deepspeed(*lines: str) -> str:
    return yaml("DEEPSPEED", "deepspeed_config:", *(f"  {line}" for line in lines or ("zero_stage: 2",)))


def fsdp(*lines: str) -> str:
    return yaml("FSDP", "fsdp_config:", *(f"  {line}" for line in lines or ("fsdp_version: 2",)))


def ds_json(**content) -> dict:
    return {"ds.json": {"zero_optimization": {"stage": 2}, **content}}


DS = "--deepspeed ds.json"
SGD = "--optim sgd"
EVAL = "--eval_strategy steps"
BEST = "--load_best_model_at_end"
TWO_GPUS = machine(A100, 2)
CLASSIFY = "--task sequence_classification --dataset_name d.csv"

# rule -> (a run in which it fires, the nearest one in which it does not)
CASES: dict[str, tuple[Run, Run]] = {
    "values_are_in_range": (Run("--save_total_limit 0"), Run("--save_total_limit 1")),
    "a_run_has_steps": (Run("--num_train_epochs 0 --max_steps -1"), Run("--num_train_epochs 0 --max_steps 5")),
    "steps_above_one_are_whole": (Run("--logging_steps 2.5"), Run("--logging_steps 0.5")),
    # Precision
    "one_precision": (Run("--fp16 --bf16", hardware=TWO_GPUS), Run("--fp16 --bf16 false", hardware=TWO_GPUS)),
    "bf16_needs_sm80": (Run("--bf16 --fp16 false", hardware=machine(T4)), Run("--bf16", hardware=machine(A100))),
    "fp16_needs_a_gpu": (Run("--fp16"), Run("--fp16", hardware=machine(T4))),
    "tf32_needs_sm80": (Run("--tf32 true", hardware=machine(T4)), Run("--tf32 true", hardware=machine(A100))),
    "yaml_precision_agrees_with_arguments": (
        Run("--bf16 false", yaml=yaml("MULTI_GPU", "mixed_precision: bf16")),
        Run("--bf16 true", yaml=yaml("MULTI_GPU", "mixed_precision: bf16")),
    ),
    "fp16_weights_cannot_be_unscaled": (
        Run("--dtype float16", hardware=machine(T4)),
        Run("--dtype float16 --use_peft", hardware=machine(T4)),
    ),
    "sixteen_bit_weights_lose_small_updates": (Run("--dtype bfloat16"), Run("--dtype bfloat16 --use_peft")),
    "best_metric_is_reported": (
        Run(f"{EVAL} {BEST} --save_steps 500 --eval_steps 500 --metric_for_best_model f1"),
        Run(f"{EVAL} {BEST} --save_steps 500 --eval_steps 500 --metric_for_best_model eval_loss"),
    ),
    "evaluating_needs_data": (Run("--eval_on_start"), Run(f"--eval_on_start {EVAL}")),
    "accuracy_is_computed_at_the_end": (
        Run(f"--batch_eval_metrics {CLASSIFY}"),
        Run(f"--eval_do_concat_batches false {CLASSIFY}"),
    ),
    "compile_backend_is_known": (
        Run("--torch_compile_backend foo"),
        Run("--torch_compile_backend aot_eager"),
    ),
    "least_rate_is_named_once": (
        Run("--lr_scheduler_type cosine_with_min_lr"),
        Run('--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr_rate":0.1}'),
    ),
    "schedule_settings_are_its_own": (
        Run('--lr_scheduler_type cosine --lr_scheduler_kwargs {"num_cicles":2}'),
        Run('--lr_scheduler_type cosine --lr_scheduler_kwargs {"num_cycles":2}'),
    ),
    "labels_have_one_name": (Run("--label_names foo"), Run("--label_names labels")),
    "batches_come_out_even": (
        Run('--accelerator_config {"even_batches":false}', world=2),
        Run('--accelerator_config {"even_batches":false}'),
    ),
    "a_training_trains": (Run("--do_train false"), Run("--do_train")),
    "a_resume_skips_what_was_trained": (Run("--ignore_data_skip"), Run("")),
    "optimizer_arguments_are_read": (
        Run("--optim adamw_torch --optim_args beta1=0.8"),
        Run("--optim sgd --optim_args momentum=0.9"),
    ),
    "output_has_a_folder": (Run("--output_dir none"), Run("--output_dir some")),
    # Processes
    "several_processes_on_a_cpu_need_use_cpu": (Run("--use_cpu false", world=2), Run("--use_cpu true", world=2)),
    "single_engine_starts_one_process": (
        Run(yaml=yaml("'NO'"), world=2),
        Run(yaml=yaml("MULTI_GPU"), world=2),
    ),
    "processes_have_a_gpu_each": (Run(world=4, hardware=TWO_GPUS), Run(world=2, hardware=TWO_GPUS)),
    "one_process_uses_one_gpu": (
        Run("--recipe baseline", hardware=TWO_GPUS),
        Run("--recipe baseline", hardware=machine(A100)),
    ),
    "recipe_has_its_own_engine": (
        Run("--recipe memory", yaml="standard.yaml"),
        Run("--recipe memory", yaml="memory_zero3.yaml"),
    ),
    "fsdp_needs_a_gpu": (Run(yaml="fsdp2.yaml"), Run(yaml="fsdp2.yaml", hardware=machine(A100))),
    "fsdp_and_deepspeed_exclude_each_other": (
        Run("--recipe memory --fsdp full_shard", yaml="memory.yaml"),
        Run("--recipe memory", yaml="memory.yaml"),
    ),
    "fsdp_argument_needs_a_distributed_launch": (
        Run("--recipe baseline --fsdp full_shard"),
        Run("--recipe standard --fsdp full_shard", yaml="standard.yaml"),
    ),
    "fsdp_checkpoints_activations_once": (
        Run("--gradient_checkpointing", yaml=fsdp("fsdp_activation_checkpointing: true")),
        Run("--gradient_checkpointing", yaml=fsdp("fsdp_activation_checkpointing: false")),
    ),
    "ddp_backend_needs_processes": (
        Run("--recipe baseline --ddp_backend gloo"),
        Run("--recipe standard --ddp_backend gloo", world=2),
    ),
    "nccl_needs_a_gpu": (
        Run("--ddp_backend nccl", world=2),
        Run("--ddp_backend nccl", world=2, hardware=TWO_GPUS),
    ),
    # DDP
    "static_graph_needs_accumulation_one": (
        Run("--ddp_static_graph true --gradient_accumulation_steps 2", world=2),
        Run("--ddp_static_graph true --gradient_accumulation_steps 1", world=2),
    ),
    "reentrant_checkpointing_needs_find_unused_off": (
        Run(
            "--gradient_checkpointing --ddp_find_unused_parameters true"
            ' --gradient_checkpointing_kwargs {"use_reentrant":true}'
        ),
        Run("--gradient_checkpointing --ddp_find_unused_parameters true"),
    ),
    "ddp_settings_need_ddp": (
        Run("--recipe memory --ddp_bucket_cap_mb 50", yaml="memory.yaml"),
        Run("--ddp_bucket_cap_mb 50", yaml="standard.yaml"),
    ),
    "bf16_compression_needs_nccl": (Run("--ddp_comm_hook bf16", world=2), Run("--ddp_comm_hook fp16", world=2)),
    "ddp_timeout_is_not_for_cpus": (Run("--ddp_timeout 60"), Run("--ddp_timeout 60", hardware=machine(A100))),
    "syncing_each_batch_is_slow": (
        Run('--accelerator_config {"gradient_accumulation_kwargs":{"sync_each_batch":true}}'),
        Run('--accelerator_config {"gradient_accumulation_kwargs":{"sync_each_batch":false}}'),
    ),
    # The batch
    "batch_size_is_not_searched": (Run("--auto_find_batch_size"), Run("--auto_find_batch_size false")),
    "accumulation_is_said_once": (
        Run('--accelerator_config {"gradient_accumulation_kwargs":{"num_steps":4}}'),
        Run("--gradient_accumulation_steps 4"),
    ),
    "batches_are_not_split": (
        Run('--accelerator_config {"split_batches":true}', world=2),
        Run('--accelerator_config {"split_batches":true}', world=1),
    ),
    "fit_chooses_the_micro_batch": (
        Run("--fit --per_device_train_batch_size 2"),
        Run("--fit --global_batch_size 8"),
    ),
    "memory_can_be_limited": (
        Run("--memory_limit 2", hardware=Hardware(platform="darwin")),
        Run("--memory_limit 2"),
    ),
    "timings_go_to_a_table": (Run("--measure timings.txt"), Run("--measure timings.jsonl")),
    "packing_frees_the_padding": (Run("--packing --padding_free"), Run("--packing false --padding_free")),
    "classification_takes_rows_as_they_are": (Run(f"{CLASSIFY} --packing"), Run(CLASSIFY)),
    "classification_needs_data": (Run("--task sequence_classification"), Run(CLASSIFY)),
    "padding_free_needs_flash_attention": (
        Run("--padding_free --packing false"),
        Run("--padding_free --packing false --attn_implementation flash_attention_2"),
    ),
    "compiling_needs_one_shape": (Run("--torch_compile --packing false"), Run("--torch_compile --packing")),
    # Optimizer
    "offload_needs_adamw": (
        Run(f"--recipe memory {SGD}", yaml="memory.yaml"),
        Run("--recipe memory --optim adamw_torch_fused", yaml="memory.yaml"),
    ),
    "deepspeed_json_chooses_the_optimizer": (
        Run(f"{DS} {SGD}", files=ds_json(optimizer={"type": "AdamW"})),
        Run(f"{DS} {SGD}", files=ds_json()),
    ),
    "optimizer_is_installed": (
        Run("--optim adamw_bnb_8bit", missing=("bitsandbytes",)),
        Run("--optim adamw_bnb_8bit"),
    ),
    "layerwise_optimizers_work_alone": (
        Run("--optim galore_adamw_layerwise --optim_target_modules all-linear", world=2),
        Run("--optim galore_adamw --optim_target_modules all-linear", world=2),
    ),
    "target_modules_are_named": (
        Run("--optim galore_adamw"),
        Run("--optim galore_adamw --optim_target_modules all-linear"),
    ),
    "schedule_needs_evaluation": (
        Run("--lr_scheduler_type reduce_lr_on_plateau"),
        Run(f"--lr_scheduler_type reduce_lr_on_plateau {EVAL}"),
    ),
    "one_warmup_step_is_one_step": (Run("--warmup_steps 1.0"), Run("--warmup_steps 0.1")),
    "max_steps_wins_over_epochs": (Run("--max_steps 5 --num_train_epochs 2"), Run("--max_steps 5")),
    # Evaluation and checkpoints
    "best_model_needs_matching_strategies": (Run(f"{BEST} {EVAL} --save_strategy epoch"), Run(f"{BEST} {EVAL}")),
    "saving_the_best_needs_evaluation": (
        Run("--save_strategy best --metric_for_best_model loss"),
        Run(f"--save_strategy best --metric_for_best_model loss {EVAL}"),
    ),
    "early_stopping_needs_evaluation": (
        Run("--early_stopping_patience 3"),
        Run(f"--early_stopping_patience 3 {EVAL} {BEST}"),
    ),
    "test_split_is_used": (Run("--dataset_test_split test"), Run(f"--dataset_test_split test {EVAL}")),
    "weights_alone_cannot_find_the_best": (
        Run(f"--save_only_model {BEST} {EVAL}", yaml="memory.yaml"),
        Run(f"--save_only_model {BEST} {EVAL}", yaml="standard.yaml"),
    ),
    "sharded_checkpoints_hold_the_optimizer": (
        Run("--save_only_model", yaml=fsdp("fsdp_state_dict_type: SHARDED_STATE_DICT")),
        Run("--save_only_model", yaml=fsdp("fsdp_state_dict_type: FULL_STATE_DICT")),
    ),
    "weights_alone_do_not_resume": (Run("--save_only_model"), Run("--save_only_model false")),
    "signal_checkpoints_may_be_incomplete": (Run("--enable_jit_checkpoint"), Run("--enable_jit_checkpoint false")),
    "resume_starts_from_something": (
        Run("--resume_from_checkpoint outputs/checkpoint-7"),
        Run("--resume_from_checkpoint true"),
    ),
    "zero3_saves_whole_weights": (
        Run(yaml=deepspeed("zero_stage: 3")),
        Run(yaml=deepspeed("zero_stage: 3", "zero3_save_16bit_model: true")),
    ),
    # Workers
    "worker_settings_need_workers": (
        Run("--dataloader_prefetch_factor 4 --dataloader_num_workers 0"),
        Run("--dataloader_prefetch_factor 4 --dataloader_num_workers 1"),
    ),
    "persistent_workers_change_a_resume": (
        Run("--dataloader_persistent_workers --dataloader_num_workers 1"),
        Run("--dataloader_num_workers 1"),
    ),
    # Adapters
    "four_bits_need_adapters": (Run("--load_in_4bit"), Run("--load_in_4bit --use_peft")),
    "qlora_loads_whole_weights": (
        Run("--load_in_4bit --use_peft", yaml="memory_zero3.yaml"),
        Run("--load_in_4bit --use_peft", yaml="memory.yaml"),
    ),
    "quantised_loading_is_installed": (Run("--use_peft", missing=("peft",)), Run("--use_peft")),
    "adapter_settings_need_adapters": (Run("--lora_r 8"), Run("--lora_r 8 --use_peft")),
    # Installed
    "deepspeed_is_installed": (
        Run("--recipe memory", yaml="memory.yaml", missing=("deepspeed",)),
        Run("--recipe memory", yaml="memory.yaml"),
    ),
    "liger_is_installed": (
        Run("--use_liger_kernel", hardware=machine(A100, liger=False)),
        Run("--use_liger_kernel", hardware=machine(A100, liger=True)),
    ),
    "reports_go_somewhere": (Run("--report_to wandb", missing=("wandb",)), Run("--report_to wandb")),
    # Speed and environment
    "yaml_compiles_what_the_arguments_do_not": (
        Run(yaml=yaml("MULTI_GPU", "dynamo_config:", "  dynamo_backend: inductor")),
        Run("--torch_compile", yaml=yaml("MULTI_GPU", "dynamo_config:", "  dynamo_backend: inductor")),
    ),
    "compile_settings_compile": (
        Run("--torch_compile false --torch_compile_mode default"),
        Run("--torch_compile --torch_compile_mode default"),
    ),
    "counting_tokens_costs_a_sync": (
        Run("--include_num_input_tokens_seen all"),
        Run("--include_num_input_tokens_seen no"),
    ),
    "logging_costs_a_sync": (Run("--logging_steps 1"), Run("--logging_steps 2")),
    "nccl_timeout_is_an_argument": (Run(environment={"NCCL_TIMEOUT": "60"}), Run(environment={"NCCL_DEBUG": "INFO"})),
    "shared_memory_is_fast": (
        Run(environment={"NCCL_SHM_DISABLE": "1"}),
        Run(environment={"NCCL_SHM_DISABLE": "0"}),
    ),
    # Nested settings
    "nested_settings_are_known": (
        Run('--accelerator_config {"even_batch":true}'),
        Run('--accelerator_config {"even_batches":true}'),
    ),
    "nested_settings_can_be_read": (Run(DS), Run(DS, files=ds_json())),
    # The Accelerate YAML
    "yaml_keys_are_known": (
        Run(yaml=yaml("MULTI_GPU", "static_graph: true")),
        Run(yaml=yaml("MULTI_GPU", "same_network: true")),
    ),
    "nested_yaml_keys_are_known": (Run(yaml=deepspeed("zero_stge: 3")), Run(yaml=deepspeed("zero_stage: 3"))),
    "sections_hold_settings": (
        Run(yaml=yaml("DEEPSPEED", "deepspeed_config: ds.json")),
        Run(yaml=yaml("DEEPSPEED", "deepspeed_config:")),
    ),
    "sections_fit_the_type": (
        Run(yaml=yaml("MULTI_GPU", "fsdp_config:", "  fsdp_version: 2")),
        Run(yaml=yaml("FSDP", "fsdp_config:", "  fsdp_version: 2")),
    ),
    "compute_environment_is_known": (
        Run(yaml="compute_environment: LOCAL\ndistributed_type: 'NO'\n"),
        Run(yaml="compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\n"),
    ),
    "distributed_type_is_known": (Run(yaml=yaml("multi_gpu")), Run(yaml=yaml("MULTI_GPU"))),
    "mixed_precision_is_known": (
        Run(yaml=yaml("MULTI_GPU", "mixed_precision: no")),
        Run(yaml=yaml("MULTI_GPU", "mixed_precision: 'no'")),
    ),
    "top_level_values_have_the_right_type": (
        Run(yaml=yaml("MULTI_GPU", "gpu_ids: 0")),
        Run(yaml=yaml("MULTI_GPU", "gpu_ids: all")),
    ),
    "num_processes_is_given": (
        Run(yaml=yaml("MULTI_GPU", processes=None)),
        Run(yaml=yaml("MULTI_GPU", processes=None), world=2),
    ),
    "gpu_ids_name_enough_gpus": (
        Run(yaml=yaml("MULTI_GPU", "gpu_ids: '0'"), hardware=TWO_GPUS),
        Run(yaml=yaml("MULTI_GPU", "gpu_ids: '0,1'"), hardware=TWO_GPUS),
    ),
    "machines_share_the_processes": (
        Run(yaml=yaml("MULTI_GPU", "num_machines: 3"), world=4),
        Run(yaml=yaml("MULTI_GPU", "num_machines: 2"), world=4),
    ),
    "machines_find_each_other": (
        Run(yaml=yaml("MULTI_GPU", "num_machines: 2"), world=2),
        Run(yaml=yaml("MULTI_GPU", "num_machines: 2", "main_process_ip: h", "main_process_port: 29500"), world=2),
    ),
    "ports_exist": (
        Run(yaml=yaml("MULTI_GPU", "main_process_port: 70000")),
        Run(yaml=yaml("MULTI_GPU", "main_process_port: 0")),
    ),
    "nested_yaml_values_are_legal": (Run(yaml=deepspeed("zero_stage: 5")), Run(yaml=deepspeed("zero_stage: '3'"))),
    "nvme_paths_reach_the_workers": (
        Run(yaml=deepspeed("zero_stage: 3", "offload_param_device: nvme", "offload_param_nvme_path: /nvme")),
        Run(yaml=deepspeed("zero_stage: 3", "offload_param_device: cpu")),
    ),
    "parameters_are_offloaded_by_stage_three": (
        Run(yaml=deepspeed("zero_stage: 2", "offload_param_device: cpu")),
        Run(yaml=deepspeed("zero_stage: 3", "offload_param_device: cpu")),
    ),
    "deepspeed_is_configured_once": (
        Run(yaml=deepspeed("deepspeed_config_file: ds.json", "zero_stage: 2"), files=ds_json()),
        Run(yaml=deepspeed("deepspeed_config_file: ds.json"), files=ds_json()),
    ),
    "deepspeed_file_can_be_read": (
        Run(yaml=deepspeed("deepspeed_config_file: ds.json")),
        Run(yaml=deepspeed("deepspeed_config_file: ds.json"), files=ds_json()),
    ),
    "yaml_agrees_with_the_batch": (
        Run(yaml=deepspeed("gradient_accumulation_steps: 3")),
        Run(yaml=deepspeed("gradient_accumulation_steps: 4")),
    ),
    "fsdp_version_two_is_chosen": (Run(yaml=fsdp("fsdp_offload_params: true")), Run(yaml=fsdp("version: 2"))),
    "efficient_loading_needs_synchronisation": (
        Run(yaml=fsdp("version: 2", "sync_module_states: false")),
        Run(yaml=fsdp("version: 2", "sync_module_states: false", "cpu_ram_efficient_loading: false")),
    ),
    # The DeepSpeed JSON
    "deepspeed_json_keys_are_known": (
        Run(DS, files=ds_json(gradient_cliping=1.0)),
        Run(DS, files=ds_json(gradient_clipping=1.0)),
    ),
    "deepspeed_json_agrees_with_arguments": (
        Run(DS, files=ds_json(gradient_accumulation_steps=2)),
        Run(DS, files=ds_json(gradient_accumulation_steps="auto")),
    ),
    "deepspeed_json_has_one_precision": (
        Run(DS, files=ds_json(fp16={"enabled": True}, bf16={"enabled": True})),
        Run(f"{DS} --bf16", files=ds_json(fp16={"enabled": False}, bf16={"enabled": True})),
    ),
    "zero_stages_exist": (
        Run(DS, files={"ds.json": {"zero_optimization": {"stage": 4}}}),
        Run(DS, files={"ds.json": {"zero_optimization": {"stage": 3}}}),
    ),
}

BY_NAME = {function.__name__: function for function in RULES}


def test_every_rule_has_a_case():
    assert set(CASES) == set(BY_NAME)


def test_every_rule_says_which_failure_it_prevents():
    assert [name for name, function in BY_NAME.items() if not (function.__doc__ or "").strip()] == []


@pytest.mark.parametrize("name", CASES)
def test_rule_fires(name, tmp_path, monkeypatch):
    found = list(BY_NAME[name](CASES[name][0].resolve(tmp_path, monkeypatch)))
    assert found
    for problem in found:
        assert problem.fix and problem.source and problem.severity in ("error", "advice")
        assert not problem.fix.endswith(".")  # the sentence gets its own


@pytest.mark.parametrize("name", CASES)
def test_rule_leaves_the_nearest_legal_run_alone(name, tmp_path, monkeypatch):
    run = CASES[name][1].resolve(tmp_path, monkeypatch)
    assert not list(BY_NAME[name](run))
    assert not run.problems


# Further sides of rules that have several.
ALSO_FIRES = [
    ("values_are_in_range", Run("--adam_beta1 1.0"), "adam_beta1"),
    ("values_are_in_range", Run("--max_steps 0"), "max_steps"),
    ("a_run_has_steps", Run("--save_steps 0"), "save_steps"),
    ("values_are_in_range", Run("--log_level loud"), "log_level"),
    ("best_model_needs_matching_strategies", Run(BEST), "load_best_model_at_end"),
    (
        "best_model_needs_matching_strategies",
        Run(f"{BEST} {EVAL} --eval_steps 3 --save_steps 7"),
        "load_best_model_at_end",
    ),
    (
        "best_model_needs_matching_strategies",
        Run(f"{BEST} {EVAL} --save_strategy best --eval_strategy no"),
        "load_best",
    ),
    ("saving_the_best_needs_evaluation", Run(f"--save_strategy best {EVAL}"), "save_strategy"),
    ("early_stopping_needs_evaluation", Run(f"--early_stopping_patience 3 {EVAL}"), "early_stopping_patience"),
    ("offload_needs_adamw", Run("--recipe memory --optim adamw_bnb_8bit", yaml="memory.yaml"), "optim"),
    ("offload_needs_adamw", Run("--recipe memory_zero3 --optim adafactor", yaml="memory_zero3.yaml"), "optim"),
    (
        "yaml_precision_agrees_with_arguments",
        Run("--bf16", yaml=yaml("'NO'", "mixed_precision: fp8")),
        "mixed_precision",
    ),
    ("single_engine_starts_one_process", Run(yaml=yaml("MULTI_CPU", processes=2), world=2), "distributed_type"),
    ("single_engine_starts_one_process", Run("--recipe baseline", world=2), "distributed_type"),
    ("worker_settings_need_workers", Run("--dataloader_persistent_workers"), "dataloader_persistent_workers"),
    ("worker_settings_need_workers", Run("--dataloader_multiprocessing_context spawn"), "multiprocessing_context"),
    ("deepspeed_json_keys_are_known", Run(DS, files={"ds.json": {"zero_optimization": {"stge": 2}}}), "stge"),
    ("nested_yaml_keys_are_known", Run(yaml=fsdp("fsdp_verion: 2")), "fsdp_verion"),
    ("nested_yaml_keys_are_known", Run(yaml=yaml("FSDP", "parallelism_config:", "  tp_size: 2")), "tp_size"),
    ("nested_settings_are_known", Run('--gradient_checkpointing_kwargs {"use_rentrant":false}'), "checkpointing"),
    (
        "nested_settings_are_known",
        Run('--fsdp full_shard --fsdp_config {"fsdp_verion":2}', yaml="standard.yaml"),
        "fsdp",
    ),
    ("deepspeed_is_installed", Run(yaml="memory.yaml", hardware=Hardware(platform="win32")), "recipe"),
    ("resume_starts_from_something", Run("--fresh --resume_from_checkpoint ."), "resume_from_checkpoint"),
    ("reports_go_somewhere", Run("--report_to tensorbord"), "report_to"),
    ("layerwise_optimizers_work_alone", Run("--optim apollo_adamw_layerwise --gradient_accumulation_steps 2"), "optim"),
    ("distributed_type_is_known", Run(yaml=yaml("NO")), "distributed_type"),
    ("distributed_type_is_known", Run(yaml=f"{LOCAL}num_processes: 1\n"), "distributed_type"),
    ("machines_share_the_processes", Run(yaml=yaml("MULTI_GPU", "machine_rank: 1")), "machine_rank"),
]

LEGAL_AFTER_ALL = [
    (
        "static_graph_needs_accumulation_one",
        Run("--ddp_static_graph true --gradient_accumulation_steps 2"),
    ),  # one process
    (
        "static_graph_needs_accumulation_one",  # reduces in every micro-step, and trains
        Run(
            "--ddp_static_graph true --gradient_accumulation_steps 2"
            ' --accelerator_config {"gradient_accumulation_kwargs":{"sync_each_batch":true}}',
            world=2,
        ),
    ),
    ("static_graph_needs_accumulation_one", Run("--ddp_static_graph true", world=2, yaml="memory.yaml")),
    (
        "reentrant_checkpointing_needs_find_unused_off",  # a static graph knows which parameters it uses
        Run(
            "--gradient_checkpointing --ddp_find_unused_parameters true --ddp_static_graph true"
            ' --gradient_checkpointing_kwargs {"use_reentrant":true}'
        ),
    ),
    ("bf16_needs_sm80", Run("--bf16")),  # a CPU
    ("bf16_needs_sm80", Run("--bf16 --use_cpu", hardware=machine(T4))),
    ("offload_needs_adamw", Run(f"{DS} {SGD}", files=ds_json(zero_force_ds_cpu_optimizer=False))),
    ("offload_needs_adamw", Run(f"--recipe memory {SGD}", yaml=deepspeed("zero_stage: 2"))),
    ("yaml_precision_agrees_with_arguments", Run("--bf16 false", yaml=yaml("'NO'", "mixed_precision: fp8"))),
    ("nested_yaml_keys_are_known", Run(yaml=fsdp("fsdp_version: 2", "fsdp_ignored_modules: lm_head"))),
    ("nested_yaml_values_are_legal", Run(yaml=deepspeed("zero3_init_flag: 'true'", "gradient_clipping: auto"))),
    ("nested_yaml_values_are_legal", Run(yaml=fsdp("fsdp_version: '2'", "fsdp_offload_params: 'false'"))),
    ("mixed_precision_is_known", Run(yaml=yaml("MULTI_GPU", "mixed_precision: BF16"))),
    ("best_model_needs_matching_strategies", Run(f"{BEST} {EVAL} --eval_steps 0.1 --save_steps 0.3")),
    ("best_model_needs_matching_strategies", Run(f"{BEST} {EVAL} --save_strategy best")),
    ("values_are_in_range", Run(f"{EVAL} --eval_steps 0")),  # logging_steps counts then
    ("a_run_has_steps", Run("--logging_steps 0 --logging_strategy no --save_steps 0 --save_strategy epoch")),
    ("single_engine_starts_one_process", Run(world=2, yaml=yaml("MULTI_CPU", "mpirun_config: {mpirun_hostfile: h}"))),
    ("gpu_ids_name_enough_gpus", Run(world=4, yaml=yaml("MULTI_GPU", "gpu_ids: '0,1'"))),  # on a CPU
    ("processes_have_a_gpu_each", Run(world=4, hardware=TWO_GPUS, yaml=yaml("MULTI_GPU", "num_machines: 2"))),
    ("worker_settings_need_workers", Run("--recipe fast --dataloader_num_workers 0", hardware=machine(A100))),
]


@pytest.mark.parametrize(("name", "run", "subject"), ALSO_FIRES, ids=lambda value: getattr(value, "argv", value))
def test_rule_fires_in_its_other_cases(name, run, subject, tmp_path, monkeypatch):
    found = list(BY_NAME[name](run.resolve(tmp_path, monkeypatch)))
    assert [problem for problem in found if subject in problem.subject]


@pytest.mark.parametrize(("name", "run"), LEGAL_AFTER_ALL, ids=lambda value: getattr(value, "argv", value))
def test_rule_does_not_refuse_what_trains(name, run, tmp_path, monkeypatch):
    assert not list(BY_NAME[name](run.resolve(tmp_path, monkeypatch)))


def test_a_message_names_where_the_value_came_from(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("load_in_4bit: true\n", encoding="utf-8")
    run = Run("--config run.yaml").resolve(tmp_path, monkeypatch)
    assert [problem.source for problem in check(run) if problem.subject == "load_in_4bit"] == ["run.yaml"]


# --- What is shipped is legal ----------------------------------------------------------------------------------------

SHIPPED = [file.name for file in sorted(shipped("standard.yaml").parent.glob("*.yaml"))]
MACHINES = {
    "one process on a CPU": (CPU, 1),
    "two processes on a CPU": (CPU, 2),
    "one A100": (machine(A100), 1),
    "two A100": (machine(A100, 2), 2),
    "eight A100": (machine(A100, 8), 8),
    "two T4": (machine(T4, 2), 2),
    "one H100": (machine(H100), 1),
    "eight H100": (machine(H100, 8), 8),
}


def errors(run) -> list[str]:
    return [str(problem) for problem in check(run) if problem.severity == "error"]


@pytest.mark.parametrize("place", MACHINES)
@pytest.mark.parametrize("file", [None, *SHIPPED])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_and_shipped_files_are_legal(recipe, file, place):
    hardware, world = MACHINES[place]
    if file == "single.yaml":
        world = 1  # which is what it starts
    config = str(shipped(file)) if file else None
    run = resolve(["--recipe", recipe], world_size=world, hardware=hardware, accelerate_config=config, environment={})
    assert errors(run) == []


@settings(deadline=None, max_examples=150)
@given(
    recipe=st.sampled_from(sorted(RECIPES)),
    world=st.integers(1, 8),
    share=st.integers(1, 48),
    gpu=st.sampled_from([None, T4, A100, H100]),
    liger=st.booleans(),
)
def test_any_recipe_on_any_machine_is_legal(recipe, world, share, gpu, liger):
    hardware = machine(gpu, world, liger) if gpu else replace(CPU, liger=liger)
    argv = ["--recipe", recipe, "--global_batch_size", str(world * share)]
    run = resolve(argv, world_size=world, hardware=hardware, environment={})
    assert errors(run) == []
    assert run.batch.total == world * share
