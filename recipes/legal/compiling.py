"""What `torch.compile` takes, read from torch's source."""

from __future__ import annotations

import ast
from functools import cache

from recipes.legal.source import assigned, has_file, literal, package_folder, parse_file, strings

_REGISTER = ("register_backend", "register_debug_backend", "register_experimental_backend")


@cache
def compile_modes() -> tuple[str, ...]:
    """Legal modes of torch's own compiler, inductor. Empty if torch has no list of them.

    Other backends read none.
    """
    file = "_inductor/__init__.py"
    for node in parse_file("torch", file).body if has_file("torch", file) else ():
        options = assigned(node.body, "mode_options") if isinstance(node, ast.FunctionDef) else None
        if isinstance(options, ast.Dict):
            return tuple(str(literal(key)) for key in options.keys)
    return ()


@cache
def compile_backends() -> frozenset[str]:
    """The compilers that torch registers, and those of installed packages that it finds."""
    from importlib import metadata

    folder = package_folder("torch")
    files = (folder / "_dynamo" / "backends").glob("*.py") if folder else ()
    registered = {name for file in files for name in _registered(parse_file("torch", f"_dynamo/backends/{file.name}"))}
    return frozenset(registered | {found.name for found in metadata.entry_points(group="torch_dynamo_backends")})


def _registered(tree: ast.Module) -> set[str]:
    """Backends that a file registers: by a decorator of a function, or by a call with `name=`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            names |= {node.name} if decorators & set(_REGISTER) else set()
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _REGISTER:
            names |= {name for keyword in node.keywords if keyword.arg == "name" for name in strings(keyword.value)}
    return names
