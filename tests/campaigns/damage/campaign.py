"""One fault after another, each done to a copy of a run that was stopped in the middle."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from tests.campaigns.damage import faults
from tests.campaigns.damage.judge import DIFFERENT, SAID, UNCHANGED, Verdict, is_named, judge
from tests.campaigns.moment import Moment
from tests.campaigns.runs import BEST, ENGINES, OUTPUT, STEPS, Final, final, in_new_folder, start, with_flags

STOPPED_IN = STEPS - 1  # the step that is saved when the run is told to stop
NEWEST, BEST_STEP = f"checkpoint-{STOPPED_IN}", "checkpoint-2"
_STOP = Moment(f"step {STOPPED_IN}", 1, signal=int(signal.SIGTERM))


@dataclass(frozen=True)
class Fault:
    """`file` is a path in the output folder: in its newest checkpoint, or in the best model's, or
    one of these itself.
    """

    engine: str
    file: str
    kind: str

    def __str__(self) -> str:
        return f"{self.engine}:{self.file}:{self.kind}"


# --- What the faults are done to ------------------------------------------------------------------


def prepare(scratch: Path, engine: str) -> list[Fault]:
    """Stop a run, and another one with another seed. Returns all faults of the first."""
    for folder, seed in ((scratch / engine, "42"), (_another(scratch, engine), "7")):
        case = with_flags(ENGINES[engine], seed=seed)
        in_new_folder(case, folder, scratch)
        outcome = start(case, _STOP.as_json())
        if outcome.record.get("status") != "preempted":
            raise RuntimeError(f"{engine} was not stopped:\n{outcome.output}")
    output = scratch / engine / OUTPUT
    folders = [output / NEWEST, *([output / BEST_STEP] if engine.endswith(BEST) else [])]
    files = sorted(str(file.relative_to(output)) for folder in folders for file in folder.rglob("*") if file.is_file())
    whole = [Fault(engine, folder.name, faults.REPLACED) for folder in folders]
    return whole + [Fault(engine, file, kind) for file in files for kind in faults.FAULTS]


def _another(scratch: Path, engine: str) -> Path:
    return scratch / f"{engine}-another"


@cache
def _references(scratch: Path, engine: str) -> dict[int, Final]:
    """What the run ends with if it goes on from each of its checkpoints, by their step."""
    found, case, stopped = {}, ENGINES[engine], scratch / engine / OUTPUT
    steps = sorted(int(path.name.partition("-")[2]) for path in stopped.glob("checkpoint-*"))
    for step in steps:
        in_new_folder(case, _own_folder(scratch), scratch, stopped)
        for newer in steps[steps.index(step) + 1 :]:
            shutil.rmtree(Path(OUTPUT, f"checkpoint-{newer}"))
        outcome = start(case)
        if outcome.code != 0:
            raise RuntimeError(f"{engine} does not go on from step {step}:\n{outcome.output}")
        found[step] = final(Path(OUTPUT))
    return found


def _own_folder(scratch: Path) -> Path:
    return scratch / f"worker-{os.getpid()}"


# --- Trying ---------------------------------------------------------------------------------------


def tried(scratch: Path, seed: str, fault: Fault) -> tuple[Fault, Verdict, str]:
    """What becomes of a fault, and everything that the run printed."""
    references, case = _references(scratch, fault.engine), ENGINES[fault.engine]
    in_new_folder(case, _own_folder(scratch), scratch, scratch / fault.engine / OUTPUT)
    other = _another(scratch, fault.engine) / OUTPUT / fault.file
    if not faults.do(fault.kind, Path(OUTPUT, fault.file), other, Random(f"{seed}-{fault}")):
        return fault, Verdict(UNCHANGED), ""
    outcome = start(case)
    verdict = judge(outcome, fault.file, references)
    if verdict.kind == DIFFERENT and fault.file.startswith(BEST_STEP) and is_named(fault.file, outcome.output):
        verdict = Verdict(SAID, verdict.why)  # the best model is gone, and another one has to do
    return fault, verdict, outcome.output
