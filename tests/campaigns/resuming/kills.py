"""Chains of SIGKILLs: a training is killed once in each start, and then started once more."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from launch.output.checkpoints import inspect
from tests.campaigns.resuming.moment import BACKGROUND, HIT, MAIN, Moment
from tests.campaigns.resuming.trainings import ENGINES, LAST, OUTPUT, Events, difference, in_new_folder, resumed_from
from tests.campaigns.resuming.trainings import start as started

_MOST_KILLS = 4


@dataclass(frozen=True)
class Chain:
    engine: str
    moments: tuple[Moment, ...]

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def from_json(text: str) -> Chain:
    content = json.loads(text)
    return Chain(content["engine"], tuple(Moment(**moment) for moment in content["moments"]))


def draw(random: Random, events: dict[str, Events]) -> Chain:
    """`events` are those of an undisturbed run of each engine that may be drawn.

    The first kill is as often in one phase as in another: mostly a training steps, and mostly it
    breaks elsewhere.
    """
    engine = random.choice(sorted(events))
    kills = random.randint(1, _MOST_KILLS)
    return Chain(engine, tuple(_moment(random, events[engine], first=number == 0) for number in range(kills)))


def _moment(random: Random, events: Events, first: bool) -> Moment:
    rank = random.randrange(len(events))
    alone = len(events) > 1 and random.random() < 0.25
    delay = round(random.uniform(0, random.choice((0.0, 0.0, 0.003, 0.03, 0.1))), 4)
    thread = BACKGROUND if events[rank][BACKGROUND] and random.random() < 0.15 else MAIN
    phases = events[rank][thread]
    if not first:  # a start that resumes has fewer events, and its first ones load a checkpoint
        return Moment(random.randint(1, max(1, len(phases) // 2)), delay, rank, alone, thread)
    phase = random.choice(sorted(set(phases)))
    number = random.choice([number for number, other in enumerate(phases, 1) if other == phase])
    return Moment(number, delay, rank, alone, thread)


@dataclass
class Result:
    """`hits` are the phases of the kills that came, `lost` says what is wrong with the end."""

    trial: Chain
    hits: list[str]
    lost: str
    output: str


def tried(scratch: Path, chain: Chain) -> Result:
    """Start, kill and start again, and at the end compare."""
    in_new_folder(ENGINES[chain.engine], scratch / f"worker-{os.getpid()}", scratch)
    result = Result(chain, [], "", "")
    for moment in (*chain.moments, None):
        result.lost, finished = _once(result, moment, scratch)
        if result.lost or finished:
            break
    last = inspect(Path(OUTPUT, LAST))
    if not result.lost and not last.valid:
        result.lost = f"the last checkpoint: {', '.join(last.faults)}"
    return result


def _once(result: Result, moment: Moment | None, scratch: Path) -> tuple[str, bool]:
    """Start the run once. Returns what is wrong afterwards, and whether the run was finished."""
    Path(HIT).unlink(missing_ok=True)
    steps = sorted(int(path.name.partition("-")[2]) for path in Path(OUTPUT).glob("checkpoint-*"))
    before = _status()
    outcome = started(ENGINES[result.trial.engine], moment.as_json() if moment else None)
    result.output += f"--- {moment or 'not killed'}\n{outcome.output}"
    hit = Path(HIT).exists()
    if hit:
        result.hits.append(Path(HIT).read_text())
    status, step = _status(), resumed_from(outcome.output) or 0
    if outcome.traceback:
        return f"traceback: {outcome.last_words()}", False
    if outcome.code is None:
        return f"hangs: {outcome.last_words()}", False
    if before != "finished" and "learning_rate" in outcome.output and len(steps) > 1 and step < steps[-2]:
        return f"a kill costs one checkpoint at most: at step {step}, with checkpoints of {steps}", False
    if status not in ("", "running", "failed", "finished"):
        return f"run.json says {status} after SIGKILL", False
    if not hit and outcome.code != 0:
        return f"exit code {outcome.code} without a kill: {outcome.last_words()}", False
    if not hit or status == "finished":  # it says that of nothing else than the whole model
        return difference(scratch, result.trial.engine), not hit
    return "", False


def _status() -> str:
    """The status in run.json, which can be read at any moment. Empty if there is none yet."""
    file = Path(OUTPUT, "run.json")
    try:
        return json.loads(file.read_text(encoding="utf-8"))["status"] if file.exists() else ""
    except (ValueError, KeyError) as error:
        return f"nothing that can be read ({error})"
