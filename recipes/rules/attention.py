"""`attn_implementation`: its name, its package, the card, the precision and the model it needs.

transformers checks these when it makes the model, and some of them never: then the kernel itself
fails in the first step. Rules about kernels that only a GPU runs say which source they come from.
"""

from __future__ import annotations

from dataclasses import replace

from recipes import legal
from recipes.errors import Problem
from recipes.legal import attention
from recipes.rules.facts import (
    advice,
    available,
    known_config,
    missing,
    mixed_precision,
    of_class,
    on_gpu,
    problem,
    rule,
)
from recipes.run import RunSpec, nearest
from recipes.run.local_model import text_config

_LEAVE_OUT = "leave it out: the model's default is the best one that it supports"
_LEAST_CAPABILITY = (8, 0)  # of every version of FlashAttention
_LARGEST_HEAD = 256  # of FlashAttention 2 and 3
_SMALLEST_FLEX_HEAD = 16

# Version of FlashAttention -> the module it is imported from, and its distribution.
_FLASH_PACKAGES = {
    2: ("flash_attn", "flash-attn"),
    3: ("flash_attn_interface", "flash-attn-3"),
    4: ("flash_attn", "flash-attn-4"),
}
# What models of different types call the dropout of their attention.
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")


def _asked(run: RunSpec) -> str:
    """The implementation asked for, without a `paged|` that transformers drops; empty if none.

    A config.json asks too, and only the argument wins over it.
    """
    name = run["attn_implementation"] or _in_config(run)
    return name if name == "paged|eager" else name.removeprefix("paged|")


def _in_config(run: RunSpec) -> str:
    """What the model's config.json asks for; empty if nothing, or one for each of its parts."""
    config = known_config(run)
    name = config.get("_attn_implementation") or config.get("attn_implementation")
    return name if isinstance(name, str) else ""


def _problem(run: RunSpec, what: str, fix: str) -> Problem:
    return _where_asked(run, problem(run, "attn_implementation", what, fix))


def _advice(run: RunSpec, what: str, fix: str) -> Problem:
    return _where_asked(run, advice(run, "attn_implementation", what, fix))


def _missing(run: RunSpec, package: str, what: str) -> Problem:
    found = missing(run, "attn_implementation", package, what)
    asked = _where_asked(run, found)
    return asked if asked is found else replace(asked, fix=f"{found.fix}, or {asked.fix}")


def _where_asked(run: RunSpec, found: Problem) -> Problem:
    """The problem, with another source and fix if it is the config.json that asks."""
    if run["attn_implementation"] is not None:
        return found
    fix = "--attn_implementation sdpa or eager, which wins over the config.json"
    return replace(found, source=f"config.json of {run['model_name_or_path']}", fix=fix)


def _flash_version(name: str) -> int | None:
    digits = name.removeprefix("flash_attention_")
    return int(digits) if digits != name and digits.isdigit() else None


def _is_known(name: str) -> bool:
    return name in attention.implementations() or attention.is_kernel(name)


# --- The name and the model -----------------------------------------------------------------------


@rule
def attention_is_known(run):
    """`ValueError: Specified attn_implementation="..." is not supported`, with a traceback."""
    name = _asked(run)
    if not name or (_is_known(name) and name != "paged|eager"):
        return
    if name == "paged|eager":  # was called without a paged attention cache
        yield _problem(run, f"{name} generates text, and does not train", "eager")
        return
    known = [known for known in attention.implementations() if "|" not in known]
    fix = nearest(name.lower(), known) or "one of " + ", ".join(known) + ", or a kernel of the Hub: org/name"
    yield _problem(run, f"there is no implementation {name!r}", fix)


@rule
def pages_are_for_generation(run):
    """transformers drops `paged|` with a warning: training has no cache that could be paged."""
    if run["attn_implementation"] and _asked(run) != run["attn_implementation"]:
        yield _advice(run, "paged| means nothing in a training", _asked(run))


@rule
def attention_is_supported_by_the_model(run):
    """`ValueError: BloomForCausalLM does not support an attention implementation through ...`"""
    name = _asked(run)
    kind = "flash_attn" if _flash_version(name) else {"sdpa": "sdpa", "flex_attention": "flex_attn"}.get(name)
    if kind and of_class(run, f"_supports_{kind}") is False:
        what = f"{name} is not supported by models of type {known_config(run)['model_type']}"
        yield _problem(run, what, _LEAVE_OUT)


@rule
def flash_attention_is_the_models_own(run):
    """gpt_oss takes its own kernel instead, with a warning: vllm-flash-attn3."""
    name = _asked(run)
    own = _own_kernels(run) if "flash" in name and _is_known(name) else []
    if own and name not in own:
        what = f"{name} is replaced: models of type {known_config(run)['model_type']} take {' or '.join(own)}"
        yield _advice(run, what, own[0])


def _own_kernels(run: RunSpec) -> list[str]:
    own = of_class(run, "_compatible_flash_implementations")
    return own if isinstance(own, list) else []


@rule
def attention_kernels_have_no_dropout(run):
    """flex_attention: ``ValueError: `flex_attention` does not support `dropout` ``. Others drop it.

    The newer FlashAttention kernels have no argument for it, so transformers leaves it out.
    """
    name, text = _asked(run), text_config(known_config(run))
    for key in _DROPOUTS:
        rate = text.get(key)
        if not isinstance(rate, (int, float)) or not rate > 0:
            continue
        if name == "flex_attention":
            fix = f'"{key}": 0.0 in the model\'s config.json, or another --attn_implementation'
            yield _problem(run, f"{name} has no dropout, and the model has {key} {rate}", fix)
        elif (_flash_version(name) or 0) > 2:
            what = f"{name} has no dropout: the model's {key} {rate} is ignored"
            yield _advice(run, what, "flash_attention_2, or sdpa")


@rule
def attention_heads_fit_the_kernel(run):
    """`embedding dimension of the query, key, and value must be at least 16`, and FlashAttention's.

    Read in torch/_inductor/kernel/flex, and in flash_api.cpp of FlashAttention 2 and 3: a CPU has
    neither kernel.
    """
    name, size = _asked(run), _head_size(run)
    if size is None:
        return
    if name == "flex_attention" and size < _SMALLEST_FLEX_HEAD:
        what = f"{name} needs heads of {_SMALLEST_FLEX_HEAD}, and the model's have {size}"
        yield _problem(run, what, _LEAVE_OUT)
    elif _flash_version(name) in (2, 3) and size > _LARGEST_HEAD:
        what = f"{name} takes heads up to {_LARGEST_HEAD}, and the model's have {size}"
        yield _problem(run, what, _LEAVE_OUT)


def _head_size(run: RunSpec) -> int | None:
    """Numbers in each attention head of the local model; None if its config.json does not say."""
    text = text_config(known_config(run))
    given, width, heads = (text.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(given, int):
        return given
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None


# --- Where it runs --------------------------------------------------------------------------------


@rule
def attention_kernels_need_a_gpu(run):
    """`NotImplementedError: FlexAttention does not support backward on CPU`, in the first step."""
    name = _asked(run)
    if not name:
        return
    devices = ("cuda",) if _flash_version(name) or name == "flex_attention" else _kernel_devices(name)
    device = "cuda" if on_gpu(run) else "cpu"
    if _is_known(name) and devices and device not in devices:
        where = "a CPU" if device == "cpu" else "this GPU"
        yield _problem(run, f"{name} does not train on {where}", "sdpa or eager, or leave it out")


def _kernel_devices(name: str) -> tuple[str, ...]:
    return attention.kernel_devices().get(name.partition(":")[0].partition("@")[0], ())


@rule
def flash_attention_needs_sm80(run):
    """`FlashAttention only supports Ampere GPUs or newer.`, from the kernel in the first step.

    Read in flash_api.cpp of FlashAttention 2 and 3. transformers states more for version 4, and its
    check is only reached without the package.
    """
    version = _flash_version(_asked(run))
    if not version or not on_gpu(run) or version not in attention.flash_versions():
        return
    card, stated = run.hardware.capability, attention.flash_versions()[version]
    here = f"the GPU has {card[0]}.{card[1]}"
    if card < _LEAST_CAPABILITY:
        yield _problem(run, f"needs compute capability 8.0, and {here}", "sdpa, or leave it out")
    elif card[0] < stated:
        what = f"transformers asks for compute capability {stated}.0, and {here}"
        yield _advice(run, what, "flash_attention_2")


@rule
def flash_attention_computes_in_16_bits(run):
    """`FlashAttention only support fp16 and bf16 data type`, from the kernel in the first step.

    transformers only warns: it casts what is fp32 to the type of autocast, or without autocast to
    that of the weights (read in its integrations/flash_attention.py).
    """
    if on_gpu(run) and "flash" in _asked(run) and run["dtype"] == "float32" and mixed_precision(run) == "no":
        fix = "--bf16: the weights stay in fp32, and attention computes in 16 bits"
        yield _problem(run, "computes in 16 bits only, and this run in fp32", fix)


@rule
def attention_kernels_are_installed(run):
    """`ImportError: ... the package for FlashAttention2 doesn't seem to be installed.`

    Without it, transformers takes the same kernel from the Hub, with the package `kernels`.
    """
    name = next(iter(_own_kernels(run)), _asked(run)) if "flash" in _asked(run) else _asked(run)
    version = _flash_version(name)
    if not name or (version and not on_gpu(run)):  # attention_kernels_need_a_gpu
        return
    is_ours = version in _FLASH_PACKAGES if version else attention.is_kernel(name)
    if not is_ours or _has_kernels(run):
        return
    if version is None:
        what = f"{name} needs the package kernels, from {' and below '.join(attention.kernels_versions())}"
        yield _missing(run, f"kernels=={attention.kernels_versions()[0]}", what)
        return
    module, distribution = _FLASH_PACKAGES[version]
    if not available(run, module) or _is_another_version(run, distribution):
        yield _missing(run, distribution, f"{name} needs the package {distribution}")


def _has_kernels(run: RunSpec) -> bool:
    """Whether the package `kernels` is there, in a version that transformers takes."""
    if not available(run, "kernels"):
        return False
    version = legal.version("kernels")
    least, limit = map(_numbers, attention.kernels_versions())
    return version is None or least <= _numbers(version) < limit


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def _is_another_version(run: RunSpec, distribution: str) -> bool:
    """Whether another FlashAttention provides the module of this one here."""
    if run.elsewhere is not None or legal.version(distribution):
        return False
    module = next(module for module, name in _FLASH_PACKAGES.values() if name == distribution)
    return any(legal.version(name) for other, name in _FLASH_PACKAGES.values() if other == module)
