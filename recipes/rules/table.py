"""The table of rules whose condition is one expression. To add a rule, add a row.

Rows of three kinds have their own tuples: settings that a run does not read, values out of
range, and missing packages. Every other row is an `error_row` or an `advice_row`. A rule that needs
more than one expression is a function in `engine`, `training` or `data_and_model`; these modules
have rows of their own too.

The run's values are filled into `what` and `fix`: "{optim} needs ..." names the optimizer.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from recipes import legal
from recipes.errors import Problem
from recipes.mixture import files_of, parts_of, parts_of_run
from recipes.rules.facts import (
    HELD_OUT,
    Rule,
    accelerator_config,
    available,
    gradient_accumulation_kwargs,
    has_test_split,
    is_true,
    mapping,
    missing,
    mixed_precision,
    uses_deepspeed,
    uses_fsdp,
)
from recipes.run import RunSpec
from recipes.run.files import expanded
from recipes.run.metrics import smaller_is_better

BY_METRIC = {"reduce_lr_on_plateau", "greedy"}  # schedules that follow the metric of the evaluations
Condition = Callable[[RunSpec], Any]
Words = str | Callable[[RunSpec], str]


def _row(severity: str, name: str, settings: str, when: Condition, what: Words, fix: Words, why: str = "") -> Rule:
    """Return a rule that, if `when(run)`, reports `settings` (if several, those that are on).

    A name in capitals is an environment variable. Any other name that is not a setting is a key of
    the YAML. `why` is the failure that the rule prevents; the default is `what`.
    """
    subjects = settings.split()

    def judge(run: RunSpec) -> Iterator[Problem]:
        if not when(run):
            return
        for subject in subjects:
            if len(subjects) == 1 or run[subject]:
                in_yaml = "" if subject in legal.settings() else run.engine.source
                source = "environment" if subject.isupper() else in_yaml
                yield Problem(subject, _filled(what, run), _filled(fix, run), source, severity)

    return Rule(name, why or str(what), judge)


def _filled(words: Words, run: RunSpec) -> str:
    return words.format_map(run) if isinstance(words, str) else words(run)


error_row = partial(_row, "error")  # stops the run
advice_row = partial(_row, "advice")  # the run trains as asked, but slowly, or not as the user may expect


# --- Settings that a run does not read ------------------------------------------------------------

# settings | condition for reading them | where they are ignored | what to write to have them read
_UNREAD: tuple[tuple[str, Condition, str, str], ...] = (
    ("lora_r lora_alpha lora_dropout lora_target_modules use_dora", lambda run: run["use_peft"],
     "without use_peft", "--use_peft"),
    ("packing_strategy", lambda run: run["packing"], "without packing", "--packing"),
    ("bnb_4bit_quant_type use_bnb_nested_quant", lambda run: run["load_in_4bit"],
     "without load_in_4bit", "--load_in_4bit"),
    ("fsdp_config", lambda run: run["fsdp"], "without fsdp", "--fsdp"),
    ("use_regional_compilation", lambda run: compiles(run), "without torch_compile", "--torch_compile"),
    ("gradient_checkpointing_kwargs", lambda run: run["gradient_checkpointing"],
     "without gradient_checkpointing", "--gradient_checkpointing"),
    ("eval_steps", lambda run: run["eval_strategy"] == "steps",
     "with eval_strategy {eval_strategy}", "--eval_strategy steps"),
    ("eval_delay eval_accumulation_steps per_device_eval_batch_size", lambda run: run["eval_strategy"] != "no",
     "without evaluations", "--eval_strategy steps"),
    ("save_steps", lambda run: run["save_strategy"] == "steps",
     "with save_strategy {save_strategy}", "--save_strategy steps"),
    ("logging_steps", lambda run: run["logging_strategy"] == "steps",
     "with logging_strategy {logging_strategy}", "--logging_strategy steps"),
    ("num_train_epochs", lambda run: run["max_steps"] <= 0, "with max_steps, which wins", "leave max_steps out"),
    ("warmup_steps", lambda run: run["lr_scheduler_type"] not in legal.names("schedules_without_warmup"),
     "by the schedule {lr_scheduler_type}, which has no warm-up", "--lr_scheduler_type constant_with_warmup"),
    ("lr_scheduler_kwargs", lambda run: run["lr_scheduler_type"] not in ("constant", "constant_with_warmup"),
     "by the schedule {lr_scheduler_type}", "use another --lr_scheduler_type"),
    ("max_grad_norm", lambda run: not _steps_in_backward(run),
     "by {optim}, which updates the weights before gradients could be clipped", "use another --optim"),
    ("optim_args", lambda run: run["optim"] not in legal.names("optimizers_without_arguments"),
     "by {optim}", "use --weight_decay and, for Adam, --adam_beta1, --adam_beta2 and --adam_epsilon"),
    ("adam_beta1 adam_beta2 adam_epsilon", lambda run: run["optim"] not in legal.names("optimizers_without_adam"),
     "by {optim}", "use an optimizer of Adam's family"),
    ("optim", lambda run: "optimizer" not in (run.engine.json or {}),
     "because the DeepSpeed JSON has its own optimizer", "remove optimizer from the JSON"),
    ("lr_scheduler_type", lambda run: "scheduler" not in (run.engine.json or {}),
     "because the DeepSpeed JSON has its own scheduler", "remove scheduler from the JSON"),
    ("load_best_model_at_end", lambda run: {run["eval_strategy"], run["save_strategy"]} != {"no"},
     "without evaluations: the last model is kept", "--eval_strategy steps --save_strategy steps"),
    ("torch_compile_mode", lambda run: (run["torch_compile_backend"] or "inductor").lower() == "inductor",
     "by the backend {torch_compile_backend}", "--torch_compile_backend inductor"),
)  # fmt: skip

# The same for settings that train.py ignores, but the user's own script may read.
_UNREAD_BY_TRAIN_PY: tuple[tuple[str, Condition, str, str], ...] = (
    ("do_eval dataset_test_split label_names", lambda run: run["eval_strategy"] != "no",
     "without evaluations", "--eval_strategy epoch"),
    ("do_predict", lambda run: False, "by train.py, which trains and evaluates", "use a script of your own"),
    ("dataset_config", lambda run: any(not files_of(part.name) for part in parts_of(run["dataset_name"])),
     "by data that has no configurations", "use --dataset_name with a data set of the Hub"),
    ("problem_type dataset_label_field", lambda run: run["task"] == "sequence_classification",
     "with --task {task}", "--task sequence_classification"),
    ("label_smoothing_factor", lambda run: run["task"] == "causal_lm"
     or run["problem_type"] in (None, "single_label_classification"),
     "with --problem_type {problem_type}", "--problem_type single_label_classification"),
    ("train_sampling_strategy",
     lambda run: not run["dataset_streaming"] or run["train_sampling_strategy"] in ("random", "sequential"),
     "for a stream, whose examples are shuffled", "--dataset_streaming false"),
)  # fmt: skip


def _unread(setting: str, is_read: Condition, where: str, meant: str) -> Rule:
    """Return the rule of a row in `_UNREAD`: advice against a setting that is on, but ignored."""
    return advice_row(
        f"{setting}_is_read", setting,
        lambda run: run.explicit(setting) and run[setting] not in (None, False, "", {}, []) and not is_read(run),
        f"is ignored {where}", f"{meant}, or leave {setting} out",
        "The run ignores the setting and prints no warning.",
    )  # fmt: skip


def setting_is_read(run: RunSpec, setting: str) -> bool:
    """True if the run reads the setting, as far as the table knows."""
    return all(reads(run) for names, reads, *_ in (*_UNREAD, *_UNREAD_BY_TRAIN_PY) if setting in names.split())


# --- Ranges ---------------------------------------------------------------------------------------

# legal values in words | legal values as a condition | settings
# Libraries accept a value out of range, which then fails late or silently means something else.
_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("a whole number from 1 up", lambda value: value >= 1,
     "global_batch_size per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps "
     "eval_accumulation_steps dataloader_prefetch_factor early_stopping_patience dataset_num_proc lora_r "
     "save_total_limit ddp_timeout"),  # Trainer reads 0 as no limit
    ("a number of steps, or -1 to train for num_train_epochs", lambda value: value != 0, "max_steps"),
    ("a number of steps, or a part of the run, such as 0.1", lambda value: value > 0, "logging_steps save_steps"),
    ("a number of steps, or a part of the run, such as 0.1", lambda value: value >= 0, "eval_steps"),
    ("a number above 0", lambda value: value > 0, "num_train_epochs memory_limit lora_alpha"),
    ("a number from 0 up", lambda value: value >= 0, "eval_delay learning_rate weight_decay neftune_noise_alpha"),
    ("a number from 0 to 1", lambda value: 0 <= value <= 1, "label_smoothing_factor"),
    ("a number from 0 to below 1", lambda value: 0 <= value < 1, "lora_dropout"),
    ("a whole number from 0 to 4294967295", lambda value: 0 <= value < 2**32, "seed"),
    ("all, non_padding or no", lambda value: value in (True, False, "all", "non_padding", "no"),
     "include_num_input_tokens_seen"),  # any other word counts as `all`
    ("at least 2: a token, and the next token to predict", lambda value: value >= 2, "max_length"),
)  # fmt: skip


def _in_range(setting: str, range_: str, is_legal: Callable[[Any], bool]) -> Rule:
    def judge(run: RunSpec) -> Iterator[Problem]:
        value = run[setting]
        if value is None or is_legal(value) or not setting_is_read(run, setting):
            return
        shown = f"{value:g}" if isinstance(value, float) else value
        yield Problem(setting, f"{shown} is out of range", f"set {setting} to {range_}")

    return Rule(f"{setting}_is_in_range", "A value out of range fails late, or silently means something else.", judge)


# --- Packages -------------------------------------------------------------------------------------

# setting | needed if | the module to import, which is also its distribution's name, with - for _
_PACKAGES: tuple[tuple[str, Condition, str], ...] = (
    ("recipe", uses_deepspeed, "deepspeed"),
    ("load_in_4bit", lambda run: run["load_in_4bit"], "bitsandbytes"),
    ("use_peft", lambda run: run["use_peft"], "peft"),
    ("use_liger_kernel", lambda run: run["use_liger_kernel"] and not run.hardware.liger, "liger_kernel"),
    ("dataset_name", lambda run: any(part.name.lower().endswith(".zst") for part in parts_of_run(run)), "zstandard"),
)


def _package(setting: str, needed: Condition, module: str) -> Rule:
    def judge(run: RunSpec) -> Iterator[Problem]:
        if needed(run) and not available(run, module):
            yield missing(run, setting, module.replace("_", "-"))

    return Rule(f"{setting}_has_{module}", "The run ends in an ImportError when it needs the package.", judge)


# --- What else is wrong ---------------------------------------------------------------------------


def _steps_in_backward(run: RunSpec) -> bool:
    """True if the optimizer updates a weight as soon as its gradient is computed."""
    return run["optim"] in ("lomo", "adalomo") or str(run["optim"]).endswith("layerwise")


def compiles(run: RunSpec) -> bool:
    return bool(run["torch_compile"] or run["torch_compile_backend"] or run["torch_compile_mode"])


def _unscales_its_weights(run: RunSpec) -> bool:
    """True if fp16's gradient scaler, which only a GPU uses, would get gradients in float16."""
    is_scaled = mixed_precision(run) == "fp16" and run.hardware.cuda and not uses_deepspeed(run)
    return is_scaled and run["dtype"] == "float16" and not run["use_peft"]


def _compares(run: RunSpec) -> bool:
    """True if there are evaluations, and a metric to compare them."""
    return run["eval_strategy"] != "no" and bool(run["metric_for_best_model"] or run["load_best_model_at_end"])


def _mode(run: RunSpec) -> str | None:
    """Return the mode that a schedule in BY_METRIC needs, None if the metric is not train.py's."""
    is_smaller = smaller_is_better(run["metric_for_best_model"] or "loss")
    return None if is_smaller is None else "min" if is_smaller else "max"


def _evaluations(run: RunSpec) -> str:
    """Return the flags that add evaluations, on the test split of a local folder if it has one."""
    by_steps = run["dataset_streaming"] or (run.explicit("save_strategy") and run["save_strategy"] == "steps")
    held_out = f" {HELD_OUT}" * (run.place.by_train_py and not run["dataset_streaming"] and not has_test_split(run))
    return f"--eval_strategy {'steps' if by_steps else 'epoch'}{held_out}"


def _asks_deepspeed_for_its_rate(run: RunSpec) -> bool:
    """True if the schedule reads the learning rate from an optimizer that DeepSpeed has wrapped."""
    name, content = run["lr_scheduler_type"], run.engine.json or {}
    reads = name == "polynomial" or (name.endswith("with_min_lr") and mapping(run["lr_scheduler_kwargs"]).get("min_lr"))
    return bool(reads) and uses_deepspeed(run) and not {"optimizer", "scheduler"} & set(content)


_ERRORS = (
    # The batch
    error_row("batch_size_is_not_searched", "auto_find_batch_size", lambda run: run["auto_find_batch_size"],
              "would change the global batch",
              "leave it out, and lower --per_device_train_batch_size: accumulation rises to match",
              "auto_find_batch_size lowers only the micro-batch, so the global batch changes silently."),
    error_row("accumulation_is_said_once", "accelerator_config",
              lambda run: gradient_accumulation_kwargs(run).get("num_steps") not in (None, 1)
              or ("num_steps" in gradient_accumulation_kwargs(run) and run["gradient_accumulation_steps"] != 1),
              "num_steps changes the global batch", "use --gradient_accumulation_steps, without num_steps",
              "num_steps silently replaces accumulation 1; a larger accumulation fails the run."),
    error_row("batches_are_not_split", "accelerator_config",
              lambda run: is_true(accelerator_config(run).get("split_batches")) and run.world_size > 1,
              "split_batches changes the global batch", "leave split_batches out",
              "split_batches divides the micro-batch by the number of processes: the global batch gets smaller."),
    error_row("batches_come_out_even", "accelerator_config",
              lambda run: accelerator_config(run).get("even_batches", True) is False
              and run.world_size > 1
              and not (run["dataloader_drop_last"] and (run["eval_strategy"] == "no" or not run.place.by_train_py)),
              "even_batches false can leave ranks waiting for each other until a timeout",
              "leave even_batches on: the loss ignores examples that only fill up the last batch",
              "If a rank has one batch fewer, the other ranks wait for this rank until a timeout."),

    # Precision and the GPU
    error_row("bf16_needs_sm80", "bf16 bf16_full_eval",
              lambda run: run.hardware.cuda and run.hardware.capability < (8, 0),
              lambda run: "is only emulated on compute capability {}.{}".format(*run.hardware.capability),
              "--fp16, with --bf16 false",
              "A T4 or V100 computes bf16 several times slower than fp16, though torch reports bf16 as supported."),
    error_row("tf32_needs_sm80", "tf32", lambda run: run["tf32"] and run.hardware.capability < (8, 0),
              "needs a GPU of compute capability 8.0 or higher", "leave it out",
              "On an older GPU: `ValueError: --tf32 requires Ampere or a newer GPU arch, cuda>=11 and torch>=1.7`"),
    error_row("fp8_needs_sm89", "mixed_precision",
              lambda run: "fp8" in (mixed_precision(run), run.engine.mixed_precision) and run.hardware.cuda
              and run.hardware.capability < (8, 9),
              lambda run: "fp8 needs compute capability 8.9, and the GPU has {}.{}".format(*run.hardware.capability),
              "mixed_precision: 'no'",
              "Only a log reports: `insufficient for FP8 mixed precision training ... Will use FP16 instead.`"),
    error_row("fp16_weights_cannot_be_unscaled", "dtype", _unscales_its_weights,
              "float16 weights cannot be trained with fp16", "use --dtype float32; compute stays in fp16",
              "The first step fails: `ValueError: Attempting to unscale FP16 gradients.`"),

    # Compilation
    error_row("compile_settings_compile", "torch_compile_backend torch_compile_mode",
              lambda run: run.explicit("torch_compile") and not run["torch_compile"],
              "turns torch_compile on, although --torch_compile is false", "leave out the backend and the mode",
              "A backend or a mode compiles the model even with `torch_compile false`."),
    error_row("checkpointing_settings_are_a_mapping", "gradient_checkpointing_kwargs",
              lambda run: run["gradient_checkpointing"] and isinstance(run["gradient_checkpointing_kwargs"], str),
              "'{gradient_checkpointing_kwargs}' is not a JSON object, and a file is not accepted here",
              '{{"use_reentrant": false}}', "Once the model is loaded: `ValueError: dictionary update sequence`."),

    # Optimizer and schedule
    error_row("every_backward_pass_is_a_step", "optim",
              lambda run: _steps_in_backward(run) and run.batch.total > run.batch.micro,
              "{optim} updates the weights in each backward pass, so micro-batches and processes form no global batch",
              "--optim adafactor, or train in one process with --global_batch_size equal to the micro-batch",
              "Each micro-batch and each process takes steps of its own: OpenLMLab/LOMO#34."),
    error_row("the_schedule_works_under_deepspeed", "lr_scheduler_type", _asks_deepspeed_for_its_rate,
              "{lr_scheduler_type} reads optimizer.defaults, which DeepSpeed's optimizer does not have",
              "--lr_scheduler_type linear, or min_lr_rate (a fraction of the learning rate) in place of min_lr",
              "Once the model is loaded: `'DeepSpeedZeroOptimizer' object has no attribute 'defaults'`."),

    # Evaluation and the best model
    error_row("the_best_model_needs_evaluation", "load_best_model_at_end",
              lambda run: run["load_best_model_at_end"] and run["eval_strategy"] == "no" != run["save_strategy"],
              "needs evaluations to find the best model",
              _evaluations,
              "Fails after imports: `--load_best_model_at_end requires the save and eval strategy to match`."),
    error_row("the_best_model_is_saved", "load_best_model_at_end",
              lambda run: run["load_best_model_at_end"]
              and run["save_strategy"] not in (run["eval_strategy"], "best") and run["eval_strategy"] != "no",
              "needs a model saved at each evaluation", "--save_strategy {eval_strategy}",
              "Fails after imports: `--load_best_model_at_end requires the save and eval strategy to match`."),
    error_row("saving_the_best_needs_evaluation", "save_strategy",
              lambda run: run["save_strategy"] == "best" and not _compares(run),
              "'best' needs evaluations, and a metric to compare them",
              lambda run: f"{_evaluations(run)} " * (run["eval_strategy"] == "no") + "--metric_for_best_model loss",
              "Without evaluations the run silently saves nothing; without a metric it ends late in a ValueError."),
    error_row("early_stopping_needs_evaluation", "early_stopping_patience",
              lambda run: run["early_stopping_patience"] is not None and not _compares(run),
              "needs evaluations, and a metric to compare them",
              lambda run: f"{_evaluations(run)} " * (run["eval_strategy"] == "no") + "--load_best_model_at_end",
              "The start fails: `EarlyStoppingCallback requires IntervalStrategy of steps or epoch` (or a metric)."),
    error_row("the_mode_fits_the_metric", "lr_scheduler_kwargs",
              lambda run: run["lr_scheduler_type"] in BY_METRIC
              and _mode(run) not in (None, mapping(run["lr_scheduler_kwargs"]).get("mode", "min")),
              lambda run: f"the schedule lowers the rate when {run['metric_for_best_model'] or 'loss'} improves",
              lambda run: "--lr_scheduler_kwargs '"
              + json.dumps({**mapping(run["lr_scheduler_kwargs"]), "mode": _mode(run)}) + "'",
              "Trainer passes no mode: the rate falls when accuracy rises (facebookresearch/fairseq#2205)."),
    advice_row("greedy_has_room", "lr_scheduler_kwargs",
               lambda run: run["lr_scheduler_type"] == "greedy" and run["learning_rate"] <= 1e-3
               and "min_lr" not in mapping(run["lr_scheduler_kwargs"]),
               "greedy never lowers the rate {learning_rate}: its min_lr is 1e-3 by default",
               'set "min_lr" below, and "max_lr" above the learning rate in --lr_scheduler_kwargs',
               "GreedyLR's defaults are for training from scratch (transformers#45168)."),

    # Checkpoints
    error_row("output_has_a_folder", "output_dir",
              lambda run: not run["output_dir"] or expanded(run["output_dir"]).is_file(),
              "does not name a folder", "--output_dir FOLDER, or leave it out",
              'With an unset shell variable (--output_dir "$OUT"), the first save ends in a `FileNotFoundError`.'),
    error_row("weights_alone_cannot_find_the_best", "save_only_model",
              lambda run: run["save_only_model"] and run["load_best_model_at_end"]
              and (uses_deepspeed(run) or uses_fsdp(run)),
              "cannot be combined with load_best_model_at_end under DeepSpeed or FSDP", "leave it out",
              "Trainer refuses: `DeepSpeed can't be used with save_only_model along with load_best_model_at_end`."),
    error_row("resume_contradicts_fresh", "resume_from_checkpoint",
              lambda run: run["resume_from_checkpoint"] and run["fresh"]
              and str(run["resume_from_checkpoint"]).lower() != "true",
              "contradicts --fresh", "leave one of the two out", "--fresh moves the checkpoint out of the way first."),
)  # fmt: skip


def _fine_tunes(run: RunSpec) -> bool:
    """True if train.py trains pretrained weights; False for a plan, which trains nothing."""
    return run["model_name_or_path"] is not None and not run["from_scratch"] and run.place.by_train_py


def _usual_rates(run: RunSpec) -> tuple[float, float, str, str]:
    """Return AdamW's lowest and highest usual rate, one to begin with, and the rates of papers."""
    if run["load_in_4bit"]:
        return 5e-5, 5e-4, "2e-4", "QLoRA: Dettmers et al. 2023 use 1e-4 to 2e-4"
    if run["use_peft"]:
        return 1e-4, 1e-3, "2e-4", "LoRA: Hu et al. 2021 use 2e-4 to 5e-4"
    begin = "5e-5" if run["task"] == "sequence_classification" else "2e-5"
    return 1e-6, 1e-4, begin, "fine-tuning: Devlin et al. 2018 use 2e-5 to 5e-5, Touvron et al. 2023 use 2e-5"


_ADVICE = (
    # Trains differently from what the user may expect
    advice_row("fp16_needs_a_gpu", "fp16",
               lambda run: run["fp16"] and not (run["bf16"] or run.hardware.cuda or uses_deepspeed(run)),
               "does nothing on a CPU: this run trains in fp32", "use --bf16, or leave fp16 out",
               "The run reports fp16, but trains in fp32."),
    advice_row("sixteen_bit_weights_lose_small_updates", "dtype",
               lambda run: run["dtype"] != "float32" and not run["use_peft"] and not uses_deepspeed(run)
               and not _unscales_its_weights(run),
               "{dtype} weights round small updates away", "--dtype float32 with --bf16, which computes in 16 bits",
               "AdamW's updates are mostly smaller than the last bit of a 16-bit weight."),

    advice_row("frozen_weights_need_16_bits", "dtype",
               lambda run: run["use_peft"] and run.explicit("dtype") and run["dtype"] == "float32" and run["bf16"]
               and run.hardware.cuda and not (run["load_in_4bit"] or uses_deepspeed(run) or uses_fsdp(run)),
               "float32 makes the frozen weights twice as large as needed: this run computes in bf16",
               "leave it out, or --dtype bfloat16", "LoRA trains no frozen weight, so no small update is lost."),
    advice_row("a_resume_repeats_the_shuffle", "accelerator_config",
               lambda run: accelerator_config(run).get("use_seedable_sampler", True) is False,
               "use_seedable_sampler false: a resume within an epoch repeats some examples and skips others",
               "leave use_seedable_sampler out", "A checkpoint lacks the sampler's state: a resume shuffles anew."),
    advice_row("a_filtered_nan_stops_no_run", "logging_nan_inf_filter", lambda run: run["logging_nan_inf_filter"],
               "true hides a NaN: the run goes on to its end, and logs a loss of 0",
               "--logging_nan_inf_filter false",
               "train.py stops at a logged NaN, before save_total_limit deletes the last good checkpoint."),
    advice_row("a_stream_has_no_epochs", "dataset_streaming",
               lambda run: run["dataset_streaming"] and "epoch" in (run["save_strategy"], run["eval_strategy"]),
               "a stream has no epochs: --save_strategy or --eval_strategy epoch acts only once, at the end",
               "--save_strategy steps, --eval_strategy steps", "A killed run would have saved nothing."),

    # Costs time
    advice_row("compiling_needs_one_shape", "torch_compile", lambda run: compiles(run) and not run["packing"],
               "compiles again for every new length of a batch", "add --packing, or leave torch_compile out",
               "`accelerate launch` compiles with dynamic=False, so each new length costs another compilation."),
)  # fmt: skip


_OF_TRAIN_PY = (
    # Adapters and weights in 4 bits
    error_row("four_bits_need_adapters", "load_in_4bit", lambda run: run["load_in_4bit"] and not run["use_peft"],
              "weights in 4 bits cannot be trained", "--use_peft",
              "Building the Trainer fails: `You cannot perform fine-tuning on purely quantized models`."),
    error_row("adapters_need_trained_weights", "load_in_4bit use_peft",
              lambda run: run["from_scratch"] if run["model_name_or_path"] is not None else run.place.by_train_py,
              "freezes or quantises pretrained weights, and this run has none",
              "name a model with --model_name_or_path, without --from_scratch",
              "The frozen weights are random: nothing but the adapters learns."),
    error_row("classifier_adapters_have_one_type", "use_peft",
              lambda run: run["use_peft"] and run["task"] == "sequence_classification" and run.engine.zero_stage == 3
              and mixed_precision(run) in ("bf16", "fp16"),
              "ZeRO-3 cannot train LoRA and a new classification head in bf16 or fp16",
              "--recipe memory (ZeRO-2), or --bf16 false --fp16 false",
              "DeepSpeed's defragment ends in `AssertionError`: the new head is in 16 bits, LoRA in fp32."),

    # Rows and batches
    error_row("classification_takes_rows_as_they_are", "packing assistant_only_loss completion_only_loss",
              lambda run: run["task"] == "sequence_classification",
              "is for language models, not for sequence_classification", "leave it out",
              "Joined examples would share one label, and a label has no assistant or completion part."),
    error_row("batches_are_not_dispatched", "accelerator_config",
              lambda run: is_true(accelerator_config(run).get("dispatch_batches")) and run.world_size > 1,
              "dispatch_batches needs batches of equal length, and repeats examples, which then count in the loss",
              "leave dispatch_batches out: each process reads its own batches",
              "The first step fails: `You can't use batches of different size with dispatch_batches=True`. With "
              "--packing, repeated examples fill up the last batch and count in the loss."),

    # Data
    error_row("only_the_demonstration_has_no_data", "dataset_name",
              lambda run: not run["dataset_name"] and run.place.by_train_py
              and (run["dataset_name"] == "" or run["model_name_or_path"] or run["task"] != "causal_lm"),
              "is missing: a model of your own needs data of your own",
              "--dataset_name FILE_OR_HUB_ID", "The run would succeed, and make the model worse."),
    error_row("only_the_demonstration_has_no_model", "model_name_or_path",
              lambda run: not run["model_name_or_path"] and run.place.by_train_py
              and (run["model_name_or_path"] == "" or run["dataset_name"]),  # "$MODEL" of an unset variable
              "is missing: data of your own need a model of your own",
              "--model_name_or_path FOLDER_OR_HUB_ID", "The run would succeed, and train a toy model."),
    error_row("a_mixture_is_for_language_models", "dataset_name",
              lambda run: run["task"] != "causal_lm" and parts_of_run(run)[1:],
              "is a mixture, which only --task causal_lm accepts", "use one data set with all labels",
              "Each part would have classes of its own."),
    error_row("a_streamed_mixture_has_weights", "dataset_name",
              lambda run: run["dataset_streaming"] and parts_of_run(run)[1:] and parts_of_run(run)[0].weight is None,
              "is a mixture without weights: each stream would be read to its end, and may have no end",
              lambda run: f"write dataset_name: {[dict(name=part.name, weight=1) for part in parts_of_run(run)]}"
              " in a file for --config",
              "Without weights each part is read to its end, which a stream may not have."),
    error_row("a_stream_is_told_how_long", "max_steps",
              lambda run: run["dataset_streaming"] and run["max_steps"] <= 0,
              "is missing: the number of examples in a stream is unknown, so an epoch has no known end",
              "--max_steps 1000, or another number",
              "Trainer refuses it: `The train_dataset does not implement __len__, max_steps has to be specified`"),
    error_row("a_stream_has_no_classes", "dataset_streaming",
              lambda run: run["dataset_streaming"] and run["task"] == "sequence_classification",
              "cannot be used for classification: listing the classes needs all rows", "--dataset_streaming false",
              "train.py numbers the classes before training, for which it reads all rows."),
    advice_row("learning_rates_are_usual", "learning_rate",
               lambda run: _fine_tunes(run) and run["optim"].startswith("adamw")
               and not _usual_rates(run)[0] <= run["learning_rate"] <= _usual_rates(run)[1],
               lambda run: "{:g} is {} the usual rates for {}".format(run["learning_rate"],
                   "below" if run["learning_rate"] < _usual_rates(run)[0] else "above", _usual_rates(run)[3]),
               lambda run: f"--learning_rate {_usual_rates(run)[2]}, to begin with",
               "A rate that is too high ruins the model, and one that is too low changes nothing."),
    advice_row("something_is_held_out", "eval_strategy",  # a stream has no slices to hold out
               lambda run: _fine_tunes(run) and run["eval_strategy"] == "no" and not run.explicit("eval_strategy")
               and not run["dataset_streaming"],
               "is 'no', so overfitting would go unnoticed", _evaluations),

    # What train.py does, and what it does not
    error_row("a_training_trains", "do_train", lambda run: run.explicit("do_train") and not run["do_train"],
              "is off, and train.py always trains", "leave it out", "train.py would train anyway."),
    error_row("evaluating_needs_data", "eval_on_start",
              lambda run: run["eval_on_start"] and run["eval_strategy"] == "no",
              "needs an eval_strategy: without one, train.py loads no data to evaluate on", "--eval_strategy steps",
              "Training fails at its start: `ValueError: Trainer: evaluation requires an eval_dataset.`"),
    error_row("accuracy_is_computed_at_the_end", "batch_eval_metrics",
              lambda run: run["task"] == "sequence_classification" and run["batch_eval_metrics"],
              "cannot be combined with the metrics of train.py", "leave it out",
              "train.py's metrics need all predictions at once, and do not accept `compute_result`."),
    error_row("metrics_need_arrays", "eval_use_gather_object",
              lambda run: run["task"] == "sequence_classification" and run["eval_use_gather_object"]
              and run["eval_strategy"] != "no" and run.engine.kind != "single",
              "cannot be combined with the metrics of train.py", "leave it out",
              "The first evaluation ends in `InvalidParameterError`, or a regression's metrics are wrong."),
    error_row("labels_have_one_name", "label_names",
              lambda run: run["label_names"] not in (None, ["labels"]) and run["eval_strategy"] != "no",
              "train.py's batches have their labels in `labels`, not in {label_names}", "leave it out",
              "The first evaluation ends in `KeyError: ... 'eval_loss', which is not found`."),
)  # fmt: skip


# `check` reports errors before advice, and otherwise in this order.
ROWS: tuple[Rule, ...] = (
    *(_in_range(name, range_, is_legal) for range_, is_legal, names in _RANGES for name in names.split()),
    *_ERRORS,
    *(replace(row, of_train_py=True) for row in _OF_TRAIN_PY),
    *(_package(*package) for package in _PACKAGES),
    *_ADVICE,
    *(_unread(name, is_read, where, meant) for names, is_read, where, meant in _UNREAD for name in names.split()),
    *(
        replace(_unread(name, is_read, where, meant), of_train_py=True)
        for names, is_read, where, meant in _UNREAD_BY_TRAIN_PY
        for name in names.split()
    ),
)
