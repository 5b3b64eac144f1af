"""Damage to what a stopped run resumes from, and to what it reads besides."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.campaigns.legality.tried import Outcome
from tests.campaigns.resuming.trainings import (
    BEST,
    BEST_STEP,
    ENGINES,
    NEWEST,
    OUTPUT,
    difference,
    in_new_folder,
    resumed_from,
    start,
    stopped,
)

PAGE = 4096
CHECKPOINT, WHOLE, TWO = "file of a checkpoint", "whole checkpoint", "two files"
INPUTS = {
    "model": "models/gpt2/model.safetensors",
    "tokenizer": "models/gpt2/tokenizer.json",
    "configuration": "models/gpt2/config.json",
    "data": "data/texts.jsonl",
    "run.json": f"{OUTPUT}/run.json",
}
# From the best to the worst. A run is lost if it is one of LOST.
MENDED, TOLD, REFUSED = "same training", "told, another training", "refused"
LOST = UNNAMED, STARTED_OVER, TRACEBACK, HANGS, DIFFERENT = (
    "mended, but no damaged file is named",
    "started over",
    "traceback",
    "hangs",
    "silently different",
)


@dataclass(frozen=True)
class Fault:
    """`where` is the damaged place, `kind` one of KINDS, `number` draws the file and its bytes."""

    engine: str
    where: str
    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.engine}:{self.where}:{self.kind}:{self.number}"


def from_text(text: str) -> Fault:
    engine, where, kind, number = text.split(":")
    return Fault(engine, where, kind, int(number))


def draw(random: Random, engines: list[str], count: int) -> list[Fault]:
    """So many faults, and more if it takes more to draw each kind and each place once."""
    slots = [(CHECKPOINT, kind) for kind in KINDS] + [(WHOLE, REPLACED)]
    places = [TWO, *INPUTS]
    while places or len(slots) < count:
        where = places.pop() if places else random.choice((CHECKPOINT, CHECKPOINT, TWO, *INPUTS))
        both_runs_read_it = where in INPUTS and where != "run.json"
        slots.append((where, random.choice([kind for kind in KINDS if kind != REPLACED or not both_runs_read_it])))
    engines = random.sample(engines, len(engines))
    return [Fault(engines[n % len(engines)], *slot, random.randrange(10**6)) for n, slot in enumerate(slots)]


# --- Doing it -------------------------------------------------------------------------------------


def _page_zeroed(content: bytes, other: bytes, random: Random) -> bytes:
    starts = [at for at in range(0, len(content), PAGE) if any(content[at : at + PAGE])]
    start = random.choice(starts or [0])
    page = content[start : start + PAGE]
    return content[:start] + bytes(len(page)) + content[start + len(page) :]


def _bit_flipped(content: bytes, other: bytes, random: Random) -> bytes:
    place = random.randrange(max(1, len(content)))
    flipped = bytes(byte ^ 1 << random.randrange(8) for byte in content[place : place + 1])
    return content[:place] + flipped + content[place + 1 :]


REPLACED = "replaced by another run's"
KINDS: dict[str, Callable[[bytes, bytes, Random], bytes | None]] = {
    "truncated": lambda content, other, random: content[: random.randrange(max(1, len(content)))],
    "emptied": lambda content, other, random: b"",
    "half zeroed": lambda content, other, random: content[: len(content) // 2] + bytes(-(-len(content) // 2)),
    "one page zeroed": _page_zeroed,
    "one bit flipped": _bit_flipped,
    "removed": lambda content, other, random: None,
    REPLACED: lambda content, other, random: other,
}


def do(kind: str, file: Path, other: Path, random: Random) -> bool:
    """Damage a file or a folder; `other` is that of another run. False if nothing changed."""
    if file.is_dir():
        shutil.rmtree(file)
        shutil.copytree(other, file)
        return True
    content = file.read_bytes()
    damaged = KINDS[kind](content, other.read_bytes() if other.is_file() else content, random)
    if damaged is None:
        file.unlink()
    else:
        file.write_bytes(damaged)
    return damaged != content


def files_of(fault: Fault, random: Random) -> list[Path]:
    """What the fault damages, in the current folder."""
    if fault.where in INPUTS:
        return [Path(INPUTS[fault.where])]
    folders = [Path(OUTPUT, NEWEST), *([Path(OUTPUT, BEST_STEP)] if fault.engine.endswith(BEST) else [])]
    folder = random.choice(folders)
    if fault.where == WHOLE:
        return [folder]
    return random.sample(sorted(file for file in folder.rglob("*") if file.is_file()), 2 if fault.where == TWO else 1)


# --- Trying and judging ---------------------------------------------------------------------------


@dataclass
class Result:
    trial: Fault
    kind: str
    lost: str
    output: str

    @property
    def hits(self) -> list[str]:
        return [self.kind]


def tried(scratch: Path, fault: Fault) -> Result:
    """The same command again, after a copy of a stopped run was damaged."""
    in_new_folder(ENGINES[fault.engine], scratch / f"worker-{os.getpid()}", scratch, stopped(scratch, fault.engine))
    random = Random(str(fault))
    files: list[Path] = []
    other = stopped(scratch, fault.engine, other=True).parent
    while not [file for file in files if do(fault.kind, file, other / file, random)]:
        files = files_of(fault, random)  # another run's file may be the same
    outcome = start(ENGINES[fault.engine])
    kind, why = judge(outcome, fault, files, lambda: difference(scratch, fault.engine))
    return Result(fault, kind, f"{kind}: {files}: {why}" if kind in LOST else "", outcome.output)


def judge(outcome: Outcome, fault: Fault, files: list[Path], differs: Callable[[], str]) -> tuple[str, str]:
    """One of the kinds above, and the reason. Damage to a checkpoint must be mended; what the run
    reads besides may also be refused, or change the training if the run tells so.
    """
    named, is_input = any(is_named(file, outcome.output) for file in files), fault.where in INPUTS
    if outcome.traceback:
        return TRACEBACK, outcome.last_words()
    if outcome.code is None:
        return HANGS, outcome.last_words()
    if outcome.code != 0:
        refused = is_input and outcome.mistake
        return REFUSED if refused else TRACEBACK, f"exit code {outcome.code}: {outcome.last_words()}"
    if not is_input and resumed_from(outcome.output) is None:
        return STARTED_OVER, outcome.last_words()
    if why := differs():
        is_best = files[0].is_relative_to(Path(OUTPUT, BEST_STEP))  # then another best model has to do
        return TOLD if named and (is_input or is_best) else DIFFERENT, why
    return MENDED if named or is_input else UNNAMED, ""


def is_named(file: Path, output: str) -> bool:
    """True if the run names the file, or says that its checkpoint is damaged where it cannot know
    which file is: a manifest of another run cannot be told from damage to all else.
    """
    said = "".join(output.split())  # a name may be broken over two lines
    checkpoint = re.search(r"checkpoint-\d+", str(file))
    is_manifest = file.is_dir() or file.name.endswith("manifest.json") or not file.parts
    return file.name in said if not (checkpoint and is_manifest) else f"{checkpoint[0]}isdamaged" in said
