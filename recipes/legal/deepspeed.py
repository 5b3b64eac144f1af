"""What is legal in a DeepSpeed JSON, and what DeepSpeed takes for what it leaves out."""

from __future__ import annotations

import ast
from functools import cache

from recipes.legal.source import (
    assigned,
    dataclass_fields,
    find_class,
    find_function,
    has_file,
    literal,
    package_folder,
    parse_file,
    strings,
)

# Sections of the JSON that are a class of DeepSpeed's, which forbids other keys.
_SECTIONS = {
    "zero_optimization": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_optimizer": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"),
    "zero_optimization.offload_param": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
    "tensor_parallel": ("runtime/tensor_parallel/config.py", "TPTrainingConfig"),
    "hybrid_engine": ("runtime/config.py", "HybridEngineConfig"),
    "compile": ("compile/config.py", "CompileConfig"),
    "comms_logger": ("comm/config.py", "CommsLoggerConfig"),
    "timers.throughput": ("utils/config.py", "DeepSpeedThroughputTimerConfig"),
    "tensorboard": ("monitor/config.py", "TensorBoardConfig"),
    "wandb": ("monitor/config.py", "WandbConfig"),
    "comet": ("monitor/config.py", "CometConfig"),
    "csv_monitor": ("monitor/config.py", "CSVConfig"),
}


@cache
def deepspeed_section_keys() -> dict[str, frozenset[str]]:
    """Section of a DeepSpeed JSON -> its legal keys, aliases included.

    Only sections that the installed DeepSpeed has: none without DeepSpeed.
    """
    sections = {}
    for section, (file, name) in _SECTIONS.items():
        tree = parse_file("deepspeed", file) if has_file("deepspeed", file) else ast.Module([], [])
        if any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body):
            sections[section] = _keys(find_class(tree, name))
    return sections


def _keys(cls: ast.ClassDef) -> frozenset[str]:
    """Every name in a class: more than the legal keys, so that none is refused."""
    names = strings(cls) | {field.name for field in dataclass_fields(cls)}
    return frozenset(name for name in names if name.isidentifier())


# Types of `optimizer` that are no class of torch's of that name.
_OPTIMIZERS = {
    "adam": ("deepspeed", "ops/adam/fused_adam.py", "FusedAdam"),  # on a CPU, too: with the same defaults
    "adamw": ("deepspeed", "ops/adam/fused_adam.py", "FusedAdam"),
    "lion": ("deepspeed", "ops/lion/fused_lion.py", "FusedLion"),
    "lamb": ("deepspeed", "ops/lamb/fused_lamb.py", "FusedLamb"),
    "adagrad": ("torch", "optim/adagrad.py", "Adagrad"),
}


@cache
def deepspeed_optimizer_defaults(name: str, torch_adam: bool = False) -> dict[str, object]:
    """Argument -> default of an `optimizer`'s type. Empty if it is unknown."""
    package, file, cls = _OPTIMIZERS.get(name.lower(), ("torch", f"optim/{name.lower()}.py", name))
    if torch_adam and name.lower() in ("adam", "adamw"):
        package, file, cls = "torch", f"optim/{name.lower()}.py", {"adam": "Adam", "adamw": "AdamW"}[name.lower()]
    return _defaults(package, file, cls)


@cache
def deepspeed_scheduler_defaults(name: str) -> dict[str, object]:
    """Argument -> default of a `scheduler`'s type, `...` if it needs a value.

    Empty if it is not DeepSpeed's own.
    """
    return _defaults("deepspeed", "runtime/lr_schedules.py", name)


def _defaults(package: str, file: str, cls: str) -> dict[str, object]:
    if not has_file(package, file):
        return {}
    classes = [node for node in parse_file(package, file).body if isinstance(node, ast.ClassDef) and node.name == cls]
    if not classes:
        return {}
    arguments = find_function(classes[0], "__init__").args
    names = [argument.arg for argument in arguments.args[2:]]  # after self, and the parameters or the optimizer
    values: list[object] = [literal(default) for default in arguments.defaults]
    by_keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    needed: list[object] = [...] * (len(names) - len(values))
    return {
        **dict(zip(names, needed + values, strict=True)),
        **{argument.arg: literal(default) for argument, default in by_keyword},
    }


@cache
def deepspeed_clipping_default() -> float:
    """The gradient norm that DeepSpeed clips at if the JSON does not say."""
    tree = parse_file("deepspeed", "runtime/constants.py") if package_folder("deepspeed") else ast.Module([], [])
    return float(literal(assigned(tree.body, "GRADIENT_CLIPPING_DEFAULT")) or 0)


@cache
def deepspeed_keys() -> frozenset[str]:
    """Top-level keys of a DeepSpeed JSON: every name in DeepSpeed's own configuration sources.

    These are more than the legal keys, so that none is refused. A misspelt key is not among them.
    Empty without DeepSpeed.
    """
    folder = package_folder("deepspeed")
    if folder is None:
        return frozenset()
    names: set[str] = set()
    for pattern in ("**/constants.py", "**/config.py", "**/config_v2.py"):
        for file in folder.glob(pattern):
            names |= strings(ast.parse(file.read_text(encoding="utf-8")))
    return frozenset(name for name in names if name.isidentifier())


@cache
def deepspeed_optimizers() -> frozenset[str]:
    """Legal types of a DeepSpeed JSON's `optimizer`: torch's, and DeepSpeed's in lower case."""
    config = parse_file("deepspeed", "runtime/config.py")
    own = {name for node in config.body if _assigns(node, "_OPTIMIZER") for name in strings(node)}
    return frozenset(own | _imported("torch", "optim/__init__.py"))


@cache
def deepspeed_schedulers() -> frozenset[str]:
    """Legal types of a DeepSpeed JSON's `scheduler`: classes of DeepSpeed, and of torch."""
    files = (("deepspeed", "runtime/lr_schedules.py"), ("torch", "optim/lr_scheduler.py"))
    bodies = [node for package, file in files for node in parse_file(package, file).body]
    return frozenset(node.name for node in bodies if isinstance(node, ast.ClassDef))


@cache
def deepspeed_tensor_styles() -> frozenset[str]:
    """How a plan may divide tensors in this DeepSpeed. Empty where it has no list of it."""
    tree = _deepspeed_module("tp_plan_converter")
    return frozenset(literal(assigned(tree.body, "SUPPORTED_STYLES")) or ()) if tree else frozenset()


@cache
def deepspeed_undivided() -> frozenset[str]:
    """What DeepSpeed cannot divide without a plan: classes of models as `gpt2` for GPT2Model."""
    tree = _deepspeed_module("auto_tp")
    nodes = ast.walk(find_class(tree, "AutoTP")) if tree else ()
    bodies = (node.body for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "supported")
    return frozenset(name for body in bodies for name in literal(assigned(body, "unsupported")) or ())


def _deepspeed_module(name: str) -> ast.Module | None:
    file = f"module_inject/{name}.py"
    return parse_file("deepspeed", file) if has_file("deepspeed", file) else None


def _assigns(node: ast.stmt, ending: str) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith(ending)


def _imported(package: str, file: str) -> set[str]:
    """The names that a file imports."""
    imports = [node for node in parse_file(package, file).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}
