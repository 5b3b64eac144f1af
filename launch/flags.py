"""What the flags of all commands share: both spellings, whole numbers, dataclasses as flags."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, TypeAlias, TypeVar

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # what add_subparsers returns
Flags = TypeVar("Flags")


def spellings(name: str) -> list[str]:
    """`--num_processes` and `--num-processes` are one flag, as in Hugging Face's own parser."""
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def whole(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def add_fields(parser: argparse.ArgumentParser, flags: type) -> None:
    """A flag for each field of a dataclass, whose metadata holds the help text."""
    for field in dataclasses.fields(flags):
        options: dict[str, Any] = {"default": field.default, "help": field.metadata["help"]}
        if isinstance(field.default, bool):
            options["action"] = "store_true"
        elif isinstance(field.default, tuple):
            options["nargs"] = "+"
        else:
            options["type"] = count if "int" in str(field.type) else str
        if "choices" in field.metadata:
            options["choices"] = field.metadata["choices"]
        parser.add_argument(*spellings(field.name), **options)


def from_fields(flags: type[Flags], options: argparse.Namespace) -> Flags:
    """The dataclass with the values that were parsed."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(flags)}  # type: ignore[arg-type]
    return flags(**values)
