"""What transformers' source says of a type of model: its classes, and what they support.

A type is a config.json's `model_type`, such as `llama`. Nothing is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from recipes.legal.source import assigned, has_file, literal, package_folder, parse_classes, parse_file, read_source

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
    value = _first_assigned(_with_bases(_classes(model_type), class_name), attribute)
    return default if value is None else literal(value)


def layer_classes(model_type: str) -> frozenset[str]:
    """The layers that are kept whole when a model is split or sharded: `_no_split_modules`."""
    named = (class_attribute(model_type, name, "_no_split_modules") for name in _classes(model_type))
    return frozenset(layer for names in named for layer in names or ())


def has_argument(model_type: str, class_name: str, argument: str) -> bool | None:
    """Whether the class's `forward` names the argument. None if the class is not found."""
    file = _file(model_type, "modeling")
    if file is None:
        return None
    classes = {node.name: node for node in parse_file("transformers", file).body if isinstance(node, ast.ClassDef)}
    for cls in _with_bases(classes, class_name):
        for item in cls.body:
            if isinstance(item, ast.FunctionDef) and item.name == "forward":
                return argument in {given.arg for given in (*item.args.args, *item.args.kwonlyargs)}
    return None


# --- Configurations -------------------------------------------------------------------------------


@cache
def known_types() -> frozenset[str]:
    """Every model type that this transformers has code for; empty if its tables are not found."""
    trees = [parse_file("transformers", f"models/auto/{name}.py") for name in ("auto_mappings", "configuration_auto")]
    tables = [
        node.value
        for tree in trees
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.Expr)) and ast.unparse(node).startswith("CONFIG_MAPPING_NAMES")
    ]
    inside = [node for table in tables for node in ast.walk(table)]
    pairs = [node.elts[0] for node in inside if isinstance(node, ast.Tuple) and len(node.elts) == 2]
    keys = [key for node in inside if isinstance(node, ast.Dict) for key in node.keys]
    return frozenset(str(literal(node)) for node in (*pairs, *keys) if isinstance(literal(node), str))


def own_name(model_type: str, field: str) -> str:
    """What the type calls a field: GPT-2's `max_position_embeddings` is its `n_positions`."""
    names = literal(_first_assigned(_config_classes(model_type), "attribute_map")) or {}
    return names.get(field, field)


def config_default(model_type: str, field: str) -> Any:
    """The default of a field of the type's configuration, by the type's own name for it.

    None if it has no such field, or its default is no literal.
    """
    return literal(_first_assigned(_config_classes(model_type), field))


def config_numbers(model_type: str) -> dict[str, bool]:
    """Fields of the type's configuration that only take numbers, true and false: field -> whether
    it takes null too.
    """
    fields = [item for cls in _config_classes(model_type) for item in cls.body if isinstance(item, ast.AnnAssign)]
    types = {ast.unparse(item.target): set(ast.unparse(item.annotation).split(" | ")) for item in reversed(fields)}
    return {name: "None" in kinds for name, kinds in types.items() if kinds <= {"int", "float", "bool", "None"}}


def config_multiples(model_type: str) -> list[tuple[str, str]]:
    """Pairs of fields of the type's configuration, which refuses a first that is not a multiple of
    the second: `validate_architecture`. What it asks in other words is left to the class itself.
    """
    file, own = _file(model_type, "configuration"), {cls.name for cls in _config_classes(model_type)}
    if file is None:
        return []
    source = read_source("transformers", file)
    blocks = [block for block in re.split(r"^(?=class )", source, flags=re.M) if re.match(r"class (\w+)", block)]
    written = "".join(block for block in blocks if block[6:].split("(")[0] in own)
    return re.findall(r"^        if self\.(\w+) % self\.(\w+)(?: != 0)?:\n\s+raise", written, flags=re.M)


@cache
def _config_classes(model_type: str) -> tuple[ast.ClassDef, ...]:
    """The configuration of a type, and what it inherits from in the same file."""
    file = _file(model_type, "configuration")
    tree = parse_classes("transformers", file).body if file else []
    classes = {node.name: node for node in tree if isinstance(node, ast.ClassDef)}
    for name, cls in classes.items():
        if literal(assigned(cls.body, "model_type")) == model_type:
            return tuple(_with_bases(classes, name))
    return ()


def tensor_plan(model_type: str, class_name: str) -> dict[str, str]:
    """Part of the model -> how tensor parallelism divides it; empty without a plan."""
    plan = literal(_first_assigned(_config_classes(model_type), "base_model_tp_plan")) or {}
    return {**plan, **(class_attribute(model_type, class_name, "_tp_plan") or {})}


# --- Quantised weights and tokenizers -------------------------------------------------------------


def trains_quantised(method: str, adapters: bool) -> bool | None:
    """Whether Trainer takes weights that are stored in this way, with adapters on them or without.

    None where the source does not say it plainly: it depends on a package, on the configuration, or
    the loader may restore the weights.
    """
    source = _quantizer(method)
    if source is None or "quantization_config.dequantize = True" in source:
        return None
    name = "is_trainable" if adapters else "is_qat_trainable"
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        return None if adapters else False  # HfQuantizer's own
    returned = {literal(node.value) for node in ast.walk(found[0]) if isinstance(node, ast.Return)}
    return returned.pop() if returned in ({True}, {False}) else None


def _quantizer(method: str) -> str | None:
    """The source of the file that loads weights stored in this way."""
    tree = parse_file("transformers", "quantizers/auto.py")
    table = assigned(tree.body, "AUTO_QUANTIZER_MAPPING")
    assert isinstance(table, ast.Dict)
    classes = {literal(key): ast.unparse(value) for key, value in zip(table.keys, table.values, strict=True)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and classes.get(method) in {alias.name for alias in node.names}:
            return read_source("transformers", f"quantizers/{node.module}.py")
    return None


def tokenizer_needs_files(model_type: str) -> bool:
    """False for a type whose own tokenizer reads no vocabulary, such as CANINE's characters."""
    file = _file(model_type, "tokenization")
    return file is None or "vocab_files_names" in read_source("transformers", file)


def refused_by_lora(model_type: str) -> frozenset[str]:
    """Modules of such a model that peft adds no LoRA to: it says so of types with Mamba layers."""
    if package_folder("peft") is None:
        return frozenset()
    tree = parse_file("peft", "tuners/tuners_utils.py")
    found = {ast.unparse(node.targets[0]): node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)}
    types, modules = (
        literal(found[name]) if name in found else None for name in ("mamba_model_types", "incompatible_modules")
    )
    return frozenset(modules or ()) if model_type in (types or ()) else frozenset()


def refuses_dora(method: str) -> bool:
    """Whether peft has no DoRA for weights that are stored in this way."""
    file = f"tuners/lora/{method}.py"
    return has_file("peft", file) and "does not support DoRA" in read_source("peft", file)


def targets_in_experts(model_type: str) -> frozenset[str]:
    """LoRA targets that peft turns into parameters of all experts at once, for such a model.

    It refuses dropout and DoRA on them. Source: `_convert_peft_config_moe`.
    """
    file = "utils/transformers_weight_conversion.py"
    if not (has_file("peft", file) and has_file("transformers", "conversion_mapping.py")):
        return frozenset()
    like = _table("transformers", "conversion_mapping.py", "_MODEL_TO_CONVERSION_PATTERN")
    own = re.findall(r'^_MODEL_TO_CONVERSION_PATTERN\["(\w+)"\] = "(\w+)"', read_source("peft", file), flags=re.M)
    base = {**like, **dict(own)}.get(model_type, "")
    return frozenset(_table("peft", file, "_MOE_TARGET_MODULE_MAPPING").get(base) or ())


def _table(package: str, file: str, name: str) -> dict[str, Any]:
    """A table of literals at the top of a file; empty if there is none."""
    found = re.search(rf"^{name}\b[^=\n]*= (\{{.*?^\}})", read_source(package, file), flags=re.M | re.S)
    return ast.literal_eval(found[1]) if found else {}


def source_names(model_type: str, name: str) -> bool | None:
    """Whether the model's code contains a name. None if there is no such file."""
    file = _file(model_type, "modeling")
    return None if file is None else name in read_source("transformers", file)


# --- Files ----------------------------------------------------------------------------------------


def _file(model_type: str, kind: str) -> str | None:
    """The file of a type: `modeling`, `configuration` or `tokenization`. None if it has none."""
    module = _folders().get(model_type, model_type.replace("-", "_"))
    file = f"models/{module}/{kind}_{module}.py"
    return file if has_file("transformers", file) else None


def _with_bases(classes: dict[str, ast.ClassDef], name: str) -> Iterator[ast.ClassDef]:
    """A class and those that it inherits from, as far as they are among `classes`."""
    waiting = [name]
    while waiting:
        cls = classes.get(waiting.pop(0))
        if cls is not None:
            yield cls
            waiting.extend(ast.unparse(base) for base in cls.bases)


def _first_assigned(classes: Iterable[ast.ClassDef], name: str) -> ast.expr | None:
    """What the first of the classes that has the attribute assigns to it; None if none has."""
    values = (assigned(cls.body, name) for cls in classes)
    return next((value for value in values if value is not None), None)


@cache
def _classes(model_type: str) -> dict[str, ast.ClassDef]:
    file = _file(model_type, "modeling")
    if file is None:
        return {}
    return {node.name: node for node in parse_classes("transformers", file).body if isinstance(node, ast.ClassDef)}


@cache
def _folders() -> dict[str, str]:
    """Model types whose folder bears another name: model type -> folder."""
    return _pairs("models/auto/auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")


def _pairs(file: str, table: str) -> dict[str, str]:
    """The table that a file of transformers writes as `OrderedDict([(key, value), ...])`."""
    made = assigned(parse_file("transformers", file).body, table)
    return dict(literal(made.args[0]) or ()) if isinstance(made, ast.Call) else {}
