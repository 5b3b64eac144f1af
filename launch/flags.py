"""The parser of every command, types for numbers, and flags made from a dataclass."""

import argparse
import contextlib
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias


class Parser(argparse.ArgumentParser):
    """A parser that accepts `--num-processes` for `--num_processes`, as Hugging Face's parser does.
    Flags cannot be abbreviated, because a flag of train.py could be taken for an abbreviation.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.flags: list[str] = []  # the names of all flags, such as num_processes
        super().__init__(*args, **{**options, "allow_abbrev": False})

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        dashed = [name.replace("_", "-") for name in names if name.startswith("--")]
        self.flags += [name[2:] for name in names if name.startswith("--")]
        return super().add_argument(*dict.fromkeys([*names, *dashed]), **options)

    def takes(self, run: Callable[..., int], table: str, **defaults: Any) -> None:
        """Add an argument for each line of `table`. `run(options, rest)` carries out the command.

        Two spaces separate the argument from its help. An argument is `NAME`, `[NAME]` (optional),
        `--flag NAME`, or `--flag` for a switch. N is a whole number from 1; GB, GB/s and SHARE are
        numbers above 0, and SHARE is at most 1.
        """
        for line in table.strip().splitlines():
            usage, _, help_text = line.strip().partition("  ")
            name, _, metavar = usage.strip("[]").partition(" ")
            options: dict[str, Any] = {"help": help_text.strip()}
            if name.startswith("-") and not metavar:
                options["action"] = "store_true"
            else:
                options |= {"metavar": metavar or name, "type": _KINDS.get(metavar, str)}
            if usage.startswith("["):
                options["nargs"] = "?"
            self.add_argument(name if name.startswith("-") else name.lower(), **options)
        self.set_defaults(run=run, parser=self, **defaults)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # what add_subparsers returns


def whole(text: str, least: int = 0) -> int:
    """Read a whole number of at least `least`."""
    if not text.isdecimal() or len(text) > 18 or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at least {least}")
    return int(text)


count = partial(whole, least=1)


def amount(text: str, most: float = math.inf) -> float:
    """Read a number above 0, and at most `most`."""
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) <= most and math.isfinite(number):
            return number
    limit = "" if math.isinf(most) else f" and at most {most:g}"
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0{limit}")


_KINDS: dict[str, Callable[[str], Any]] = {
    "N": count, "GB": amount, "GB/s": amount, "SHARE": partial(amount, most=1),
}  # fmt: skip


def add_fields(parser: argparse.ArgumentParser, flags: type) -> None:
    """Add a flag for each field of a dataclass. The field's metadata holds the help text.

    The parsed options hold only the flags that the user gave, so that defaults can fill the rest.
    """
    for field in dataclasses.fields(flags):
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": field.metadata["help"]}
        if isinstance(field.default, bool):
            options["action"] = "store_true"
        elif isinstance(field.default, tuple):
            options["nargs"] = "+"
        else:
            options["type"] = field.metadata.get("type") or (count if "int" in str(field.type) else str)
        if "choices" in field.metadata:
            options["choices"] = field.metadata["choices"]
        parser.add_argument(f"--{field.name}", **options)


def given(flags: type, options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a dataclass that the command line sets, with their values."""
    names = [field.name for field in dataclasses.fields(flags)]
    return {name: getattr(options, name) for name in names if hasattr(options, name)}
