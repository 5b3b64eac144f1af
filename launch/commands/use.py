"""`recipes evaluate` and `recipes generate`: the model of a run, measured and tried.

Both load it as the run did: with its tokenizer and precision, and an adapter on its base model.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.flags import Commands
from launch.host.world import World, prepare_process, process_group
from launch.terminal import console, print_table
from recipes.errors import UserError, mistake
from recipes.quiet import quiet_libraries
from recipes.rules.check import require_legal
from recipes.rules.facts import mixed_precision
from recipes.run import RunSpec, here, recorded, resolve
from recipes.run.command_line import parse
from recipes.run.engine_sources import from_yaml
from recipes.run.files import shipped
from recipes.run.metrics import is_figure

if TYPE_CHECKING:
    from launch.data.load import Data

_EVALUATE = "FOLDER  the --output_dir of a run, or one of its checkpoints"
_GENERATE = f"""
{_EVALUATE}
PROMPT              a message to a chat model, or the beginning of a text
--max_new_tokens N  the longest answer [100]
"""
# What a run does besides its training: an evaluation saves, sends and adds nothing.
_OFF = {
    "eval_strategy": "epoch", "save_strategy": "steps", "load_best_model_at_end": False, "push_to_hub": False,
    "report_to": "none", "measure": None, "fit": False, "early_stopping_patience": None, "fresh": False,
    "resume_from_checkpoint": None, "deepspeed": None, "fsdp": None, "torch_compile": False, "from_scratch": False,
}  # fmt: skip


def add_parser(commands: Commands) -> None:
    text = "Measure the model of a run on its --dataset_test_split, or with --dataset_name FILE_OR_ID on other data: "
    text += "on their split `train`, if --dataset_test_split names no other. train.py's other flags change settings."
    commands.add_parser("evaluate", description=text).takes(evaluate, _EVALUATE)
    text = "Generate with the model of a run. If its tokenizer has a chat template, the prompt is a user's message."
    commands.add_parser("generate", description=text).takes(generate, _GENERATE, max_new_tokens=100)


def evaluate(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print what Trainer's evaluation returns."""
    with tempfile.TemporaryDirectory() as scratch:
        metrics = _evaluated(Path(options.folder), argv, scratch)
    rows = [[name, f"{value:.4f}"] for name, value in metrics.items() if is_figure(name) and name != "epoch"]
    print_table(["metric", "value"], rows)
    return 0


def _evaluated(folder: Path, argv: Sequence[str], scratch: str) -> dict[str, float]:
    typed = {name: setting.value for name, setting in parse(argv, []).items()}
    other: dict[str, Any] = {}
    if "dataset_name" in typed:
        split = typed.get("dataset_test_split", "train")
        other = {"dataset_train_split": split, "dataset_test_split": split}
        other["dataset_config"] = typed.get("dataset_config")
    run = _run_of(folder, argv, {**_OFF, **other, "output_dir": scratch}, "train.py")
    if not run["dataset_test_split"]:
        what = "the run held no data out to evaluate on"
        raise mistake("dataset_name", what, "--dataset_name FILE_OR_ID, other data with the same columns")
    require_legal(run)
    prepare_process(run)
    from launch.data.load import load_data
    from launch.training.build import build_arguments, build_trainer
    from launch.training.model import known_classes, load_tokenizer

    tokenizer = load_tokenizer(run)
    data = load_data(run, tokenizer, known_classes(run, tokenizer))
    with process_group(run, World()):
        args = build_arguments(run)
        model = _model(run, folder, tokenizer, data)
        return build_trainer(run, World(), args, model, tokenizer, data, console(is_main=False)).evaluate()


def generate(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print the answer while it is generated."""
    folder = Path(options.folder)
    run = _run_of(folder, [], {**_OFF, "eval_strategy": "no"}, "nobody")
    if run["task"] != "causal_lm":
        raise mistake("FOLDER", f"{folder} holds a classifier, which generates nothing", f"recipes evaluate {folder}")
    prepare_process(run)
    import torch
    from transformers import TextStreamer

    from launch.data.load import Data
    from launch.training.model import load_tokenizer

    tokenizer = load_tokenizer(run)
    nothing = Data((), None, list, "")  # type: ignore[arg-type]
    model = _model(run, folder, tokenizer, nothing).eval()
    model = model.to("cpu" if run["use_cpu"] or not run.hardware.cuda else "cuda")
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": options.prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision(run))
    with torch.autocast(model.device.type, precision) if precision else contextlib.nullcontext():
        shown = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        model.generate(**inputs.to(model.device), max_new_tokens=options.max_new_tokens, streamer=shown, use_cache=True)
    return 0


def _run_of(folder: Path, argv: Sequence[str], changed: dict[str, Any], trained_by: Any) -> RunSpec:
    """The run of a folder, in one process here, with flags and settings that change it."""
    quiet_libraries(verbose=False)
    file = recorded.file_of(folder)
    if not file.is_file() and folder.name.startswith("checkpoint-"):
        file = recorded.file_of(folder.parent)
    settings = recorded.read(file, "FOLDER")["settings"]
    if not settings.get("use_peft", {}).get("value"):  # the folder holds a whole model
        changed = {**changed, "model_name_or_path": str(folder), "model_revision": "main"}
    run = resolve(["--config", str(file), *argv], here(1, trained_by=trained_by), changed, "this command")
    if errors := [problem for problem in run.problems if problem.severity == "error"]:
        raise UserError(*errors)
    return replace(run, engine=from_yaml(shipped("single.yaml")))  # nothing is trained: no engine has to divide it


def _model(run: RunSpec, folder: Path, tokenizer: Any, data: Data) -> Any:
    from launch.training.model import load_model

    model = load_model(run, tokenizer, data)
    if run["use_peft"]:
        model.load_adapter(str(folder), "default")
    return model
