"""What became of a run that was started again after its newest checkpoint was damaged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.legality.tried import Outcome
from tests.campaigns.runs import OUTPUT, Final, final

# From the best to the worst. A run is lost if it ended as one of LOST.
UNCHANGED = "undamaged"  # the fault changed no byte
MENDED = "mended"
SAID = "another best model, and said so"
UNNAMED = "mended, but the file is not named"
STARTED_OVER = "started over"
MANUAL = "manual action needed"
TRACEBACK = "traceback"
DIFFERENT = "silently different"
LOST = (UNNAMED, STARTED_OVER, MANUAL, TRACEBACK, DIFFERENT)


@dataclass(frozen=True)
class Verdict:
    kind: str
    why: str = ""


def judge(outcome: Outcome, file: str, references: dict[int, Final]) -> Verdict:
    """`references` are undamaged runs by the step that they went on from, in the same way."""
    if outcome.traceback:
        return Verdict(TRACEBACK, outcome.last_words())
    if outcome.code != 0:
        return Verdict(MANUAL, f"exit code {outcome.code}: {outcome.last_words()}")
    step = resumed_from(outcome.output)
    if step is None:
        return Verdict(STARTED_OVER, " ".join(line for line in outcome.output.splitlines() if "damaged" in line))
    try:
        difference = final(Path(OUTPUT)).differs(references[step])
    except (OSError, ValueError, KeyError) as error:
        return Verdict(DIFFERENT, f"no finished run: {type(error).__name__}: {error}")
    if difference:
        return Verdict(DIFFERENT, f"resumed from step {step}, {difference}")
    return Verdict(MENDED if is_named(file, outcome.output) else UNNAMED, f"resumed from step {step}")


def is_named(file: str, output: str) -> bool:
    """Whether the run names a file of a checkpoint that was damaged.

    A manifest of another run cannot be told from damage to all else: then the checkpoint is enough.
    """
    said, checkpoint = "".join(output.split()), file.partition("/")[0]  # a name may be broken over two lines
    return Path(file).name in said or (file.endswith("manifest.json") and f"{checkpoint}isdamaged" in said)


def resumed_from(output: str) -> int | None:
    found = re.search(r"resum\w*\s+from\s+\S*?checkpoint-(\d+)", output)
    return int(found.group(1)) if found else None
