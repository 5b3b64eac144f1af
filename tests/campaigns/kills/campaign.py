"""One chain after another: start, kill, start again, and at the end compare."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.output.checkpoints import newest_valid
from tests.campaigns.damage.judge import DIFFERENT, MANUAL, STARTED_OVER, TRACEBACK, Verdict, resumed_from
from tests.campaigns.kills.draw import Chain, Counts
from tests.campaigns.legality.tried import Outcome
from tests.campaigns.moment import COUNT, HIT, Moment
from tests.campaigns.runs import ENGINES, OUTPUT, STEPS, Final, bound_of, final, in_new_folder, start

HANGS = "hangs"
RECORD = "wrong record"
UNSAVED = "no checkpoint of the last step"


class Lost(Exception):
    """What went wrong in a chain: the kind, one of those above, and the reason."""


@dataclass
class Result:
    """`kills` are the moments that came, by their phase. `left` are files that no whole run has."""

    chain: Chain
    kills: Counter[str] = field(default_factory=Counter)
    lost: Verdict | None = None
    output: str = ""
    left: tuple[str, ...] = ()


def prepare(scratch: Path, engine: str) -> tuple[str, Counts]:
    """Train without a kill. Returns the events of each rank."""
    folder = scratch / engine
    in_new_folder(ENGINES[engine], folder, scratch)
    outcome = start(ENGINES[engine], COUNT)
    if outcome.code != 0:
        raise RuntimeError(f"{engine} does not train:\n{outcome.output}")
    (folder / "final").write_bytes(pickle.dumps(final(folder / OUTPUT)))
    return engine, [json.loads(file.read_text()) for file in sorted(folder.glob("events-*.json"))]


def run(scratch: Path, chain: Chain) -> Result:
    """Start, kill and start again. If the run is lost, find the shortest chain that loses it."""
    result = _attempt(scratch, chain)
    if result.lost is None:
        return result
    for moment in chain.moments:
        fewer = tuple(other for other in result.chain.moments if other is not moment)
        again = _attempt(scratch, replace(chain, moments=fewer))
        if again.lost is not None and again.lost.kind == result.lost.kind:
            result.chain, result.lost, result.output = again.chain, again.lost, again.output
    return result


def _attempt(scratch: Path, chain: Chain) -> Result:
    folder = scratch / f"worker-{os.getpid()}"
    in_new_folder(ENGINES[chain.engine], folder, scratch)
    result = Result(chain)
    expected: Final = pickle.loads((scratch / chain.engine / "final").read_bytes())
    try:
        for moment in (*chain.moments, None):
            if not _killed(result, moment, expected):
                break
        _require_same(expected, bound_of(chain.engine))
        _require_last_checkpoint()
        whole = _names(scratch / chain.engine / OUTPUT)
        result.left = tuple(sorted(_names(Path(OUTPUT)) - whole))
    except Lost as lost:
        result.lost = Verdict(*lost.args)
    return result


def _killed(result: Result, moment: Moment | None, expected: Final) -> bool:
    """Start the run once. False if it was finished."""
    Path(HIT).unlink(missing_ok=True)
    steps = sorted(int(path.name.partition("-")[2]) for path in Path(OUTPUT).glob("checkpoint-*"))
    before = _status()
    outcome = start(ENGINES[result.chain.engine], moment.as_json() if moment else None)
    result.output += f"--- {moment or 'not killed'}\n{outcome.output}"
    hit = moment is not None and Path(HIT).exists()
    if hit:
        assert moment is not None
        result.kills[moment.phase] += 1
    if outcome.traceback:
        raise Lost(TRACEBACK, outcome.last_words())
    if outcome.code is None:
        raise Lost(HANGS, outcome.last_words())
    _require_resumed(outcome, steps, before)
    _require_true_record(expected, bound_of(result.chain.engine))
    if hit:
        return True
    if outcome.code != 0:
        raise Lost(MANUAL, f"exit code {outcome.code} without a kill: {outcome.last_words()}")
    return False


def _require_resumed(outcome: Outcome, steps: list[int], before: str) -> None:
    """A kill costs at most the newest checkpoint."""
    step = resumed_from(outcome.output)
    trained = "step " in outcome.output and "learning_rate" in outcome.output
    if before != "finished" and trained and len(steps) > 1 and (step or 0) < steps[-2]:
        raise Lost(STARTED_OVER, f"at step {step or 0}, with checkpoints of the steps {steps}")


def _require_true_record(expected: Final, bound: float) -> None:
    """It can be read at any moment, and says `finished` of nothing else than the whole model."""
    status = _status()
    if status == "finished":
        _require_same(expected, bound)
    elif status not in ("", "running", "failed"):
        raise Lost(RECORD, f"run.json says {status} after SIGKILL")


def _status() -> str:
    """What run.json says. Empty if there is none yet."""
    file = Path(OUTPUT, "run.json")
    if not file.exists():
        return ""
    try:
        return json.loads(file.read_text(encoding="utf-8"))["status"]
    except (ValueError, KeyError) as error:
        raise Lost(RECORD, f"run.json cannot be read: {error}") from None


def _require_same(expected: Final, bound: float) -> None:
    try:
        difference = final(Path(OUTPUT)).differs(expected, bound)
    except (OSError, ValueError, KeyError) as error:
        raise Lost(DIFFERENT, f"no finished run: {type(error).__name__}: {error}") from None
    if difference:
        raise Lost(DIFFERENT, difference)


def _require_last_checkpoint() -> None:
    """A longer run goes on from there."""
    newest, damaged = newest_valid(OUTPUT)
    if newest is None or newest.step != STEPS:
        faults = [fault for checkpoint in damaged for fault in checkpoint.faults]
        raise Lost(UNSAVED, f"the last is {newest and newest.path.name}; damaged: {', '.join(faults) or 'none'}")


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
