"""A test that a model keeps the examples of a packed row apart.

The test runs a model, because source code may mislead. OPT accepts position_ids, but every token
attends to all earlier tokens. Layers with a state (Mamba, LFM2) mix examples in that state.

The test runs on a narrow copy, the twin, with random weights, before the model is loaded.
FlashAttention is imitated, because it has no CPU version. The model mixes examples if any gradient
of the second example's outputs with respect to the first example's embeddings is not 0.
"""

import contextlib
import copy
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from launch.data.batches import Stack
from recipes.errors import Problem, mistake
from recipes.quiet import silence
from recipes.rules.facts import advice
from recipes.run import RunSpec, Settings

_FIRST, _SECOND = 5, 7  # tokens of the two examples, so that a block of 2, 4 or 8 tokens holds tokens of both
_DIVISORS = (64, 32, 16, 8, 4, 2, 1)  # tried in turn: the twin's widths are divided by the first that works
_LEAST_WIDTH = 16
_MOST_WEIGHTS = 60_000_000
_WIDTHS = re.compile(r"(size|dim|dims|rank|embd|inner|width|d_head|d_model|d_ff|d_ssm)$|^dim_|_dim_|intermediate")
_NO_WIDTHS = re.compile(r"patch|conv|kernel|image|window|block_size|batch")
_MOST = {"vocab": 64, "token_id$": 0, "experts$": 16, "chunk": 16}
_FLASH = "flash_attention_on_cpu"


def with_separate_examples(run: RunSpec, config: PreTrainedConfig) -> tuple[RunSpec, list[Problem]]:
    """Turn packing off, with advice, if the model mixes examples or cannot be tested. Raise
    `UserError` instead if the user asked for packing.
    """
    packs = run["task"] == "causal_lm" and run["packing"] and run["packing_strategy"] == "bfd"
    mixes = _twin_mixes(run, config) if packs else False
    if mixes is False:
        return run, []
    what = f"{config.model_type} models let the examples of a packed row see each other"
    reason = what if mixes else f"it is unknown whether {what}"
    if run.explicit("packing"):
        raise mistake("packing", reason, "--packing false; or, to join the examples anyway, --packing_strategy wrapped")
    fix = "to join the examples anyway, set --packing_strategy wrapped"
    return run.limited("packing", False, reason), [advice("packing", f"is off: {reason}", fix)]


def _twin_mixes(run: Settings, config: PreTrainedConfig) -> bool | None:
    """True if, in a narrow copy of the model, packed examples see each other. None if no copy can
    be tested, for example because the model's code comes with its weights.
    """
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    attention = run["attn_implementation"] or config._attn_implementation or ""
    flash = "flash" in attention
    hidden = getattr(config, "hidden_size", None) or 64 * _LEAST_WIDTH
    for by in (by for by in _DIVISORS if kind and (by == 1 or hidden // by >= _LEAST_WIDTH)):
        # A model's own code may raise any error for sizes and inputs that it does not expect.
        with silence(), contextlib.suppress(Exception):
            twin = _made(kind, _narrowed(copy.deepcopy(config), by), "eager" if attention == "eager" else None)
            if flash:
                _imitate_flash_attention(twin)
            mixes = _mixes(twin, rows=2 if flash else 1)
            if mixes is not None:
                return mixes
    return None


def _mixes(model: PreTrainedModel, rows: int) -> bool | None:
    """True if, in a batch of `rows` equal rows, the outputs of the second example depend on the
    first example. None if the gradients prove nothing, because they are not finite, or because even
    the last output has gradient 0 for the token before it, as after a layer norm of one number.
    """
    embedded = []

    def keep(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0].clone()

    model.get_input_embeddings().register_forward_hook(keep)
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])
    row = {"input_ids": torch.arange(1, len(positions) + 1), "position_ids": positions}
    with torch.enable_grad():
        said = model.eval()(**Stack(flash=rows > 1)([row] * rows)).logits[0, _FIRST:].float()
        one_number = said @ torch.linspace(-1, 2, said.shape[-1])  # for each token
    (by_all,) = torch.autograd.grad(one_number.sum(), embedded[0], retain_graph=True)
    (by_last,) = torch.autograd.grad(one_number[-1], embedded[0])
    can_tell = by_all.isfinite().all() and by_last[0, -2].any()
    return bool(by_all[0, :_FIRST].any()) if can_tell else None


# --- The twin -------------------------------------------------------------------------------------


def _narrowed(value: Any, by: int, name: str = "") -> Any:
    """Shrink a configuration, or its field `name`: widths, vocabulary, the number of experts."""
    if isinstance(value, PreTrainedConfig):
        for field, part in vars(value).items():
            setattr(value, field, _narrowed(part, by, field))
    elif isinstance(value, dict):
        return {key: _narrowed(part, by, str(key)) for key, part in value.items()}
    elif isinstance(value, list) and name in ("short_factor", "long_factor"):  # LongRoPE: one factor per angle
        return value[: len(value) // by]
    elif isinstance(value, list):
        return [_narrowed(part, by, name) for part in value]
    elif isinstance(value, int) and not isinstance(value, bool):
        for pattern, most in _MOST.items():
            if re.search(pattern, name):
                return min(value, most)
        if _WIDTHS.search(name) and not _NO_WIDTHS.search(name) and value > 1:
            return max(2, value // by)
    return value


def _made(kind: type[PreTrainedModel], config: PreTrainedConfig, attention: str | None) -> PreTrainedModel:
    """Create the model in float32, with noise added to its weights, because branches whose weights
    start at zero would hide a dependency. Raises `ValueError` if there are too many weights.
    """
    if not isinstance(config, kind.config_class):
        config = config.get_text_config()
    config.use_cache = False  # as in training
    config._attn_implementation, config._experts_implementation = attention, "eager"
    with torch.device("meta"):
        if kind(config).num_parameters() > _MOST_WEIGHTS:
            raise ValueError("too many weights")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        model = kind(config).float()
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model


def _imitate_flash_attention(model: PreTrainedModel) -> None:
    ALL_ATTENTION_FUNCTIONS[_FLASH] = _flash_attention
    ALL_MASK_ATTENTION_FUNCTIONS[_FLASH] = flash_attention_mask
    model.config._attn_implementation = _FLASH  # only now, because a model's constructor looks for the kernel


def _flash_attention(module, query, key, value, attention_mask=None, scaling=None, cu_seq_lens_q=None, **_):
    """Compute attention within each example, as a FlashAttention kernel does. `cu_seq_lens_q` lists
    where the examples of all rows begin; without this list, each row is one example.
    """
    rows, _, length, _ = query.shape
    example = torch.zeros(rows, length)
    if cu_seq_lens_q is not None:
        example = torch.searchsorted(cu_seq_lens_q.long(), torch.arange(rows * length), right=True).view(rows, length)
    seen = (example[:, None, :, None] == example[:, None, None, :]) & torch.ones(length, length).tril().bool()
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True).transpose(1, 2), None
