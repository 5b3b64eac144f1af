"""The configuration of the model to plan, from the Hub, a folder, a file or a size."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from recipes.errors import mistake, one_line
from recipes.quiet import silence
from recipes.run import RunSpec
from recipes.run.files import existing_path

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_config(model: str, run: RunSpec | None = None) -> PreTrainedConfig:
    """Return the configuration of a Hub id, a folder, a config.json, or a size such as 7B.

    `run` sets the revision (otherwise `main`) and `trust_remote_code`. The Hub is asked only if no
    local or cached file has the configuration. If the Hub fails, models in `SHAPES` get their known
    shape, but only at the revision `main`. Raises `UserError` if the configuration cannot be read.
    """
    if is_size(model):
        return config_of(model)
    revision, trusted = (run["model_revision"], run["trust_remote_code"]) if run else ("main", False)
    local = existing_path(model)
    from transformers import AutoConfig

    origin = {"revision": revision, "trust_remote_code": trusted}
    try:
        with silence():
            try:
                return AutoConfig.from_pretrained(local or model, **origin, local_files_only=True)
            except OSError:
                if local:
                    raise
                return AutoConfig.from_pretrained(model, **origin)
    except Exception as error:  # each library involved has exceptions of its own
        if "trust_remote_code" in str(error):
            what = f"{model} comes with Python code"
            raise mistake("trust_remote_code", what, "read the code, then add --trust_remote_code") from None
        if model in SHAPES and revision == "main":  # without a network, or access to the model
            return config_of(model)
        wanted = "check the Hub id, the network and `hf auth login`; or give a folder, a config.json, a size: 7B"
        raise mistake("model", f"{model} cannot be read: {one_line(error)}", wanted) from None


# --- A size gets the shape of the nearest public model --------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A decoder with gated MLPs of `width` (hidden_size) and `inner` (intermediate_size).

    `heads` are the query heads, `groups` the key-value heads.
    """

    source: str
    parameters: int
    model_type: str
    width: int
    inner: int
    layers: int
    heads: int
    groups: int
    vocabulary: int
    tied: bool
    head: int = 128

    @property
    def tables(self) -> int:
        """Parameters of the embedding, the last norm, and the head unless the head is tied."""
        return self.width * (self.vocabulary * (1 if self.tied else 2) + 1)


# Source: the config.json of each model on the Hub.
PUBLIC = (
    Shape("HuggingFaceTB/SmolLM2-135M", 134_515_008, "llama", 576, 1536, 30, 9, 3, 49_152, tied=True, head=64),
    Shape("HuggingFaceTB/SmolLM2-360M", 361_821_120, "llama", 960, 2560, 32, 15, 5, 49_152, tied=True, head=64),
    Shape("Qwen/Qwen2.5-0.5B", 494_032_768, "qwen2", 896, 4864, 24, 14, 2, 151_936, tied=True, head=64),
    Shape("Qwen/Qwen3-0.6B", 596_049_920, "qwen3", 1024, 3072, 28, 16, 8, 151_936, tied=True),
    Shape("meta-llama/Llama-3.2-1B", 1_235_814_400, "llama", 2048, 8192, 16, 32, 8, 128_256, tied=True, head=64),
    Shape("Qwen/Qwen2.5-1.5B", 1_543_714_304, "qwen2", 1536, 8960, 28, 12, 2, 151_936, tied=True),
    Shape("Qwen/Qwen3-1.7B", 1_720_574_976, "qwen3", 2048, 6144, 28, 16, 8, 151_936, tied=True),
    Shape("Qwen/Qwen2.5-3B", 3_085_938_688, "qwen2", 2048, 11_008, 36, 16, 2, 151_936, tied=True),
    Shape("meta-llama/Llama-3.2-3B", 3_212_749_824, "llama", 3072, 8192, 28, 24, 8, 128_256, tied=True),
    Shape("Qwen/Qwen3-4B", 4_022_468_096, "qwen3", 2560, 9728, 36, 32, 8, 151_936, tied=True),
    Shape("Qwen/Qwen2.5-7B", 7_615_616_512, "qwen2", 3584, 18_944, 28, 28, 4, 152_064, tied=False),
    Shape("meta-llama/Llama-3.1-8B", 8_030_261_248, "llama", 4096, 14_336, 32, 32, 8, 128_256, tied=False),
    Shape("Qwen/Qwen2.5-14B", 14_770_033_664, "qwen2", 5120, 13_824, 48, 40, 8, 152_064, tied=False),
    Shape("Qwen/Qwen2.5-32B", 32_763_876_352, "qwen2", 5120, 27_648, 64, 40, 8, 152_064, tied=False),
    Shape("meta-llama/Llama-3.1-70B", 70_553_706_496, "llama", 8192, 28_672, 80, 64, 8, 128_256, tied=False),
    Shape("meta-llama/Llama-3.1-405B", 405_853_388_800, "llama", 16_384, 53_248, 126, 128, 8, 128_256, tied=False),
)


SHAPES = {shape.source: shape for shape in PUBLIC}


def is_size(model: str) -> bool:
    """True if the model is given as a number of parameters, such as 7B."""
    return existing_path(model) is None and bool(re.fullmatch(r"\d+(\.\d+)?[A-Za-z]?", model))


def _shape_of(model: str) -> tuple[Shape, Shape]:
    """Return the shape to plan, and the shape of the public model that it is made from.

    `model` is a size or a public model's name. A public model within 2 % of the size keeps its
    shape. Otherwise the nearest model gets more or fewer layers, and its MLP width changes by a
    multiple of 8 to reach the size. Raises `UserError` for a size outside 40M to 2000B.
    """
    if model in SHAPES:
        return SHAPES[model], SHAPES[model]
    unit = {"M": 1e6, "B": 1e9}.get(model[-1].upper(), 0)
    asked = float(model[:-1]) * unit if unit else 0
    if not 4e7 <= asked <= 2e12:
        raise mistake("model", f"{model} is not a possible size of a decoder", "give 40M to 2000B, such as 7B")
    public = min(PUBLIC, key=lambda shape: abs(math.log(shape.parameters / asked)))
    if abs(public.parameters / asked - 1) <= 0.02:
        return public, public
    layer = (public.parameters - public.tables) / public.layers
    layers = max(1, round((asked - public.tables) / layer))
    missing = (asked - public.tables) / layers - layer  # parameters in each layer
    return replace(public, layers=layers, inner=public.inner + round(missing / (3 * public.width) / 8) * 8), public


def config_of(model: str) -> PreTrainedConfig:
    """Return the configuration of a `SHAPES` name or of a size, 40M to 2000B (else `UserError`)."""
    shape, _ = _shape_of(model)  # raises before the import, which takes seconds
    from transformers import AutoConfig

    return AutoConfig.for_model(
        shape.model_type,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        head_dim=shape.head,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=131_072,
        dtype="bfloat16",
    )


def description(model: str) -> str:
    """Return one line about the architecture that a size or a public model's name stands for."""
    shape, public = _shape_of(model)
    like = "the shape of" if shape == public else "a shape like that of"
    like = "the model could not be read from the Hub: this is the known shape of" if model in SHAPES else like
    tied = "tied" if shape.tied else "not tied"
    return (
        f"{like} {public.source}: {shape.layers} layers, width {shape.width:,}, MLP {shape.inner:,}, "
        f"{shape.heads} heads ({shape.groups} for keys and values), vocabulary {shape.vocabulary:,}, embeddings {tied}"
    )
