"""Each row of the table: a run in which it fires, the nearest legal one, and the real failure."""

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from peft import LoraConfig, get_peft_model
from transformers import get_scheduler

from recipes import legal
from recipes.rules.check import check
from recipes.rules.facts import HELD_OUT
from tests.support.real_failures import arguments, assert_fires, losses, tiny_llama, train
from tests.support.runs import A100, BEST, CLASSIFY, DS, EVAL, MODEL, SGD, T4, Run, ds_json, machine, model, resolved

MIN_LR = "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs"
RECOMPUTES = "--gradient_checkpointing --gradient_checkpointing_kwargs"
EVEN = '--accelerator_config {"even_batches":false}'
PLATEAU = "--lr_scheduler_type reduce_lr_on_plateau --metric_for_best_model accuracy --lr_scheduler_kwargs"
SPLIT = '--accelerator_config {"split_batches":true}'
DISPATCHED = '--accelerator_config {"dispatch_batches":true}'
GATHERED = f"--eval_use_gather_object {EVAL}"
NUM_STEPS = '--accelerator_config {"gradient_accumulation_kwargs":{"num_steps":4}}'
STREAM = "--dataset_name d --dataset_streaming --max_steps 9"
WEIGHTED = "dataset_name: [{name: a, weight: 1}, {name: b, weight: 2}]"
POLYNOMIAL = f"{DS} --lr_scheduler_type polynomial"

# row -> flags on one process of a CPU, with which of them it fires, and with which it does not
FLAGS = {
    "batch_size_is_not_searched": ("", "--auto_find_batch_size", ""),
    "accumulation_is_said_once": ("", NUM_STEPS, "--gradient_accumulation_steps 4"),
    "compile_settings_compile": ("--torch_compile_mode default", "--torch_compile false", ""),
    "checkpointing_settings_are_a_mapping": (RECOMPUTES, "file.json", '{"use_reentrant":false}'),
    "saving_the_best_needs_evaluation": ("--save_strategy best --metric_for_best_model loss", "", EVAL),
    "early_stopping_needs_evaluation": (f"--early_stopping_patience 3 {BEST}", "", EVAL),
    "output_has_a_folder": ("--output_dir", "none", "some"),
    "resume_contradicts_fresh": ("--resume_from_checkpoint .", "--fresh", ""),
    "four_bits_need_adapters": ("--load_in_4bit", "", "--use_peft"),
    "adapters_need_trained_weights": ("--use_peft", "", "--model_name_or_path gpt2"),
    "classification_takes_rows_as_they_are": (CLASSIFY, "--packing", ""),
    "a_mixture_is_for_language_models": ("--task sequence_classification --dataset_name a", "b", ""),
    "a_stream_is_told_how_long": ("--dataset_name d --dataset_streaming", "", "--max_steps 9"),
    "a_stream_has_no_epochs": (f"{STREAM} {EVAL} --save_strategy", "epoch", "steps"),
    "a_stream_has_no_classes": (f"{CLASSIFY} --max_steps 9", "--dataset_streaming", ""),
    "the_best_model_needs_evaluation": (BEST, "", EVAL),
    "the_best_model_is_saved": (f"{BEST} --eval_strategy steps --save_strategy", "no", "best"),
    "a_training_trains": ("--do_train", "false", ""),
    "evaluating_needs_data": ("--eval_on_start", "", EVAL),
    "accuracy_is_computed_at_the_end": (CLASSIFY, "--batch_eval_metrics", ""),
    "labels_have_one_name": (f"{EVAL} --label_names", "foo", "labels"),
    "the_mode_fits_the_metric": (PLATEAU, '{"patience":1}', '{"mode":"max"}'),
    "greedy_has_room": ("--learning_rate 1e-4 --lr_scheduler_type greedy", "", '--lr_scheduler_kwargs {"min_lr":1e-6}'),
    "a_filtered_nan_stops_no_run": ("--logging_nan_inf_filter", "true", "false"),
    "only_the_demonstration_has_no_data": ("--model_name_or_path gpt2", "", "--dataset_name d"),
    "only_the_demonstration_has_no_model": ("--dataset_name d", "", "--model_name_or_path gpt2"),
    "learning_rates_are_usual": ("--model_name_or_path gpt2 --learning_rate", "2e-4", "2e-4 --use_peft"),
    "something_is_held_out": ("--model_name_or_path gpt2 --dataset_name d", "", EVAL),
    "sixteen_bit_weights_lose_small_updates": ("--dtype bfloat16", "", "--use_peft"),
    "compiling_needs_one_shape": ("--torch_compile", "--packing false", "--packing"),
    "do_predict_is_read": ("--do_predict", "", "false"),
    "label_smoothing_factor_is_read": (f"{CLASSIFY} --label_smoothing_factor 0.1", "--problem_type regression", ""),
}  # fmt: skip
CASES = {name: (Run(f"{flags} {bad}"), Run(f"{flags} {good}")) for name, (flags, bad, good) in FLAGS.items()}

# row -> the same as whole runs, where more than the flags decides
CASES |= {
    "batches_are_not_split": (Run(SPLIT, world=2), Run(SPLIT)),
    "batches_come_out_even": (Run(EVEN, world=2), Run(EVEN)),
    "batches_are_not_dispatched": (Run(DISPATCHED, world=2), Run(DISPATCHED)),
    "a_resume_repeats_the_shuffle": (
        Run('--accelerator_config {"use_seedable_sampler":false}'),
        Run('--accelerator_config {"use_seedable_sampler":true}')),
    "bf16_needs_sm80": (Run("--bf16", hardware=machine(T4)), Run("--bf16 --use_cpu", hardware=machine(T4))),
    "frozen_weights_need_16_bits": (
        Run("--use_peft --dtype float32 --model_name_or_path gpt2", hardware=machine(A100)),
        Run("--use_peft --model_name_or_path gpt2", hardware=machine(A100))),
    "tf32_needs_sm80": (Run("--tf32 true", hardware=machine(T4)), Run("--tf32 true", hardware=machine(A100))),
    "fp16_needs_a_gpu": (Run("--fp16"), Run("--fp16", hardware=machine(T4))),
    "fp16_weights_cannot_be_unscaled": (
        Run("--dtype float16", hardware=machine(T4)), Run("--dtype float16 --fp16")),  # which does nothing on a CPU
    "metrics_need_arrays": (
        Run(f"{CLASSIFY} {GATHERED}", yaml="standard.yaml"), Run(f"{CLASSIFY} {GATHERED}", yaml="single.yaml")),
    "every_backward_pass_is_a_step": (
        Run("--optim lomo"), Run("--optim lomo --global_batch_size 4 --per_device_train_batch_size 4")),
    "the_schedule_works_under_deepspeed": (
        Run(POLYNOMIAL, files=ds_json()), Run(POLYNOMIAL, files=ds_json(optimizer={"type": "Adam"}))),
    "weights_alone_cannot_find_the_best": (
        Run(f"--save_only_model {BEST} {EVAL}", yaml="memory.yaml"),
        Run(f"--save_only_model {BEST} {EVAL}", yaml="standard.yaml")),
    "classifier_adapters_have_one_type": (
        Run(f"--recipe memory_zero3 --use_peft {CLASSIFY}", yaml="memory_zero3.yaml"),
        Run(f"--recipe memory --use_peft {CLASSIFY}", yaml="memory.yaml")),
    "a_streamed_mixture_has_weights": (
        Run("--dataset_name a b --dataset_streaming --max_steps 9"),
        Run("--config c.yaml --dataset_streaming --max_steps 9", files={"c.yaml": WEIGHTED})),
    "optim_is_read": (
        Run(f"{DS} {SGD}", files=ds_json(optimizer={"type": "AdamW"})), Run(f"{DS} {SGD}", files=ds_json())),
    "lr_scheduler_type_is_read": (
        Run(f"{DS} --lr_scheduler_type cosine", files=ds_json(scheduler={"type": "WarmupLR"})),
        Run(f"{DS} --lr_scheduler_type cosine", files=ds_json())),
}  # fmt: skip

# settings, flags with which the run reads them, a value out of range, the nearest one in it
RANGES = [
    ("global_batch_size per_device_train_batch_size gradient_accumulation_steps", "", "0", "1"),
    ("save_total_limit dataset_num_proc ddp_timeout", "", "0", "1"),
    ("learning_rate weight_decay seed neftune_noise_alpha", "", "-1", "0"),
    ("eval_steps eval_delay", EVAL, "-1", "0"),
    ("eval_accumulation_steps per_device_eval_batch_size", EVAL, "0", "1"),
    ("early_stopping_patience", f"{EVAL} {BEST}", "0", "1"),
    ("lora_r lora_alpha", "--use_peft", "0", "1"),
    ("lora_dropout", "--use_peft", "1", "0"),
    ("max_steps", "", "0", "-1"),
    ("num_train_epochs logging_steps save_steps memory_limit", "--save_strategy steps --max_steps -1", "0", "0.1"),
    ("label_smoothing_factor", "", "1.1", "1"),
    ("dataloader_prefetch_factor", "--dataloader_num_workers 1", "0", "1"),
    ("max_length", "", "1", "2"),
    ("include_num_input_tokens_seen", "", "some", "all"),
]
CASES |= {
    f"{name}_is_in_range": (Run(f"{flags} --{name} {bad}"), Run(f"{flags} --{name} {good}"))
    for names, flags, bad, good in RANGES
    for name in names.split()
}

# settings, how they are written, what makes the run read them, and what keeps it from reading them
CLASSIFIES = "--dataset_name d --task sequence_classification"
UNREAD = [
    ("lora_r lora_alpha lora_dropout lora_target_modules use_dora", "1", "--use_peft", ""),
    ("packing_strategy", "wrapped", "--packing", "--packing false"),
    ("bnb_4bit_quant_type", "fp4", "--load_in_4bit", ""),
    ("use_bnb_nested_quant", "true", "--load_in_4bit", ""),
    ("fsdp_config", '{"version":2}', "--fsdp full_shard", ""),
    ("use_regional_compilation", "true", "--torch_compile", ""),
    ("gradient_checkpointing_kwargs", '{"use_reentrant":false}', "--gradient_checkpointing", ""),
    ("eval_steps eval_delay eval_accumulation_steps per_device_eval_batch_size", "5", EVAL, ""),
    ("do_eval dataset_test_split label_names", "true", EVAL, ""),
    ("save_steps", "5", "--save_strategy steps", "--save_strategy epoch"),
    ("logging_steps", "5", "--logging_strategy steps", "--logging_strategy epoch"),
    ("num_train_epochs", "2", "--max_steps -1", "--max_steps 5"),
    ("warmup_steps", "5", "--lr_scheduler_type linear", "--lr_scheduler_type constant"),
    ("lr_scheduler_kwargs", '{"num_cycles":2}', "--lr_scheduler_type cosine", "--lr_scheduler_type constant"),
    ("max_grad_norm", "1", "--optim adamw_torch", "--optim lomo --global_batch_size 1"),
    ("optim_args", "beta1=0.8", "--optim ademamix", "--optim lion_8bit"),
    ("adam_beta1 adam_beta2 adam_epsilon", "0.5", "--optim lion_8bit", "--optim adafactor"),
    ("load_best_model_at_end", "true", f"{EVAL} --save_strategy steps", "--save_strategy no"),
    ("torch_compile_mode", "default", "--torch_compile_backend inductor", "--torch_compile_backend eager"),
    ("dataset_config", "en", "--dataset_name a/b", ""),
    ("problem_type", "regression", CLASSIFIES, "--dataset_name d"),
    ("dataset_label_field", "score", CLASSIFIES, "--dataset_name d"),
    ("train_sampling_strategy", "group_by_length", "--dataset_name d", STREAM),
]
CASES |= {
    f"{name}_is_read": (Run(f"--{name} {value} {unread}"), Run(f"--{name} {value} {read}"))
    for names, value, read, unread in UNREAD
    for name in names.split()
}

# setting, how it is written, the module that it needs
PACKAGES = [
    ("recipe", "memory", "deepspeed"),
    ("load_in_4bit", "true", "bitsandbytes"),
    ("use_peft", "true", "peft"),
    ("use_liger_kernel", "true", "liger_kernel"),
    ("dataset_name", "d.jsonl.zst", "zstandard"),
]
CASES |= {
    f"{name}_has_{module}": (Run(f"--{name} {value}", missing=(module,)), Run(f"--{name} {value}"))
    for name, value, module in PACKAGES
}

# row, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("adapters_need_trained_weights", Run(f"--load_in_4bit --use_peft --from_scratch {MODEL}", files=model()), "4bit"),
    ("saving_the_best_needs_evaluation", Run(f"--save_strategy best {EVAL}"), "save_strategy"),  # without a metric
    ("early_stopping_needs_evaluation", Run(f"--early_stopping_patience 3 {EVAL}"), "early_stopping"),
    ("the_schedule_works_under_deepspeed", Run(f'{MIN_LR} {{"min_lr":1e-6}}', yaml="memory.yaml"), "lr_scheduler"),
    ("the_best_model_is_saved", Run(f"{BEST} --eval_strategy epoch --save_strategy steps"), "load_best"),
    ("compiling_needs_one_shape", Run("--torch_compile_mode default --packing false"), "torch_compile"),
    ("only_the_demonstration_has_no_data", Run("--task sequence_classification"), "dataset_name"),
    ("only_the_demonstration_has_no_data", Run("--dataset_name="), "dataset_name"),  # "$DATA" of an unset variable
    ("only_the_demonstration_has_no_model", Run("--model_name_or_path="), "model_name_or_path"),
    ("learning_rates_are_usual", Run("--model_name_or_path gpt2 --dataset_name d --use_peft"), "learning_rate"),
    ("learning_rates_are_usual", Run(f"{MODEL} --use_peft --load_in_4bit --learning_rate 1e-3"), "learning_rate"),
]

# row, another run that is legal
LEGAL_AFTER_ALL = [
    ("the_schedule_works_under_deepspeed", Run(f'{MIN_LR} {{"min_lr_rate":0.1}}', yaml="memory.yaml")),
    ("lora_r_is_in_range", Run("--lora_r 0")),  # lora_r_is_read speaks of it
    ("fp16_needs_a_gpu", Run("--bf16")),  # the fix
    ("only_the_demonstration_has_no_data", Run("--config c.yaml", files={"c.yaml": "dataset_name: null"})),
    ("learning_rates_are_usual", Run("--model_name_or_path gpt2 --learning_rate 3e-4 --from_scratch")),
    ("something_is_held_out", Run(f"--model_name_or_path gpt2 {STREAM}")),
    ("something_is_held_out", Run("--model_name_or_path gpt2 --dataset_name d --eval_strategy no")),
]


@pytest.mark.parametrize(("other", "held_out"), [("test", False), ("latest", True)])
def test_the_fix_for_a_run_without_evaluations_uses_a_test_split_in_the_folder(other, held_out, tmp_path):
    for name in ("train", other):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}')
    found = check(resolved(f"--model_name_or_path gpt2 --dataset_name {tmp_path}"))
    assert [HELD_OUT in each.fix for each in found if each.subject == "eval_strategy"] == [held_out]


def test_a_package_missing_here_is_only_advice_if_the_run_trains_on_another_machine(tmp_path, monkeypatch):
    run = Run(
        "--use_peft --model_name_or_path gpt2 --dataset_name d", missing=("peft",), elsewhere=frozenset()
    ).resolve(tmp_path, monkeypatch)
    assert {problem.severity for problem in check(run) if "peft" in problem.what} == {"advice"}


# --- What really happens --------------------------------------------------------------------------


# row -> settings of a run in which it fires, and what that run has at its end: steps, checkpoints
SILENT = {
    "save_total_limit_is_in_range": (dict(save_total_limit=0, save_strategy="steps", save_steps=1), 2, 2),  # keeps all
    "max_steps_is_in_range": (dict(max_steps=0, num_train_epochs=3), 1, 0),  # of several epochs
    "num_train_epochs_is_in_range": (dict(max_steps=-1, num_train_epochs=0), 0, 0),
    "saving_the_best_needs_evaluation": (
        dict(save_strategy="best", metric_for_best_model="loss", load_best_model_at_end=True), 2, 0),
}  # fmt: skip


@pytest.mark.parametrize("row", SILENT)
def test_a_rule_reports_each_setting_that_silently_changes_how_often_trainer_steps_or_saves(row, tmp_path):
    settings, steps, checkpoints = SILENT[row]
    assert train(tmp_path, **settings).state.global_step == steps
    assert len(list(tmp_path.glob("checkpoint-*"))) == checkpoints
    assert_fires(row, settings)


def test_a_plateau_schedule_lowers_the_learning_rate_when_accuracy_rises():
    optimizer = torch.optim.SGD(tiny_llama().parameters(), 1.0)
    schedule = get_scheduler("reduce_lr_on_plateau", optimizer, scheduler_specific_kwargs={"patience": 0})
    for accuracy in (0.5, 0.6):
        schedule.step(accuracy)
    assert schedule.get_last_lr() == [0.1]
    assert_fires("the_mode_fits_the_metric", {"lr_scheduler_type": "greedy", "metric_for_best_model": "accuracy"})


def test_weights_grow_if_weight_decay_is_negative(tmp_path):
    def size(decay: float) -> float:
        model = train(tmp_path, optim="sgd", weight_decay=decay).model
        return sum(float(one.detach().double().square().sum()) for one in model.parameters())

    assert size(0.1) < size(0) < size(-1)
    assert_fires("weight_decay_is_in_range", {"weight_decay": -1})


def loss_of(model) -> float:
    tokens = torch.arange(8)[None]
    return model.eval()(input_ids=tokens, labels=tokens).loss.item()


def test_the_labels_become_less_likely_if_label_smoothing_is_above_one(tmp_path):
    learn = dict(learning_rate=0.01, max_steps=20)
    ends = [loss_of(train(tmp_path, label_smoothing_factor=factor, **learn).model) for factor in (1, 1.1)]
    assert ends[0] < 4 < 5 < ends[1]  # before the training 3.5
    assert_fires("label_smoothing_factor_is_in_range", {"label_smoothing_factor": 1.1})


def test_adapters_learn_nothing_if_their_alpha_is_0_or_their_dropout_1(tmp_path):
    def learned(**lora) -> float:
        adapted = get_peft_model(tiny_llama(), LoraConfig(target_modules="all-linear", **lora))
        return loss_of(tiny_llama()) - loss_of(train(tmp_path, model=adapted, learning_rate=0.01).model)

    assert learned() > 0.01
    assert learned(lora_alpha=0) == learned(lora_dropout=1.0) == 0
    assert_fires("lora_alpha_is_in_range", {"use_peft": True, "lora_alpha": 0})
    assert_fires("lora_dropout_is_in_range", {"use_peft": True, "lora_dropout": 1.0})


def test_adapters_of_a_model_with_random_weights_leave_all_other_weights_random(tmp_path):
    adapted = get_peft_model(tiny_llama(), LoraConfig(target_modules="all-linear"))
    trained = train(tmp_path, model=adapted, learning_rate=0.01).model.unload()
    assert all(map(torch.equal, trained.state_dict().values(), tiny_llama().state_dict().values()))
    assert_fires("adapters_need_trained_weights", {"use_peft": True})


def test_an_unknown_word_for_include_num_input_tokens_seen_counts_all_tokens_and_is_refused(tmp_path):
    counts = [train(tmp_path, include_num_input_tokens_seen=word).state.num_input_tokens_seen for word in ("all", "x")]
    assert counts == [128, 128]
    assert_fires("include_num_input_tokens_seen_is_in_range", {"include_num_input_tokens_seen": "x"})


def test_ignored_settings_leave_losses_unchanged_and_are_reported_without_an_error(tmp_path):
    ignored = dict(fsdp_config={"fsdp_verion": 2}, gradient_checkpointing_kwargs={"use_rentrant": False})
    expected = losses(train(tmp_path / "plain", logging_steps=1))
    assert losses(train(tmp_path / "ignored", logging_steps=1, **ignored)) == expected
    found = check(resolved(settings={"recipe": "baseline", **ignored}))
    assert {problem.subject for problem in found if "ignored" in problem.what} == set(ignored)
    assert "error" not in [problem.severity for problem in found]


@pytest.mark.parametrize("schedule", sorted(legal.names("schedules_without_warmup")))
def test_schedules_without_warmup_ignore_warmup_steps(schedule, tmp_path):
    settings = dict(lr_scheduler_type=schedule, warmup_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=1)
    history = train(tmp_path, evaluates=True, **settings).state.log_history
    assert [entry["learning_rate"] for entry in history if "learning_rate" in entry] == [5e-5, 5e-5]
    assert_fires("warmup_steps_is_read", settings)


def test_torch_compile_backend_turns_compilation_on_though_torch_compile_is_false(tmp_path):
    settings = dict(torch_compile=False, torch_compile_backend="eager")
    assert arguments(tmp_path, **settings).torch_compile
    assert_fires("compile_settings_compile", settings)


def test_auto_find_batch_size_changes_the_global_batch(tmp_path):
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


def batches_of(rank: int, **settings) -> list:
    """The batches of one of two ranks: of four rows, or of the rest of 20."""
    loader = torch.utils.data.DataLoader(range(20), batch_size=4)
    return list(prepare_data_loader(loader, num_processes=2, process_index=rank, put_on_device=False, **settings))


def test_split_batches_divides_each_dataloader_batch_by_the_number_of_processes():
    assert [len(batches_of(0, split_batches=split)[0]) for split in (False, True)] == [4, 2]
    assert_fires("batches_are_not_split", {"accelerator_config": {"split_batches": True}}, world=2)


def test_with_even_batches_off_one_rank_has_one_batch_more_than_another():
    assert [len(batches_of(rank)) for rank in (0, 1)] == [3, 3]
    assert [len(batches_of(rank, even_batches=False)) for rank in (0, 1)] == [3, 2]
    assert_fires("batches_come_out_even", {"accelerator_config": {"even_batches": False}}, world=2)


def test_fp16_on_a_cpu_trains_in_fp32(tmp_path):
    ends = [train(tmp_path, fp16=fp16).state.log_history[-1]["train_loss"] for fp16 in (False, True)]
    assert ends[0] == ends[1]
    assert_fires("fp16_needs_a_gpu", {"fp16": True})
