"""Where a file assigns text to a secret's name: in Python, and in YAML, of which JSON is a part."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

Span = tuple[int, int]


def assigned(text: str, is_python: bool, is_secret: Callable[[str], object]) -> list[Span]:
    """Where each text begins and ends that is a value of such a name, without its quotes.

    Empty if the file cannot be read as what it is.
    """
    import yaml

    try:
        spans = _in_python(text, is_secret) if is_python else _in_yaml(text, is_secret)
        return sorted({_unquoted(text, start, end) for start, end in spans})
    except (SyntaxError, yaml.YAMLError, ValueError, RecursionError, MemoryError):
        return []


def _unquoted(text: str, start: int, end: int) -> Span:
    """Without the prefix and the quotes of a text, and the blank lines that end a block."""
    value = text[start:end].rstrip()
    quote = next((quote for quote in ('"""', "'''", '"', "'") if value.endswith(quote)), "")
    opening = value.find(quote) + len(quote) if value.count(quote) > 1 and quote else 0
    return start + opening, start + len(value) - len(quote) * bool(opening)


def _values(items: Sequence[Any]) -> Sequence[Any]:
    """Of a pair the first: the second is the reason of a recipe's setting."""
    return items[:1] if len(items) == 2 else items


def _in_yaml(text: str, is_secret: Callable[[str], object]) -> Iterator[Span]:
    import yaml

    # The loader in C ends the process if brackets are nested deeply.
    nodes, seen = [(False, yaml.compose(text, yaml.SafeLoader))], set()
    while nodes:
        secret, node = nodes.pop()
        if node is None or (secret, id(node)) in seen:  # an alias is the node itself
            continue
        seen.add((secret, id(node)))
        if isinstance(node, yaml.MappingNode):
            nodes += [(secret or bool(is_secret(str(key.value))), value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += [(secret, value) for value in (_values(node.value) if secret else node.value)]
        elif secret and node.tag == "tag:yaml.org,2002:str":
            yield node.start_mark.index, node.end_mark.index


# --- Python ---------------------------------------------------------------------------------------


def _in_python(text: str, is_secret: Callable[[str], object]) -> Iterator[Span]:
    # Columns count bytes. A byte that continues a character adds none.
    raw = text.encode()
    lines = [0, *accumulate(len(line) + 1 for line in raw.split(b"\n"))]
    characters = [0, *accumulate(byte & 0xC0 != 0x80 for byte in raw)]
    for name, value in _assignments(ast.parse(text)):
        if is_secret(name):
            for node in _texts(value):
                start = lines[node.lineno - 1] + node.col_offset
                end = lines[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
                yield characters[start], characters[end]


def _assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets, value):
                for target in targets:
                    yield from _to(target, value)
            case ast.AnnAssign(target, _, ast.expr() as value) | ast.AugAssign(target, _, value):
                yield from _to(target, value)
            case ast.NamedExpr(target, value):
                yield from _to(target, value)
            case ast.keyword(str() as name, value):
                yield name, value
            case ast.Dict(keys, values):
                yield from zip(map(_name, keys), values, strict=True)
            case ast.Call(_, arguments):  # setdefault("NAME", "...")
                pairs = pairwise(arguments)
                yield from ((_name(before), value) for before, value in pairs if isinstance(before, ast.Constant))


def _to(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
        for one, its in zip(target.elts, value.elts, strict=False):
            yield from _to(one, its)
    else:
        yield _name(target), value


def _name(target: ast.expr | None) -> str:
    """Of a variable, an attribute, or the key in brackets."""
    match target:
        case ast.Name(name) | ast.Attribute(_, name) | ast.Constant(str() as name):
            return name
        case ast.Subscript(_, key):
            return _name(key)
    return ""


def _texts(value: ast.expr | None) -> Iterator[ast.expr]:
    """The texts of an expression. What a call is given is a variable's name, or a file's."""
    match value:
        case ast.Constant(str() | bytes() as text) if text:
            yield value
        case ast.JoinedStr(parts) if any(isinstance(part, ast.Constant) for part in parts):
            yield value
        case ast.Tuple(items) | ast.List(items):
            yield from (text for item in _values(items) for text in _texts(item))
        case ast.Dict(_, values) | ast.BoolOp(_, values):
            yield from (text for item in values for text in _texts(item))
        case ast.BinOp(left, _, right) | ast.IfExp(_, left, right):
            yield from (*_texts(left), *_texts(right))
