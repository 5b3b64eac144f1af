"""`recipes merge`: a trained adapter merged into its base model, and compared with both."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.flags import Commands
from launch.output.checkpoints import model_notes, numbered
from launch.output.record import read
from launch.terminal import console, memory_size, plural, print_note
from recipes.errors import mistake, one_line
from recipes.quiet import quiet_libraries, silence
from recipes.run import Json, fingerprints
from recipes.run.files import expanded, read_json

if TYPE_CHECKING:
    import torch

# Of the largest logit: how far those of the merged model may be from those of adapter plus base.
# The merged weights are rounded to the type of the base model.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
INPUTS, LENGTH = 3, 16  # sequences that both are asked, and their tokens
_CLASSES = {"CAUSAL_LM": "AutoModelForCausalLM", "SEQ_CLS": "AutoModelForSequenceClassification"}
_DESCRIPTION = """\
Merge a trained adapter (LoRA and its like) into its base model, and write a model that any library loads, with
tokenizer and generation config. Before it is written, its logits are compared with those of adapter plus base.
"""
_FLAGS = """
FOLDER                     the --output_dir of a run with --use_peft, or a checkpoint
--output FOLDER            where to write the model [FOLDER/merged]
--model_name_or_path BASE  the base model [the one that the adapter names]
--trust_remote_code        run Python code that comes with the base model
"""


def add_parser(commands: Commands) -> None:
    commands.add_parser("merge", description=_DESCRIPTION).takes(merge, _FLAGS)


def merge(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Returns 0, or 1 if the merged model is not equal, which is then not written. Raises
    `UserError` for what cannot be merged.
    """
    quiet_libraries(verbose=False)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # where models are merged; DeepSpeed would look, and say what it saw
    out, folder = console(), Path(options.folder)
    output = Path(options.output or folder / "merged")
    config = read_json(folder / "adapter_config.json")[0]
    if config is None:
        newest = next(
            map(str, numbered(folder)), "the --output_dir of a run with --use_peft, or one of its checkpoints"
        )
        raise mistake("FOLDER", f"{folder} holds no adapter", newest)
    if output.exists():
        raise mistake("output", f"{output} is there already", "--output with a new folder")
    run = read(folder) or read(folder.parent)  # of a checkpoint
    base = _base(options.model_name_or_path, config, run)
    revision = config.get("revision") or _value(run, "model_revision") or "main"
    if fingerprints.differ(run.get("model"), fingerprints.of_model(base, revision)):
        print_note(f"{base} is not what the adapter was trained on: its files differ from those of that run", out)
    for line in model_notes(folder, read(folder).get("model_files") or {}):
        print_note(line, out)
    if _value(run, "load_in_4bit"):
        print_note("the adapter was trained on 4-bit weights: it is merged into the unquantised ones", out)

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent)
    except OSError as error:
        raise mistake("output", f"{output} cannot be written: {error.strerror}", "--output elsewhere") from None
    with beside:
        origin = {"revision": revision, "trust_remote_code": options.trust_remote_code}
        with silence():  # of weights that the adapter brings, it would be said that they are missing
            before, merged, tokenizer = _merged(folder, config, base, run, origin)
        dtype = str(merged.dtype).removeprefix("torch.")
        difference = float((before - _logits(merged)).abs().max()) / (float(before.abs().max()) or 1.0)
        limit = TOLERANCE.get(dtype, TOLERANCE["float32"])
        compared = f"{plural(INPUTS, 'input')} differ from adapter plus base by {difference:.1e} of the largest"
        if not difference <= limit:  # NaN too
            print_note(f"logits of {compared}, more than {limit:g} in {dtype}: nothing was written", out)
            return 1
        whole = Path(beside.name, "whole")
        merged.save_pretrained(whole)  # with the generation config
        tokenizer.save_pretrained(whole)
        whole.rename(output)
    size = memory_size(sum(weight.nbytes for weight in merged.parameters()))
    lines = [f"merged   {folder} into {base}", f"checked  logits of {compared} (at most {limit:g} in {dtype})"]
    out.print("\n".join([*lines, f"written  {output}, {size} in {dtype}"]), highlight=False, markup=False)
    return 0


def _value(run: Json, name: str) -> Any:
    return run.get("settings", {}).get(name, {}).get("value")


def _base(wanted: str | None, config: Json, run: Json) -> str:
    """The base model: as asked for, or as the adapter names it, or where the run found it."""
    named, then = str(config.get("base_model_name_or_path")), (run.get("paths") or {}).get("model_name_or_path")
    if wanted:
        return str(expanded(wanted))
    return then if then and not Path(named).is_dir() and Path(then).is_dir() else named


# --- Models ---------------------------------------------------------------------------------------


def _merged(folder: Path, config: Json, base: str, run: Json, origin: Json) -> tuple[torch.Tensor, Any, Any]:
    """The logits of adapter plus base, the two in one, and their tokenizer.

    Raises `UserError` if they do not fit each other.
    """
    import transformers
    from peft import PeftModel

    try:
        task = config["task_type"]
        beside = (folder / "tokenizer_config.json").is_file()  # where train.py saves it
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder if beside else base, **origin)
        described = transformers.AutoConfig.from_pretrained(base, **origin)
        if task == "SEQ_CLS":
            _as_trained(described, folder, run, tokenizer)
        model_class = getattr(transformers, _CLASSES[task])
        model = model_class.from_pretrained(base, config=described, dtype="auto", **origin)  # as it is stored
        adapter = PeftModel.from_pretrained(model, str(folder)).eval()
        # Again: only this returns what had no place, which peft drops without a word.
        if strange := adapter.load_adapter(str(folder), "default").unexpected_keys:
            raise ValueError(f"there is no place for {plural(len(strange), 'tensor')} such as {strange[0]}")
        return _logits(adapter), adapter.merge_and_unload(), tokenizer
    except Exception as error:  # anything: a base that is not there, other shapes, a damaged file
        what = f"the adapter in {folder} does not fit {base}: {one_line(error)}"
        raise mistake("FOLDER", what, "the model that it was trained on, with --model_name_or_path") from None


def _as_trained(described: Any, folder: Path, run: Json, tokenizer: Any) -> None:
    """Give the configuration the classes of the head that the adapter brings, trained in full."""
    from peft.utils.save_and_load import load_peft_weights

    heads = ("score.weight", "classifier.weight", "out_proj.weight")
    weights = load_peft_weights(str(folder), device="cpu").items()
    classes = next((len(weight) for name, weight in weights if name.endswith(heads)), described.num_labels)
    described.id2label = dict(enumerate(run.get("classes") or [f"LABEL_{number}" for number in range(classes)]))
    described.label2id = {name: number for number, name in described.id2label.items()}
    described.problem_type = _value(run, "problem_type")
    described.pad_token_id = getattr(described, "pad_token_id", None) or tokenizer.pad_token_id


def _logits(model: Any) -> torch.Tensor:
    """The logits of a few sequences of random tokens, the same at each call."""
    import torch

    numbers = torch.Generator().manual_seed(0)
    known = model.config.get_text_config().vocab_size
    with torch.no_grad():  # one by one: a classifier may have no padding token
        rows = (torch.randint(known, (1, LENGTH), generator=numbers) for _ in range(INPUTS))
        return torch.cat([model.eval()(input_ids=row).logits.float() for row in rows])
