"""`recipes merge`: a trained adapter merged into its base model, and compared with both."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.flags import Commands, spellings
from launch.host.files import make_folder
from launch.output.checkpoints import inspect, numbered
from launch.terminal import console, memory_size, plural, print_note
from launch.training.words import unloadable
from recipes.errors import UserError, mistake, one_line
from recipes.quiet import quiet_imported, quiet_libraries, silence
from recipes.run import Json, fingerprints, recorded
from recipes.run.files import expanded, read_json
from recipes.run.local_model import existing_path

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Of the largest logit: how far those of the merged model may be from those of adapter plus base.
# The merged weights are rounded to the type of the base model.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
INPUTS, LENGTH = 3, 16  # sequences that both are asked, and their tokens
_CLASSES = {"CAUSAL_LM": "AutoModelForCausalLM", "SEQ_CLS": "AutoModelForSequenceClassification"}
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
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
    out, asked = console(), Path(options.folder)
    folder = adapter_folder(asked)
    config, run = read_json(folder / "adapter_config.json")[0] or {}, _record(folder)
    base = _base(options.model_name_or_path, config, run)
    if folder != asked:
        print_note(f"{asked} holds no adapter itself: {folder.name}, its newest checkpoint, is merged", out)
    if fingerprints.differ(run.get("model"), fingerprints.of_model(base)):
        print_note(f"{base} is not what the adapter was trained on: its files are others than in that run", out)
    if _value(run, "load_in_4bit"):
        print_note("the adapter was trained on 4-bit weights: it is merged into the unquantised ones", out)

    output = Path(options.output or asked / "merged")
    with _new_folder(output) as place:
        with silence():  # of weights that the adapter brings, it would be said that they are missing
            tokenizer = _tokenizer(folder, base, options.trust_remote_code)
            model = _base_model(folder, config, base, run, options.trust_remote_code, tokenizer)
            before, merged = _merged(model, folder, base)
        size, free = sum(weight.nbytes for weight in merged.parameters()), shutil.disk_usage(place).free
        if size > free:
            what = f"{output} has {memory_size(free)} free, and the merged model takes {memory_size(size)}"
            raise mistake("output", what, "--output on a larger disk")
        dtype, difference = str(merged.dtype).removeprefix("torch."), _difference(before, _logits(merged))
        limit = TOLERANCE.get(dtype, TOLERANCE["float32"])
        compared = f"{plural(INPUTS, 'input')} differ from adapter plus base by {difference:.1e} of the largest"
        if not difference <= limit:  # NaN too
            print_note(f"logits of {compared}, more than {limit:g} in {dtype}: nothing was written", out)
            return 1
        merged.save_pretrained(place)  # with the generation config
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
    out.print(f"merged   {folder} into {base}", highlight=False, markup=False)
    out.print(f"checked  logits of {compared} (at most {limit:g} in {dtype})", highlight=False, markup=False)
    out.print(f"written  {output}, {memory_size(size)} in {dtype}", highlight=False, markup=False)
    if tokenizer is None:
        print_note(f"neither {folder} nor {base} has a tokenizer", out)
    return 0


# --- Adapter and base -----------------------------------------------------------------------------


def adapter_folder(folder: Path) -> Path:
    """The folder that holds the adapter: this one, or its newest whole checkpoint.

    Raises `UserError` if there is none.
    """
    found = [path for path in (folder, *numbered(folder)) if _holds_adapter(path)]
    whole = [path for path in found if path == folder or inspect(path).valid]
    if whole:
        return whole[0]
    what = f"the checkpoints in {folder} are damaged" if found else f"{folder} holds no adapter"
    raise mistake("FOLDER", what, "the --output_dir of a run with --use_peft, or one of its checkpoints")


def _holds_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file() and any((folder / name).is_file() for name in _WEIGHTS)


def _record(folder: Path) -> Json:
    """The record of the run that trained the adapter or checkpoint; empty if there is none."""
    for place in (folder, folder.parent):
        with suppress(UserError):
            return recorded.read(place, "FOLDER")
    return {}


def _value(run: Json, name: str) -> Any:
    return run.get("settings", {}).get(name, {}).get("value")


def _base(wanted: str | None, config: Json, run: Json) -> str:
    """The base model: as asked for, or as the adapter names it, or where the run found it."""
    named, then = config.get("base_model_name_or_path"), (run.get("paths") or {}).get("model_name_or_path")
    if wanted:
        return str(expanded(wanted))
    if then and not (named and existing_path(named)) and Path(then).is_dir():
        return then
    if not named or (Path(named).is_absolute() and not Path(named).is_dir()):
        what = f"the base model that the adapter names is not there: {named}"
        raise mistake("model_name_or_path", what, "--model_name_or_path with where it is now")
    return named


# --- Models ---------------------------------------------------------------------------------------


def _base_model(folder: Path, config: Json, base: str, run: Json, trust_remote_code: bool, tokenizer: Any) -> Any:
    """The base model in the type that it is stored in, with the head that the adapter brings."""
    task = str(config.get("task_type"))
    if task not in _CLASSES:
        what = f"the adapter is for {task}, and train.py trains {' and '.join(_CLASSES)}"
        raise mistake("FOLDER", what, "peft's own merge_and_unload")
    import transformers

    quiet_imported(verbose=False, deepspeed=False)
    revision = config.get("revision") or _value(run, "model_revision") or "main"
    origin = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        described = transformers.AutoConfig.from_pretrained(base, **origin)
        if hasattr(described, "quantization_config"):
            what = f"{base} is stored quantised, and an adapter is merged into whole weights"
            raise mistake("model_name_or_path", what, "--model_name_or_path with the model that it was quantised from")
        if task == "SEQ_CLS":
            _as_trained(described, folder, run, tokenizer)
        return getattr(transformers, _CLASSES[task]).from_pretrained(base, config=described, dtype="auto", **origin)
    except UserError:
        raise
    except Exception as error:  # anything, for a damaged file
        raise unloadable({"model_name_or_path": base, "attn_implementation": None}, "model", error) from None


def _as_trained(described: Any, folder: Path, run: Json, tokenizer: Any) -> None:
    """Give the configuration the classes of the head that the adapter brings, trained in full."""
    from peft.utils.save_and_load import load_peft_weights

    weights = load_peft_weights(str(folder), device="cpu")
    heads = [
        len(weight)
        for name, weight in weights.items()
        if name.split(".")[-2:-1] in (["score"], ["classifier"], ["out_proj"]) and weight.dim() == 2
    ]
    if not heads:
        return
    names = run.get("classes") or []
    names = names if len(names) == heads[0] else [f"LABEL_{number}" for number in range(heads[0])]
    described.id2label = dict(enumerate(names))
    described.label2id = {name: number for number, name in described.id2label.items()}
    described.problem_type = _value(run, "problem_type")
    if getattr(described, "pad_token_id", None) is None and tokenizer is not None:
        described.pad_token_id = tokenizer.pad_token_id


def _merged(model: PreTrainedModel, folder: Path, base: str) -> tuple[torch.Tensor, PreTrainedModel]:
    """The logits of adapter plus base, and the two in one. Raises `UserError` for a wrong base."""
    from peft import PeftModel

    try:
        adapter = PeftModel.from_pretrained(model, str(folder)).eval()
        loaded = adapter.load_adapter(str(folder), "default")  # again: only this returns what had no place
        absent = [name for name in loaded.missing_keys if "lora_" in name]  # those of others may be shared
        # peft drops the first without a word, and only warns of the second.
        for names, what in ((loaded.unexpected_keys, "there is no place for"), (absent, "it has no weights for")):
            if names:
                raise ValueError(f"{what} {plural(len(names), 'tensor')} such as {names[0]}")
        return _logits(adapter), adapter.merge_and_unload()
    except Exception as error:  # anything: other shapes, or a damaged adapter_config.json
        what = f"the adapter in {folder} does not fit: {one_line(error)}"
        fix = f"the base model that it was trained on, with --model_name_or_path; this is {base}"
        raise mistake("FOLDER", what, fix) from None


def _tokenizer(folder: Path, base: str, trust_remote_code: bool) -> Any:
    """The tokenizer beside the adapter, where train.py saves it, or the base model's; or None."""
    from transformers import AutoTokenizer

    for source in (str(folder), base):
        with suppress(Exception):  # none there: a library raises anything
            return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    return None


def _logits(model: Any) -> torch.Tensor:
    """The logits of a few sequences of random tokens, the same at each call."""
    import torch

    numbers = torch.Generator().manual_seed(0)
    known = model.config.get_text_config().vocab_size
    with torch.no_grad():  # one by one: a classifier may have no padding token
        rows = (torch.randint(known, (1, LENGTH), generator=numbers) for _ in range(INPUTS))
        return torch.cat([model.eval()(input_ids=row).logits.float() for row in rows])


def _difference(before: torch.Tensor, after: torch.Tensor) -> float:
    """The largest difference, as a share of the largest logit."""
    return float((before - after).abs().max()) / (float(before.abs().max()) or 1.0)


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output`, which becomes it if something was written: whole, or not at all.

    Raises `UserError` for an output that holds something, or cannot be made.
    """
    place = output.with_name(f".{output.name}-{os.getpid()}")
    try:
        if output.is_file() or (output.is_dir() and any(output.iterdir())):
            raise mistake("output", f"{output} is there already", "--output with a new folder")
        make_folder(place)
    except OSError as error:
        raise mistake("output", f"{output} cannot be written: {error.strerror}", "--output elsewhere") from None
    try:
        yield place
        if any(place.iterdir()):
            place.replace(output)
    finally:
        shutil.rmtree(place, ignore_errors=True)
