"""`recipes evaluate`, `generate` and `merge`: measure, try or merge the model of a run."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.flags import Commands
from launch.host.files import share, writing
from launch.host.world import World, prepare_process, process_group
from launch.output.checkpoints import model_notes, numbered
from launch.terminal import console, memory_size, plural, print_note, print_progress, print_table
from recipes.errors import mistake, one_line, raise_errors
from recipes.mixture import title
from recipes.quiet import quiet_libraries
from recipes.rules.check import require_legal
from recipes.rules.facts import mixed_precision
from recipes.run import Json, RunSpec, fingerprints, here, recorded, resolve
from recipes.run.command_line import parse
from recipes.run.engine import from_yaml
from recipes.run.files import shipped
from recipes.run.metrics import is_figure

if TYPE_CHECKING:
    import torch

_EVALUATE = "FOLDER  the --output_dir of a run, or one of its checkpoints"
_GENERATE = f"""
{_EVALUATE}
PROMPT              a message to a chat model, or the beginning of a text
--max_new_tokens N  the longest answer, in tokens [100]
"""
_MERGE = f"""
{_EVALUATE}
--output FOLDER             where to write the model [FOLDER/merged]
--model_name_or_path MODEL  the base model [the run's base model]
"""
# The allowed distance between the logits of the merged model and of base plus adapter, as a share
# of the largest logit. Distances arise because merged weights are rounded to the base's dtype.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
INPUTS, LENGTH = 3, 16  # number of sequences that both models get, and tokens per sequence
# Overrides that turn off parts that only a training needs, such as saving and reporting.
_OFF = {
    "eval_strategy": "epoch", "save_strategy": "steps", "load_best_model_at_end": False, "push_to_hub": False,
    "report_to": "none", "measure": None, "early_stopping_patience": None, "fresh": False,
    "resume_from_checkpoint": None, "deepspeed": None, "fsdp": None, "torch_compile": False, "from_scratch": False,
    "dataloader_drop_last": False,
}  # fmt: skip


def add_parser(commands: Commands) -> None:
    text = "Measure the model of a run on the run's --dataset_test_split. --dataset_name FILE_OR_ID names other data, "
    text += "with split `train` unless --dataset_test_split names another. Other flags of train.py override the run's."
    commands.add_parser("evaluate", description=text).takes(evaluate, _EVALUATE)
    text = "Generate with the model of a run. The model's generation config decides whether tokens are sampled. "
    text += "If the run trained on chats, the prompt is a user's message; else the model continues the prompt."
    commands.add_parser("generate", description=text).takes(generate, _GENERATE, max_new_tokens=100)
    text = "Merge a trained adapter, such as LoRA, into its base model, and write a model that any library loads, with "
    text += "tokenizer and generation config. Merged logits are first compared with the logits of base plus adapter."
    commands.add_parser("merge", description=text).takes(merge, _MERGE)


def evaluate(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print evaluation metrics, not times or speeds. Raises `UserError` without held-out data."""
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
    run, record = _run_of(folder, argv, {**_OFF, **other, "output_dir": scratch}, "train.py")
    name = title(run["dataset_name"]) or "the standard library"
    if not run["dataset_test_split"] and record["settings"]["eval_strategy"]["value"] == "no":
        what = "the run has no held-out data to evaluate on"
        raise mistake("dataset_name", what, "add --dataset_name FILE_OR_ID: other data with the same columns")
    trained, found = record.get("data"), fingerprints.of_data(run["dataset_name"])
    if not other and fingerprints.differ(trained, found):
        print_note(f"{name} has changed since the run", console(stderr=True))
    is_of_run = trained is not None and trained == found
    if is_of_run:  # the data's description then counts evaluated rows that the run trained on
        run = run.given_too(dataset_train_split=record["settings"]["dataset_train_split"]["value"])
    require_legal(run)
    prepare_process(run)
    from launch.data.load import load_data
    from launch.training.model import known_classes, load_tokenizer
    from launch.training.trainer import build_trainer

    tokenizer = load_tokenizer(run)
    classes = record.get("classes") or known_classes(run, tokenizer)
    data = load_data(run, tokenizer, classes)
    unknown = sorted({*(data.labels or ())} - {*classes}) if data.problem_type != "regression" else []
    if classes and unknown:
        what = f"the column holds {', '.join(unknown[:5])}, but the model knows only {', '.join(classes)}"
        raise mistake("dataset_label_field", what, "use the model's class names in this column")
    words = data.description.partition("\nevaluation: ")[2] if is_of_run else data.eval
    print(f"{name}, split {run['dataset_test_split'] or 'test or validation'}: {words}")
    with process_group(run, World()) as args:
        model = _model(run, folder, tokenizer, data.labels, data.problem_type)
        return build_trainer(run, args, model, tokenizer, data, console(is_main=False)).evaluate()


def generate(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print an answer while it is generated. Raises `UserError` if the model is a classifier."""
    folder = Path(options.folder)
    run, record = _run_of(folder, [], {**_OFF, "eval_strategy": "no"}, "nobody")
    if run["task"] != "causal_lm":
        whole = folder / "merged" if run["use_peft"] else folder
        first = f"recipes merge {folder}, then " * run["use_peft"]
        fix = f"{first}transformers.pipeline('text-classification', '{whole}'), in Python"
        raise mistake("FOLDER", f"{folder} holds a classifier, which generates no text", fix)
    prepare_process(run)
    import torch
    from transformers import TextStreamer

    from launch.training.model import load_tokenizer

    tokenizer = load_tokenizer(run)
    model = _model(run, folder, tokenizer).eval()
    model = model.to("cuda" if run.hardware.cuda else "cpu")
    if tokenizer.chat_template and record.get("chats", True):
        chat = [{"role": "user", "content": options.prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        ids = tokenizer(options.prompt)["input_ids"]
        ids = ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids  # as in training, cut the tokenizer's EOS
        inputs = tokenizer.pad({"input_ids": [ids]}, return_tensors="pt")
    length, config = inputs["input_ids"].shape[1], model.config.get_text_config()
    if not length:
        raise mistake("PROMPT", "is empty, and this tokenizer adds no first token", "write the beginning of a text")
    longest = getattr(config, "max_position_embeddings", None) or 0
    # A model without rotary positions has no embedding for a later token.
    if 0 < longest < length + options.max_new_tokens and not hasattr(config, "rope_parameters"):
        what = f"{options.max_new_tokens} and the prompt's {length} tokens exceed the model's {longest} positions"
        fix = f"--max_new_tokens {longest - length}" if longest > length else "write a shorter prompt"
        raise mistake("max_new_tokens", what, fix)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision(run))
    with torch.autocast(model.device.type, precision, enabled=precision is not None):
        shown = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        model.generate(**inputs.to(model.device), max_new_tokens=options.max_new_tokens, streamer=shown, use_cache=True)
    return 0


def _run_of(folder: Path, argv: Sequence[str], changed: dict[str, Any], trained_by: Any) -> tuple[RunSpec, Json]:
    """Return a folder's run, for one process, and its record. `argv` and `changed` override the
    run's settings. A whole model in the folder replaces model_name_or_path; a note is printed if a
    merged model is older than its adapter. Raises `UserError` with every problem.
    """
    quiet_libraries(verbose=False)
    file, around = recorded.file_of(folder), recorded.file_of(folder.parent)
    if folder.is_dir() and not file.is_file() and around.is_file():  # a checkpoint, or a merged model
        file = around
    record = recorded.read(file if file.is_file() else folder, "FOLDER")
    held = [name for name in ("config.json", "adapter_config.json") if (folder / name).is_file()]
    if not held:
        newest = next((str(path) for path in numbered(folder)), "")
        fix = f"use {newest}, or " * bool(newest) + "finish the run: repeat the command that started it"
        raise mistake("FOLDER", f"{folder} holds no model, because its run has not finished", fix)
    is_adapter = record["settings"].get("use_peft", {}).get("value") and "config.json" not in held
    if not is_adapter:  # the folder holds a whole model, perhaps a merged one
        whole = {"model_name_or_path": str(folder), "model_revision": "main", "use_peft": False, "load_in_4bit": False}
        changed = {**changed, **whole}
        if _is_outdated(folder, folder.parent):
            print_note(f"{folder} is older than its adapter: run `recipes merge` again", console(stderr=True))
    run = resolve(["--config", str(file), *argv], here(1, trained_by=trained_by), changed, "this command")
    raise_errors(list(run.problems))
    print_progress("importing the libraries", console(stderr=True))
    return replace(run, engine=from_yaml(shipped("single.yaml"))), record  # nothing is trained: it needs no engine


def _is_outdated(merged: Path, folder: Path) -> bool:
    """True if the folder's adapter was written after this merged model."""
    adapter = folder / "adapter_model.safetensors"
    return adapter.is_file() and adapter.stat().st_mtime > merged.stat().st_mtime


def _model(
    run: RunSpec, folder: Path, tokenizer: Any, labels: list[str] | None = None, problem_type: str | None = None
) -> Any:
    from launch.training.model import load_model

    model = load_model(run, tokenizer, labels, problem_type)
    if run["use_peft"]:
        try:
            if strange := model.load_adapter(str(folder), "default").unexpected_keys:
                raise ValueError(f"the adapter has {plural(len(strange), 'unexpected tensor')} such as {strange[0]}")
        except Exception as error:  # anything: no adapter, other shapes, a damaged file
            what = f"the adapter in {folder} does not fit {run['model_name_or_path']}: {one_line(error)}"
            raise mistake("FOLDER", what, "use the adapter's own base model, and all files of the adapter") from None
    return model


# --- Merging --------------------------------------------------------------------------------------


def merge(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Merge an adapter into its base model, and save the result. If logits change too much, save
    nothing and return 1, else return 0. Raises `UserError` if the folder holds no adapter.
    """
    folder, out = Path(options.folder), console()
    output = Path(options.output or folder / "merged")
    if not (folder / "adapter_config.json").is_file():
        holding = (f"recipes merge {path}" for path in numbered(folder) if (path / "adapter_config.json").is_file())
        fix = next(holding, "give the folder of a run with --use_peft; other runs need no merge")
        raise mistake("FOLDER", f"{folder} {'holds no adapter' if folder.exists() else 'does not exist'}", fix)
    if output.exists():
        what = f"{output} exists already{', and is older than the adapter' if _is_outdated(output, folder) else ''}"
        raise mistake("output", what, f"give --output a new folder, or first run `rm -r {output}`")
    other = {"model_name_or_path": options.model_name_or_path, "model_revision": "main"}
    whole = {"eval_strategy": "no", "load_in_4bit": False, "gradient_checkpointing": False, "attn_implementation": None}
    changed = {**_OFF, **whole, **(other if options.model_name_or_path else {})}
    run, record = _run_of(folder, [], changed, "nobody")
    base = run["model_name_or_path"]
    if fingerprints.differ(record.get("model"), fingerprints.of_model(base, run["model_revision"])):
        print_note(f"{base} is not the model that the adapter was trained on: its files differ", out)
    for line in model_notes(folder, record.get("model_files") or {}) if recorded.file_of(folder).is_file() else ():
        print_note(line, out)
    if record["settings"]["load_in_4bit"]["value"]:
        print_note("the adapter was trained on 4-bit weights: it is merged into the unquantised weights", out)

    prepare_process(run)
    from transformers import AutoTokenizer

    from launch.training.model import load_tokenizer, read_config

    saved = (folder / "tokenizer_config.json").is_file()  # train.py saves the tokenizer here
    tokenizer = AutoTokenizer.from_pretrained(folder) if saved else load_tokenizer(run)
    dtype = str(read_config(run).dtype or "float32").removeprefix("torch.")
    run = run.given_too(dtype=dtype)
    model = _model(run, folder, tokenizer, record.get("classes"), run["problem_type"])
    eos = tokenizer.eos_token_id or 0
    before, merged = _logits(model, eos), model.merge_and_unload()
    difference = float((before - _logits(merged, eos)).abs().max()) / (float(before.abs().max()) or 1.0)
    limit = TOLERANCE[dtype]
    compared = f"{plural(INPUTS, 'input')} and those of adapter plus base differ by {difference:.1e} of the largest"
    if not difference <= limit:  # NaN too
        print_note(f"logits of {compared}, more than the limit of {limit:g} for {dtype}: nothing was written", out)
        return 1
    merged.config.use_cache = merged.config.get_text_config().use_cache = True  # training turns the cache off
    with writing(output, "output", "choose another --output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as beside:
            whole_model = Path(beside, "whole")
            for part in (merged, tokenizer):  # the model with its generation config
                part.save_pretrained(whole_model)
            share(whole_model / "config.json")
            whole_model.rename(output)
    size = memory_size(sum(weight.nbytes for weight in merged.parameters()))
    lines = [f"merged   {folder}, based on {base}", f"checked  logits of {compared} (limit in {dtype}: {limit:g})"]
    out.print("\n".join([*lines, f"written  {output}, {size} in {dtype}"]), highlight=False, markup=False)
    return 0


def _logits(model: Any, eos: int) -> torch.Tensor:
    """Return the logits of a few sequences of random tokens, the same sequences at each call."""
    import torch

    numbers = torch.Generator().manual_seed(0)
    known = model.config.get_text_config().vocab_size
    rows = torch.randint(known, (INPUTS, LENGTH), generator=numbers)
    rows[:, -1] = eos  # BART's and T5's classifiers read the position of EOS
    with torch.no_grad():  # one by one: a classifier may have no padding token
        return torch.cat([model.eval()(input_ids=row).logits.float() for row in rows.split(1)])
