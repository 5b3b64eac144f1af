"""Which models liger-kernel has a fused loss for: read in its source, or known of a version."""

from __future__ import annotations

import ast
from functools import cache

from recipes.legal.source import assigned, find_function, has_file, literal, parse_file

_TABLE = "transformers/monkey_patch.py"
# What the table of liger-kernel 0.8.5 says, for a plan where the package is not installed.
_KNOWN = frozenset(
    "deepseek_v2 deepseek_v3 deepseek_v4 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text glm4 glm4v glm4v_moe "
    "gpt_oss internvl llama llama4 llama4_text llava mllama mllama_text_model ministral mistral mixtral muse_glimmer "
    "nemotron olmo2 olmo3 qwen2 qwen3 qwen3_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3_next qwen3_5 "
    "qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text smollm3 phi3 "
    "paligemma falcon_h1 smolvlm hunyuan_v1_dense hunyuan_v1_moe exaone4".split()
)


@cache
def types_with_fused_loss() -> frozenset[str]:
    """Model types whose loss Liger makes without the logits as a whole, unless told otherwise."""
    if not has_file("liger_kernel", _TABLE):
        return _KNOWN
    tree = parse_file("liger_kernel", _TABLE)
    table = assigned(tree.body, "MODEL_TYPE_TO_APPLY_LIGER_FN")
    if not isinstance(table, ast.Dict):
        return _KNOWN
    functions = {literal(key): ast.unparse(value) for key, value in zip(table.keys, table.values, strict=True)}
    return frozenset(kind for kind, name in functions.items() if _fuses_by_default(find_function(tree, name)))


def _fuses_by_default(function: ast.FunctionDef) -> bool:
    arguments = function.args.args
    defaults = dict(zip(reversed([one.arg for one in arguments]), reversed(function.args.defaults), strict=False))
    wanted = defaults.get("fused_linear_cross_entropy")
    return wanted is not None and literal(wanted) is True
