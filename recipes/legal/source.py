"""Reads the source of installed libraries: fields of dataclasses, enumerations, tables, flags.

Nothing is imported: `importlib.util.find_spec` only looks for a top-level package, and `ast` parses
a file in milliseconds. Importing it would take seconds.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from recipes.errors import mistake


@dataclass(frozen=True)
class Field:
    """One legal setting: its type as the source writes it, its default, any listed values."""

    name: str
    annotation: str
    default: Any = None
    choices: tuple[str, ...] = ()
    help: str = ""

    @property
    def types(self) -> frozenset[str]:
        """Which of bool, int, float, str, list, dict and None the annotation allows."""
        allowed = frozenset(
            re.findall(
                r"\b(?:bool|int|float|str|list|dict|None)\b",
                re.sub(r"\[.*?\]", "", self.annotation).replace("Literal", "str"),
            )
        )
        return allowed or frozenset({"str"})


def version(package: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def package_folder(package: str) -> Path | None:
    """Where a package is installed; None if it is not."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def parse_file(package: str, file: str) -> ast.Module:
    """The syntax tree of a file. Raises `UserError` if the package is not installed."""
    return ast.parse(read_source(package, file))


def has_file(package: str, file: str) -> bool:
    """Whether a package is installed, in a version that has the file."""
    folder = package_folder(package)
    return folder is not None and (folder / file).exists()


def read_source(package: str, file: str) -> str:
    """The text of a file. Raises `UserError` if the package is not installed."""
    folder = package_folder(package)
    if folder is None:
        raise mistake(package, "is not installed, and what is legal is read from its source", f"pip install {package}")
    return (folder / file).read_text(encoding="utf-8")


@cache
def parse_classes(package: str, file: str) -> ast.Module:
    """The classes of a file, each up to its first method: enough for fields, and parsed sooner."""
    source = read_source(package, file)
    blocks = re.findall(r"^class .*\n(?:(?:[ \t].*)?\n)*", source, flags=re.M)
    heads = [re.split(r"^    (?:@|def )", block, maxsplit=1, flags=re.M)[0] + "    pass\n" for block in blocks]
    try:
        return ast.parse("".join(heads))
    except SyntaxError:  # for example, a docstring with text at the left margin
        return parse_file(package, file)


def find_class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def find_function(tree: ast.Module | ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


def enumerations(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Class name -> string values of its members, for every enumeration in the file."""
    enums = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or not any("Enum" in ast.unparse(base) for base in node.bases):
            continue
        values = [item.value for item in node.body if isinstance(item, ast.Assign)]
        enums[node.name] = tuple(v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str))
    return enums


def dataclass_fields(cls: ast.ClassDef, enums: dict[str, tuple[str, ...]] | None = None) -> list[Field]:
    """The annotated fields of a class. A field whose type is in `enums` has these choices."""
    enums = enums or {}
    constants = {  # the last assignment counts, also inside an `if`: an up-to-date installation executes that one
        item.targets[0].id: item.value
        for item in ast.walk(cls)
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
    }
    fields = []
    for item in cls.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        keywords = _keywords(item.value)
        default = keywords.get("default", None if isinstance(item.value, ast.Call) else item.value)
        if isinstance(default, ast.Name):
            default = constants.get(default.id, default)
        metadata = _literal_entries(keywords.get("metadata"))
        annotation = ast.unparse(item.annotation)
        if metadata.get("const") is True and "bool" not in annotation:  # a flag that may stand alone
            annotation += " | bool"
        choices = metadata.get("choices") or next((enums[e] for e in enums if e in annotation), ())
        fields.append(
            Field(item.target.id, annotation, literal(default), tuple(choices), str(metadata.get("help", "")))
        )
    return fields


def _keywords(node: ast.expr | None) -> dict[str, ast.expr]:
    return {k.arg: k.value for k in node.keywords if k.arg} if isinstance(node, ast.Call) else {}


def _literal_entries(node: ast.expr | None) -> dict[str, Any]:
    if not isinstance(node, ast.Dict):
        return {}
    return {literal(k): literal(v) for k, v in zip(node.keys, node.values, strict=True)}


def literal(node: ast.expr | None) -> Any:
    """The value of a literal expression; None for any other."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, SyntaxError):
        return None


def assigned(body: list[ast.stmt], name: str) -> ast.expr | None:
    """The expression that a statement of `body` assigns to `name`; None without one."""
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == name:
                return node.value
    return None


def strings(tree: ast.AST) -> set[str]:
    """Every string constant below a node."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def names_with_prefix(tree: ast.AST, prefix: str) -> set[str]:
    """Attributes and strings below a node that are names and start with `prefix`."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | strings(tree)
    return {name for name in names if name.startswith(prefix) and name.isidentifier()}


def dict_keys(tree: ast.Module, name: str) -> tuple[str, ...]:
    """The keys of the dictionary that the module assigns to `name`."""
    table = assigned(tree.body, name)
    return tuple(str(literal(key)) for key in table.keys) if isinstance(table, ast.Dict) else ()


def values_by_member(tree: ast.Module, table: str, enum_file: str, enum: str) -> list[tuple[str, str]]:
    """A dictionary of `Enumeration.MEMBER: name`, as pairs (value of the member, name)."""
    values = member_values(enum_file, enum)
    node = assigned(tree.body, table)
    assert isinstance(node, ast.Dict)
    return [
        (values[key.attr], value.id)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Attribute) and isinstance(value, ast.Name)
    ]


def member_values(file: str, enum: str) -> dict[str, str]:
    """Member -> value, of an enumeration in transformers."""
    members = find_class(parse_classes("transformers", file), enum).body
    return {ast.unparse(item.targets[0]): literal(item.value) for item in members if isinstance(item, ast.Assign)}


def attributes_read(function: ast.FunctionDef) -> set[str]:
    """The attributes that a function reads from any object."""
    return {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}


def method_calls(tree: ast.Module, method: str) -> list[ast.Call]:
    """Every call `something.method(...)` in a file."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
    ]


def receiver(call: ast.Call) -> str:
    """The name before the dot of a method call; empty if it is an expression."""
    assert isinstance(call.func, ast.Attribute)
    return call.func.value.id if isinstance(call.func.value, ast.Name) else ""


def option_names(call: ast.Call) -> list[str]:
    """The long flags of an `add_argument` call, as argparse stores them: `num_processes`."""
    names = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return [name[2:].replace("-", "_") for name in names if name.startswith("--")]


def argument_field(name: str, call: ast.Call) -> Field:
    """The flag that an `add_argument` call defines, as a field."""
    keywords = _keywords(call)
    help_text = str(literal(keywords.get("help")) or "")
    # Some choices stand only in the help text, as in "(none|cpu|nvme)".
    stated = re.search(r"\((\w+(?:\|\w+)+)\)", help_text)
    choices = literal(keywords.get("choices")) or (stated.group(1).split("|") if stated else ())
    annotation = ast.unparse(keywords["type"]) if "type" in keywords else "str"
    return Field(name, annotation, literal(keywords.get("default")), tuple(choices), help_text)
