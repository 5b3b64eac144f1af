"""Finds the files that a user names, and reads YAML and JSON."""

import difflib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from recipes.errors import mistake
from recipes.legal.schema import Json, hf_home


def expanded(name: str | Path) -> Path:
    """Expand ~ in a path. An unknown ~user stays as it is, whereas Path.expanduser would raise."""
    return Path(os.path.expanduser(name))  # noqa: PTH111


def existing_path(name: str | None) -> Path | None:
    """The file or folder of this name; None if it does not exist here."""
    path = expanded(name or "")
    return path if name and os.path.exists(path) else None  # noqa: PTH110, Path.exists raises for a long name


def files_in(folder: Path) -> list[Path]:
    """Return the sorted files that `datasets` reads below a folder. A file is left out if its name,
    or the name of a folder on the way to it, starts with . or __.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return [file for file in files if not re.search(r"/(\.|__)", f"/{file.relative_to(folder)}")]


def nearest(name: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar of `names`; empty if none is similar (difflib's ratio, from 0 to 1)."""
    return next(iter(difflib.get_close_matches(str(name), list(names), n=1, cutoff=cutoff)), "")


def shipped(name: str, folder: str = "accelerate_configs") -> Path:
    """The path of a shipped file, such as an Accelerate YAML, in the package or in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / folder / name
    return inside if inside.exists() else package.parent / folder / name


def launch_with(name: str) -> str:
    """Return the command `accelerate launch --config_file ...` with the path of a shipped YAML."""
    path = shipped(name)
    near = path.is_relative_to(Path.cwd())
    return f"accelerate launch --config_file {path.relative_to(Path.cwd()) if near else path}"


def find_yaml(name: str | Path, subject: str = "--accelerate_config", beside: str = "", source: str = "") -> Path:
    """Find an Accelerate YAML by its path, relative to the folder of the file `beside`; else find
    the shipped YAML of that name. Raises `UserError` about `subject` if there is neither.
    """
    path = existing_path(str(Path(beside).parent / expanded(name)))
    if path and not path.is_dir():
        return path
    known, stem = [file.stem for file in sorted(shipped("").glob("*.yaml"))], str(name).removesuffix(".yaml")
    if stem in known:
        return shipped(f"{stem}.yaml")
    fix = nearest(stem, known, 0.7) or f"give the path of an existing file, or one of {', '.join(known)}"
    raise mistake(subject, f"there is no file {name}, and no shipped YAML of that name", fix, source)


def default_accelerate_config() -> Path | None:
    """The file that `accelerate launch` reads without --config_file; None if the user has none."""
    names = ("default_config.yaml", "default_config.json")
    return next((file for name in names if (file := hf_home() / "accelerate" / name).is_file()), None)


# --- YAML and JSON --------------------------------------------------------------------------------


def read_yaml(path: str | Path, subject: str, as_text: bool = False) -> Json:
    """Read a YAML file's mapping, {} if empty. Raises `UserError` about `subject` if that fails.

    With `as_text` every value stays text, because YAML would read `8:00:00` as 28800.
    """
    import yaml  # here, because `recipes list` does not need it

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise mistake(subject, f"{path} cannot be read: {reason}", "give a YAML file that exists, in UTF-8") from None
    try:
        content = yaml.load(text, yaml.BaseLoader if as_text else yaml.SafeLoader) or {}
    except (yaml.YAMLError, ValueError, AttributeError) as error:  # `2026-13-13` is an illegal date
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise mistake(subject, f"{path} is not valid YAML{line}", "write one `name: value` on each line") from None
    if not isinstance(content, dict):
        what = f"{path} holds a {type(content).__name__}, not settings"
        raise mistake(subject, what, "write one `name: value` on each line")
    return content


def read_json(file: str | Path) -> tuple[Json | None, str]:
    """Read a JSON file's object. Return (object, ""), or (None, the fault in the file)."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError:
        return None, f"{file} cannot be read"
    except ValueError as error:
        return None, f"{file} is not valid JSON: {error}"
    return (content, "") if isinstance(content, dict) else (None, f"{file} holds a {type(content).__name__}")
