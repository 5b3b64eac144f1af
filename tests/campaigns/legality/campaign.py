"""One drawn run after another: judged, tried, compared, and what disagrees made small."""

from __future__ import annotations

import os
import re
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

from tests.campaigns.legality.case import FILES, Case, write
from tests.campaigns.legality.compare import Comparison, Disagreement, compare
from tests.campaigns.legality.draw import draw
from tests.campaigns.legality.judge import Judgement, judge_deep
from tests.campaigns.legality.material import write_material
from tests.campaigns.legality.tried import SECONDS, Outcome, tried

_reduced: set[tuple[str, str]] = set()  # the rules that this process has tried on their own, and how
_shrunk: set[str] = set()  # the disagreements that it has made small


@dataclass
class Result:
    """What became of a run. `rule` is that which refuses it if it was reduced to one."""

    number: int
    case: Case
    judgement: Judgement
    outcome: Outcome
    comparison: Comparison = field(default_factory=Comparison)
    rule: str = ""

    @property
    def disagreement(self) -> Disagreement | None:
        return self.comparison.disagreement


def run(scratch: Path, seed: str, number: int) -> list[Result]:
    """Draw a run and try it; if it is refused, also the smallest run that each rule refuses."""
    case = draw(Random(f"{seed}-{number}"))
    first = attempt(scratch, number, case)
    results = [first]
    for rule in {} if first.disagreement else first.judgement.errors:
        small = shrink(case, lambda other, rule=rule: rule in _judged(scratch, other).errors)
        key = (rule, re.sub(r"\d+", "0", small.as_json()))
        if key not in _reduced:
            _reduced.add(key)
            results.append(attempt(scratch, number, small, rule))
    return results


def attempt(scratch: Path, number: int, case: Case, rule: str = "") -> Result:
    """Judge and try a case, and if both disagree, find the smallest that does.

    With a `rule` only its refusal counts, whatever else explains the run.
    """
    result = once(scratch, number, case, rule)
    found = result.disagreement
    if found and found.signature not in _shrunk:
        _shrunk.add(found.signature)
        small = shrink(case, lambda other: _kind(once(scratch, number, other, rule)) == found.kind)
        return once(scratch, number, small, rule)
    return result


def _kind(result: Result) -> str:
    return result.disagreement.kind if result.disagreement else ""


def once(scratch: Path, number: int, case: Case, rule: str = "") -> Result:
    """What check says of a case, what becomes of it, and whether the two disagree."""
    folder = _folder_of(scratch, case)
    try:
        judgement = judge_deep(case)
    except Exception:
        said = Disagreement("check itself fails", traceback.format_exc().strip().splitlines()[-1])
        return Result(number, case, Judgement(), Outcome(1, traceback.format_exc()), Comparison(said))
    outcome = tried(case, folder, checked=judgement.legal)
    if outcome.code is None:  # perhaps the machine is busy
        outcome = tried(case, _folder_of(scratch, case), checked=judgement.legal, seconds=3 * SECONDS)
    rules = [rule] if rule in judgement.errors else list(judgement.errors)
    comparison = compare(judgement, outcome, case, rules, partial(_twin, scratch))
    return Result(number, case, judgement, outcome, comparison, rule)


def _twin(scratch: Path, case: Case, rule: str) -> Outcome | None:
    """What becomes of a similar case, None if the rule refuses that one too."""
    judgement = _judged(scratch, case)
    return None if rule in judgement.errors else tried(case, Path.cwd(), checked=judgement.legal)


def _judged(scratch: Path, case: Case) -> Judgement:
    _folder_of(scratch, case)
    try:
        return judge_deep(case)
    except Exception:
        return Judgement()


def _folder_of(scratch: Path, case: Case) -> Path:
    """A new folder with the case's files, which becomes the current one."""
    own = scratch / f"worker-{os.getpid()}"
    folder = own / "case"
    shutil.rmtree(folder, ignore_errors=True)
    write(case, folder, write_material(own / "material"))
    os.chdir(folder)
    return folder


# --- Making it small ------------------------------------------------------------------------------


def shrink(case: Case, remains: Callable[[Case], bool]) -> Case:
    """The case with one thing after another dropped, as long as `remains` of it is true."""
    while smaller := next((other for other in _smaller(case) if remains(other)), None):
        case = smaller
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """The case with one thing dropped or made plain."""
    for where in (*FILES, "variable", "flag"):  # all of a file at once
        if other := case.of(where):
            yield case.without(other)
    if len(case.changes) > 3:  # half of them at once
        middle = len(case.changes) // 2
        yield case.without(case.changes[:middle])
        yield case.without(case.changes[middle:])
    for change in case.changes:
        yield case.without([change])
    plain = Case()
    if not case.of("yaml"):
        if case.launcher != plain.launcher:
            yield replace(case, launcher=plain.launcher, processes=None, yaml="")
        if case.yaml not in ("", "standard.yaml"):
            yield replace(case, yaml="standard.yaml")
    if case.processes == 2:
        yield replace(case, processes=1)
    if (case.model, case.data) != (plain.model, plain.data):
        yield replace(case, model=plain.model, data=plain.data)
