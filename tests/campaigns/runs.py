"""The trainings that campaigns interrupt and damage: one for each engine, seconds long.

Each is a `Case` of the legality campaign: the real train.py in forks of a process that has imported
everything, behind the real code of `accelerate launch`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.campaigns.legality.case import Case, Change, write
from tests.campaigns.legality.material import write_material
from tests.campaigns.legality.tried import Outcome, tried
from tests.campaigns.moment import VARIABLE

OUTPUT = "out"
STEPS = 6
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


def bound_of(engine: str) -> float:
    """How far a resumed run may end from one that nobody stopped: 0 if each bit must be the same.

    DeepSpeed's CPU Adam rounds beta powers differently after a resume.
    """
    return 1e-4 if engine.startswith("zero") else 0.0


def in_new_folder(case: Case, folder: Path, scratch: Path, earlier: Path | None = None) -> None:
    """Go to a new folder with what the case reads, and with a copy of the output `earlier`."""
    shutil.rmtree(folder, ignore_errors=True)
    write(case, folder, write_material(scratch / f"material-{os.getpid()}"))
    os.chdir(folder)
    if earlier is not None:
        shutil.copytree(earlier, folder / OUTPUT, symlinks=True)


def start(case: Case, moment: str | None = None) -> Outcome:
    """Run the case in the current folder until it ends, or until its moment comes."""
    if moment is not None:
        case = replace(case, changes=(*case.changes, Change("variable", VARIABLE, moment)))
    return tried(case, Path.cwd(), checked=True, seconds=PATIENCE)


@dataclass
class Final:
    """What a finished run leaves: its model's weights, and all that it logged but durations."""

    weights: dict[str, np.ndarray]
    log: list[dict[str, Any]]

    def differs(self, other: Final, bound: float = 0.0) -> str:
        """Where the two differ by more than `bound`, in one line. Empty if they do not."""
        if self.weights.keys() != other.weights.keys():
            return f"weights {sorted(self.weights.keys() ^ other.weights.keys())}"
        for name, values in self.weights.items():
            difference = float(np.abs(values - other.weights[name]).max())
            if not difference <= bound:
                return f"weights by {difference:.2g}, first in {name}"
        if len(self.log) != len(other.log):
            return f"{len(self.log)} log entries instead of {len(other.log)}"
        for own, others in zip(self.log, other.log, strict=True):
            for name in own.keys() | others.keys():
                if not abs(own.get(name, np.inf) - others.get(name, np.inf)) <= bound:
                    return f"{name} {own.get(name)} instead of {others.get(name)} at step {own.get('step')}"
        return ""


def final(folder: Path) -> Final:
    """Raises OSError, ValueError or KeyError if the folder holds no finished run."""
    from safetensors.torch import load_file

    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError("no model.safetensors")
    weights = {name: values.double().numpy() for file in files for name, values in load_file(file).items()}
    return Final(weights, _comparable(record["log_history"]))


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
