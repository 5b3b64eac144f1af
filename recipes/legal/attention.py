"""Attention implementations and their kernels, read from transformers' source."""

from __future__ import annotations

import ast
import re
from functools import cache

from recipes.legal.source import assigned, find_class, find_function, literal, parse_classes, parse_file

_KERNELS = "modeling_flash_attention_utils.py"


@cache
def implementations() -> tuple[str, ...]:
    """Legal values of `attn_implementation` besides kernels of the Hub."""
    interface = find_class(parse_classes("transformers", "modeling_utils.py"), "AttentionInterface")
    table = assigned(interface.body, "_global_mapping")
    assert isinstance(table, ast.Dict)
    return ("eager", *sorted(str(literal(key)) for key in table.keys))


@cache
def flash_versions() -> dict[int, int]:
    """Version of FlashAttention -> the least major compute capability that transformers states.

    0 if it states none.
    """
    table = assigned(parse_file("transformers", _KERNELS).body, "FLASH_ATTENTION_COMPATIBILITY_MATRIX")
    assert isinstance(table, ast.Dict)
    versions = {}
    for version, entry in zip(table.keys, table.values, strict=True):
        assert isinstance(entry, ast.Dict)
        stated = {literal(key): literal(value) for key, value in zip(entry.keys, entry.values, strict=True)}
        versions[int(literal(version))] = int(stated.get("cuda_min_major_version", 0))
    return versions


@cache
def kernel_devices() -> dict[str, tuple[str, ...]]:
    """A flash kernel of the Hub -> the devices that it is built for. Others run anywhere."""
    return literal(assigned(parse_file("transformers", _KERNELS).body, "FLASH_ATTN_KERNEL_DEVICES")) or {}


def is_kernel(name: str) -> bool:
    """Whether transformers takes the name for a kernel of the Hub: `org/repo[@revision][:name]`."""
    return re.search(_kernel_pattern(), name) is not None


@cache
def _kernel_pattern() -> str:
    function = find_function(parse_file("transformers", "integrations/hub_kernels.py"), "is_kernel")
    call = next(node for node in ast.walk(function) if isinstance(node, ast.Call))
    return str(literal(call.args[0]))


@cache
def kernels_versions() -> tuple[str, str]:
    """Versions of the package `kernels` that transformers takes: from the first, below the last."""
    body = parse_file("transformers", "utils/import_utils.py").body
    least, limit = (literal(assigned(body, f"KERNELS_{end}_VERSION")) for end in ("MIN", "MAX"))
    return str(least), str(limit)
