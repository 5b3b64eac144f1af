"""Facts of a type of model, such as `llama`: its classes, what they support, its configuration.

The tables of types are transformers' own, kept by `schema`. Facts of one type are read from its
source: importing one model takes five seconds, importing all of them half a minute, and reading
one takes hundredths of a second.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from typing import Any

from recipes.legal.schema import facts, names, package_folder

# The table of liger-kernel 0.8.5, for a plan where the package is not installed.
_LIGER = frozenset(
    "deepseek_v2 deepseek_v3 deepseek_v4 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text glm4 glm4v glm4v_moe "
    "gpt_oss internvl llama llama4 llama4_text llava mllama mllama_text_model ministral mistral mixtral muse_glimmer "
    "nemotron olmo2 olmo3 qwen2 qwen3 qwen3_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3_next qwen3_5 "
    "qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text smollm3 phi3 "
    "paligemma falcon_h1 smolvlm hunyuan_v1_dense hunyuan_v1_moe exaone4".split()
)


# --- Tables of the libraries ----------------------------------------------------------------------


def model_class(model_type: str, task: str) -> str | None:
    """The class of a task, such as `LlamaForCausalLM` of `causal_lm`; None if the type has none."""
    return facts().get("model_classes", {}).get(task.upper(), {}).get(model_type)


def known_types() -> frozenset[str]:
    """Every model type that this transformers has code for; empty if its tables are not found."""
    return frozenset(names("model_types"))


def types_with_fused_loss() -> frozenset[str]:
    """Model types whose loss Liger makes without the logits as a whole, unless told otherwise."""
    return frozenset(names("liger")) or _LIGER


# --- A type's own source --------------------------------------------------------------------------


def class_names(model_type: str) -> frozenset[str]:
    """The classes in the model's file, its layers among them. Empty if there is no file."""
    return frozenset(_classes(model_type, "modeling"))


def class_attribute(model_type: str, class_name: str, attribute: str, default: Any = None) -> Any:
    """A plain class attribute such as `_supports_sdpa`, inherited ones too.

    `default` if no class of the model's file sets it: PreTrainedModel's own value.
    """
    return _attribute(_lineage(_classes(model_type, "modeling"), class_name), attribute, default)


def layer_classes(model_type: str) -> frozenset[str]:
    """The layers that are kept whole when a model is split or sharded: `_no_split_modules`."""
    named = (class_attribute(model_type, name, "_no_split_modules") for name in class_names(model_type))
    return frozenset(layer for names in named for layer in names or ())


def has_argument(model_type: str, class_name: str, argument: str) -> bool | None:
    """True if the class's `forward` names the argument. None if the class is not found."""
    for cls in _lineage(_classes(model_type, "modeling"), class_name):
        for item in cls.body:
            if isinstance(item, ast.FunctionDef) and item.name == "forward":
                return argument in {given.arg for given in (*item.args.args, *item.args.kwonlyargs)}
    return None


def own_name(model_type: str, field: str) -> str:
    """The type's name for a field: GPT-2's `max_position_embeddings` is its `n_positions`."""
    return (_attribute(_configuration(model_type), "attribute_map") or {}).get(field, field)


def config_default(model_type: str, field: str) -> Any:
    """The default of a field of the type's configuration, by the type's own name for it.

    None if it has no such field, or its default is no literal.
    """
    return _attribute(_configuration(model_type), field)


@cache
def _classes(model_type: str, kind: str) -> dict[str, ast.ClassDef]:
    """The classes in the file of a type: `modeling` or `configuration`. Empty if it has none."""
    module = facts().get("model_folders", {}).get(model_type, model_type.replace("-", "_"))
    folder = package_folder("transformers")
    file = folder / "models" / module / f"{kind}_{module}.py" if folder else None
    body = ast.parse(file.read_text(encoding="utf-8")).body if file and file.exists() else []
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


@cache
def _configuration(model_type: str) -> tuple[ast.ClassDef, ...]:
    """The configuration of a type, and the classes that it inherits from in the same file."""
    classes = _classes(model_type, "configuration")
    own = (name for name, cls in classes.items() if _attribute((cls,), "model_type") == model_type)
    return tuple(_lineage(classes, next(own, "")))


def _lineage(classes: dict[str, ast.ClassDef], name: str) -> list[ast.ClassDef]:
    """A class and those that it inherits from, as far as they are among `classes`."""
    cls = classes.get(name)
    return [cls, *(one for base in cls.bases for one in _lineage(classes, ast.unparse(base)))] if cls else []


def _attribute(classes: Iterable[ast.ClassDef], name: str, default: Any = None) -> Any:
    """The value of the first of the classes that sets the attribute; None for an expression."""
    for item in (item for cls in classes for item in cls.body):
        target = item.targets[0] if isinstance(item, ast.Assign) else getattr(item, "target", None)
        if isinstance(item, (ast.Assign, ast.AnnAssign)) and item.value and getattr(target, "id", None) == name:
            try:
                return ast.literal_eval(item.value)
            except ValueError:
                return None
    return default
