"""The checks of `recipes doctor` that look at this machine alone, and those of its software.

None imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from launch.doctor import gpus, host
from launch.doctor.check import Check, Request
from launch.host.own_packages import NAMES, other_owners
from recipes.legal.schema import version


def examine(request: Request) -> Iterator[Check]:
    """Run the checks in the order they are printed.

    One that cannot read what it needs is an error of its own, and the others go on.
    """
    for one in (python, versions, *gpus.CHECKS, *host.CHECKS):
        try:
            result = one(request)
        except OSError as error:
            name = getattr(one, "__name__", "check").replace("_", " ")
            result = Check("error", name, f"cannot be read: {error}", "run it as a user who may read it")
        if result:
            yield result


def python(request: Request) -> Check:
    installed = ".".join(map(str, sys.version_info[:3]))
    wanted = _supported()[0]
    if outside(installed, wanted):
        fix = f"use an environment with Python {wanted}"
        return Check("error", "Python", f"{installed}, supported is {wanted}", fix)
    return Check("ok", "Python", installed)


def versions(request: Request) -> Check:
    """The libraries' versions, compared with the ranges that this package supports."""
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in _supported()[1]]
    wanted = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    if not wanted:
        return Check("warning", "versions", "the supported versions are unknown here", "pip install this package")
    installed = {one.name: version(one.name) for one in wanted}
    wrong = {one: outside(installed[one.name], str(one.specifier)) for one in wanted}
    if any(wrong.values()):
        outsiders = [one for one in wanted if wrong[one]]
        what = ", ".join(
            f"{one.name} {installed[one.name] or 'missing'} (supported: {one.specifier})" for one in outsiders
        )
        status = "warning" if all(how in ("", "newer") for how in wrong.values()) else "error"
        install = " ".join(f"'{one.name}{one.specifier}'" for one in outsiders)
        return Check(status, "versions", what, f"pip install {install}")
    for name in NAMES:
        if others := other_owners(name):  # it works here: ours came last, or is imported first
            what = f"{' and '.join(others)} has a package {name} too, and takes that name if it is installed again"
            return Check("warning", "versions", what, "an environment of its own for one of them")
    return Check(
        "ok", "versions", ", ".join(f"{name} {installed[name]}" for name in ("torch", "transformers", "accelerate"))
    )


@cache
def _supported() -> tuple[str, list[str]]:
    """Supported Python and requirements: of the installed package, else of the checkout."""
    from importlib import metadata

    try:
        declared = metadata.metadata("accelerate-recipes")
        return declared["Requires-Python"], metadata.requires("accelerate-recipes") or []
    except metadata.PackageNotFoundError:
        pass
    import tomllib

    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    project = tomllib.loads(file.read_text())["project"] if file.exists() else {}
    return project.get("requires-python", ""), project.get("dependencies", [])


def outside(installed: str | None, wanted: str) -> str:
    """How a version is outside a range: "missing", "newer", "older", or "" if it is inside."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    if installed is None:
        return "missing"
    release = Version(Version(installed).base_version)  # vendors ship 2.12.0a0+x, which sorts before 2.12
    violated = [one for one in SpecifierSet(wanted) if not one.contains(release, prereleases=True)]
    if not violated:
        return ""
    return "newer" if all(one.operator.startswith("<") for one in violated) else "older"
