"""What the micro-batches of one model keep in memory: traced if possible, else from its shape."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.errors import mistake
from recipes.planner.footprint import Need, need, recomputes, weight_bytes
from recipes.planner.shapes import ATTENTION, Adapters, Case, Traced, Weights
from recipes.rules.adapters import what_peft_accepts
from recipes.run import RunSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Estimator:
    """Memory of one model's micro-batches. Two cached traces give every other size."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = _with_padding(config)
        self._weights: dict[tuple[str, Adapters | None], Weights] = {}
        self._traced: dict[Case, Traced] = {}
        self._equal: dict[tuple[str, Adapters | None], bool] = {}
        self._untraceable = False

    def need(self, run: RunSpec, micro: int) -> tuple[Need, bool]:
        """What the run needs at this micro-batch and its global batch, and whether it was traced.

        Raises `UserError` if the model cannot be built, or cannot have these adapters.
        """
        accumulation = run.batch.micro * run.batch.accumulation // micro
        micro_batch, was_traced = self.traced(run, micro)
        return need(run, self.weights(run), micro_batch, accumulation=accumulation), was_traced

    def weights(self, run: RunSpec) -> Weights:
        """The model's parameters with the run's task and adapters. Raises `UserError` as `need`."""
        from recipes.planner.trace import weigh

        key = (run["task"], _adapters(run))
        if key not in self._weights:
            try:
                self._weights[key] = weigh(self.config, *key)
            except Exception as error:  # models and peft raise exceptions of their own
                message = " ".join(str(error).split())[:200]
                if "Unrecognized configuration class" in message:
                    what = f"there is no {run['task']} model of type {self.config.model_type}"
                    fix = "a decoder, or an encoder with --task sequence_classification"
                    raise mistake("model", what, fix) from None
                if key[1] is None:
                    what = f"cannot be built: {message}"
                    raise mistake("model", what, "a config.json that transformers loads") from None
                what = f"peft refuses this model: {message}"
                raise mistake("use_peft", what, what_peft_accepts(message)) from None
        return self._weights[key]

    def length(self, run: RunSpec) -> int:
        """Tokens per sequence: the run's `max_length`, at most the model's positions."""
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return min(run["max_length"], longest) if longest and longest > 0 else run["max_length"]

    def traced(self, run: RunSpec, micro: int) -> tuple[Traced, bool]:
        """What a micro-batch keeps, and whether it was traced."""
        from recipes.planner.trace import at_batch

        if self._untraceable:
            return self._closed_form(run, micro), False
        try:
            if micro == 1 and self._case(run, 2) not in self._traced:
                return self._trace(run, 1), True
            two, three = self._trace(run, 2), self._trace(run, 3)
        except Exception:  # a model's own code may fail in any way on fake tensors
            self._untraceable = True
            return self._closed_form(run, micro), False
        try:
            return at_batch(two, three, micro), True
        except ValueError:
            return self._trace(run, micro), True

    def _case(self, run: RunSpec, micro: int) -> Case:
        half = weight_bytes(run) == 2
        mixed = "bfloat16" if run["bf16"] else "float16" if run["fp16"] else None
        return Case(
            batch=micro,
            length=self.length(run),
            task=run["task"],
            dtype="bfloat16" if half else "float32",
            autocast=None if _casts_the_model(run) else mixed,
            checkpointing=recomputes(run),
            mask=not run["packing"],
            adapters=_adapters(run),
            on_cuda=run.hardware.cuda,
            attention=ATTENTION if run.hardware.cuda else "sdpa",
        )

    def _trace(self, run: RunSpec, micro: int) -> Traced:
        from recipes.planner.trace import trace

        case = self._case(run, micro)
        if case not in self._traced:
            self._traced[case] = self._of_equal_layers(run, case) or trace(self.config, case)
        return self._traced[case]

    def _of_equal_layers(self, run: RunSpec, case: Case) -> Traced | None:
        """The trace of a deep model from two shallow ones, None if its layers are not equal."""
        from recipes.planner.trace import SHALLOW, layers_are_equal, of_depth, trace, with_layers

        key = (case.task, case.adapters)
        if key not in self._equal:
            self._equal[key] = layers_are_equal(self.config, self.weights(run), *key)
        if not self._equal[key]:
            return None
        shallow, deeper = (trace(with_layers(self.config, count), case) for count in (SHALLOW, SHALLOW + 1))
        try:
            return of_depth(shallow, deeper, self.config.get_text_config().num_hidden_layers)
        except ValueError:
            return None

    def _closed_form(self, run: RunSpec, micro: int) -> Traced:
        """82 bytes per unit of width, token and layer, 12 per logit, and autocast's weight copies.

        This is about what traces of Llama and Qwen models find in mixed precision; dropout takes
        more. With checkpointing, each layer keeps its input, and one layer at a time the rest.
        """
        text = self.config.get_text_config()
        tokens = micro * self.length(run)
        layer = 82 * tokens * text.hidden_size
        layers = text.num_hidden_layers
        kept = 4 * tokens * text.hidden_size * layers + layer if recomputes(run) else layer * layers
        copies = 2 * self.weights(run).total if (run["bf16"] or run["fp16"]) and not _casts_the_model(run) else 0
        vocabulary = text.vocab_size if run["task"] == "causal_lm" else 0
        return Traced([(kept + copies, 12 * tokens * vocabulary, 0)], forward=1)


def _adapters(run: RunSpec) -> Adapters | None:
    if not run["use_peft"]:
        return None
    compute = "bfloat16" if run["bf16"] else "float16" if run["fp16"] else "float32"
    wanted = run["lora_target_modules"]
    targets = tuple(wanted) if wanted and wanted != ["all-linear"] else "all-linear"
    four_bits = compute if run["load_in_4bit"] else None
    return Adapters(run["lora_r"], targets, run["lora_dropout"], four_bits, in_fp32=not _casts_the_model(run))


def _casts_the_model(run: RunSpec) -> bool:
    """Whether the parameters are cast for mixed precision, and no operation (`_prepare_fsdp2`)."""
    return run.engine.kind in ("deepspeed", "fsdp")


# --- The model ------------------------------------------------------------------------------------


def read_config(model: str) -> PreTrainedConfig:
    """The configuration of a Hub id, a folder, a config.json, or a size. Raises `UserError`."""
    size = _size(model)
    if size:
        parameters = float(size[1]) * {"M": 1e6, "B": 1e9}.get(size[2].upper(), 0)
        if not 2e7 <= parameters <= 2e12:
            raise mistake("model", f"{model} is not a size that a Llama can have", "20M to 2000B, such as 7B")
        return _config_of_size(parameters)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # each library involved has exceptions of its own
        first = " ".join(" ".join(str(error).strip().splitlines()[:2]).split())
        raise mistake("model", f"{model} cannot be read: {first}", "a Hub id, a folder, a config.json or 7B") from None


def is_size(model: str) -> bool:
    """Whether `read_config` takes this for a number of parameters: 7B."""
    return _size(model) is not None


def _size(model: str) -> re.Match[str] | None:
    return None if Path(model).exists() else re.fullmatch(r"(\d+(?:\.\d+)?)([A-Z]?)", model, flags=re.I)


def _config_of_size(parameters: float) -> PreTrainedConfig:
    """A Llama of about this many parameters. Heads are 128 wide; width is 128 x layers.

    The shape follows Llama 3: four query heads per key-value head, 12.5 width^2 parameters per
    layer, two tables of 128,256 tokens (32,000 up to 2B).
    """
    from transformers import LlamaConfig

    vocabulary = 128_256 if parameters > 2e9 else 32_000
    width = next(
        width
        for width in range(256, 1 << 16, 256)
        if 12.5 * width**2 * (width // 128) + 2 * vocabulary * width >= parameters
    )
    layers = max(1, round((parameters - 2 * vocabulary * width) / (12.5 * width**2)))
    heads = width // 128
    attention = 2 * width**2 + 2 * width * 128 * max(1, heads // 4)
    inner = ((parameters - 2 * vocabulary * width) / layers - attention) / (3 * width)  # the rest is the MLP
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=max(64, round(inner / 64) * 64),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        vocab_size=vocabulary,
        max_position_embeddings=131_072,
    )


def _with_padding(config: PreTrainedConfig) -> PreTrainedConfig:
    """With a padding token, as in training: classifiers on decoders need it for batches."""
    if getattr(config.get_text_config(), "pad_token_id", None) is not None:
        return config
    config = copy.deepcopy(config)
    config.get_text_config().pad_token_id = 0
    return config
