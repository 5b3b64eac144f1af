"""Learning rate schedules and their settings, read from transformers' source."""

from __future__ import annotations

import ast
from functools import cache

from recipes.legal.source import Field, find_class, find_function, literal, parse_file, values_by_member

_FILE = "optimization.py"
_GIVEN_BY_TRAINER = {"self", "optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}


@cache
def schedule_keys() -> dict[str, dict[str, bool]]:
    """Legal keys of `lr_scheduler_kwargs` by schedule, and whether each must be given."""
    keys = {}
    for schedule, arguments in _arguments().items():
        required = len(arguments.args) - len(arguments.defaults)
        names = [argument.arg for argument in arguments.args]
        keys[schedule] = {key: place < required for place, key in enumerate(names) if key not in _GIVEN_BY_TRAINER}
    return keys


@cache
def schedule_defaults() -> dict[str, dict[str, object]]:
    """The values of keys that are not given, by schedule. None for an expression."""
    return {
        schedule: {
            argument.arg: literal(default)
            for argument, default in zip(reversed(arguments.args), reversed(arguments.defaults), strict=False)
        }
        for schedule, arguments in _arguments().items()
    }


@cache
def schedule_types() -> dict[str, dict[str, frozenset[str]]]:
    """Types of each key's value by schedule, as its annotation or else its default names them."""
    types: dict[str, dict[str, frozenset[str]]] = {}
    for schedule, arguments in _arguments().items():
        defaults = schedule_defaults()[schedule]
        types[schedule] = {
            argument.arg: Field(argument.arg, _annotation(argument, defaults.get(argument.arg))).types
            for argument in arguments.args
            if argument.arg not in _GIVEN_BY_TRAINER
        }
    return types


def _annotation(argument: ast.arg, default: object) -> str:
    return ast.unparse(argument.annotation) if argument.annotation else type(default).__name__


@cache
def schedule_choices() -> dict[str, dict[str, tuple[str, ...]]]:
    """Legal values by schedule and key, for each key that the source compares with a list."""
    choices: dict[str, dict[str, tuple[str, ...]]] = {}
    for schedule, taker in _takers().items():
        choices[schedule] = {}
        for node in ast.walk(taker):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn) and isinstance(node.left, ast.Name):
                values = literal(node.comparators[0]) or ()
                if isinstance(values, (list, tuple, set)) and values:
                    choices[schedule][node.left.id] = tuple(sorted(map(str, values)))
    return choices


@cache
def schedules_without_warmup() -> frozenset[str]:
    """The schedules whose function takes no warm-up: get_scheduler drops it silently."""
    return frozenset(
        schedule
        for schedule, function in _functions().items()
        if "num_warmup_steps" not in [argument.arg for argument in function.args.args]
    )


@cache
def _functions() -> dict[str, ast.FunctionDef]:
    """The function that makes each schedule."""
    tree = parse_file("transformers", _FILE)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    pairs = values_by_member(tree, "TYPE_TO_SCHEDULER_FUNCTION", "trainer_utils.py", "SchedulerType")
    return {schedule: functions[name] for schedule, name in pairs}


@cache
def _takers() -> dict[str, ast.AST]:
    """What reads each schedule's keys: its function, or the class that is handed all of them."""
    return {
        schedule: _class_called(function) if function.args.kwarg else function
        for schedule, function in _functions().items()
    }


def _class_called(function: ast.FunctionDef) -> ast.ClassDef:
    (call,) = (node.value for node in function.body if isinstance(node, ast.Return))
    assert isinstance(call, ast.Call)
    name = ast.unparse(call.func)
    own = parse_file("transformers", _FILE)
    if any(isinstance(node, ast.ClassDef) and node.name == name for node in own.body):
        return find_class(own, name)
    return find_class(parse_file("torch", "optim/lr_scheduler.py"), name)


def _arguments() -> dict[str, ast.arguments]:
    found = {}
    for schedule, taker in _takers().items():
        if isinstance(taker, ast.ClassDef):
            taker = find_function(taker, "__init__")
        assert isinstance(taker, ast.FunctionDef)
        found[schedule] = taker.args
    return found
