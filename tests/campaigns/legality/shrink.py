"""Makes a case as small as it gets while something remains true of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.campaigns.legality.case import FILES, Case


def shrink(case: Case, remains: Callable[[Case], bool]) -> Case:
    """The case with one thing after another dropped, as long as `remains` of it is true."""
    while smaller := next((other for other in _smaller(case) if remains(other)), None):
        case = smaller
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """The case with one thing dropped or made simpler; each is nearer to the plain run."""
    for where in (*FILES, "variable"):  # all of a file at once
        if other := case.of(where):
            yield case.without(other)
    if case.of("flag"):
        yield case.without(case.of("flag"))
    if len(case.changes) > 3:  # half of them at once
        middle = len(case.changes) // 2
        yield case.without(case.changes[:middle])
        yield case.without(case.changes[middle:])
    for change in case.changes:
        yield case.without([change])
    plain = Case()
    if case.machine and case.launcher == "accelerate" and case.processes:
        name, _, count = case.machine.partition(":")
        if count != "1":
            fewer = int(count) // 2 if count == "2" else 2
            yield replace(case, machine=f"{name}:{fewer}", processes=fewer)
    elif case.launcher != plain.launcher and not case.of("yaml"):
        yield replace(case, launcher=plain.launcher, processes=None, yaml="")
    if case.launcher == "accelerate" and not case.of("yaml") and case.processes:
        yield replace(case, launcher="torchrun", yaml="")
    if case.yaml and not case.of("yaml"):
        yield replace(case, yaml="")
    if case.yaml not in ("", "standard.yaml"):
        yield replace(case, yaml="standard.yaml")
    if case.processes == 2 and not case.machine:
        yield replace(case, processes=1)
    if case.model != plain.model:
        yield replace(case, model=plain.model, data=plain.data if "demonstration" in case.data else case.data)
    if case.data != plain.data and case.model != "demonstration":
        yield replace(case, data=plain.data)
    for change in case.of("config"):
        if isinstance(change.value, (str, int, float, bool)):
            written = [str(change.value).lower() if isinstance(change.value, bool) else str(change.value)]
            yield replace(
                case,
                changes=tuple(
                    replace(other, where="flag", value=written) if other is change else other for other in case.changes
                ),
            )
