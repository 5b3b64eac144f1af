"""What the libraries say of a model that they cannot load or train: their words, and our Fix."""

from __future__ import annotations

import re

from recipes.errors import Problem, UserError, mistake, one_line
from recipes.run import Settings
from recipes.run.files import existing_path

# A library's own words for a run that it cannot train, the flag that asks for it, and the Fix.
_CANNOT_TRAIN = (
    ("AutoTP|HuggingFace tp_plan", "tensor_parallel", "leave tensor_parallel out of the DeepSpeed JSON"),
    (r"mixed dtype \(CPU\)", "dtype", "--dtype float32"),  # LayerNorm's; RMSNorm takes both
    (
        r"does not support (activation|gradient) checkpointing",
        "gradient_checkpointing",
        "--gradient_checkpointing false",
    ),
)
# What it says of a model that it cannot load.
_CANNOT_LOAD = (
    ("trust_remote_code", "trust_remote_code", "read the Python code that it comes with, then --trust_remote_code"),
    (
        "ignore_mismatched_sizes",
        "model_name_or_path",
        "a model without a head for other classes, or the config.json that was saved with these weights",
    ),
)


def unloadable(run: Settings, what: str, error: Exception) -> UserError:
    """The library's message about a model or a tokenizer, under the flag that it is about."""
    name, text = run["model_name_or_path"], str(error)
    for words, flag, fix in _CANNOT_LOAD:
        if words in text:
            return mistake(flag, f"{name}: {one_line(error)}", fix)
    if run["attn_implementation"] and re.search("ttention|attn|`kernels`", text):
        return mistake("attn_implementation", one_line(error), "leave it out, for the best one that the model supports")
    if existing_path(name) is None:
        what = f"{what}: it is neither a local folder nor a model that can be read from the Hub"
        fix = "check the spelling, the network and `hf auth login`, and that the model fits --task"
    else:
        fix = "a folder that save_pretrained of model and tokenizer wrote, whole, for this --task"
    return mistake("model_name_or_path", f"{name} cannot be loaded as a {what} ({one_line(error)})", fix)


def untrainable(error: BaseException) -> tuple[Problem, ...]:
    """The mistake in a run that a library refuses while it trains; empty for any other error."""
    return tuple(
        Problem(flag, one_line(error), fix) for words, flag, fix in _CANNOT_TRAIN if re.search(words, str(error))
    )
