"""What is legal: the settings, keys and values in the source of the installed libraries.

A name is legal if the installed version knows it. Nothing here imports a library.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import cache

from recipes.flags import RunFlags
from recipes.legal.source import (
    Field,
    argument_field,
    assigned,
    attributes_read,
    dataclass_fields,
    dict_keys,
    enumerations,
    find_class,
    find_function,
    literal,
    member_values,
    method_calls,
    names_with_prefix,
    option_names,
    parse_classes,
    parse_file,
    receiver,
    strings,
    values_by_member,
)

# New names of old fields. Inside this package the name is the one every supported version has.
ALIASES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}


@cache
def trainer_fields() -> dict[str, Field]:
    """Every field of the installed `transformers.TrainingArguments`."""
    source = parse_classes("transformers", "training_args.py")
    enums = enumerations(source) | enumerations(parse_classes("transformers", "trainer_utils.py"))
    return {field.name: field for field in dataclass_fields(find_class(source, "TrainingArguments"), enums)}


@cache
def run_flags() -> dict[str, Field]:
    """Every flag of our own, `recipes.flags.RunFlags`."""
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
    """Everything that train.py takes. An alias is listed beside the field that it renames."""
    return {**trainer_fields(), **run_flags()}


@cache
def accelerate_keys() -> frozenset[str]:
    """Legal top-level keys of an Accelerate YAML."""
    file = "commands/config/config_args.py"
    names = _field_names("accelerate", file, "BaseConfig") | _field_names("accelerate", file, "ClusterConfig")
    return names | {"fp16", "dynamo_backend"}  # old spellings that `process_config` still converts


@cache
def distributed_types() -> tuple[str, ...]:
    """Legal values of `distributed_type`."""
    return enumerations(parse_classes("accelerate", "utils/dataclasses.py"))["DistributedType"]


@cache
def accelerate_nested_keys(section: str) -> dict[str, Field]:
    """Legal keys of a section such as `deepspeed_config`, from the flags of the launch parser.

    accelerate itself does not check them: it drops an unknown one silently.
    """
    prefix = section.removesuffix("_config")
    group = {"parallelism": "parallelism_config_args"}.get(prefix, f"{prefix}_args")
    flags = {}
    for call in method_calls(parse_file("accelerate", "commands/launch.py"), "add_argument"):
        if prefix == "dynamo":
            names = [name for name in option_names(call) if name.startswith("dynamo_")]
        else:
            names = option_names(call) if receiver(call) == group else []
        for name in names:
            flags[name] = argument_field(name, call)
    if prefix == "fsdp":  # the launcher reads keys for which its parser has no flag
        read = names_with_prefix(parse_file("accelerate", "utils/launch.py"), "fsdp_")
        flags = {name: Field(name, "str") for name in read} | flags
    optional_prefix = {"fsdp": "fsdp_", "fp8": "fp8_", "dynamo": "dynamo_"}.get(prefix)
    if optional_prefix:
        flags |= {name.removeprefix(optional_prefix): field for name, field in flags.items()}
    return flags


@cache
def accelerate_choices() -> dict[str, tuple[str, ...]]:
    """Legal values by the list or enumeration that has them, such as `PrecisionType`."""
    constants = {
        node.targets[0].id: literal(node.value)
        for node in parse_file("accelerate", "utils/constants.py").body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    lists = {name: tuple(value) for name, value in constants.items() if isinstance(value, list)}
    return lists | enumerations(parse_classes("accelerate", "utils/dataclasses.py"))


@cache
def ddp_keywords() -> frozenset[str]:
    """Keywords of torch's DistributedDataParallel that accelerate's handler passes on."""
    return _field_names("accelerate", "utils/dataclasses.py", "DistributedDataParallelKwargs")


@cache
def accelerator_config_keys() -> frozenset[str]:
    """Legal keys of `TrainingArguments.accelerator_config`."""
    return _field_names("transformers", "trainer_pt_utils.py", "AcceleratorConfig")


@cache
def gradient_accumulation_keys() -> frozenset[str]:
    """Legal keys of `accelerator_config.gradient_accumulation_kwargs`."""
    return _field_names("accelerate", "utils/dataclasses.py", "GradientAccumulationPlugin")


@cache
def fsdp_config_keys() -> frozenset[str]:
    """Legal keys of `fsdp_config`, without `fsdp_`: every name in the methods that read it."""
    cls = find_class(parse_file("transformers", "training_args.py"), "TrainingArguments")
    readers = [node for node in cls.body if isinstance(node, ast.FunctionDef) and "fsdp" in node.name]
    return frozenset(name for reader in readers for name in strings(reader) if name.isidentifier())


@cache
def fsdp_words() -> tuple[str, ...]:
    """Legal words of `fsdp`."""
    return enumerations(parse_classes("transformers", "trainer_utils.py"))["FSDPOption"]


@cache
def checkpoint_keys() -> frozenset[str]:
    """Legal keys of `gradient_checkpointing_kwargs`: the keywords of torch's own `checkpoint`."""
    function = find_function(parse_file("torch", "utils/checkpoint.py"), "checkpoint")
    return frozenset({argument.arg for argument in function.args.kwonlyargs} | {"use_reentrant", "preserve_rng_state"})


@cache
def report_integrations() -> tuple[str, ...]:
    """Legal values of `report_to`."""
    return dict_keys(parse_file("transformers", "integrations/integration_utils.py"), "INTEGRATION_TO_CALLBACK")


@cache
def log_levels() -> tuple[str, ...]:
    """Legal values of `log_level`."""
    return (*dict_keys(parse_file("transformers", "utils/logging.py"), "log_levels"), "passive")


@cache
def debug_options() -> tuple[str, ...]:
    """Legal words in `debug`."""
    return enumerations(parse_file("transformers", "debug_utils.py"))["DebugOption"]


@cache
def optimizers_without_arguments() -> frozenset[str]:
    """Values of `optim` whose optimizer ignores `optim_args`."""
    return _optimizers_that_do_not_read("optim_args")


@cache
def optimizers_without_betas() -> frozenset[str]:
    """Values of `optim` whose optimizer ignores `adam_beta1`, `adam_beta2` and `adam_epsilon`."""
    return _optimizers_that_do_not_read("adam_kwargs")


@cache
def optimizer_numbers() -> dict[str, dict[str, str]]:
    """The keys of `optim_args` that are made numbers, by optimizer: key -> `int` or `float`."""
    tree = parse_file("transformers", "trainer_optimizer.py")
    read = {node.name: _numbers_read(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    numbers = {
        name: read.get(handler, {})
        for name, handler in values_by_member(tree, "_OPTIMIZER_HANDLERS", "training_args.py", "OptimizerNames")
    }
    for family in ("galore", "apollo", "schedule_free"):  # entered into the table as whole lists
        listed = _optimizers_listed(f"_{family.upper()}_OPTIMIZERS")
        numbers |= dict.fromkeys(listed, read.get(f"_get_{family}_optimizer", {}))
    ademamix = [name for name in bitsandbytes_optimizers() if "ademamix" in name]  # the others read none
    return numbers | dict.fromkeys(ademamix, read.get("_get_bitsandbytes_optimizer", {}))


def _numbers_read(function: ast.FunctionDef) -> dict[str, str]:
    """`float(ctx.optim_args.get("alpha", 5.0))`, and `float(ctx.optim_args[key])` in a loop."""
    source = ast.unparse(function)
    named = re.findall(r"\b(int|float)\(ctx\.optim_args(?:\.(?:get|pop)\(|\[)'(\w+)'", source)
    numbers = {key: type_ for type_, key in named}
    for node in ast.walk(function):
        if isinstance(node, ast.For) and "float(ctx.optim_args[key])" in ast.unparse(node):
            numbers |= dict.fromkeys(literal(node.iter) or (), "float")
    return numbers


def _optimizers_that_do_not_read(attribute: str) -> frozenset[str]:
    tree = parse_file("transformers", "trainer_optimizer.py")
    readers = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and attribute in attributes_read(node)
    }
    handlers = values_by_member(tree, "_OPTIMIZER_HANDLERS", "training_args.py", "OptimizerNames")
    return frozenset(name for name, handler in handlers if handler not in readers)


@cache
def bitsandbytes_optimizers() -> frozenset[str]:
    """Values of `optim` that bitsandbytes runs."""
    return _optimizers_listed("_BITSANDBYTES_OPTIMIZERS")


def _optimizers_listed(table: str) -> frozenset[str]:
    values = member_values("training_args.py", "OptimizerNames")
    listed = assigned(parse_file("transformers", "trainer_optimizer.py").body, table)
    assert listed
    return frozenset(values[node.attr] for node in ast.walk(listed) if isinstance(node, ast.Attribute))


def _field_names(package: str, file: str, cls: str) -> frozenset[str]:
    return frozenset(field.name for field in dataclass_fields(find_class(parse_classes(package, file), cls)))
