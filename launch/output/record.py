"""run.json: what trained, with which settings, and how it ended. A damaged one is ignored."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.host.files import write_whole
from launch.host.memory import ran_out
from launch.host.secrets import hide, in_environment
from launch.host.signals import Preempted
from launch.host.world import World
from launch.output.manifest import checksum_of
from launch.output.surroundings import surroundings
from recipes.run import HIDDEN, Json, RunSpec, Setting, fingerprints, recorded, shown
from recipes.run.files import read_json

NAME = recorded.NAME
OUT_OF_MEMORY = "out_of_memory.json"
_RUNNING = '"status": "running",'

# With another value of these a checkpoint belongs to another run: other weights, or other data.
IDENTITY = (
    "task problem_type model_name_or_path model_revision from_scratch dtype use_peft lora_r lora_alpha "
    "lora_target_modules use_dora load_in_4bit optim dataset_name dataset_config dataset_train_split "
    "dataset_text_field dataset_label_field max_length packing packing_strategy padding_free assistant_only_loss "
    "completion_only_loss"
).split()
# Trainer's resume keeps the old value of these silently: they are part of the checkpoint's state.
KEPT_BY_RESUME = (
    "logging_steps save_steps eval_steps learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon"
).split()
# A resume takes the new value of these, and then continues another training.
CHANGES_COURSE = (
    "global_batch_size dataset_streaming seed data_seed train_sampling_strategy dataloader_drop_last ignore_data_skip "
    "lr_scheduler_type lr_scheduler_kwargs warmup_steps max_grad_norm max_steps num_train_epochs "
    "label_smoothing_factor neftune_noise_alpha lora_dropout bf16 fp16 tf32"
).split()

# Where a run writes and what it prints: without influence on the training or its speed.
NO_DIFFERENCE = {
    "output_dir", "run_name", "config", "fresh", "fit", "verbose", "disable_tqdm", "log_level", "log_level_replica",
    "dataset_num_proc",
}  # fmt: skip


def read(folder: str | Path) -> Json:
    """The record in a folder. Empty if it is missing or damaged."""
    file = Path(folder) / NAME
    return (os.path.isfile(file) and read_json(file)[0]) or {}  # noqa: PTH113, Path.is_file may raise


def read_intact(folder: str | Path) -> Json:
    """The record in a folder. Empty if it is missing or damaged, a wrong bit in a setting included:
    what was trained cannot be told from it. Older records have no checksum.
    """
    found = read(folder)
    return found if found.get("checksum") in (None, _checksum(found)) else {}


def _checksum(record: Json) -> str:
    return checksum_of(json.loads(_text({name: record.get(name) for name in ("settings", "data", "engine")})))


def write(folder: str | Path, record: Json, name: str = NAME) -> None:
    """Replace the record in one step, so that a reader or a crash never sees half of it."""
    write_whole(Path(folder) / name, _text(record))


def _text(record: Json) -> bytes:
    """A record as its file holds it, with room to change the status of a run in place."""
    text = json.dumps(record, indent=2, default=str)
    return text.replace(_RUNNING, _RUNNING + " " * len("out_of_memory"), 1).encode()


def _write_end(folder: str | Path, record: Json) -> None:
    """Replace the record at the end of a run. A disk that is full takes the status alone.

    Raises `OSError` if that lost the results of a finished run, which then counts as failed.
    """
    try:
        write(folder, record)
    except OSError:
        finished = record["status"] == "finished"
        with contextlib.suppress(OSError):
            _change_status(Path(folder) / NAME, "failed" if finished else record["status"])
        if finished:
            raise


def _change_status(file: Path, status: str) -> None:
    """Overwrite the status `running` where it stands, which takes no room on a disk, and none of a
    quota.
    """
    with file.open("r+b") as stream:
        place = stream.read(100).find(_RUNNING.encode())
        if place >= 0:
            stream.seek(place)
            stream.write(_RUNNING.replace("running", status).ljust(len(_RUNNING)).encode())


def note_out_of_memory(folder: Path, facts: Json) -> None:
    """Leave out_of_memory.json with `facts`, and the status: rank 0 may hang until it is killed."""
    with contextlib.suppress(OSError):
        write(folder, facts, OUT_OF_MEMORY)
        _change_status(folder / NAME, "out_of_memory")


def is_out_of_memory(folder: Path) -> bool:
    """Whether a rank of the run that writes there has run out of memory."""
    return (folder / OUT_OF_MEMORY).exists()


def forget_out_of_memory(folder: Path) -> None:
    """Remove what an earlier run left about its end."""
    with contextlib.suppress(OSError):
        (folder / OUT_OF_MEMORY).unlink()


@dataclass
class Record:
    """The record of one run. The training fills in its `results`."""

    results: Json = field(default_factory=dict)


@contextlib.contextmanager
def kept_record(
    run: RunSpec,
    world: World,
    data_commit: str | None = None,
    kept: Json | None = None,
    identity: Json | None = None,
    classes: list[str] | None = None,
) -> Iterator[Record]:
    """Write run.json: `running`, then `finished`, `preempted`, `interrupted`, `out_of_memory` or
    `failed`.

    `kept` are recorded settings that a resume keeps, `identity` tells this run from others
    (launch.output.identity), `classes` are a classifier's names.

    Rank 0 writes it. If another rank runs out of memory, rank 0 only sees a lost connection;
    out_of_memory.json, which that rank has left, tells the cause.
    """
    record, content = Record(), started(run, world.size, data_commit)
    content["settings"] |= kept or {}
    content |= {"classes": classes} if classes else {}
    content |= {"run": identity, "checksum": _checksum(content)}
    status, error_text = "failed", None
    if world.is_main:
        write(run["output_dir"], content)
    try:
        yield record
        status = "finished"
    except (KeyboardInterrupt, Preempted) as error:
        status = "preempted" if isinstance(error, Preempted) else "interrupted"
        raise
    except BaseException as error:
        error_text = f"{type(error).__name__}: {error}"
        if ran_out(error) or is_out_of_memory(Path(run["output_dir"])):
            status = "out_of_memory"
        raise
    finally:
        if world.is_main:
            content |= {"status": status, "ended": now(), **record.results}
            failed = {"error": hide(error_text, secrets_of(run))} if error_text else {}
            _write_end(run["output_dir"], content | failed)


def started(run: RunSpec, world_size: int, data_commit: str | None = None) -> Json:
    """The record of a run that begins now, without secrets.

    `data_commit` is that of data from the Hub.
    """
    content = {
        "status": "running",
        "recipe": run.recipe.name,
        **({"recipe_files": [str(Path(file).resolve()) for file in run.recipe.files]} if run.recipe.files else {}),
        "engine": run.engine.title,
        "world_size": world_size,
        "local_world_size": run.local_world_size,
        "data_parallel_size": run.data_parallel_size,
        "started": now(),
        "command": sys.argv,
        "data": fingerprints.of_data(run["dataset_name"]) or (f"commit {data_commit}" if data_commit else None),
        "model": fingerprints.of_model(run["model_name_or_path"], run["model_revision"]),
        "settings": {name: _as_dict(name, run.setting(name)) for name in sorted(run)},
        **surroundings(run),
    }
    return hide(content, secrets_of(run))


def secrets_of(run: RunSpec) -> set[str]:
    """The tokens among the settings, and those in the environment."""
    tokens = {str(setting.value) for name, setting in run.given.items() if shown(name, setting.value) == HIDDEN}
    return tokens | in_environment()


def changes(old: Json, run: RunSpec, names: list[str]) -> dict[str, tuple[Any, Any]]:
    """Settings among `names` that differ from an earlier record, as name -> (then, now)."""
    settings = old.get("settings")
    recorded = settings.items() if isinstance(settings, dict) else ()
    then = {name: entry["value"] for name, entry in recorded if isinstance(entry, dict) and "value" in entry}
    if not (then.get("packing") and run["packing"]):
        then.pop("packing_strategy", None)
    return {name: (then[name], run[name]) for name in names if name in then and then[name] != run[name]}


def _as_dict(name: str, setting: Setting) -> Json:
    return {"value": shown(name, setting.value), "source": setting.source, "reason": setting.reason}


def now() -> str:
    """Local time with its offset, in ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
