"""Rules about train.py's data, and about a model's folder, type, length, attention and adapters.

The rules judge a local model before the start, and a model on the Hub once its config.json is
downloaded: train.py then applies the same rules again.
"""

import glob
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from recipes import legal
from recipes.errors import Problem
from recipes.mixture import Part, files_of, parts_of, paths_of
from recipes.rules.facts import (
    HELD_OUT,
    advice,
    available,
    in_yaml,
    known_config,
    mapping,
    missing,
    mixed_precision,
    model_config,
    rule,
    rule_of_train_py,
    uses_fsdp,
)
from recipes.rules.local_model import (
    is_git_lfs_pointer,
    is_rotary,
    max_positions,
    model_folder,
    text_config,
    weights_in,
)
from recipes.rules.table import advice_row, error_row
from recipes.run import RunSpec, nearest
from recipes.run.files import existing_path, expanded

# --- Data -----------------------------------------------------------------------------------------

FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
COMPRESSED = (".gz", ".zst")  # not for Parquet, which is compressed inside
_SPLIT_FILES = "use a folder with a file for each split, such as train.jsonl and test.jsonl"

# A part of a split as `datasets` reads it (arrow_reader._SUB_SPEC_RE).
_BOUND = r"(-?(100|\d?\d)%|-?[\d_]+)?"
_SPLIT = re.compile(rf"\w+(\.\w+)*(\[{_BOUND}:{_BOUND}\])?(\([^)]*\))?")


def file_kind(path: PurePath) -> str | None:
    """The `datasets` reader for a file's suffix (before .gz or .zst); None for other suffixes."""
    if path.suffix.lower() not in COMPRESSED:
        return FILE_KINDS.get(path.suffix.lower())
    kind = FILE_KINDS.get(Path(path.stem).suffix.lower())
    return None if kind == "parquet" else kind


@rule_of_train_py
def the_data_exists(run):
    """`datasets` mistakes a missing path for a Hub id, and finds no such data set on the Hub."""
    for part in parts_of(run["dataset_name"]):
        if run.place.is_elsewhere or paths_of(part.name):
            continue
        if glob.has_magic(part.name):
            what = f"there is no file that matches {part.name}"
            yield Problem("dataset_name", what, "write a pattern that matches files")
        elif part.name.startswith((".", "/", "~")) or file_kind(Path(part.name)):
            what, name = f"there is no file or folder {part.name}", Path(part.name).name
            beside = {path.name: str(path) for path in expanded(part.name).parent.glob("*")}
            fix = beside.get(nearest(name, beside), "give the path of an existing file or folder")
            yield Problem("dataset_name", what, fix)


@rule_of_train_py
def a_data_file_can_be_read(run):
    """One reader, chosen by suffix, reads all files of a pattern. An empty file has no columns."""
    for part, paths in _of_files(run):
        kinds = {file_kind(path): path for path in paths}
        if None in kinds:
            fix = "use a .parquet file, or .jsonl, .json, .csv, .txt, which may be compressed (.gz, .zst)"
            yield Problem("dataset_name", f"{kinds[None]} has an unknown suffix", fix)
        elif len(kinds) > 1:
            what = f"{part.name} matches files of several kinds: {', '.join(map(str, kinds.values()))}"
            patterns = " ".join(f"'{path.parent}/*{''.join(path.suffixes)}'" for path in kinds.values())
            yield Problem("dataset_name", what, f"give a pattern for each kind: --dataset_name {patterns}")
        for path in paths:
            if not path.stat().st_size:
                yield Problem("dataset_name", f"{path} is empty", "name a file with rows")


@rule_of_train_py
def the_splits_can_be_read(run):
    """Files have only the split `train`. A stream cannot be sliced: `Bad split: train[:95%]`."""
    parts, evaluates = parts_of(run["dataset_name"]), run["eval_strategy"] != "no"
    files = [part for part, _ in _of_files(run)]
    has = "a single file has only train" if len(files) == 1 else "files have only train"
    for part in parts or [Part("")]:
        asked = {"dataset_name" if part.split else "dataset_train_split": part.split or run["dataset_train_split"]}
        asked |= {"dataset_test_split": run["dataset_test_split"] or "train"} if evaluates else {}
        for name, split in asked.items():
            pieces = {piece.partition("[")[0].strip() for piece in split.split("+")}
            if not all(_SPLIT.fullmatch(piece.strip()) for piece in split.split("+")):
                yield Problem(name, f"{split!r} is no split", "write train, train[:80%], train[100:200] or train+test")
            elif pieces - {"train"} and part in files:
                fix = "train" if run["dataset_streaming"] else "train, or a slice of it: 'train[:95%]'"
                yield Problem(name, f"there is no split {split!r}: {has}", fix)
            elif run["dataset_streaming"] and re.search(r"[\[+]", split):
                what = f"{split!r} is not one whole split, and splits of a stream cannot be sliced or joined"
                yield Problem(name, what, f"name one whole split; to evaluate, {_SPLIT_FILES}")
    if files == parts != [] and evaluates and not run["dataset_test_split"]:
        yield nothing_to_evaluate_on(has, run["dataset_streaming"])


@rule_of_train_py
def evaluation_rows_are_not_trained(run):
    """The evaluation measures rows that the model has memorized, so its metrics are too good."""
    test, train = run["dataset_test_split"] or "", run["dataset_train_split"]
    if run["eval_strategy"] == "no" or not _share_rows(test, train):
        return
    name, unit, start, end = _slice(test) or (test, "", 0, math.inf)
    rest = f"{name}[:{start}{unit}]" if end == math.inf else f"{name}[{end:g}{unit}:]"
    fix = f"--dataset_train_split '{rest}'" if bool(start) != (end < math.inf) else "choose splits that share no rows"
    yield advice("dataset_test_split", f"{test} shares rows with {train}, the split to train on", fix)


def _share_rows(one: str, other: str) -> bool:
    """True if two splits surely share rows: one holds the other, or both are overlapping slices."""
    if (first := _slice(one)) and (second := _slice(other)):
        return first[:2] == second[:2] and max(first[2], second[2]) < min(first[3], second[3])
    return one.partition("[")[0] == other.partition("[")[0] and ("[" not in one or "[" not in other)


def _slice(split: str) -> tuple[str, str, int, float] | None:
    """Return (name, unit, start, end) of a slice such as `train[80%:]`; None for other splits."""
    found = re.fullmatch(r"(\w+)\[(\d*)(%?):(\d*)(%?)\]", split)
    return found and (found[1], found[3] or found[5], int(found[2] or 0), float(found[4] or "inf"))


def _of_files(run: RunSpec) -> list[tuple[Part, list[Path]]]:
    """Return the data's sources that are local files or patterns, each with the files' paths."""
    return [(part, files) for part in parts_of(run["dataset_name"]) if (files := files_of(part.name))]


def nothing_to_evaluate_on(has: str, streams: bool) -> Problem:
    """Return the problem of an evaluation without a test split. `has` names the existing splits."""
    what = f"there is nothing to evaluate on: {has}, no test and no validation"
    return Problem("dataset_test_split", what, f"{_SPLIT_FILES if streams else HELD_OUT}, or --eval_strategy no")


# --- The model's folder ---------------------------------------------------------------------------

_AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "sequence_classification": "AutoModelForSequenceClassification",
}
_TOKENIZERS = (
    "tokenizer*", "*vocab*", "merges.txt", "dict.txt", "*.model", "*.spm", "*.tiktoken", "*.codes", "tekken.json",
)  # fmt: skip


def _type(run: RunSpec) -> str:
    """The `model_type`; empty if it is unknown."""
    return str(known_config(run).get("model_type") or "")


@rule_of_train_py
def the_model_is_a_folder(run):
    """transformers mistakes a missing path for a Hub id, and reports a missing repository."""
    name = run["model_name_or_path"]
    if not name or run.place.is_elsewhere or model_folder(name):
        return
    if existing_path(name):
        fix = "name the folder that holds config.json and the weights"
        yield Problem("model_name_or_path", f"{name} is a file", fix)
        return
    parent = expanded(name).parent
    near = nearest(expanded(name).name, [path.name for path in parent.glob("*")])
    fix = f"use {parent / near}" if near else "name an existing folder, or a Hub id"
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1:
        yield Problem("model_name_or_path", f"there is no folder {name}", fix)
    elif near and "/" in name:  # a misspelt `outputs/base`, or a Hub id whose owner is also a folder here
        yield advice("model_name_or_path", f"there is no folder {name} here, so the name is used as a Hub id", fix)


@rule_of_train_py
def the_folder_holds_a_model(run):
    """Without weights, loading ends in `OSError: no file named model.safetensors found`; with the
    pointer of git-lfs in their place, in `Error while deserializing header: header too large`.
    """
    folder = model_folder(run["model_name_or_path"])
    if folder is None or run.place.is_elsewhere:
        return
    what, fix = "", ""
    weights = [] if run["from_scratch"] else weights_in(folder)
    if not (folder / "config.json").is_file():
        what, fix = "has no config.json", "name a folder that save_pretrained wrote"
        if (folder / "adapter_config.json").is_file():
            what = "holds LoRA adapters without their base model"
            fix = f"run `recipes merge {folder}`, then use --model_name_or_path {folder / 'merged'}"
    elif not weights and not run["from_scratch"]:
        what = "has a config.json but no weights"
        fix = "name a folder with model.safetensors too, or use --from_scratch for random weights"
    elif pointer := next(filter(is_git_lfs_pointer, weights), None):
        what, fix = f"has no weights: {pointer.name} is only a git-lfs pointer", "run `git lfs pull` in its repository"
    elif not any(path.is_file() for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        # BERT's tokenizer, for example, then loads with five tokens: all text becomes unknown.
        what, fix = "has no tokenizer", "call tokenizer.save_pretrained with the same folder"
    if what:
        yield Problem("model_name_or_path", f"the folder {folder} {what}", fix)


# --- The type and the task ------------------------------------------------------------------------


@rule_of_train_py
def the_model_can_do_the_task(run):
    """Loading fails with `Transformers does not recognize this architecture` or
    `Unrecognized configuration class ...`, or would run Python code that comes with the model.
    """
    name, kind, task, known = run["model_name_or_path"], _type(run), run["task"], legal.names("model_types")
    if name is None or model_config(run) is None or not known or legal.model_class(kind, task):
        return
    if kind not in known and run.model is not None:
        return  # transformers, or the user's script, has already loaded this configuration
    code = _AUTO_CLASSES[task] if kind in known else "AutoConfig"
    if code in mapping(known_config(run).get("auto_map")):
        if not run["trust_remote_code"]:
            what = f"{name} comes with Python code"
            yield Problem("trust_remote_code", what, "read the code, then use --trust_remote_code")
    elif not kind:
        what = f"{name} has no model_type in its config.json"
        yield Problem("model_name_or_path", what, "use the config.json that save_pretrained wrote")
    elif kind not in known:
        what = f"{name} has the type {kind!r}, which transformers {legal.version('transformers')} does not know"
        say = Problem if not run.place.is_elsewhere else advice  # the other machine may have another version
        yield say("model_name_or_path", what, "pip install --upgrade transformers, or use another model")
    else:
        others = [f"--task {other}, or " for other in _AUTO_CLASSES if legal.model_class(kind, other)]
        fix = f"{''.join(others)}use another model"
        yield Problem("model_name_or_path", f"transformers has no {kind} model for {task}", fix)


@rule_of_train_py
def sequences_fit_the_model(run):
    """A sequence beyond a table of positions ends in `IndexError`. Rotary models have no table."""
    positions = max_positions(known_config(run)) or math.inf
    if not run.explicit("max_length") or run["max_length"] <= positions:
        return  # train.py lowers a length that the user did not set
    what = f"{run['max_length']} tokens exceed the model's {positions} positions"
    fix = f"--max_length {positions} or less"
    if is_rotary(known_config(run)):
        yield advice("max_length", what, f"{fix}; or set rope_parameters in the config.json of a local copy")
    else:
        yield Problem("max_length", what, fix)


# --- LoRA -----------------------------------------------------------------------------------------


def _targets(run: RunSpec) -> list[str]:
    """The last part of each name in `lora_target_modules`; empty for `all-linear`."""
    wanted = run["lora_target_modules"] or []
    return [] if wanted == ["all-linear"] else [target.rpartition(".")[2] for target in wanted]


def fuses_the_loss(run: RunSpec) -> bool:
    """True if Liger computes a language model's loss from the hidden states, without the logits."""
    asked = run["use_liger_kernel"] and run["task"] == "causal_lm"
    fused = mapping(run["liger_kernel_config"]).get("fused_linear_cross_entropy", True)
    return bool(asked and fused and _type(run) in legal.types_with_fused_loss())


def freeze_parts_without_text(model: Any) -> list[str]:
    """Freeze a multimodal model's modules that text does not use, such as its vision tower: DDP
    would wait for their gradients. Return regexes of the names, for peft's `exclude_modules`.
    """
    base, decoder = model.base_model, model.get_decoder()
    if base in (decoder, model) or not {"vision_config", "audio_config"} & vars(model.config).keys():
        return []
    parts = {name: part for name, part in base.named_children() if part is not decoder}
    for part in parts.values():
        part.requires_grad_(False)
    return [rf"{model.base_model_prefix}\.{name}\..*" for name in parts]


def what_peft_accepts(message: str, dora: bool) -> str:
    """Return the fix for peft's error `message` about a model. `dora`: the run uses DoRA."""
    fix = "name other modules of the model with --lora_target_modules"
    if "DoRA" in message or (dora and "ParamWrapper" in message):  # peft has neither dropout nor DoRA for experts
        return f"{fix}, or use --lora_dropout 0 without --use_dora"
    return f"--lora_dropout 0, or {fix}" if "dropout" in message else fix


# --- Attention ------------------------------------------------------------------------------------

_LEAVE_OUT = "leave it out: the default is the best implementation that the model supports"
_FLASH_PACKAGES = {
    2: ("flash_attn", "flash-attn"),
    3: ("flash_attn_interface", "flash-attn-3"),
    4: ("flash_attn", "flash-attn-4"),
}

_HEADS = ("head_dim", "global_head_dim", "swa_head_dim", "qk_head_dim", "v_head_dim")


def _flash_version(name: str) -> int:
    """FlashAttention's version in a name such as `flash_attention_2`; 0 for any other attention."""
    found = re.search(r"flash[-_]att(?:entio)?n[-_]?(\d?)", name)
    return int(found[1] or 2) if found else 0  # kernels-community/flash-attn is version 2


@rule
def attention_fits_the_model(run):
    """FlashAttention 2 and 3 fail in step 1 if heads exceed 256 dimensions, as in Gemma 4."""
    name, text = run["attn_implementation"] or "", text_config(known_config(run))
    layers = map(mapping, [text, *mapping(text.get("per_layer_config")).values()])
    heads = max((layer[key] for layer in layers for key in _HEADS if isinstance(layer.get(key), int)), default=0)
    if _flash_version(name) in (2, 3) and heads > 256:
        what = f"{name} needs head dimensions up to 256, and the model has {heads}"
        yield Problem("attn_implementation", what, _LEAVE_OUT)


@rule
def attention_fits_the_machine(run):
    """The first step fails: `FlexAttention does not support backward on CPU`,
    `FlashAttention only supports Ampere GPUs`, or `only support fp16 and bf16 data type`.

    FlashAttention 3 is written for Hopper, version 4 for Hopper and Blackwell. Version 3 trains on
    Ampere only if it was built for Ampere, and does not train on GPUs after Hopper:
    https://github.com/Dao-AILab/flash-attention/issues/1049 and 1853.
    """
    name, card = run["attn_implementation"] or "", run.hardware.capability
    flash, here = _flash_version(name), f"the GPU has compute capability {'.'.join(map(str, card))}"
    package, distribution = _FLASH_PACKAGES.get(flash, ("", "")) if "/" not in name else ("kernels", "kernels")
    has_kernels = not package or available(run, "kernels") or available(run, package)  # `kernels` loads every version
    say: Callable[..., Problem] = Problem
    what, fix = "", "sdpa, or leave it out"
    if not run.hardware.cuda:
        what = f"{name} does not train on a CPU" if flash or name == "flex_attention" else ""
    elif flash and card < (8, 0):
        what = f"needs compute capability 8.0 or higher: {here}"
    elif flash == 3 and card[0] > 9:
        what, fix = f"FlashAttention 3 does not train on this GPU: {here}", "flash_attention_2 or flash_attention_4"
    elif flash > 2 and card[0] < 9:
        what, fix = f"FlashAttention {flash} is not written for GPUs before Hopper: {here}", "flash_attention_2"
        say = advice if run.place.is_elsewhere or has_kernels else Problem
    elif not has_kernels:
        yield missing(run, "attn_implementation", distribution, f"{name} needs the package {distribution}")
    if what:
        yield say("attn_implementation", what, fix)
    if flash and run.hardware.cuda and run["dtype"] == "float32" and mixed_precision(run) == "no":
        fix = "--bf16: the weights stay in fp32, and attention computes in 16 bits"
        yield Problem("attn_implementation", "FlashAttention needs 16 bits, and this run computes in fp32", fix)


# --- The model's class, which only train.py has imported ------------------------------------------


def refused_by_class(run: RunSpec, cls: type) -> Iterator[Problem]:
    """Yield a problem for each setting that the model's class does not support. Libraries refuse
    such a setting only after loading the weights: `BloomForCausalLM does not support an attention
    implementation ...`, `Could not find the transformer layer class GPT2Block in the model.`
    """
    name = run["attn_implementation"] or ""
    kind = "flash_attn" if _flash_version(name) else {"sdpa": "sdpa", "flex_attention": "flex_attn"}.get(name)
    if kind and not getattr(cls, f"_supports_{kind}", True):
        yield Problem("attn_implementation", f"{name} is not supported by {cls.__name__}", _LEAVE_OUT)
    layers = run.engine.fsdp.get("transformer_layer_cls_to_wrap") if uses_fsdp(run) else None
    layers = layers.split(",") if isinstance(layers, str) else layers or []
    known = sorted((getattr(cls, "_no_split_modules", None) or _layers_of_base(cls)) if layers else ())
    for layer in (layer for layer in layers if known and not hasattr(sys.modules[cls.__module__], layer)):
        what = f"transformer_layer_cls_to_wrap: {layer} is not a part of {cls.__name__}"
        yield in_yaml(run, "fsdp_config", what, nearest(layer, known) or ", ".join(known))


def _layers_of_base(cls: type) -> Sequence[str]:
    """The `_no_split_modules` of a class's headless model; empty if there are none."""
    from transformers import AutoModel

    config = getattr(cls, "config_class", None)
    return getattr(config and AutoModel._model_mapping.get(config, None), "_no_split_modules", None) or ()


# --- Rules of one expression ----------------------------------------------------------------------


def _is_encoder(run: RunSpec) -> bool:
    config = known_config(run)
    decodes = config.get("is_encoder_decoder") or config.get("is_decoder")
    return bool(legal.model_class(_type(run), "masked_lm")) and not decodes


def _names_no_attention(run: RunSpec) -> bool:
    """True if the attention is neither a name in transformers nor a Hub kernel (org/name)."""
    name = run["attn_implementation"]
    return bool(name) and "/" not in name and name not in legal.names("attn_implementation")


def _known_attention(run: RunSpec) -> str:
    known = [name for name in legal.names("attn_implementation") if "|" not in name]
    near = nearest(run["attn_implementation"].lower(), known)
    return near or "use one of " + ", ".join(known) + ", or a kernel of the Hub: org/name"


_OF_TRAIN_PY = (
    error_row("a_language_model_is_a_decoder", "model_name_or_path",
              lambda run: run["model_name_or_path"] is not None and run["task"] == "causal_lm" and _is_encoder(run),
              lambda run: f"{run['model_name_or_path']} is an encoder ({_type(run)}): it sees the tokens it has to "
              "predict",
              "choose a decoder, or --task sequence_classification",
              "An encoder trains without an error, and its loss falls only because it sees the tokens to predict."),
    error_row("lora_on_the_head_gets_gradients", "lora_target_modules",
              lambda run: run["use_peft"] and "lm_head" in _targets(run) and fuses_the_loss(run),
              "lm_head gets no gradient: Liger's fused loss uses only the frozen lm_head.weight, not the adapter",
              "leave lm_head out, or --liger_kernel_config '{{\"fused_linear_cross_entropy\": false}}'",
              "The head's adapter never changes: Liger multiplies by `lm_head.weight`, which peft freezes. Under DDP "
              "the unused adapter is an error in the second step."),
    advice_row("lora_on_tied_weights_cannot_be_merged", "lora_target_modules",
               lambda run: run["use_peft"] and {"lm_head", "embed_tokens", "wte", "embed_out"} & {*_targets(run)}
               and known_config(run).get("tie_word_embeddings"),
               "`recipes merge` will refuse these adapters: the head and the embeddings are one weight",
               "leave head and embeddings out, or never merge",
               "Merging an adapter of the head changes the embeddings too, and the reverse: transformers #45127."),
    advice_row("the_routers_loss_counts_once_in_a_step", "model_name_or_path",
               lambda run: known_config(run).get("output_router_logits") and run.batch.total > run.batch.micro,
               lambda run: "the router's auxiliary loss counts "
               f"{run.batch.accumulation * run.batch.data_parallel} times per optimizer step, once per micro-batch",
               lambda run: "in config.json, divide router_aux_loss_coef by that number, or set output_router_logits "
               "to false",
               "Trainer divides the tokens' loss by the tokens of the whole step, and adds the auxiliary loss of each "
               "micro-batch and process as it is: transformers #48690."),
    error_row("liger_evaluates_plain_labels", "use_liger_kernel",
              lambda run: run["label_smoothing_factor"] and run["eval_strategy"] != "no" and fuses_the_loss(run),
              "cannot evaluate with label_smoothing_factor, which also turns off Liger's fused loss",
              "--use_liger_kernel false, or --label_smoothing_factor 0",
              "The first evaluation fails: `skip_logits is True, but labels and shift_labels are None`."),
)  # fmt: skip

ROWS = (
    *(replace(row, of_train_py=True) for row in _OF_TRAIN_PY),
    error_row("attention_is_known", "attn_implementation", _names_no_attention,
              "there is no implementation '{attn_implementation}'", _known_attention,
              'Once data is loaded: `ValueError: Specified attn_implementation="..." is not supported`.'),
)  # fmt: skip
