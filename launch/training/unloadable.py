"""What is wrong with a model that transformers cannot load, as one line for the user."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from recipes.errors import UserError, mistake, one_line
from recipes.run.files import existing_path, read_json
from recipes.run.local_model import foreign_content, model_folder, weight_files
from recipes.run.spec import Settings

# What transformers reads from each JSON file of a folder; without it, it fails with a KeyError.
_ENTRIES = {
    "tokenizer.json": "model",
    "model.safetensors.index.json": "weight_map",
    "tokenizer_config.json": None,
    "config.json": None,
}


def unloadable(run: Settings, what: str, error: Exception) -> UserError:
    """The library's message as one line, under the flag that it is about."""
    name, text = run["model_name_or_path"], " ".join(str(error).split())
    if "trust_remote_code" in text:
        return mistake("trust_remote_code", f"{name} comes with Python code", "read it, then --trust_remote_code")
    if run["attn_implementation"] and ("ttention" in text or "attn" in text or "`kernels`" in text):
        return without_attention(text)
    folder = model_folder(name)
    damaged = _damaged_json(folder) or (_damaged_pickle(folder) if what == "model" else None) if folder else None
    if damaged:
        return damaged
    if existing_path(name) is None:
        what = f"{what}: it is neither a local folder nor a model that can be read from the Hub"
        fix = "check the spelling, the network and `hf auth login`, and that the model fits --task"
    else:
        fix = "a folder that save_pretrained of model and tokenizer wrote, whole, for this --task"
    return mistake("model_name_or_path", f"{name} cannot be loaded as a {what} ({one_line(text)})", fix)


def _damaged_json(folder: Path) -> UserError | None:
    """The file that a library has not named: it only says that it expected a value."""
    for name, entry in _ENTRIES.items():
        file = folder / name
        if not file.exists():
            continue
        content, reason = read_json(file)
        what, fix = foreign_content(file) or (None, "the one that save_pretrained wrote")
        if content is None or what:
            return mistake("model_name_or_path", f"{file} {what}" if what else one_line(reason), fix)
        if entry and entry not in content:
            return mistake("model_name_or_path", f"{file} has no {entry!r}", fix)
    return None


def _damaged_pickle(folder: Path) -> UserError | None:
    """A file of torch's with something else than weights by their names. Nothing is executed."""
    import torch

    for file in weight_files(folder):
        if file.suffix != ".bin" or not file.is_file():
            continue
        try:
            content = torch.load(file, map_location="meta", weights_only=True)
        except Exception as error:  # a pickle may raise anything
            what = f"holds something else than a model's weights ({type(error).__name__})"
        else:
            if isinstance(content, dict) and all(torch.is_tensor(value) for value in content.values()):
                continue
            what = f"holds something else than a model's weights ({type(content).__name__})"
        return mistake("model_name_or_path", f"{file} {what}", "the file that save_pretrained wrote")
    return None


def missing_weights(run: Settings, base: str, in_model: Collection[str], missing: Collection[str]) -> str:
    """A note on the model's weights that its files lack, and that start with random values.

    Empty if there are none, or if they are a classifier's new head, outside the module `base`.
    Raises `UserError` if all are missing: the files hold another model, or none.
    """
    name, lacking = run["model_name_or_path"], sorted(set(in_model) & set(missing))
    if len(lacking) == len(in_model):
        what = f"{name} holds none of the {len(in_model)} weights that its config.json describes, such as {lacking[0]}"
        raise mistake("model_name_or_path", what, "the weights that were saved with that config.json")
    is_head = run["task"] == "sequence_classification" and not any(weight.startswith(f"{base}.") for weight in lacking)
    if not lacking or is_head:
        return ""
    more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
    return f"{name} lacks {lacking[0]}{more}: random values to start with"


def without_attention(text: str) -> UserError:
    return mistake("attn_implementation", one_line(text), "leave it out, for the best one that the model supports")


def wrong_config(run: Settings, error: Exception) -> UserError:
    """A mistake about config.json: what the configuration's class, or the model's, says of it."""
    name, text = run["model_name_or_path"], " ".join(str(error).split())
    text = re.sub(r"^(Class v|V)alidation error for .*?: (\w+Error: )?", "", text) or type(error).__name__
    folder = model_folder(name)
    what = (
        f"{folder / 'config.json' if folder else f'the config.json of {name}'} does not make a model: {one_line(text)}"
    )
    return mistake(
        "model_name_or_path", what, "correct that value, or the config.json that save_pretrained wrote", name
    )


def other_sizes(run: Settings, other_classes: bool) -> UserError:
    """A head for another number of classes, or a config.json that is not that of the weights."""
    name = run["model_name_or_path"]
    if run["task"] == "sequence_classification" and other_classes:
        what = f"{name} has a head for another number of classes than the data's"
        return mistake(
            "model_name_or_path", what, "a model without a classification head, or data with the same classes"
        )
    what = f"{name} has weights of other sizes than its config.json says"
    return mistake("model_name_or_path", what, "the config.json that was saved with these weights", name)
