"""Draw random runs, and compare what `recipes check` says of them with what becomes of them.

    python -m tests.campaigns.legality --runs N --seed S [--workers K]

What check calls legal is trained for two steps; what it refuses is tried without the check. Each
disagreement is printed with the shortest command that shows it. Refusals of runs that train count
as proven if something else trained than was asked; those that two steps cannot prove are printed
too. The same seed draws the same runs, whatever the number of workers. Returns 1 if there was a
disagreement.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from functools import partial
from itertools import chain

from tests.campaigns.legality import campaign
from tests.campaigns.legality.case import described, from_json
from tests.campaigns.pool import results, scratch_folder


def main() -> int:
    options = _parser().parse_args()
    started, counts, seen = time.monotonic(), Counter[str](), set[str]()
    unproven, early = Counter[str](), Counter[str]()
    with scratch_folder() as scratch:
        if options.case:
            return _alone(campaign.once(scratch, 0, from_json(options.case)))
        work = partial(campaign.run, scratch, options.seed)
        for one in chain.from_iterable(results(work, range(options.runs), options.workers)):
            legal, finished = one.judgement.legal, one.outcome.finished
            counts["reduced" if one.rule else "legal" if legal else "refused"] += 1
            counts["trained"] += legal and finished
            counts["proven"] += len(one.comparison.proven)
            unproven.update(f"{rule}: {why}" for rule, why in one.comparison.unproven.items())
            if legal and not finished and not one.disagreement:
                early[re.sub(r"\d+", "0", one.outcome.last_words())[:110]] += 1
            if one.disagreement:
                counts["disagreements"] += 1
                _report(one, seen)
    _print("legal runs that ended early, as check cannot know", early)
    _print("refusals of runs that train, taken at their word", unproven)
    print(
        f"{counts['legal'] + counts['refused']} runs drawn: {counts['legal']} legal, of which {counts['trained']} "
        f"trained to the end; {counts['refused']} refused and tried without the check, and {counts['reduced']} "
        f"reduced to one rule: {counts['proven']} refusals proven, {unproven.total()} unproven; "
        f"{counts['disagreements']} disagreements ({len(seen)} different) "
        f"({time.monotonic() - started:.0f} s, seed {options.seed})"
    )
    return int(bool(seen))


def _alone(result: campaign.Result) -> int:
    print(described(result.case))
    for rule, problems in result.judgement.errors.items():
        print(f"check: {rule}: " + "; ".join(map(str, problems)))
    print(result.outcome.output)
    print(result.comparison.proven, result.comparison.unproven)
    print(result.disagreement.kind if result.disagreement else "check and reality agree")
    return int(result.disagreement is not None)


def _report(result: campaign.Result, seen: set[str]) -> None:
    found = result.disagreement
    if found and found.signature not in seen:
        seen.add(found.signature)
        print(f"\n=== run {result.number}: {found.kind}\n{found.what}\n{described(result.case)}")
        print(f"--case '{result.case.as_json()}'", flush=True)


def _print(title: str, counted: Counter[str]) -> None:
    if counted:
        print(f"{title}:\n" + "\n".join(f"  {count} x {text}" for text, count in counted.most_common()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.legality")
    parser.add_argument("--runs", type=int, default=100, help="how many runs to draw [100]")
    parser.add_argument("--seed", default="0", help="any word; the same word draws the same runs [0]")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="runs at a time")
    parser.add_argument("--case", metavar="JSON", help="try one case, as a disagreement prints it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
