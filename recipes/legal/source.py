"""What is legal, read from the source of the installed libraries without importing them.

`importlib.util.find_spec` of a top-level package imports nothing, and `ast` gives the fields of a dataclass or the
flags of an argument parser in milliseconds. So a name is legal exactly when the installed version knows it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from recipes.errors import mistake
from recipes.flags import RunFlags


@dataclass(frozen=True)
class Field:
    """One legal setting. `annotation` is its type as written in the source, `choices` its legal values if listed."""

    name: str
    annotation: str
    default: Any = None
    choices: tuple[str, ...] = ()
    help: str = ""

    @property
    def types(self) -> frozenset[str]:
        """The plain types among bool, int, float, str, list, dict and None that the annotation allows."""
        found = frozenset(
            re.findall(r"\b(?:bool|int|float|str|list|dict|None)\b", re.sub(r"\[.*?\]", "", self.annotation))
        )
        return found or frozenset({"str"})


# New names of old fields. Inside this package the name is the one every supported version has.
ALIASES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}


@cache
def training_arguments() -> dict[str, Field]:
    """Every field of the installed `transformers.TrainingArguments`."""
    source = _parse_classes("transformers", "training_args.py")
    enums = _enums(source) | _enums(_parse_classes("transformers", "trainer_utils.py"))
    return {field.name: field for field in _dataclass_fields(_class(source, "TrainingArguments"), enums)}


@cache
def run_flags() -> dict[str, Field]:
    """Our own flags, in the same form."""
    return {
        item.name: Field(
            item.name,
            str(item.type),
            item.default,
            tuple(re.findall(r"""['"]([^'"]*)['"]""", str(item.type))),
            item.metadata["help"],
        )
        for item in dataclasses.fields(RunFlags)
    }


@cache
def settings() -> dict[str, Field]:
    """Everything that train.py takes. An alias stands for the field it renames."""
    return {**training_arguments(), **run_flags()}


@cache
def accelerate_keys() -> frozenset[str]:
    """Legal top-level keys of an Accelerate YAML."""
    source = _parse_classes("accelerate", "commands/config/config_args.py")
    names = {
        field.name for cls in ("BaseConfig", "ClusterConfig") for field in _dataclass_fields(_class(source, cls), {})
    }
    return frozenset(names | {"fp16", "dynamo_backend"})  # old spellings that `process_config` still converts


@cache
def distributed_types() -> tuple[str, ...]:
    """Legal values of `distributed_type`."""
    return _enums(_parse_classes("accelerate", "utils/dataclasses.py"))["DistributedType"]


@cache
def accelerate_nested_keys(section: str) -> dict[str, Field]:
    """Legal keys of a section such as `deepspeed_config`: the flags of the launch parser's argument group.

    accelerate itself never checks them: an unknown one is dropped without a word.
    """
    prefix = section.removesuffix("_config")
    group = {"parallelism": "parallelism_config_args"}.get(prefix, f"{prefix}_args")
    flags = {}
    for call in _calls(_parse("accelerate", "commands/launch.py"), "add_argument"):
        if prefix == "dynamo":
            names = [name for name in _option_names(call) if name.startswith("dynamo_")]
        else:
            names = _option_names(call) if _receiver(call) == group else []
        for name in names:
            flags[name] = _parser_field(name, call)
    if prefix == "fsdp":  # the launcher reads more from the YAML than its parser has flags for
        read = _attributes(_parse("accelerate", "utils/launch.py"), "fsdp_")
        flags = {name: Field(name, "str") for name in read} | flags
    optional_prefix = {"fsdp": "fsdp_", "fp8": "fp8_", "dynamo": "dynamo_"}.get(prefix)
    if optional_prefix:
        flags |= {name.removeprefix(optional_prefix): field for name, field in flags.items()}
    return flags


@cache
def accelerate_choices() -> dict[str, tuple[str, ...]]:
    """Legal values that accelerate writes as constants or enumerations: `FSDP_STATE_DICT_TYPE`, `PrecisionType`, ..."""
    constants = {
        node.targets[0].id: _literal(node.value)
        for node in _parse("accelerate", "utils/constants.py").body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    lists = {name: tuple(value) for name, value in constants.items() if isinstance(value, list)}
    return lists | _enums(_parse_classes("accelerate", "utils/dataclasses.py"))


@cache
def ddp_keywords() -> frozenset[str]:
    """What torch's DistributedDataParallel takes through accelerate's handler."""
    source = _parse_classes("accelerate", "utils/dataclasses.py")
    return frozenset(field.name for field in _dataclass_fields(_class(source, "DistributedDataParallelKwargs"), {}))


@cache
def accelerator_config_keys() -> frozenset[str]:
    """Legal keys of `TrainingArguments.accelerator_config`."""
    source = _parse_classes("transformers", "trainer_pt_utils.py")
    return frozenset(field.name for field in _dataclass_fields(_class(source, "AcceleratorConfig"), {}))


@cache
def gradient_accumulation_keys() -> frozenset[str]:
    """Legal keys of `accelerator_config.gradient_accumulation_kwargs`."""
    source = _parse_classes("accelerate", "utils/dataclasses.py")
    return frozenset(field.name for field in _dataclass_fields(_class(source, "GradientAccumulationPlugin"), {}))


@cache
def fsdp_config_keys() -> frozenset[str]:
    """Keys `TrainingArguments.fsdp_config` may have, without `fsdp_`: every name in the methods that read it."""
    cls = _class(_parse("transformers", "training_args.py"), "TrainingArguments")
    readers = [node for node in cls.body if isinstance(node, ast.FunctionDef) and "fsdp" in node.name]
    return frozenset(name for reader in readers for name in _strings(reader) if name.isidentifier())


@cache
def checkpoint_keys() -> frozenset[str]:
    """Legal keys of `gradient_checkpointing_kwargs`: the keywords of torch's own `checkpoint`."""
    tree = _parse("torch", "utils/checkpoint.py")
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "checkpoint")
    return frozenset({argument.arg for argument in function.args.kwonlyargs} | {"use_reentrant", "preserve_rng_state"})


@cache
def report_integrations() -> tuple[str, ...]:
    """What `report_to` may name."""
    return _dict_keys(_parse("transformers", "integrations/integration_utils.py"), "INTEGRATION_TO_CALLBACK")


@cache
def log_levels() -> tuple[str, ...]:
    """What `log_level` may be."""
    return (*_dict_keys(_parse("transformers", "utils/logging.py"), "log_levels"), "passive")


@cache
def schedule_keys() -> dict[str, dict[str, bool]]:
    """Legal keys of `lr_scheduler_kwargs` by schedule, and whether each must be given.

    A schedule that takes any key is not listed.
    """
    tree = _parse("transformers", "optimization.py")
    functions = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    by_trainer = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    keys = {}
    for name, function in _by_member(tree, "TYPE_TO_SCHEDULER_FUNCTION", "trainer_utils.py", "SchedulerType"):
        arguments = functions[function]
        if not arguments.kwarg:
            required = len(arguments.args) - len(arguments.defaults)
            names = [argument.arg for argument in arguments.args]
            keys[name] = {key: place < required for place, key in enumerate(names) if key not in by_trainer}
    return keys


@cache
def optimizers_without_arguments() -> frozenset[str]:
    """Values of `optim` whose optimizer is built without a look at `optim_args`."""
    tree = _parse("transformers", "trainer_optimizer.py")
    readers = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and "optim_args" in _names_read(node)
    }
    handlers = _by_member(tree, "_OPTIMIZER_HANDLERS", "training_args.py", "OptimizerNames")
    return frozenset(name for name, handler in handlers if handler not in readers)


@cache
def deepspeed_zero_keys() -> frozenset[str]:
    """Legal keys of a DeepSpeed JSON's `zero_optimization`, aliases included; empty without DeepSpeed."""
    if _root("deepspeed") is None:
        return frozenset()
    cls = _class(_parse("deepspeed", "runtime/zero/config.py"), "DeepSpeedZeroConfig")
    names = _strings(cls) | {field.name for field in _dataclass_fields(cls, {})}
    return frozenset(name for name in names if name.isidentifier())


@cache
def deepspeed_keys() -> frozenset[str]:
    """Top-level keys a DeepSpeed JSON may have: every name that DeepSpeed's own config sources mention.

    That is more than the legal ones, so a legal key is never refused, and a misspelt one is not among them.
    """
    root = _root("deepspeed")
    if root is None:
        return frozenset()
    words: set[str] = set()
    for file in sorted({*root.glob("**/constants.py"), *root.glob("**/config.py"), *root.glob("**/config_v2.py")}):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        words |= _strings(tree)
    return frozenset(word for word in words if word.isidentifier())


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- Reading sources -------------------------------------------------------------------------------------------------


@cache
def _root(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def _parse(package: str, file: str) -> ast.Module:
    return ast.parse(_source(package, file))


def _source(package: str, file: str) -> str:
    root = _root(package)
    if root is None:
        raise mistake(package, "is not installed, and what is legal is read from its source", f"pip install {package}")
    return (root / file).read_text(encoding="utf-8")


@cache
def _parse_classes(package: str, file: str) -> ast.Module:
    """Only the classes of a module, each up to its first method: all that fields and enumerations need, much sooner."""
    source = _source(package, file)
    blocks = re.findall(r"^class .*\n(?:(?:[ \t].*)?\n)*", source, flags=re.M)
    heads = [re.split(r"^    (?:@|def )", block, maxsplit=1, flags=re.M)[0] + "    pass\n" for block in blocks]
    try:
        return ast.parse("".join(heads))
    except SyntaxError:  # a text at the left margin inside a docstring, say
        return _parse(package, file)


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _enums(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Class name -> string values, for classes whose body assigns them."""
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or not any("Enum" in ast.unparse(base) for base in node.bases):
            continue
        values = [item.value for item in node.body if isinstance(item, ast.Assign)]
        found[node.name] = tuple(v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str))
    return found


def _dataclass_fields(cls: ast.ClassDef, enums: dict[str, tuple[str, ...]]) -> list[Field]:
    constants = {  # the last assignment counts, also inside an `if`: that is what an up-to-date install executes
        item.targets[0].id: item.value
        for item in ast.walk(cls)
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
    }
    fields = []
    for item in cls.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        annotation = ast.unparse(item.annotation)
        keywords = _keywords(item.value)
        default = keywords.get("default", None if isinstance(item.value, ast.Call) else item.value)
        if isinstance(default, ast.Name):
            default = constants.get(default.id, default)
        metadata = _literal_entries(keywords.get("metadata"))
        choices = metadata.get("choices") or next((enums[e] for e in enums if e in annotation), ())
        fields.append(
            Field(item.target.id, annotation, _literal(default), tuple(choices), str(metadata.get("help", "")))
        )
    return fields


def _keywords(node: ast.expr | None) -> dict[str, ast.expr]:
    return {k.arg: k.value for k in node.keywords if k.arg} if isinstance(node, ast.Call) else {}


def _literal_entries(node: ast.expr | None) -> dict[str, Any]:
    if not isinstance(node, ast.Dict):
        return {}
    return {_literal(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True)}


def _literal(node: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, SyntaxError):
        return None


def _strings(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _attributes(tree: ast.AST, prefix: str) -> set[str]:
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | _strings(tree)
    return {name for name in found if name.startswith(prefix) and name.isidentifier()}


def _dict_keys(tree: ast.Module, name: str) -> tuple[str, ...]:
    """The keys of the dictionary that the module assigns to `name`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Dict):
            return tuple(str(_literal(key)) for key in node.value.keys)
    return ()


def _by_member(tree: ast.Module, table: str, enum_file: str, enum: str) -> list[tuple[str, str]]:
    """(value of the enumeration's member, name) for each `Enumeration.MEMBER: name` in a dictionary of the module."""
    assigned = [item for item in _class(_parse_classes("transformers", enum_file), enum).body]
    values = {ast.unparse(item.targets[0]): _literal(item.value) for item in assigned if isinstance(item, ast.Assign)}
    node = next(
        node.value
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and table in ast.unparse(node).partition("=")[0]
    )
    assert isinstance(node, ast.Dict)
    return [
        (values[key.attr], value.id)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Attribute) and isinstance(value, ast.Name)
    ]


def _names_read(function: ast.FunctionDef) -> set[str]:
    return {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}


def _calls(tree: ast.Module, method: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
    ]


def _receiver(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return call.func.value.id if isinstance(call.func.value, ast.Name) else ""


def _option_names(call: ast.Call) -> list[str]:
    names = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return [name[2:].replace("-", "_") for name in names if name.startswith("--")]


def _parser_field(name: str, call: ast.Call) -> Field:
    keywords = _keywords(call)
    help_text = str(_literal(keywords.get("help")) or "")
    # Some choices are stated in the help text alone, as in "(none|cpu|nvme)".
    stated = re.search(r"\((\w+(?:\|\w+)+)\)", help_text)
    choices = _literal(keywords.get("choices")) or (stated.group(1).split("|") if stated else ())
    annotation = ast.unparse(keywords["type"]) if "type" in keywords else "str"
    return Field(name, annotation, _literal(keywords.get("default")), tuple(choices), help_text)
