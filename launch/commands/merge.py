"""`recipes merge`: a trained adapter merged into its base model, and compared with both."""

from __future__ import annotations

import argparse
import math
import os
import shutil
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.flags import Commands, spellings
from launch.host.files import make_folder, require_writable
from launch.output import record
from launch.output.checkpoints import inspect, numbered
from launch.terminal import console, memory_size, plural, print_note
from launch.training.unloadable import one_line, unloadable
from recipes.errors import UserError, mistake
from recipes.quiet import quiet_imported, quiet_libraries, silence
from recipes.run import Json, fingerprints
from recipes.run.files import expanded, read_json
from recipes.run.local_model import existing_path, has_weights, model_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Of the largest logit: how far those of the merged model may be from those of adapter plus base.
# The merged weights are rounded to the type of the base model.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
INPUTS, LENGTH = 3, 16  # sequences that both are asked, and their tokens
_CLASSES = {"CAUSAL_LM": "AutoModelForCausalLM", "SEQ_CLS": "AutoModelForSequenceClassification"}
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_OF_LORA = ("r", "lora_alpha", "target_modules")
_DESCRIPTION = """\
Merge a trained adapter (LoRA and its like) into its base model, and write a model that any library loads, with
tokenizer and generation config. Before it is written, its logits are compared with those of adapter plus base.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "merge",
        allow_abbrev=False,
        usage="recipes merge FOLDER [--output FOLDER] [--model_name_or_path BASE] [--trust_remote_code]",
        description=_DESCRIPTION,
    )
    parser.add_argument("folder", metavar="FOLDER", help="the --output_dir of a run with --use_peft, or a checkpoint")
    parser.add_argument("--output", metavar="FOLDER", help="where to write the model [FOLDER/merged]")
    parser.add_argument(
        *spellings("model_name_or_path"), metavar="BASE", help="the base model [the one that the adapter names]"
    )
    parser.add_argument(
        *spellings("trust_remote_code"), action="store_true", help="run Python code that comes with the base model"
    )
    parser.set_defaults(run=merge)


def merge(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Returns 0, or 1 if the merged model is not equal, which is then not written. Raises
    `UserError` for what cannot be merged.
    """
    quiet_libraries(verbose=False)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # where models are merged; DeepSpeed would look, and say what it saw
    out = console()
    folder = adapter_folder(Path(options.folder))
    config = _config(folder / "adapter_config.json")
    output = Path(options.output or Path(options.folder) / "merged")
    _require_free(output)
    run = record.read(folder) or record.read(folder.parent)
    base = _base(options.model_name_or_path, config, run)
    if folder != Path(options.folder):
        print_note(f"{options.folder} holds no adapter itself: {folder.name}, its newest checkpoint, is merged", out)
    if fingerprints.differ(run.get("model"), fingerprints.of_model(base)):
        print_note(f"{base} is not what the adapter was trained on: its files are others than in that run", out)
    if _value(run, "load_in_4bit"):
        print_note("the adapter was trained on 4-bit weights: it is merged into the unquantised ones", out)

    with silence():  # of weights that the adapter brings, it would be said that they are missing
        tokenizer = _tokenizer(folder, base, options.trust_remote_code)
        adapter = _load(folder, config, base, run, options.trust_remote_code, tokenizer)
    free, needed = shutil.disk_usage(_existing(output)).free, _bytes(adapter.get_base_model())
    if needed > free:
        what = f"{output} has {memory_size(free)} free, and the merged model takes {memory_size(needed)}"
        raise mistake("output", what, "--output on a larger disk")
    with silence():
        before, merged = _merged(adapter, folder)
    dtype, difference = str(merged.dtype).removeprefix("torch."), _difference(before, _logits(merged))
    if math.isnan(difference):
        what = f"adapter plus base answer with values that are not numbers: {folder}"
        raise mistake("FOLDER", what, "the adapter_config.json that peft wrote, or an earlier checkpoint")
    limit = TOLERANCE.get(dtype, TOLERANCE["float32"])
    compared = f"logits of {plural(INPUTS, 'input')} differ from adapter plus base by {difference:.1e} of the largest"
    if difference > limit:
        print_note(f"{compared}, more than {limit:g} in {dtype}: nothing was written", out)
        return 1
    _write(merged, tokenizer, output)
    out.print(f"merged   {folder} into {base}", highlight=False, markup=False)
    out.print(f"checked  {compared} (at most {limit:g} in {dtype})", highlight=False, markup=False)
    out.print(f"written  {output}, {memory_size(needed)} in {dtype}", highlight=False, markup=False)
    if tokenizer is None:
        print_note(f"neither {folder} nor {base} has a tokenizer", out)
    return 0


# --- What to merge --------------------------------------------------------------------------------


def adapter_folder(folder: Path) -> Path:
    """The folder that holds the adapter: this one, or its newest whole checkpoint.

    Raises `UserError` if there is none.
    """
    if not folder.is_dir():
        what = f"{folder} is a file" if folder.is_file() else f"there is no folder {folder}"
        raise mistake("FOLDER", what, "the --output_dir of a run with --use_peft")
    found = [path for path in (folder, *numbered(folder)) if _holds_adapter(path)]
    whole = [path for path in found if path == folder or inspect(path, _of_deepspeed(path)).valid]
    if whole:
        return whole[0]
    fix = "the --output_dir of a run with --use_peft, or one of its checkpoints"
    if found:
        raise mistake("FOLDER", f"the checkpoints in {folder} are damaged", fix)
    if has_weights(folder):
        raise mistake("FOLDER", f"{folder} holds a whole model, and no adapter to merge", fix)
    raise mistake("FOLDER", f"{folder} holds no adapter_config.json with its weights", fix)


def _holds_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file() and any((folder / name).is_file() for name in _WEIGHTS)


def _config(file: Path) -> Json:
    """Raises `UserError` if it lacks what peft writes: it has a value of its own for most."""
    config, _ = read_json(file)
    if config is None:
        raise mistake("FOLDER", f"{file} is not a JSON object", "the one that peft wrote")
    needed = ("peft_type", "task_type", *(_OF_LORA if config.get("peft_type") == "LORA" else ()))
    if absent := [name for name in needed if name not in config]:
        raise mistake("FOLDER", f"{file} has no {' and no '.join(absent)}", "the one that peft wrote")
    return config


def _of_deepspeed(checkpoint: Path) -> bool:
    return (checkpoint / "latest").exists()


def _require_free(output: Path) -> None:
    """Raises `UserError` for a folder that holds something, or cannot be made."""
    try:
        if output.is_file() or (output.is_dir() and any(output.iterdir())):
            raise mistake("output", f"{output} is there already", "--output with a new folder")
        require_writable(output.absolute().parent)
    except OSError as error:
        raise mistake("output", f"{output} cannot be written: {error.strerror}", "--output elsewhere") from None


def _base(wanted: str | None, config: Json, run: Json) -> str:
    """The base model: as asked for, or as the adapter names it, or where the run found it."""
    if wanted:
        if existing_path(wanted) is not None and model_folder(wanted) is None:
            raise mistake("model_name_or_path", f"{wanted} is a file", "the folder of the base model, or a Hub id")
        return str(expanded(wanted))
    named, then = _text(config, "base_model_name_or_path"), _text(run.get("paths"), "model_name_or_path")
    if not named and not then:
        what = "the adapter does not name its base model"
        raise mistake("model_name_or_path", what, "--model_name_or_path with it")
    if then and not (named and existing_path(named)) and Path(then).is_dir():
        return str(then)
    if Path(base := str(named or then)).is_absolute() and not Path(base).is_dir():
        what = f"the base model that the adapter names is not there: {base}"
        raise mistake("model_name_or_path", what, "--model_name_or_path with where it is now")
    return base


def _value(run: Json, name: str) -> Any:
    settings = run.get("settings")
    setting = settings.get(name) if isinstance(settings, dict) else None
    return setting.get("value") if isinstance(setting, dict) else None


def _text(section: Any, name: str) -> str | None:
    """A text in a file that somebody may have changed. None if there is none."""
    value = section.get(name) if isinstance(section, dict) else None
    return value if isinstance(value, str) and value else None


# --- Models ---------------------------------------------------------------------------------------


def _load(folder: Path, config: Json, base: str, run: Json, trust_remote_code: bool, tokenizer: Any) -> Any:
    """The base model in the type that it is stored in, with the adapter around it."""
    task = str(config.get("task_type"))
    if task not in _CLASSES:
        what = f"the adapter is for {task}, and train.py trains {' and '.join(_CLASSES)}"
        raise mistake("FOLDER", what, "peft's own merge_and_unload")
    import transformers
    from peft import PeftModel

    quiet_imported(verbose=False, deepspeed=False)
    revision = _text(config, "revision") or _text({"revision": _value(run, "model_revision")}, "revision") or "main"
    origin = {"revision": revision, "trust_remote_code": trust_remote_code}
    settings = {"model_name_or_path": base, "attn_implementation": None}
    try:
        described = transformers.AutoConfig.from_pretrained(base, **origin)
        if hasattr(described, "quantization_config"):
            what = f"{base} is stored quantised, and an adapter is merged into whole weights"
            raise mistake("model_name_or_path", what, "--model_name_or_path with the model that it was quantised from")
        _as_trained(described, folder, task, run, tokenizer)
        model = getattr(transformers, _CLASSES[task]).from_pretrained(base, config=described, dtype="auto", **origin)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # anything, for a damaged file
        raise unloadable(settings, "model", error) from None
    try:
        adapter = PeftModel.from_pretrained(model, str(folder))
    except Exception as error:
        raise _does_not_fit(folder, base, one_line(" ".join(str(error).split()))) from None
    if not hasattr(adapter.base_model, "merge_and_unload"):
        what = f"peft cannot merge an adapter of the type {config.get('peft_type')}"
        raise mistake("FOLDER", what, "load it with peft beside its base model")
    _require_all_weights(adapter.load_adapter(str(folder), "default"), folder, base)  # again, since now it tells
    return adapter.eval()


def _require_all_weights(loaded: Any, folder: Path, base: str) -> None:
    """Raises `UserError` if weights have no place in the base model, or a place has no weights:
    peft drops the first without a word, and only warns of the second.
    """
    absent = [name for name in loaded.missing_keys if "lora_" in name]  # those of others may be shared
    for names, what in ((loaded.unexpected_keys, "there is no place for"), (absent, "it has no weights for")):
        if names:
            text = f"{what} {plural(len(names), 'tensor')} such as {names[0]}"
            raise _does_not_fit(folder, base, text)


def _does_not_fit(folder: Path, base: str, text: str) -> UserError:
    fix = f"the base model that it was trained on, with --model_name_or_path; this is {base}"
    return mistake("FOLDER", f"the adapter in {folder} does not fit: {text}", fix)


def _merged(adapter: Any, folder: Path) -> tuple[list[torch.Tensor], PreTrainedModel]:
    """What adapter plus base answer, and the two in one."""
    try:
        return _logits(adapter), adapter.merge_and_unload()
    except MemoryError:
        raise
    except Exception as error:  # anything, for a value that its adapter_config.json should not have
        text = one_line(" ".join(str(error).split()) or type(error).__name__)
        what = f"peft cannot merge the adapter in {folder}: {text}"
        raise mistake("FOLDER", what, "the adapter_config.json that peft wrote") from None


def _as_trained(described: Any, folder: Path, task: str, run: Json, tokenizer: Any) -> None:
    """The configuration with the head that the adapter brings, which its base does not have."""
    names, heads = run.get("classes"), _head_sizes(folder) if task == "SEQ_CLS" else []
    if heads:
        names = names if isinstance(names, list) and len(names) == heads[0] else None
        described.id2label = dict(enumerate(names or (f"LABEL_{number}" for number in range(heads[0]))))
        described.label2id = {name: number for number, name in described.id2label.items()}
        described.problem_type = _value(run, "problem_type")
        if getattr(described, "pad_token_id", None) is None and tokenizer is not None:
            described.pad_token_id = tokenizer.pad_token_id


def _tokenizer(folder: Path, base: str, trust_remote_code: bool) -> Any:
    """The tokenizer beside the adapter, where train.py saves it, or the base model's; or None."""
    from transformers import AutoTokenizer

    for source in (str(folder), base):
        try:
            return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        except Exception:  # none there: a library raises anything
            continue
    return None


def _head_sizes(folder: Path) -> list[int]:
    """The outputs of the head that was trained in full, beside the adapter."""
    from peft.utils.save_and_load import load_peft_weights

    weights = load_peft_weights(str(folder), device="cpu")
    return [
        len(weight)
        for name, weight in weights.items()
        if name.rpartition(".")[0].rpartition(".")[2] in ("score", "classifier", "out_proj") and weight.dim() == 2
    ]


def _bytes(model: PreTrainedModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _logits(model: Any) -> list[torch.Tensor]:
    """What a model answers to a few sequences of random tokens, the same at each call."""
    import torch

    numbers = torch.Generator().manual_seed(0)
    known = model.config.get_text_config().vocab_size
    with torch.no_grad():
        rows = (torch.randint(known, (1, LENGTH), generator=numbers) for _ in range(INPUTS))
        return [model.eval()(input_ids=row).logits.float() for row in rows]


def _difference(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest logit."""
    pairs = list(zip(before, after, strict=True))
    largest = max(float(one.abs().max()) for one, _ in pairs) or 1.0
    differences = [float((one - other).abs().max()) / largest for one, other in pairs]
    return max(differences, key=lambda value: float("inf") if value != value else value)


# --- Writing --------------------------------------------------------------------------------------


def _write(merged: PreTrainedModel, tokenizer: Any, output: Path) -> None:
    """Whole, or not at all."""
    with _filled(output) as place:
        merged.save_pretrained(place)  # with the generation config
        if tokenizer is not None:
            tokenizer.save_pretrained(place)


@contextmanager
def _filled(output: Path):
    """A folder to write into, which becomes `output` at the end."""
    make_folder(output.parent)
    place = output.with_name(f".{output.name}-{os.getpid()}")
    place.mkdir()
    try:
        yield place
        if output.is_dir():
            output.rmdir()  # empty
        place.rename(output)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.is_dir())
