"""What is wrong with a model that transformers cannot load, as one line for the user."""

from __future__ import annotations

import re

from recipes.errors import UserError, mistake
from recipes.run.local_model import existing_path, model_folder
from recipes.run.spec import Settings


def unloadable(run: Settings, what: str, error: Exception) -> UserError:
    """The library's message as one line, under the flag that it is about."""
    name, text = run["model_name_or_path"], " ".join(str(error).split())
    if "trust_remote_code" in text:
        return mistake("trust_remote_code", f"{name} comes with Python code", "read it, then --trust_remote_code")
    if run["attn_implementation"] and ("ttention" in text or "attn" in text or "`kernels`" in text):
        return without_attention(text)
    if existing_path(name) is None:
        what = f"{what}: it is neither a local folder nor a model that can be read from the Hub"
        fix = "check the spelling, the network and `hf auth login`, and that the model fits --task"
    else:
        fix = "a folder that save_pretrained of model and tokenizer wrote, whole, for this --task"
    return mistake("model_name_or_path", f"{name} cannot be loaded as a {what} ({one_line(text)})", fix)


def without_attention(text: str) -> UserError:
    return mistake("attn_implementation", one_line(text), "leave it out, for the best one that the model supports")


def one_line(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


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
