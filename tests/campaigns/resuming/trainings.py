"""The trainings that campaigns interrupt and damage: one for each engine, seconds long.

Each is a `Case` of the legality campaign: the real train.py in forks of a process that has imported
everything, behind the real code of `accelerate launch`.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.campaigns.legality.case import Case, Change, write
from tests.campaigns.legality.material import write_material
from tests.campaigns.legality.tried import Outcome, tried
from tests.campaigns.resuming.moment import COUNT, VARIABLE, Moment

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
# Called the best is the first, so that it differs from the last.
_BEST = {"load_best_model_at_end": "true", "metric_for_best_model": "eval_loss", "greater_is_better": "true"}


def _case(launcher: str, recipe: str, lifted: bool = False, **flags: str) -> Case:
    two = {"processes": 2, "yaml": f"{recipe}.yaml"} if launcher == "accelerate" else {}
    two |= {"yaml": "memory_zero3.yaml"} if recipe == "memory_zero3" else {}
    case = Case(launcher, model="gpt2", lifted=lifted, **two)  # type: ignore[arg-type]
    return with_flags(case, recipe=recipe, **_TRAINING, **flags)


def with_flags(case: Case, **flags: str) -> Case:
    """The case with these flags besides, or with another value of theirs."""
    kept = [change for change in case.changes if change.where != "flag" or change.name not in flags]
    return replace(case, changes=(*kept, *(Change("flag", name, [value]) for name, value in flags.items())))


ENGINES = {
    "single": _case("python", "standard"),
    "ddp": _case("accelerate", "standard"),
    "lora": _case("accelerate", "standard", use_peft="true", lora_dropout="0.1"),
    "zero2": _case("accelerate", "memory", bf16="false"),  # in fp32 the bound below is a sharp one
    "zero3": _case("accelerate", "memory_zero3", bf16="false"),
    "sharded": _case("accelerate", "sharded", lifted=True),
}
_STREAM = {"dataset_streaming": "true", "dataset_train_split": "train", "eval_strategy": "no"}
_STREAM |= {"dataloader_num_workers": "2"}
ENGINES |= {f"{name}-stream": with_flags(ENGINES[name], **_STREAM) for name in ("single", "ddp")}
# Parts of other formats, of which the smaller ones end in the first window.
_PARTS = [{"name": f"data/{name}.jsonl", "weight": weight} for name, weight in (("texts", 3), ("chats", 2), ("few", 1))]
_MIXTURE = Change("config", "dataset_name", _PARTS)
ENGINES |= {
    f"{name}-mixture": replace(ENGINES[name], changes=(*ENGINES[name].changes, _MIXTURE))
    for name in ("single-stream", "ddp-stream")
}
BEST = "-best"
PLAIN = list(ENGINES)
# The same, but they end with the best model instead of the last.
ENGINES |= {f"{name}{BEST}": with_flags(ENGINES[name], **_BEST) for name in PLAIN if "stream" not in name}


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
        case = replace(case, changes=(*case.changes, Change("variable", VARIABLE, moment)))
    return tried(case, Path.cwd(), checked=True, seconds=PATIENCE)


def prepare(scratch: Path, engine: str) -> tuple[str, Events]:
    """Train an engine without a kill. Returns its events; `expected` then knows what it leaves."""
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
        case = with_flags(ENGINES[engine], seed=seed)
        in_new_folder(case, stopped(scratch, engine, other).parent, scratch)
        outcome = start(case, Moment(first, signal=int(signal.SIGTERM)).as_json())
        if outcome.record.get("status") != "preempted":
            raise RuntimeError(f"{engine} was not stopped:\n{outcome.output}")


def stopped(scratch: Path, engine: str, other: bool = False) -> Path:
    return scratch / f"{engine}-stopped{'-other' * other}" / OUTPUT


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
    return np.allclose(numbers, others, rtol=0, atol=bound, equal_nan=True)  # an infinity is equal to itself


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


def resumed_from(output: str) -> int | None:
    found = re.search(r"resum\w*\s+from\s+\S*?checkpoint-(\d+)", output)
    return int(found.group(1)) if found else None
