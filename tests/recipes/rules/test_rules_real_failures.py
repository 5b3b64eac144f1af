"""The failures that rules prevent, in the real libraries: what happens without the rule, and that the rule fires."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import types
import warnings
from datetime import timedelta
from pathlib import Path

import pytest

from recipes.rules.check import RULES
from recipes.run import resolve
from recipes.run.engine import shipped
from recipes.run.hardware import Gpu, Hardware
from tests.support.running import fork_ranks

BY_NAME = {function.__name__: function for function in RULES}
TOKENS = {"input_ids": list(range(8)), "labels": list(range(8))}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its CPU Adam: needs g++")


def assert_fires(
    rule: str,
    settings: dict,
    *,
    world: int = 1,
    gpu: tuple[int, int] | None = None,
    config=None,
    environment: dict[str, str] | None = None,
) -> None:
    """The rule reports the run that just failed."""
    run = resolve(
        [],
        settings=settings,
        world_size=world,
        hardware=Hardware((Gpu("GPU", gpu, 16 << 30),)) if gpu else Hardware(),
        accelerate_config=str(config) if config else None,
        environment=environment or {},
    )
    assert list(BY_NAME[rule](run)), f"{rule} says nothing about {settings}"


@pytest.fixture(autouse=True)
def fresh_state():
    """accelerate keeps its state, and what it wrote into the environment, for the life of a process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    before = dict(os.environ)
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    os.environ.clear()
    os.environ.update(before)


def arguments(folder: Path, **changes):
    from transformers import TrainingArguments

    fixed = dict(
        output_dir=str(folder), use_cpu=True, report_to="none", max_steps=2, save_strategy="no", disable_tqdm=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TrainingArguments(**{**fixed, **changes})


def tiny_llama(**changes):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=32, **changes))


def train(folder: Path, *, callbacks=None, model=None, resume=None, evaluates=False, **changes):
    """A real Trainer that has trained a tiny model; the losses are equal where the settings mean the same."""
    from transformers import Trainer

    args = arguments(folder, **changes)
    rows = [TOKENS] * 16
    evaluated = rows[:4] if evaluates else None
    trainer = Trainer(model or tiny_llama(), args, train_dataset=rows, eval_dataset=evaluated, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def one_rank(monkeypatch):
    """A world of one rank, as a launcher announces it, for as long as the test runs."""
    import torch

    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", **address}.items():
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def gpu_rank(one_rank, monkeypatch):
    """A rank that accelerate takes for one with a GPU. All that follows is real, over gloo and on the CPU."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    monkeypatch.setattr(PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.MULTI_GPU))
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")


@pytest.fixture
def hide(monkeypatch):
    """Hides a package, from the libraries that remember what is installed too."""
    from transformers.utils import is_bitsandbytes_available, is_peft_available

    def hidden(package: str) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        forget()

    def forget() -> None:
        is_bitsandbytes_available.cache_clear()
        is_peft_available.cache_clear()

    yield hidden
    monkeypatch.undo()
    forget()


# --- TrainingArguments refuses, in every rank, after the libraries were imported -------------------------------------

REFUSED_BY_THE_CONSTRUCTOR = [
    ("one_precision", dict(fp16=True, bf16=True), ValueError, "At most one of fp16 and bf16"),
    ("tf32_needs_sm80", dict(tf32=True), ValueError, "requires Ampere"),
    ("steps_above_one_are_whole", dict(logging_steps=2.5), ValueError, "must be an integer"),
    ("schedule_needs_evaluation", dict(lr_scheduler_type="reduce_lr_on_plateau"), ValueError, "requires an eval"),
    ("worker_settings_need_workers", dict(dataloader_prefetch_factor=2), ValueError, "prefetch_factor can only be set"),
    ("values_are_in_range", dict(warmup_steps=-1), ValueError, "warmup_steps"),
    ("values_are_in_range", dict(torch_empty_cache_steps=0), ValueError, "bigger than 0"),
    ("nested_settings_are_known", dict(accelerator_config={"even_batch": True}), TypeError, "even_batch"),
    ("nested_settings_can_be_read", dict(accelerator_config="nowhere.json"), FileNotFoundError, "nowhere.json"),
    ("ddp_backend_needs_processes", dict(ddp_backend="gloo"), ValueError, "Default process group"),
    (
        "best_model_needs_matching_strategies",
        dict(load_best_model_at_end=True, save_strategy="steps"),
        ValueError,
        "requires the save and eval strategy to match",
    ),
    (
        "best_model_needs_matching_strategies",
        dict(load_best_model_at_end=True, save_strategy="steps", save_steps=7, eval_strategy="steps", eval_steps=3),
        ValueError,
        "round multiple",
    ),
]


@pytest.mark.parametrize(("rule", "settings", "error", "message"), REFUSED_BY_THE_CONSTRUCTOR)
def test_the_constructor_raises(rule, settings, error, message, tmp_path):
    with pytest.raises(error, match=message):
        arguments(tmp_path, **settings)
    assert_fires(rule, {"recipe": "baseline", **settings})


# --- The constructor takes it, training fails ------------------------------------------------------------------------

FAILS_IN_TRAINING = [
    ("worker_settings_need_workers", dict(dataloader_persistent_workers=True), ValueError, "persistent_workers option"),
    (
        "worker_settings_need_workers",
        dict(dataloader_multiprocessing_context="spawn"),
        ValueError,
        "multi-process loading",
    ),
    ("values_are_in_range", dict(gradient_accumulation_steps=0), ZeroDivisionError, "zero"),
    ("values_are_in_range", dict(seed=-1), Exception, "(?i)seed"),
    ("values_are_in_range", dict(adam_beta1=1.0), ValueError, "Invalid beta"),
    ("values_are_in_range", dict(learning_rate=-1.0), ValueError, "Invalid learning rate"),
    ("values_are_in_range", dict(dataloader_num_workers=-1), ValueError, "non-negative"),
    ("values_are_in_range", dict(log_level="loud"), KeyError, "loud"),
    (
        "nested_settings_are_known",
        dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_rentrant": False}),
        ValueError,
        "use_rentrant",
    ),
    (
        "accumulation_is_said_once",
        dict(gradient_accumulation_steps=2, accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 2}}),
        ValueError,
        "num_steps",
    ),
    ("saving_the_best_needs_evaluation", dict(save_strategy="best"), ValueError, "metric_for_best_model"),
    ("reports_go_somewhere", dict(report_to="tensorbord"), ValueError, "is not supported"),
    ("reports_go_somewhere", dict(report_to="clearml"), RuntimeError, "to be installed"),
    ("optimizer_is_installed", dict(optim="schedule_free_adamw"), ImportError, "schedulefree"),
    ("optimizer_is_installed", dict(optim="lomo"), ImportError, "lomo"),
    ("liger_is_installed", dict(use_liger_kernel=True), ImportError, "liger"),
    ("optimizer_arguments_are_read", dict(optim_args="rank"), ValueError, "not enough values to unpack"),
    ("least_rate_is_named_once", dict(lr_scheduler_type="cosine_with_min_lr"), ValueError, "One of min_lr or"),
    ("least_rate_is_named_once", dict(lr_scheduler_type="cosine_warmup_with_min_lr"), ValueError, "One of min_lr or"),
    (
        "least_rate_is_named_once",
        dict(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 0.0, "min_lr_rate": 0.1}),
        ValueError,
        "Only one of min_lr or",
    ),
    ("schedule_settings_are_its_own", dict(lr_scheduler_type="warmup_stable_decay"), TypeError, "num_decay_steps"),
    (
        "schedule_settings_are_its_own",
        dict(lr_scheduler_type="linear", lr_scheduler_kwargs={"num_cycles": 2}),
        TypeError,
        "unexpected keyword argument 'num_cycles'",
    ),
    ("evaluating_needs_data", dict(eval_on_start=True), ValueError, "evaluation requires an eval_dataset"),
    ("output_has_a_folder", dict(output_dir=""), FileNotFoundError, "No such file or directory: ''"),
    ("compile_backend_is_known", dict(torch_compile_backend="foo"), ValueError, "not a valid DynamoBackend"),
    (
        "nested_settings_can_be_read",
        dict(lr_scheduler_kwargs="nowhere.json"),
        TypeError,
        "must be a mapping, not str",
    ),
    (
        "nested_settings_can_be_read",
        dict(gradient_checkpointing=True, gradient_checkpointing_kwargs="nowhere.json"),
        ValueError,
        "dictionary update sequence",
    ),
    (
        "fsdp_argument_needs_a_distributed_launch",
        dict(fsdp="full_shard"),
        ValueError,
        "fsdp only works in distributed training",
    ),
]


@pytest.mark.parametrize(("rule", "settings", "error", "message"), FAILS_IN_TRAINING)
def test_training_fails(rule, settings, error, message, tmp_path):
    with pytest.raises(error, match=message):
        train(tmp_path, **settings)
    assert_fires(rule, {"recipe": "baseline", **settings})


def test_early_stopping_without_evaluation_is_an_assertion_error(tmp_path):
    from transformers import EarlyStoppingCallback

    with pytest.raises(AssertionError, match="EarlyStoppingCallback requires"):
        train(tmp_path, callbacks=[EarlyStoppingCallback(3)])
    assert_fires("early_stopping_needs_evaluation", {"early_stopping_patience": 3})


@pytest.mark.parametrize("needed", [dict(save_strategy="best"), dict(load_best_model_at_end=True)])
def test_a_metric_that_nobody_reports_fails_after_the_first_evaluation(needed, tmp_path):
    evaluation = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    settings = {**evaluation, **needed, "metric_for_best_model": "foo"}
    with pytest.raises(KeyError, match="not found in the evaluation metrics"):
        train(tmp_path, evaluates=True, **settings)
    assert_fires("best_metric_is_reported", settings)


def test_metrics_batch_by_batch_are_not_what_our_accuracy_computes(tmp_path):
    from transformers import Trainer

    from launch.training.data import compute_accuracy

    with pytest.raises(ValueError, match="must take a `compute_result` boolean argument"):
        Trainer(tiny_llama(), arguments(tmp_path, batch_eval_metrics=True), compute_metrics=compute_accuracy)
    settings = {"batch_eval_metrics": True, "task": "sequence_classification"}
    assert_fires("accuracy_is_computed_at_the_end", settings)


@pytest.fixture
def galore(monkeypatch):
    """The optimizers of galore_torch are stand-ins: what is asked of the arguments is Trainer's own decision."""
    import torch

    module = types.ModuleType("galore_torch")
    for name in ("GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit"):
        setattr(module, name, torch.optim.AdamW)
    monkeypatch.setitem(sys.modules, "galore_torch", module)
    monkeypatch.setattr("transformers.trainer_optimizer.is_galore_torch_available", lambda: True)


LAYERWISE = {"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"}


def test_galore_wants_to_know_its_modules(galore, tmp_path):
    with pytest.raises(ValueError, match="You need to define `optim_target_modules`"):
        train(tmp_path, optim="galore_adamw")
    assert_fires("target_modules_are_named", {"optim": "galore_adamw"})


def test_a_layerwise_optimizer_does_not_accumulate(galore, tmp_path):
    settings = {**LAYERWISE, "gradient_accumulation_steps": 2}
    with pytest.raises(ValueError, match="does not support gradient accumulation"):
        train(tmp_path, **settings)
    assert_fires("layerwise_optimizers_work_alone", settings)


def test_a_layerwise_optimizer_does_not_work_with_ddp(galore, one_rank, tmp_path):
    with pytest.raises(NotImplementedError, match="does not support DDP"):
        train(tmp_path, **LAYERWISE)
    assert_fires("layerwise_optimizers_work_alone", LAYERWISE, world=2)


FAILS_WITH_SHARDS = [
    (
        "fsdp_checkpoints_activations_once",
        dict(gradient_checkpointing=True, fsdp_config={"activation_checkpointing": True}),
        "can't both be set to True",
    ),
    (
        "weights_alone_cannot_find_the_best",
        dict(save_only_model=True, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch"),
        "FSDP can't be used with `save_only_model`",
    ),
    (
        "sharded_checkpoints_hold_the_optimizer",
        dict(save_only_model=True, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"}),
        "not compatible with FSDP state dict type",
    ),
]


@pytest.mark.parametrize(("rule", "settings", "message"), FAILS_WITH_SHARDS)
def test_fsdp_fails(rule, settings, message, gpu_rank, tmp_path):
    settings = {"fsdp": "full_shard", **settings}
    with pytest.raises(ValueError, match=message):
        train(tmp_path, evaluates=True, use_cpu=False, **settings)
    assert_fires(rule, settings, world=2, gpu=(8, 0))


def test_resuming_from_nothing_fails_after_everything_was_loaded(tmp_path):
    with pytest.raises(Exception, match="checkpoint"):
        train(tmp_path, resume=str(tmp_path / "checkpoint-9"))
    assert_fires("resume_starts_from_something", {"resume_from_checkpoint": str(tmp_path / "checkpoint-9")})


def test_weights_in_four_bits_cannot_be_trained_without_adapters(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantised = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=quantised, device_map={"": "cpu"})
    with pytest.raises(ValueError, match="purely quantized"):
        train(tmp_path, model=model)
    assert_fires("four_bits_need_adapters", {"load_in_4bit": True})


def test_four_bits_need_bitsandbytes(tiny_model, hide):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantised = BitsAndBytesConfig(load_in_4bit=True)
    hide("bitsandbytes")
    with pytest.raises(ImportError, match="4-bit quantization requires bitsandbytes"):
        AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=quantised, device_map={"": "cpu"})
    assert_fires("quantised_loading_is_installed", {"load_in_4bit": True, "use_peft": True})


def test_adapters_need_peft(hide):
    hide("peft")
    with pytest.raises(ValueError, match="PEFT is not installed"):
        tiny_llama().add_adapter({})
    assert_fires("quantised_loading_is_installed", {"use_peft": True})


def test_fp16_gradients_cannot_be_unscaled():
    import torch

    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer, scaler = torch.optim.SGD([weight], 0.1), torch.amp.GradScaler("cpu")
    scaler.scale((weight * 2).sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    assert_fires("fp16_weights_cannot_be_unscaled", {"dtype": "float16", "fp16": True}, gpu=(7, 5))


def test_small_updates_of_bf16_weights_are_lost():
    import torch

    kept = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.ones(1, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.0)
        for _ in range(10):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        kept[dtype] = weight.item() != 1.0
    assert kept == {torch.float32: True, torch.bfloat16: False}
    assert_fires("sixteen_bit_weights_lose_small_updates", {"dtype": "bfloat16"})


# --- Nothing fails, and something else happens -----------------------------------------------------------------------


def test_a_save_total_limit_of_zero_keeps_every_checkpoint(tmp_path):
    train(tmp_path, save_total_limit=0, save_strategy="steps", save_steps=1, max_steps=3)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3
    assert_fires("values_are_in_range", {"save_total_limit": 0})


def test_saving_the_best_without_evaluation_saves_nothing(tmp_path):
    train(tmp_path, save_strategy="best", metric_for_best_model="loss", load_best_model_at_end=True)
    assert not list(tmp_path.glob("checkpoint-*"))
    assert_fires("saving_the_best_needs_evaluation", {"save_strategy": "best", "metric_for_best_model": "loss"})
    assert_fires("best_model_needs_matching_strategies", {"save_strategy": "best", "load_best_model_at_end": True})


def test_fp16_on_a_cpu_trains_in_fp32(tmp_path):
    losses = [train(tmp_path, fp16=fp16).state.log_history[-1]["train_loss"] for fp16 in (False, True)]
    assert losses[0] == losses[1]
    assert_fires("fp16_needs_a_gpu", {"fp16": True})


def test_zero_max_steps_train_one_step_of_several_epochs(tmp_path):
    assert train(tmp_path, max_steps=0, num_train_epochs=3).state.global_step == 1
    assert_fires("values_are_in_range", {"max_steps": 0})


def test_zero_epochs_train_nothing(tmp_path):
    assert train(tmp_path, max_steps=-1, num_train_epochs=0).state.global_step == 0
    assert_fires("a_run_has_steps", {"num_train_epochs": 0.0, "max_steps": -1})


def test_a_warmup_of_one_point_zero_is_one_step(tmp_path):
    assert arguments(tmp_path, warmup_steps=1.0).get_warmup_steps(100) == 1
    assert arguments(tmp_path, warmup_steps=0.5).get_warmup_steps(100) == 50
    assert_fires("one_warmup_step_is_one_step", {"warmup_steps": 1.0})


def test_a_compile_backend_compiles_what_torch_compile_switched_off(tmp_path):
    settings = dict(torch_compile=False, torch_compile_backend="eager")
    assert arguments(tmp_path, **settings).torch_compile
    assert_fires("compile_settings_compile", settings)


def test_weights_alone_leave_no_optimizer_to_resume(tmp_path):
    train(tmp_path, save_only_model=True, save_strategy="steps", save_steps=2)
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()
    assert not (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    assert_fires("weights_alone_do_not_resume", {"save_only_model": True})


def test_unknown_fsdp_keys_pass_the_constructor(tmp_path):
    settings = dict(fsdp="full_shard", fsdp_config={"fsdp_verion": 2})
    assert "verion" in arguments(tmp_path, **settings).fsdp_config
    assert_fires("nested_settings_are_known", settings)


def test_max_steps_train_a_part_of_the_epochs(tmp_path):
    settings = dict(max_steps=2, num_train_epochs=5.0)
    assert train(tmp_path, **settings).state.epoch == 1
    assert_fires("max_steps_wins_over_epochs", settings)


def test_do_eval_alone_evaluates_nothing(tmp_path):
    history = train(tmp_path, evaluates=True, do_eval=True).state.log_history
    assert not [entry for entry in history if "eval_loss" in entry]
    assert_fires("evaluating_needs_data", {"do_eval": True})


def test_a_batch_size_that_is_searched_changes_the_global_batch(tmp_path):
    model, rows = tiny_llama(), []
    forward = model.forward

    def with_little_memory(input_ids, **inputs):
        if len(input_ids) > 1:
            raise RuntimeError("CUDA out of memory.")
        rows.append(len(input_ids))
        return forward(input_ids=input_ids, **inputs)

    model.forward = with_little_memory
    settings = dict(auto_find_batch_size=True, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert (train(tmp_path, model=model, **settings).state.global_step, sum(rows)) == (2, 2 * 2)  # not 2 * 4
    assert_fires("batch_size_is_not_searched", settings)


def test_split_batches_divide_the_global_batch_by_the_processes():
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    seen = {}
    for split in (False, True):
        loader = DataLoader(range(16), batch_size=4)
        mine = prepare_data_loader(loader, num_processes=2, process_index=0, split_batches=split, put_on_device=False)
        seen[split] = len(next(iter(mine)))
    assert seen == {False: 4, True: 2}
    assert_fires("batches_are_not_split", {"accelerator_config": {"split_batches": True}}, world=2)


def test_ddp_settings_wrap_nothing_in_one_process(tmp_path):
    trainer = train(tmp_path, ddp_bucket_cap_mb=1)
    assert type(trainer.model_wrapped) is type(trainer.model)
    assert_fires("ddp_settings_need_ddp", {"recipe": "baseline", "ddp_bucket_cap_mb": 1})


def timeout_of_the_world() -> timedelta:
    import torch

    return torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout


def test_with_use_cpu_the_world_has_the_timeout_of_torch(one_rank, tmp_path):
    arguments(tmp_path, ddp_timeout=77)
    assert timeout_of_the_world() == timedelta(minutes=30)
    assert_fires("ddp_timeout_is_not_for_cpus", {"ddp_timeout": 77})


def test_nccl_timeout_changes_no_timeout(gpu_rank, tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_TIMEOUT", "7")
    arguments(tmp_path, use_cpu=False, ddp_timeout=77)
    assert timeout_of_the_world() == timedelta(seconds=77)
    assert_fires("nccl_timeout_is_an_argument", {}, environment={"NCCL_TIMEOUT": "7"})


EXACT = dict(logging_steps=1, max_steps=3, save_strategy="steps", save_steps=1)


def train_with_dropout(folder: Path, **settings) -> list[float]:
    """The losses of a run that a resume repeats exactly, as long as the random state is the same."""
    return losses(train(folder, model=tiny_llama(attention_dropout=0.5), **{**EXACT, **settings}))


def test_persistent_workers_change_what_follows_a_resume(tmp_path):
    same = {}
    for persistent in (False, True):
        settings = dict(dataloader_num_workers=1, dataloader_persistent_workers=persistent)
        whole = train_with_dropout(tmp_path / f"{persistent}", **settings)
        checkpoint = str(tmp_path / f"{persistent}" / "checkpoint-2")  # the end of an epoch
        same[persistent] = train_with_dropout(tmp_path / "resumed", resume=checkpoint, **settings) == whole
    assert same == {False: True, True: False}
    assert_fires("persistent_workers_change_a_resume", settings)


def test_a_checkpoint_on_a_signal_is_from_the_middle_of_a_step(tmp_path):
    """Its random state is from after the forward pass, its weights are from before the update."""
    from transformers import Trainer, TrainerCallback

    class Signal(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            manager.is_checkpoint_requested = state.global_step == 1  # as the handler of SIGTERM does

    steps = dict(gradient_accumulation_steps=2, per_device_train_batch_size=4)
    whole = train_with_dropout(tmp_path / "whole", **steps)
    on_signals = {**EXACT, **steps, "save_strategy": "no", "enable_jit_checkpoint": True}
    args = arguments(tmp_path / "stopped", **on_signals)
    trainer = Trainer(tiny_llama(attention_dropout=0.5), args, train_dataset=[TOKENS] * 16, callbacks=[Signal()])
    manager = next(each.jit_manager for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager"))
    trainer.train()
    same = {}
    for run in ("whole", "stopped"):
        checkpoint = str(tmp_path / run / "checkpoint-1")
        same[run] = train_with_dropout(tmp_path / "resumed", resume=checkpoint, **steps) == whole
    assert same == {"whole": True, "stopped": False}
    assert_fires("signal_checkpoints_may_be_incomplete", {"enable_jit_checkpoint": True})


@pytest.fixture
def yaml(tmp_path):
    def write(type_: str, *lines: str, processes: int | None = 2, environment: str = "LOCAL_MACHINE") -> Path:
        file = tmp_path / "accelerate.yaml"
        head = [f"compute_environment: {environment}", f"distributed_type: {type_}"]
        head += [f"num_processes: {processes}"] if processes else []
        file.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")
        return file

    return write


def test_mixed_precision_in_the_yaml_turns_bf16_on_behind_the_arguments(yaml, tmp_path, monkeypatch):
    file = yaml("'NO'", "mixed_precision: bf16", processes=1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched(file)["ACCELERATE_MIXED_PRECISION"])
    trainer = train(tmp_path)
    assert (trainer.args.bf16, trainer.accelerator.mixed_precision) == (False, "bf16")
    assert_fires("yaml_precision_agrees_with_arguments", {"bf16": False}, config=file)


def test_dynamo_in_the_yaml_compiles_behind_the_arguments(yaml, tmp_path, monkeypatch):
    file = yaml("'NO'", "dynamo_config:", "  dynamo_backend: eager", processes=1)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", launched(file)["ACCELERATE_DYNAMO_BACKEND"])
    trainer = train(tmp_path)
    assert not trainer.args.torch_compile
    assert trainer.accelerator.state.dynamo_plugin.backend.value == "EAGER"
    assert_fires("yaml_compiles_what_the_arguments_do_not", {}, config=file)


# --- What accelerate's launcher makes of a YAML ----------------------------------------------------------------------


def launched(file: Path, *flags: str) -> dict[str, str]:
    """What `accelerate launch --config_file FILE` would put into the processes' environment."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    parsed = launch_command_parser().parse_args(["--config_file", str(file), *flags, "train.py"])
    args, defaults, _ = _validate_launch_command(parsed)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return launch.prepare_deepspeed_cmd_env(args)[1]
    if args.multi_gpu or args.use_fsdp:
        return launch.prepare_multi_gpu_env(args)
    return launch.prepare_simple_launcher_cmd_env(args)[1]


REFUSED_BY_THE_LAUNCHER = [
    ("mixed_precision_is_known", "MULTI_GPU", ["mixed_precision: no"], AttributeError, "'bool' object"),
    ("mixed_precision_is_known", "MULTI_GPU", ["mixed_precision: bfloat16"], ValueError, "Unknown mixed_precision"),
    ("yaml_keys_are_known", "MULTI_GPU", ["static_graph: true"], ValueError, "unknown keys"),
    ("distributed_type_is_known", "multi_gpu", [], ValueError, "not a valid DistributedType"),
    ("top_level_values_have_the_right_type", "MULTI_GPU", ["gpu_ids: 0"], AttributeError, "'int' object"),
    ("top_level_values_have_the_right_type", "MULTI_GPU", ["num_machines: '1'"], TypeError, "not supported between"),
    ("gpu_ids_name_enough_gpus", "MULTI_GPU", ["gpu_ids: '0'"], ValueError, "Less than two GPU ids"),
    (
        "efficient_loading_needs_synchronisation",
        "FSDP",
        ["fsdp_config:", "  fsdp_sync_module_states: false"],
        ValueError,
        "fsdp_sync_module_states",
    ),
    (
        "nested_yaml_values_are_legal",
        "MULTI_GPU",
        ["dynamo_config:", "  dynamo_backend: inductr"],
        ValueError,
        "Unknown dynamo backend",
    ),
    ("ports_exist", "MULTI_GPU", ["main_process_port: 99999"], OverflowError, "port must be 0-65535"),
]


@pytest.mark.parametrize(("rule", "type_", "lines", "error", "message"), REFUSED_BY_THE_LAUNCHER)
def test_the_launcher_raises(rule, type_, lines, error, message, yaml):
    file = yaml(type_, *lines)
    with pytest.raises(error, match=message):
        launched(file)
    assert_fires(rule, {}, config=file)


def test_another_compute_environment_is_read_as_sagemakers(yaml):
    file = yaml("MULTI_GPU", environment="local_machine")
    with pytest.raises(ValueError, match=r"unknown keys \(\['num_processes'"):
        launched(file)
    assert_fires("compute_environment_is_known", {}, config=file)


SECTIONS_OF_ANOTHER_TYPE = [
    ["fsdp_config:", "  fsdp_version: 2"],
    ["deepspeed_config:", "  zero_stage: 3"],
    ["megatron_lm_config:", "  megatron_lm_tp_degree: 2"],
]


@pytest.mark.parametrize("section", SECTIONS_OF_ANOTHER_TYPE, ids=lambda lines: lines[0])
def test_a_section_of_another_type_changes_nothing(section, yaml):
    plain = launched(yaml("MULTI_GPU"))
    file = yaml("MULTI_GPU", *section)
    assert launched(file) == plain
    assert_fires("sections_fit_the_type", {}, config=file)


def run_launch_command(file: Path, *flags: str) -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser

    launch_command(launch_command_parser().parse_args(["--config_file", str(file), *flags, "train.py"]))


def test_a_section_that_is_a_file_name_breaks_the_launcher(yaml):
    file = yaml("DEEPSPEED", "deepspeed_config: ds.json")
    with pytest.raises(AttributeError, match="keys"):
        run_launch_command(file)
    assert_fires("sections_hold_settings", {}, config=file)


def test_the_launcher_wants_num_processes(yaml):
    file = yaml("MULTI_GPU", processes=None)
    with pytest.raises(ValueError, match="manually pass in `--num_processes`"):
        launched(file)
    launched(file, "--num_processes", "2")
    assert_fires("num_processes_is_given", {}, config=file)


@pytest.mark.parametrize("type_", ["'NO'", "MULTI_CPU"])
def test_no_and_multi_cpu_start_one_process(type_, yaml, monkeypatch):
    from accelerate.commands import launch

    started = []
    monkeypatch.setattr(launch, "simple_launcher", started.append)
    file = yaml(type_)
    run_launch_command(file)
    assert [args.num_processes for args in started] == [2]  # one command, though two were asked for
    assert_fires("single_engine_starts_one_process", {}, world=2, config=file)


def test_a_misspelt_zero_stage_trains_with_stage_two(yaml, monkeypatch):
    from accelerate.utils import DeepSpeedPlugin

    file = yaml("DEEPSPEED", "deepspeed_config:", "  zero_stge: 3")
    environment = launched(file)
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE" not in environment
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", raising=False)
    assert DeepSpeedPlugin().zero_stage == 2
    assert_fires("nested_yaml_keys_are_known", {}, config=file)


def test_a_misspelt_fsdp_version_trains_with_fsdp1(yaml):
    file = yaml("FSDP", "fsdp_config:", "  fsdp_verion: 2")
    assert launched(file)["FSDP_VERSION"] == "1"
    assert_fires("nested_yaml_keys_are_known", {}, config=file)
    assert_fires("fsdp_version_two_is_chosen", {}, config=file)


def test_an_nvme_path_never_reaches_the_processes(yaml):
    path = "  offload_optimizer_nvme_path: /local_nvme"
    file = yaml("DEEPSPEED", "deepspeed_config:", "  zero_stage: 3", "  offload_optimizer_device: nvme", path)
    environment = launched(file)
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "nvme"
    assert "/local_nvme" not in environment.values()
    assert_fires("nvme_paths_reach_the_workers", {}, config=file)


def test_a_deepspeed_launch_exports_no_dynamo(yaml):
    file = yaml("DEEPSPEED", "dynamo_config:", "  dynamo_backend: inductor", "deepspeed_config:", "  zero_stage: 2")
    assert not [name for name in launched(file) if "DYNAMO" in name]
    assert_fires("yaml_compiles_what_the_arguments_do_not", {}, config=file)


def torchrun_arguments(file: Path):
    """What `accelerate launch --config_file FILE` would start torchrun with."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(file), "train.py"]))
    prepare_multi_gpu_env(args)
    return args


def test_three_processes_on_two_machines_start_one_each(yaml):
    address = ["main_process_ip: 127.0.0.1", "main_process_port: 29876"]
    file = yaml("MULTI_GPU", "num_machines: 2", *address, processes=3)
    args = torchrun_arguments(file)
    assert (args.nnodes, args.nproc_per_node) == ("2", "1")
    assert_fires("machines_share_the_processes", {"global_batch_size": 12}, world=3, config=file)


def test_machines_without_an_address_look_for_one_named_none(yaml):
    file = yaml("MULTI_GPU", "num_machines: 2", "machine_rank: 1")
    assert torchrun_arguments(file).rdzv_endpoint == "None:29500"
    assert_fires("machines_find_each_other", {}, world=2, config=file)


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "adamw_mode"), [("SGD", False), ("Adam", False), ("AdamW", True), ("bnb8bit", False)]
)
def test_offload_replaces_the_optimizer_silently(optimizer, adamw_mode, monkeypatch):
    """Accelerate's own decision; only the class that would be compiled from C++ is a stand-in."""
    adam = pytest.importorskip("deepspeed.ops.adam")
    import torch
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    monkeypatch.setattr(adam, "DeepSpeedCPUAdam", lambda groups, **options: ("DeepSpeedCPUAdam", options["adamw_mode"]))
    weight = [torch.nn.Parameter(torch.ones(1))]
    if optimizer == "bnb8bit":
        chosen = pytest.importorskip("bitsandbytes").optim.AdamW(weight, lr=0.1, optim_bits=8)
    else:
        chosen = getattr(torch.optim, optimizer)(weight, lr=0.1)
    assert map_pytorch_optim_to_deepspeed(chosen) == ("DeepSpeedCPUAdam", adamw_mode)
    if optimizer in ("SGD", "bnb8bit"):
        named = {"SGD": "sgd", "bnb8bit": "adamw_bnb_8bit"}[optimizer]
        assert_fires("offload_needs_adamw", {"recipe": "memory", "optim": named})


@pytest.mark.parametrize(
    "content",
    [
        dict(train_micro_batch_size_per_gpu=3),
        dict(gradient_accumulation_steps=3),
        dict(train_batch_size=99),
        dict(gradient_clipping=0.3),
        dict(bf16={"enabled": True}),
        dict(optimizer={"params": {"lr": 0.3}}),
    ],
    ids=lambda content: next(iter(content)),
)
def test_a_deepspeed_json_that_contradicts_the_arguments_is_refused(content, tmp_path):
    pytest.importorskip("deepspeed")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = {"zero_optimization": {"stage": 2}, **content}
    real = HfTrainerDeepSpeedConfig(config)
    args = arguments(tmp_path)
    real.trainer_config_process(args)
    with pytest.raises(ValueError, match="mismatch TrainingArguments"):
        real.trainer_config_finalize(args, None, 10)
    assert_fires("deepspeed_json_agrees_with_arguments", {"recipe": "baseline", "deepspeed": config})


def test_deepspeed_is_configured_in_the_yaml_or_in_the_json(yaml, tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    from accelerate.utils import DeepSpeedPlugin

    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8")
    json_file = tmp_path / "ds.json"
    file = yaml("DEEPSPEED", "deepspeed_config:", f"  deepspeed_config_file: {json_file}", "  zero_stage: 2")
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", launched(file)["ACCELERATE_CONFIG_DS_FIELDS"])
    with pytest.raises(ValueError, match="will be ignored"):
        DeepSpeedPlugin(hf_ds_config=str(json_file))
    assert_fires("deepspeed_is_configured_once", {}, config=file)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, ValueError, "Expected a string path to an existing deepspeed config"),
        ("{bad", ValueError, "Expecting property name"),
        ("[1]", AttributeError, "'list' object"),
        ("{}", ValueError, "Please specify the ZeRO optimization config"),
    ],
)
def test_a_deepspeed_json_that_cannot_be_used_fails_in_the_workers(content, error, message, yaml, tmp_path):
    pytest.importorskip("deepspeed")
    from accelerate.utils import DeepSpeedPlugin

    json_file = tmp_path / "ds.json"
    if content is not None:
        json_file.write_text(content, encoding="utf-8")
    file = yaml("DEEPSPEED", "deepspeed_config:", f"  deepspeed_config_file: {json_file}")
    launched(file)
    with pytest.raises(error, match=message):
        DeepSpeedPlugin(hf_ds_config=str(json_file))
    assert_fires("deepspeed_file_can_be_read", {}, config=file)


@pytest.mark.parametrize("line", ["gradient_accumulation_steps: 3", "gradient_clipping: 0.5"])
def test_a_yaml_that_contradicts_the_batch_fails_in_the_workers(line, yaml, tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    file = yaml("DEEPSPEED", "deepspeed_config:", "  zero_stage: 2", f"  {line}")
    for name, value in launched(file).items():
        monkeypatch.setenv(name, value)
    args = arguments(tmp_path)
    real = HfTrainerDeepSpeedConfig(DeepSpeedPlugin().hf_ds_config.config)
    real.trainer_config_process(args)
    with pytest.raises(ValueError, match="mismatch TrainingArguments"):
        real.trainer_config_finalize(args, None, 10)
    assert_fires("yaml_agrees_with_the_batch", {}, config=file)


ZERO_2 = {"zero_optimization": {"stage": 2}}


def test_two_precisions_in_the_json_are_refused_by_deepspeed():
    deepspeed = pytest.importorskip("deepspeed")
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    with pytest.raises(AssertionError, match="cannot be simultaneously enabled"):
        deepspeed.DeepSpeedConfig({"train_batch_size": 1, **both})
    assert_fires("deepspeed_json_has_one_precision", {"deepspeed": {**ZERO_2, **both}})


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        ("fsdp_and_deepspeed_exclude_each_other", dict(fsdp="full_shard"), "together with --deepspeed"),
        (
            "weights_alone_cannot_find_the_best",
            dict(save_only_model=True, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch"),
            "DeepSpeed can't be used with `save_only_model`",
        ),
    ],
)
def test_trainer_refuses_beside_deepspeed(rule, settings, message, tmp_path):
    pytest.importorskip("deepspeed")
    with pytest.raises(ValueError, match=message):
        train(tmp_path, evaluates=True, deepspeed=dict(ZERO_2), **settings)
    assert_fires(rule, {"deepspeed": ZERO_2, **settings})


def test_deepspeed_that_is_not_installed_is_missed_in_the_workers(hide, one_rank, tmp_path, monkeypatch):
    hide("deepspeed")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ImportError, match="DeepSpeed is not available"):
        arguments(tmp_path, use_cpu=False)
    assert_fires("deepspeed_is_installed", {"recipe": "memory"})


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("adagrad", "unexpected keyword argument 'adamw_mode'"),
        ("lion_32bit", "unexpected keyword argument 'adamw_mode'"),
        pytest.param("adafactor", "incompatible function arguments", marks=needs_compiler),
    ],
)
def test_offload_fails_with_other_optimizers(optimizer, message, tmp_path):
    pytest.importorskip("deepspeed")
    import torch
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed
    from transformers import Trainer

    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    chosen, options = Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim=optimizer))
    with pytest.raises(TypeError, match=message):
        map_pytorch_optim_to_deepspeed(chosen([weight], **options)).step()
    assert_fires("offload_needs_adamw", {"recipe": "memory", "optim": optimizer})


def test_a_zero_stage_that_does_not_exist_is_refused_by_deepspeed():
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    with pytest.raises(ValueError, match="Input should be 0, 1, 2"):
        zero.DeepSpeedZeroConfig(stage=4)
    assert_fires("zero_stages_exist", {"deepspeed": {"zero_optimization": {"stage": 4}}})


def test_a_typo_inside_zero_optimization_is_refused_by_deepspeed():
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    with pytest.raises(ValueError, match="stge"):
        zero.DeepSpeedZeroConfig(stge=2)
    assert_fires("deepspeed_json_keys_are_known", {"deepspeed": {"zero_optimization": {"stge": 2}}})


# --- DeepSpeed trains, in a process of its own: it keeps its groups for the life of a process ------------------------

AUTO = dict.fromkeys(["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"], "auto")


def zero(stage: int, *, sections: dict | None = None, **zero_optimization) -> dict:
    return {**AUTO, "zero_optimization": {"stage": stage, **zero_optimization}, **(sections or {})}


def saved(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "checkpoint-2").iterdir())


def in_shards(trainer) -> int:
    return sum(hasattr(weight, "ds_tensor") for weight in trainer.model.parameters())


def zero_report(folder: Path) -> dict:
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 1}}
    chosen = zero(2, sections={"optimizer": optimizer, "scheduler": scheduler})
    engine = train(folder / "chosen", deepspeed=chosen, optim="sgd", lr_scheduler_type="cosine").model_wrapped
    offload, saves = {"offload_param": {"device": "cpu"}}, dict(save_strategy="steps", save_steps=2)
    zero2 = train(folder / "zero2", deepspeed=zero(2, **offload))
    zero3 = train(folder / "zero3", deepspeed=zero(3, **offload), **saves)
    train(folder / "whole", deepspeed=zero(3, stage3_gather_16bit_weights_on_model_save=True), **saves)
    return {
        "optimizer": type(engine.optimizer.optimizer).__name__,
        "scheduler": type(engine.lr_scheduler).__name__,
        "in shards": {"zero2": in_shards(zero2), "zero3": in_shards(zero3)},
        "saved": saved(folder / "zero3"),
        "saved whole": saved(folder / "whole"),
    }


ZERO_SCRIPT = """
import json, sys
from pathlib import Path
from tests.recipes.rules.test_rules_real_failures import zero_report
report = zero_report(Path(sys.argv[1]))
(Path(sys.argv[1]) / "report.json").write_text(json.dumps(report))
"""


@pytest.fixture(scope="module")
def zero_trained(tmp_path_factory) -> dict:
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("zero")
    script = folder / "script.py"
    script.write_text(ZERO_SCRIPT, encoding="utf-8")
    output = run_ranks([str(script), str(folder)], 1, DS_ACCELERATOR="cpu")
    report = folder / "report.json"
    assert report.exists(), output
    return json.loads(report.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "trained", "settings"),
    [("optimizer", "AdamW", {"optim": "sgd"}), ("scheduler", "WarmupLR", {"lr_scheduler_type": "cosine"})],
)
def test_the_deepspeed_json_replaces_what_the_arguments_choose(section, trained, settings, zero_trained):
    assert zero_trained[section] == trained
    config = zero(2, sections={section: {"type": trained, "params": {}}})
    assert_fires("deepspeed_json_chooses_the_optimizer", {"deepspeed": config, **settings})


@pytest.mark.slow
def test_zero3_saves_no_weights_unless_it_is_told_to_gather_them(zero_trained):
    assert "model.safetensors" in zero_trained["saved whole"]
    assert "model.safetensors" not in zero_trained["saved"]
    assert_fires("zero3_saves_whole_weights", {"deepspeed": zero(3)})


@pytest.mark.slow
def test_zero2_leaves_parameters_alone_that_it_was_told_to_offload(zero_trained, yaml):
    in_shards = zero_trained["in shards"]
    assert in_shards["zero3"] and not in_shards["zero2"]
    file = yaml("DEEPSPEED", "deepspeed_config:", "  zero_stage: 2", "  offload_param_device: cpu")
    assert_fires("parameters_are_offloaded_by_stage_three", {}, config=file)


# --- Two ranks -------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys, tempfile, torch
from tests.recipes.rules.test_rules_real_failures import train
from pathlib import Path
settings = json.loads(sys.argv[1])
trainer = train(Path(tempfile.mkdtemp()), per_device_train_batch_size=2, **settings)
parts = [trainer.args.world_size, trainer.accelerator.distributed_type.value, type(trainer.model_wrapped).__name__]
sys.stdout.write(f"TRAINED {' '.join(map(str, parts))}\\n")  # in one piece: the other rank writes too
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""

STATIC = {"ddp_static_graph": True, "gradient_accumulation_steps": 2}
REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "ddp_find_unused_parameters": True,
}


def torchrun(folder: Path, settings: dict, processes: int = 2, **environment: str) -> str:
    script = folder / "ranks.py"
    script.write_text(SCRIPT, encoding="utf-8")
    return run_ranks([str(script), json.dumps(settings)], processes, **environment)


def run_ranks(words: list[str], processes: int, **environment: str) -> str:
    """What the ranks of a script with arguments print, errors included."""
    with tempfile.TemporaryFile() as log:
        fork_ranks(processes, {**os.environ, **environment}, words, log.fileno())
        log.seek(0)
        return log.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "settings", "processes", "message"),
    [
        ("static_graph_needs_accumulation_one", STATIC, 2, "expect_autograd_hooks_ INTERNAL ASSERT FAILED"),
        ("reentrant_checkpointing_needs_find_unused_off", REENTRANT, 1, "Expected to mark a variable ready only once"),
        ("nccl_needs_a_gpu", {"ddp_backend": "nccl"}, 1, "nccl is not available"),
    ],
)
def test_ranks_fail(rule, settings, processes, message, tmp_path):
    output = torchrun(tmp_path, settings, processes)
    assert message in output and "TRAINED" not in output
    assert_fires(rule, settings, world=processes)


@pytest.mark.slow
def test_static_graph_with_accumulation_works_in_one_process(tmp_path):
    assert torchrun(tmp_path, STATIC, 1).count("TRAINED 1 MULTI_CPU DistributedDataParallel") == 1
    run = resolve([], settings=STATIC, world_size=1, hardware=Hardware(), environment={})
    assert not list(BY_NAME["static_graph_needs_accumulation_one"](run))


@pytest.mark.slow
def test_static_graph_trains_when_every_micro_batch_is_reduced(tmp_path):
    settings = {**STATIC, "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    assert torchrun(tmp_path, settings).count("TRAINED 2 ") == 2
    run = resolve([], settings=settings, world_size=2, hardware=Hardware(), environment={})
    assert not list(BY_NAME["static_graph_needs_accumulation_one"](run))


@pytest.mark.slow
def test_two_ranks_without_use_cpu_train_two_models(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert torchrun(tmp_path, {"use_cpu": False}).count("TRAINED 1 ") == 2
    assert_fires("several_processes_on_a_cpu_need_use_cpu", {"use_cpu": False}, world=2)


@pytest.mark.slow
def test_fsdp_on_a_cpu_is_plain_ddp(tmp_path):
    output = torchrun(tmp_path, {}, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    assert output.count("TRAINED 2 MULTI_CPU DistributedDataParallel") == 2
    assert_fires("fsdp_needs_a_gpu", {}, world=2, config=shipped("fsdp2.yaml"))


@pytest.mark.slow
def test_bf16_compression_on_a_cpu_is_a_type_error(tmp_path):
    script = tmp_path / "hook.py"
    script.write_text(
        "import torch\n"
        "from accelerate import DistributedDataParallelKwargs, DDPCommunicationHookType, PartialState\n"
        "PartialState(cpu=True)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16).register_comm_hook(model)\n",
        encoding="utf-8",
    )
    assert "TypeError: BF16 all reduce communication hook required" in run_ranks([str(script)], 1)
    assert_fires("bf16_compression_needs_nccl", {"ddp_comm_hook": "bf16"}, world=2)
