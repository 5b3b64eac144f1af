"""What transformers' source says of a type of model: its classes, and what they support.

A type is a config.json's `model_type`, such as `llama`. Nothing is imported.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

from recipes.legal.source import literal, package_folder, parse_classes, parse_file

# Which of transformers' tables names the class that a task trains.
_TABLES = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}


def model_class(model_type: str, task: str) -> str | None:
    """The class that the task trains, such as `LlamaForCausalLM`; None if there is none."""
    return model_types(_TABLES[task]).get(model_type)


@cache
def model_types(table: str) -> dict[str, str]:
    """Model type -> class, from a table of transformers' auto classes."""
    return _pairs("models/auto/modeling_auto.py", table)


def class_names(model_type: str) -> frozenset[str]:
    """The classes in the model's file, its layers among them. Empty if there is no file."""
    return frozenset(_classes(model_type))


def class_attribute(model_type: str, class_name: str, attribute: str, default: Any = None) -> Any:
    """A plain class attribute such as `_supports_sdpa`, inherited ones too.

    `default` if no class of the model's file sets it: PreTrainedModel's own value.
    """
    classes = _classes(model_type)
    waiting = [class_name]
    while waiting:
        cls = classes.get(waiting.pop(0))
        if cls is None:
            continue
        for item in cls.body:
            if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == attribute:
                return literal(item.value)
        waiting.extend(ast.unparse(base) for base in cls.bases)
    return default


def layer_classes(model_type: str) -> frozenset[str]:
    """The layers that are kept whole when a model is split or sharded: `_no_split_modules`."""
    named = (class_attribute(model_type, name, "_no_split_modules") for name in _classes(model_type))
    return frozenset(layer for names in named for layer in names or ())


@cache
def _classes(model_type: str) -> dict[str, ast.ClassDef]:
    module = _folders().get(model_type, model_type.replace("-", "_"))
    file = f"models/{module}/modeling_{module}.py"
    folder = package_folder("transformers")
    if folder is None or not (folder / file).exists():
        return {}
    return {node.name: node for node in parse_classes("transformers", file).body if isinstance(node, ast.ClassDef)}


@cache
def _folders() -> dict[str, str]:
    """Model types whose folder bears another name: model type -> folder."""
    return _pairs("models/auto/auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")


def _pairs(file: str, table: str) -> dict[str, str]:
    """The table that a file of transformers writes as `OrderedDict([(key, value), ...])`."""
    for node in parse_file("transformers", file).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table and isinstance(node.value, ast.Call):
            return dict(literal(node.value.args[0]) or ())
    return {}
