"""One drawn run after another: judged, tried, compared, and what disagrees made small."""

from __future__ import annotations

import os
import re
import shutil
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.campaigns.legality.case import Case, write
from tests.campaigns.legality.compare import Disagreement, compare
from tests.campaigns.legality.draw import draw
from tests.campaigns.legality.draw_cards import draw_card
from tests.campaigns.legality.draw_own import draw_own
from tests.campaigns.legality.draw_parallel import draw_parallel
from tests.campaigns.legality.draw_sharded import draw_sharded
from tests.campaigns.legality.judge import Judgement, judge_deep
from tests.campaigns.legality.shrink import shrink
from tests.campaigns.legality.tried import SECONDS, Outcome, tried

# What is drawn, by the word after --kind.
DRAWS = {"plain": draw, "cards": draw_card, "sharded": draw_sharded, "parallel": draw_parallel, "own": draw_own}


@dataclass
class Result:
    """What became of one drawn run. `reduced` are the rules that were tried on their own.

    `ended` says how a legal run ended that was not trained to the end.
    """

    number: int
    legal: bool
    finished: bool
    case: Case
    disagreement: Disagreement | None = None
    reduced: list[str] = field(default_factory=list)
    ended: str = ""


class Campaign:
    """Runs cases in folders below `folder`. What it has seen it does not try again."""

    def __init__(self, seed: str, folder: Path, material: Path, kind: str = "plain") -> None:
        self.seed, self.folder, self.material = seed, folder, material
        self.draw = DRAWS[kind]
        self.tried_rules: set[tuple[str, str]] = set()
        self.shrunk: set[str] = set()

    def run(self, number: int) -> Iterator[Result]:
        """Draw a run and try it; if it is refused, also the smallest run that each rule refuses."""
        case = self.draw(Random(f"{self.seed}-{number}"))
        result = self.attempt(number, case)
        yield result
        if result.legal or result.disagreement:
            return
        for rule in self._judge(case).errors:
            small = shrink(case, lambda other, rule=rule: rule in self._judge(other).errors)
            key = (rule, re.sub(r"\d+", "0", small.as_json()))
            if key not in self.tried_rules:
                self.tried_rules.add(key)
                again = self.attempt(number, small)
                again.reduced = [rule]
                yield again

    def attempt(self, number: int, case: Case) -> Result:
        """Judge and try a case, and if both disagree, find the smallest that does."""
        judgement, outcome, found = self.once(case)
        result = Result(number, judgement.legal, outcome.finished, case, found)
        if found is None:
            result.ended = outcome.last_words() if judgement.legal and not outcome.finished else ""
            return result
        if found.signature not in self.shrunk:
            self.shrunk.add(found.signature)
            result.case = shrink(case, lambda other: self._still(other, found))
            result.disagreement = self.once(result.case)[2] or found
        return result

    def _still(self, case: Case, found: Disagreement) -> bool:
        again = self.once(case)[2]
        return again is not None and again.kind == found.kind

    def once(self, case: Case) -> tuple[Judgement, Outcome, Disagreement | None]:
        """What check says of a case, what becomes of it, and whether the two disagree."""
        folder = self._folder_of(case)
        try:
            judgement = judge_deep(case)
        except Exception:
            said = traceback.format_exc().strip().splitlines()[-1]
            return Judgement(), Outcome(1, traceback.format_exc()), Disagreement("check itself fails", said)
        outcome = tried(case, folder, checked=judgement.legal)
        if outcome.code is None:  # perhaps the machine is busy
            outcome = tried(case, self._folder_of(case), checked=judgement.legal, seconds=3 * SECONDS)
        return judgement, outcome, compare(case, judgement, outcome)

    def _judge(self, case: Case) -> Judgement:
        self._folder_of(case)
        try:
            return judge_deep(case)
        except Exception:
            return Judgement()

    def _folder_of(self, case: Case) -> Path:
        """A new folder with the case's files, which becomes the current one."""
        folder = self.folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        write(case, folder, self.material)
        os.chdir(folder)
        return folder
