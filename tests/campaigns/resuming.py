"""Kill trainings and damage their files, and give the same command again.

    python -m tests.campaigns.resuming kills --seed S --count N [--engine E ...] [--workers K]
    python -m tests.campaigns.resuming damage --seed S --count N [--engine E ...] [--workers K]

kills: chains of one to four SIGKILLs, at the whole run or at one rank of it, until N have hit.
damage: N faults, each kind of them and each place at least once: in files of the newest checkpoint,
in the whole of it, in two files, in the model that the run started from, its tokenizer and
configuration, in the data and in run.json.

The finished run must be the one that nobody touched: final weights, losses, and the last
checkpoint's optimizer, schedule and random states, bit by bit, with DeepSpeed to 1e-4. Damage is
named; to what is no checkpoint the answer may also be a refusal, or that something changed. Each
run that is lost is printed, and `--only` tries it alone. The same seed draws the same. Returns 1 if
a run was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from launch.output.checkpoints import inspect
from tests.campaigns.runs import MOMENT, Case, Change, Outcome, results, scratch_folder, tried, write, write_material

# --- A moment, so that the same seed kills in the same place --------------------------------------
#
# A rank counts its events: Trainer's and torch's own functions as they begin and end, and every
# file below the output folder that Python opens, renames or removes. At the drawn event, or some
# milliseconds later, it kills itself and all others, or only itself.

COUNT = "count"  # in place of a moment: only count the events
HIT = "hit"  # the file that names the phase in which the moment came
MAIN, BACKGROUND = "main", "background"  # a save goes on in another thread

# Function -> its phase; "" if its begin and end are only two events.
_OF_TRAINER = {
    "_inner_training_loop": "training",
    "_finalize_training": "end",
    "_save_checkpoint": "save",
    "_load_from_checkpoint": "loading",
    "_load_best_model": "best model",
    "evaluation_loop": "evaluation",
    "prediction_step": "",
    "training_step": "step",
}
_OF_MODULES = {("transformers.trainer", "rotate_checkpoints"): "rotation", ("torch", "save"): "", ("os", "fsync"): ""}
_FILES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "shutil.rmtree"}
_REMOVALS = {"os.remove", "os.rmdir"}


@dataclass(frozen=True)
class Moment:
    """`delay` seconds after the event with this `number` (from 1) of a thread, as `rank` counts.

    `alone`: only that rank is struck. Otherwise all processes of the run, the launcher among them.
    """

    number: int
    delay: float = 0.0
    rank: int = 0
    alone: bool = False
    thread: str = MAIN
    signal: int = int(signal.SIGKILL)


class Watch:
    """Keeps the phase of each event of this rank, by its thread, and acts at the moment."""

    def __init__(self, moment: Moment | None, folder: str) -> None:
        self.moment, self.folder = moment, os.path.abspath(folder)  # noqa: PTH100
        self.phases = ["start"]
        self.events: dict[str, list[str]] = {MAIN: [], BACKGROUND: []}

    def event(self) -> None:
        thread = MAIN if threading.current_thread() is threading.main_thread() else BACKGROUND
        phase, moment = self.phases[-1] if thread == MAIN else BACKGROUND, self.moment
        self.events[thread].append(phase)
        if moment and (thread, len(self.events[thread])) == (moment.thread, moment.number):
            if moment.delay:
                threading.Timer(moment.delay, self.act, [phase]).start()
            else:
                self.act(phase)

    def act(self, phase: str) -> None:
        assert self.moment is not None
        handle = os.open(HIT, os.O_CREAT | os.O_WRONLY)
        os.write(handle, phase.encode())
        if self.moment.alone or self.moment.signal != signal.SIGKILL:
            os.kill(os.getpid(), self.moment.signal)
        else:
            os.killpg(os.getpgid(0), signal.SIGKILL)

    def audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name not in _FILES or not isinstance(arguments[0], str | os.PathLike):
            return
        path = str(arguments[0])  # of a folder that is removed whole, each file without the way to it
        if os.path.abspath(path).startswith(self.folder) or (name in _REMOVALS and "/" not in path):  # noqa: PTH100
            self.event()

    def within(self, phase: str, function: Callable) -> Callable:
        @wraps(function)
        def inside(*args, **kwargs):
            named = f"step {args[0].state.global_step + 1}" if phase == "step" else phase
            self.phases.append(named or self.phases[-1])
            self.event()
            try:
                return function(*args, **kwargs)
            finally:
                self.event()
                self.phases.pop()
                if phase == "training":
                    self.phases[0] = "end"

        return inside


@contextlib.contextmanager
def watched(folder: str) -> Iterator[None]:
    """Watch this rank, which writes to `folder`, for the moment that its environment names.

    What it has counted goes to events-RANK.json in the current folder.
    """
    asked, rank = os.environ[MOMENT], int(os.environ.get("RANK", 0))
    moment = None if asked == COUNT else eval(asked)
    watch = Watch(moment if moment and moment.rank == rank else None, folder)
    from launch.training.trainer import RecipeTrainer

    for name, phase in _OF_TRAINER.items():
        setattr(RecipeTrainer, name, watch.within(phase, getattr(RecipeTrainer, name)))
    for (module, name), phase in _OF_MODULES.items():
        holder = importlib.import_module(module)
        setattr(holder, name, watch.within(phase, getattr(holder, name)))
    sys.addaudithook(watch.audit)
    watch.event()
    try:
        yield
    finally:
        Path(f"events-{rank}.json").write_text(json.dumps(watch.events), encoding="utf-8")


# --- The trainings: one for each engine, seconds long ---------------------------------------------

OUTPUT = "out"
STEPS = 6
STOPPED_IN = STEPS - 1  # the step that is saved when the run is told to stop
LAST, NEWEST, BEST_STEP = f"checkpoint-{STEPS}", f"checkpoint-{STOPPED_IN}", "checkpoint-2"
PATIENCE = 300.0  # seconds; a start takes two to ten, and only a hang takes as long

# The learning rate is high, so that whatever trains differently ends far away. GPT-2 has dropout:
# random states matter.
_TRAINING = {
    "dataset_train_split": "train[:64]",
    "dataset_test_split": "train[64:]",
    "max_steps": str(STEPS),
    "global_batch_size": "8",
    "learning_rate": "5e-3",
    "logging_steps": "1",
    "save_strategy": "steps",
    "save_steps": "2",
    "eval_strategy": "steps",
    "eval_steps": "2",
    "dataloader_num_workers": "0",
}


def _engine(recipe: str, lifted: bool = False, **flags: str) -> Case:
    case = Case("accelerate", 2, f"{recipe}.yaml", model="gpt2", lifted=lifted)
    return case.with_flags(recipe=recipe, **_TRAINING, **flags)


ENGINES = {
    "single": Case("python", model="gpt2").with_flags(recipe="standard", **_TRAINING),
    "ddp": _engine("standard"),
    "lora": _engine("standard", use_peft="true", lora_dropout="0.1"),
    "zero2": _engine("memory", bf16="false"),  # in fp32 the bound below is a sharp one
    "zero3": _engine("memory_zero3", bf16="false"),
    "sharded": _engine("sharded", lifted=True),
}
# The same, but they end with the best model. Called the best is the first, which is not the last.
BEST = "-best"
_BEST = {"load_best_model_at_end": "true", "metric_for_best_model": "eval_loss", "greater_is_better": "true"}
_OF_BEST = {f"{name}{BEST}": case.with_flags(**_BEST) for name, case in ENGINES.items()}
_STREAM = {"dataset_streaming": "true", "dataset_train_split": "train", "eval_strategy": "no"}
_STREAM |= {"dataloader_num_workers": "2"}
ENGINES |= {f"{name}-stream": ENGINES[name].with_flags(**_STREAM) for name in ("single", "ddp")}
# Parts of other formats, of which the smaller ones end in the first window.
_PARTS = [{"name": f"data/{name}.jsonl", "weight": weight} for name, weight in (("texts", 3), ("chats", 2), ("few", 1))]
_MIXTURE = Change("config", "dataset_name", _PARTS)
ENGINES |= {
    f"{name}-mixture": replace(ENGINES[name], changes=(*ENGINES[name].changes, _MIXTURE))
    for name in ("single-stream", "ddp-stream")
}
PLAIN = list(ENGINES)
ENGINES |= _OF_BEST

Left = dict[str, Any]  # what a run leaves: each tensor and number by its file and its place in it
Events = list[dict[str, list[str]]]  # of each rank: the phases of the events of its threads


def bound_of(engine: str) -> float:
    """How far a resumed run may end from one that nobody stopped: 0 if each bit must be the same.

    DeepSpeed's CPU Adam rounds beta powers differently after a resume.
    """
    return 1e-4 if engine.startswith("zero") else 0.0


def in_new_folder(case: Case, folder: Path, scratch: Path, earlier: Path | None = None) -> None:
    """Go to a new folder with copies of what the case reads, and of the output `earlier`."""
    shutil.rmtree(folder, ignore_errors=True)
    material = write_material(scratch / f"material-{os.getpid()}")
    write(case, folder, material)
    os.chdir(folder)
    for name in ("models/gpt2", "data"):
        Path(name.partition("/")[0]).unlink()
        shutil.copytree(material / name, name)
    if earlier is not None:
        shutil.copytree(earlier, OUTPUT, symlinks=True)


def start(case: Case, moment: str | None = None) -> Outcome:
    """Run the case in the current folder until it ends, or until its moment comes."""
    if moment is not None:
        case = replace(case, changes=(*case.changes, Change("variable", MOMENT, moment)))
    return tried(case, checked=True, seconds=PATIENCE)


def prepare(scratch: Path, engine: str) -> tuple[str, Events]:
    """Train an engine without a kill. Returns its events; `difference` knows what it leaves."""
    folder = scratch / engine
    in_new_folder(ENGINES[engine], folder, scratch)
    outcome = start(ENGINES[engine], COUNT)
    if outcome.code != 0:
        raise RuntimeError(f"{engine} does not train:\n{outcome.output}")
    (folder / "left").write_bytes(pickle.dumps(left()))
    return engine, [json.loads(file.read_text()) for file in sorted(folder.glob("events-*.json"))]


def prepare_stopped(scratch: Path, engine: str) -> None:
    """As `prepare`, and two runs that were told to stop in step STOPPED_IN, which they save: the
    second has another seed. Their folders are `stopped` ones.
    """
    _, events = prepare(scratch, engine)
    first = events[0]["main"].index(f"step {STOPPED_IN}") + 1
    for other, seed in ((False, "42"), (True, "7")):
        case = ENGINES[engine].with_flags(seed=seed)
        in_new_folder(case, stopped(scratch, engine, other).parent, scratch)
        outcome = start(case, repr(Moment(first, signal=int(signal.SIGTERM))))
        if outcome.record.get("status") != "preempted":
            raise RuntimeError(f"{engine} was not stopped:\n{outcome.output}")


def stopped(scratch: Path, engine: str, other: bool = False) -> Path:
    return scratch / f"{engine}-stopped{'-other' * other}" / OUTPUT


def resumed_from(output: str) -> int | None:
    found = re.search(r"resum\w*\s+from\s+\S*?checkpoint-(\d+)", output)
    return int(found.group(1)) if found else None


# --- What a run leaves ----------------------------------------------------------------------------


def difference(scratch: Path, engine: str) -> str:
    """Where the run in the current folder differs from the one that nobody touched, in one line:
    in the final model's weights, in what was logged, and in the last checkpoint's weights,
    optimizer, schedule and random states. Empty if in nothing.
    """
    expected, bound = pickle.loads((scratch / engine / "left").read_bytes()), bound_of(engine)
    try:
        found = left()
    except Exception as error:  # a damaged file may hold anything
        return f"no finished run: {type(error).__name__}: {error}"
    if found.keys() != expected.keys():
        return f"left only by one of both: {sorted(found.keys() ^ expected.keys())[:5]}"
    for name, value in found.items():
        if not _is_same(value, expected[name], bound):
            return f"{name} is {value} instead of {expected[name]}"
    return ""


def _is_same(one: Any, other: Any, bound: float) -> bool:
    try:
        numbers, others = np.asarray(one, np.float64), np.asarray(other, np.float64)
    except (TypeError, ValueError):
        return one == other
    if numbers.shape != others.shape:
        return False
    largest = np.nanmax(np.abs(others), initial=0)  # an optimizer's second moments are far below 1
    return np.allclose(numbers, others, rtol=0, atol=bound * min(1, largest), equal_nan=True)  # inf is equal to itself


def left() -> Left:
    """Raises OSError, ValueError or KeyError if the current folder holds no finished run."""
    output, found = Path(OUTPUT), {}
    record = json.loads((output / "run.json").read_text(encoding="utf-8"))
    _flatten(_comparable(record["log_history"]), "log", found)
    for file in [*sorted(output.glob("*.safetensors")), *sorted((output / LAST).rglob("*"))]:
        _flatten(_content(file), str(file.relative_to(output)), found)
    if not any("safetensors" in name for name in found):
        raise FileNotFoundError("no model.safetensors")
    return found


def _content(file: Path) -> Any:
    """The tensors and numbers of a file; None of one that holds none, or others in each run."""
    import torch
    from safetensors.numpy import load_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    if file.suffix == ".safetensors":
        return load_file(file)
    if file.suffix in (".pt", ".pth"):
        return torch.load(file, map_location="cpu", weights_only=False)
    if file.name == ".metadata":  # FSDP's shards of one state
        whole = Path("whole.pt")
        dcp_to_torch_save(file.parent, whole)
        return torch.load(whole, weights_only=False)
    return None


def _flatten(value: Any, name: str, found: Left) -> None:
    """The leaves of nested containers."""
    if isinstance(value, dict):
        for key, below in value.items():
            _flatten(below, f"{name}.{key}", found)
    elif isinstance(value, list | tuple) and not all(isinstance(one, int | float) for one in value):
        for number, below in enumerate(value):
            _flatten(below, f"{name}.{number}", found)
    elif hasattr(value, "detach"):
        found[name] = value.detach().double().numpy()
    elif isinstance(value, int | float | str | list | tuple | np.ndarray):  # not DeepSpeed's own objects
        found[name] = value


def _comparable(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without durations, Trainer's mean over this start's own steps, and a second evaluation of the
    last step: a start that finds nothing to train evaluates the final model once more.
    """
    left_out = ("runtime", "per_second", "total_flos", "train_loss")
    found: list[dict[str, Any]] = []
    for entry in log:
        kept = {name: value for name, value in entry.items() if not any(word in name for word in left_out)}
        again = "eval_loss" in kept and any("eval_loss" in old and old["step"] == kept["step"] for old in found)
        if not again:
            found.append(kept)
    return found


# --- Chains of kills: one in each start, and a last start without ---------------------------------

_MOST_KILLS = 4


@dataclass(frozen=True)
class Chain:
    engine: str
    moments: tuple[Moment, ...]


def draw_kills(random: Random, events: dict[str, Events]) -> Chain:
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
    """`hits` are the phases of the kills that came, or the kind of answer to a fault; `lost` says
    what is wrong with the end.
    """

    trial: Chain | Fault
    hits: list[str]
    lost: str = ""
    output: str = ""


def killed(scratch: Path, chain: Chain) -> Result:
    """Start, kill and start again, and at the end compare."""
    in_new_folder(ENGINES[chain.engine], scratch / f"worker-{os.getpid()}", scratch)
    result = Result(chain, [])
    for moment in (*chain.moments, None):
        result.lost, finished = _once(result, chain.engine, moment, scratch)
        if result.lost or finished:
            break
    last = inspect(Path(OUTPUT, LAST))
    if not result.lost and last.faults:
        result.lost = f"the last checkpoint: {', '.join(last.faults)}"
    return result


def _once(result: Result, engine: str, moment: Moment | None, scratch: Path) -> tuple[str, bool]:
    """Start the run once. Returns what is wrong afterwards, and whether the run was finished."""
    Path(HIT).unlink(missing_ok=True)
    steps = sorted(int(path.name.partition("-")[2]) for path in Path(OUTPUT).glob("checkpoint-*"))
    before = _status()
    outcome = start(ENGINES[engine], repr(moment) if moment else None)
    result.output += f"--- {moment or 'not killed'}\n{outcome.output}"
    hit = Path(HIT).exists()
    if hit:
        result.hits.append(Path(HIT).read_text())
    status, step = _status(), resumed_from(outcome.output) or 0
    if outcome.traceback:
        return f"traceback: {outcome.last_words()}", False
    if outcome.code is None:
        return f"hangs: {outcome.last_words()}", False
    if before != "finished" and "  learning_rate " in outcome.output and len(steps) > 1 and step < steps[-2]:
        return f"a kill costs one checkpoint at most: at step {step}, with checkpoints of {steps}", False
    if status not in ("", "running", "failed", "finished"):
        return f"run.json says {status} after SIGKILL", False
    if not hit and outcome.code != 0:
        return f"exit code {outcome.code} without a kill: {outcome.last_words()}", False
    if not hit or status == "finished":  # it says that of nothing else than the whole model
        return difference(scratch, engine), not hit
    return "", False


def _status() -> str:
    """The status in run.json, which can be read at any moment. Empty if there is none yet."""
    file = Path(OUTPUT, "run.json")
    try:
        return json.loads(file.read_text(encoding="utf-8"))["status"] if file.exists() else ""
    except (ValueError, KeyError) as error:
        return f"nothing that can be read ({error})"


# --- Damage to what a stopped run resumes from, and to what it reads besides ----------------------

PAGE = 4096
CHECKPOINT, WHOLE, TWO, RECORD = "file of a checkpoint", "whole checkpoint", "two files", "run.json"
INPUTS = {
    "model": "models/gpt2/model.safetensors",
    "tokenizer": "models/gpt2/tokenizer.json",
    "configuration": "models/gpt2/config.json",
    "data": "data/texts.jsonl",
    RECORD: f"{OUTPUT}/run.json",
}
# Answers, from the best to the worst. A run is lost if it is one of LOST.
MENDED, TOLD, REFUSED = "same training", "told, another training", "refused"
UNNAMED, STARTED_OVER = "mended, but no damaged file is named", "started over"
TRACEBACK, HANGS, DIFFERENT = "traceback", "hangs", "silently different"
LOST = UNNAMED, STARTED_OVER, TRACEBACK, HANGS, DIFFERENT


@dataclass(frozen=True)
class Fault:
    """`where` is the damaged place, `kind` one of KINDS, `number` draws the file and its bytes."""

    engine: str
    where: str
    kind: str
    number: int


def draw_damage(random: Random, engines: list[str], count: int) -> list[Fault]:
    """So many faults, and more if it takes more to draw each kind and each place once."""
    slots = [(CHECKPOINT, kind) for kind in KINDS] + [(WHOLE, REPLACED)]
    places = [TWO, *INPUTS]
    while places or len(slots) < count:
        where = places.pop() if places else random.choice((CHECKPOINT, CHECKPOINT, TWO, *INPUTS))
        both_runs_read_it = where in INPUTS and where != RECORD
        slots.append((where, random.choice([kind for kind in KINDS if kind != REPLACED or not both_runs_read_it])))
    engines = random.sample(engines, len(engines))
    return [Fault(engines[n % len(engines)], *slot, random.randrange(10**6)) for n, slot in enumerate(slots)]


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
    """The files that the fault damages, in the current folder."""
    if fault.where in INPUTS:
        return [Path(INPUTS[fault.where])]
    folders = [Path(OUTPUT, NEWEST), *([Path(OUTPUT, BEST_STEP)] if fault.engine.endswith(BEST) else [])]
    folder = random.choice(folders)
    if fault.where == WHOLE:
        return [folder]
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [random.choice(files), *([random.choice([*files, Path(INPUTS[RECORD])])] if fault.where == TWO else [])]


def damaged(scratch: Path, fault: Fault) -> Result:
    """The same command again, after a copy of a stopped run was damaged."""
    in_new_folder(ENGINES[fault.engine], scratch / f"worker-{os.getpid()}", scratch, stopped(scratch, fault.engine))
    random = Random(str(fault))
    files: list[Path] = []
    other = stopped(scratch, fault.engine, other=True).parent
    while not [file for file in files if do(fault.kind, file, other / file, random)]:
        files = files_of(fault, random)  # another run's file may be the same
    outcome = start(ENGINES[fault.engine])
    kind, why = judge(outcome, fault, files, lambda: difference(scratch, fault.engine))
    return Result(fault, [kind], f"{kind}: {files}: {why}" if kind in LOST else "", outcome.output)


def judge(outcome: Outcome, fault: Fault, files: list[Path], differs: Callable[[], str]) -> tuple[str, str]:
    """One of the answers above, and the reason. Damage to a checkpoint or to run.json must be
    mended, but with another run's run.json no checkpoint is the run's own. What the run reads
    besides may also be refused, or change the training if the run tells so.
    """
    is_foreign = fault.kind == REPLACED and Path(INPUTS[RECORD]) in files
    named, is_input = any(is_named(file, outcome.output) for file in files), fault.where in INPUTS
    setting = "dataset_name" if fault.where == "data" else "model_name_or_path"
    if outcome.traceback:
        return TRACEBACK, outcome.last_words()
    if outcome.code is None:
        return HANGS, outcome.last_words()
    if outcome.code != 0:
        about_it = named or re.search(rf"^error .*\b{setting}\b", outcome.output, re.M)
        refused = is_input and fault.where != RECORD and outcome.mistake and about_it
        return REFUSED if refused else TRACEBACK, f"exit code {outcome.code}: {outcome.last_words()}"
    if fault.where in (CHECKPOINT, WHOLE, TWO, RECORD) and not is_foreign and resumed_from(outcome.output) is None:
        return STARTED_OVER, outcome.last_words()
    if why := differs():
        is_best = files[0].is_relative_to(Path(OUTPUT, BEST_STEP))  # then another best model has to do
        subject = "data" if fault.where == "data" else "model|tokenizer|configuration"
        noted = is_input and re.search(rf"^note .*({subject}).*(changed|differ|damaged)", outcome.output, re.M)
        return TOLD if noted or (named and is_best) else DIFFERENT, why
    return MENDED if named or is_input else UNNAMED, ""


def is_named(file: Path, output: str) -> bool:
    """True if the run names the file, or says that its checkpoint cannot be used where the run
    cannot know the file: a manifest of another run cannot be told from damage to all else.
    """
    said = "".join(output.split())  # a name may be broken over two lines
    checkpoint = re.search(r"checkpoint-\d+", str(file))
    is_manifest = file.is_dir() or file.name.endswith("manifest.json") or not file.parts
    unusable = "(cannotbeused|,isnotloaded|hasnomanifest)"
    pattern = f"{checkpoint[0]}{unusable}" if checkpoint and is_manifest else re.escape(file.name)
    return bool(re.search(pattern, said))


# --- All of them ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.resuming")
    parser.add_argument("what", choices=("kills", "damage"))
    parser.add_argument("--seed", default="0", help="any word; the same word draws the same [0]")
    parser.add_argument("--count", type=int, default=30, help="how many kills that hit, or faults [30]")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, metavar="E", default=PLAIN, help=", ".join(ENGINES))
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="runs at a time")
    parser.add_argument("--only", metavar="TRIAL", help="try what is printed of a lost run, and print its output")
    options = parser.parse_args()
    started, hits, lost = time.monotonic(), Counter[str](), list[bool]()
    with scratch_folder() as scratch:
        for result in (_kills if options.what == "kills" else _damage)(options, scratch):
            hits.update("a step" if hit.startswith("step ") else hit for hit in result.hits)
            lost.append(bool(result.lost))
            if result.lost:
                print(f"{result.lost}\n    --only {shlex.quote(repr(result.trial))}", flush=True)
            if options.only:
                print(result.output)
    print(", ".join(f"{number} {hit}" for hit, number in hits.most_common()))
    took = time.monotonic() - started
    print(f"{options.what}: {hits.total()} in {len(lost)} runs: {sum(lost)} lost ({took:.0f} s, seed {options.seed})")
    few = options.what == "kills" and not options.only and hits.total() < options.count
    return int(any(lost) or few)


def _kills(options: argparse.Namespace, scratch: Path) -> Iterator[Result]:
    only = [eval(options.only)] if options.only else []
    engines = [chain.engine for chain in only] or options.engine
    events = dict(results(partial(prepare, scratch), engines, options.workers))
    missing, number = options.count, itertools.count()
    while missing > 0:  # a chain may end before its last kill
        chains = only or [draw_kills(Random(f"{options.seed}-{next(number)}"), events) for _ in range(-(-missing // 2))]
        hits = 0
        for result in results(partial(killed, scratch), chains, options.workers):
            hits += len(result.hits)
            yield result
        missing = 0 if only or not hits else missing - hits  # without a hit, something else is wrong


def _damage(options: argparse.Namespace, scratch: Path) -> Iterator[Result]:
    faults = draw_damage(Random(options.seed), options.engine, options.count)
    faults = [eval(options.only)] if options.only else faults
    engines = sorted({fault.engine for fault in faults})
    list(results(partial(prepare_stopped, scratch), engines, options.workers))
    yield from results(partial(damaged, scratch), faults, options.workers)


if __name__ == "__main__":
    sys.exit(main())
