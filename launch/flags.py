"""Parts of the flags of all commands: both spellings, whole numbers, dataclasses as flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from recipes.flags import MOST_PROCESSES

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # what add_subparsers returns


def spellings(name: str) -> list[str]:
    """`--num_processes` and `--num-processes` are one flag, as in Hugging Face's own parser."""
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def count(text: str) -> int:
    """A whole number of at least 1, and at most a million."""
    if not text.isdecimal() or text.strip("0") == "":
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at least 1")
    if len(text) > 9 or int(text) > MOST_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is more than {MOST_PROCESSES:,}")
    return int(text)


def whole(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number")
    return int(text)


def add_fields(parser: argparse.ArgumentParser, flags: type) -> None:
    """A flag for each field of a dataclass, whose metadata holds the help text.

    A flag that is not given is absent from what is parsed: a site's defaults can stand there.
    """
    for field in dataclasses.fields(flags):
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": field.metadata["help"]}
        if isinstance(field.default, bool):
            options["action"] = "store_true"
        elif isinstance(field.default, tuple):
            options["nargs"] = "+"
        else:
            options["type"] = value_type(field)
        if "choices" in field.metadata:
            options["choices"] = field.metadata["choices"]
        parser.add_argument(*spellings(field.name), **options)


def value_type(field: dataclasses.Field[Any]) -> Callable[[str], Any]:
    """The reader of a field's text. It raises `ArgumentTypeError` for a text it cannot read."""
    return field.metadata.get("type") or (count if "int" in str(field.type) else str)


def given(flags: type, options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a dataclass that the command line names, with their values."""
    names = [field.name for field in dataclasses.fields(flags)]
    return {name: getattr(options, name) for name in names if hasattr(options, name)}
