"""run.json: what trained, with which settings and around it, and how it ended. A damaged one is
ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from launch.host.files import write_whole
from launch.host.launcher import first_environment, launcher_argv
from launch.host.memory import ran_out
from launch.host.secrets import SECRET_NAME, hide, in_environment, recorded_text
from launch.host.signals import Preempted
from launch.host.world import World
from recipes import __version__, legal
from recipes.errors import UserError
from recipes.run import HIDDEN, Json, RunSpec, fingerprints, recorded, shown
from recipes.run.engine_sources import deepspeed_json
from recipes.run.files import default_accelerate_config, expanded, read_json, read_yaml

NAME = recorded.NAME
OUT_OF_MEMORY = "out_of_memory.json"

# With another value of these a checkpoint belongs to another run: other weights, or other data.
IDENTITY = (
    "task problem_type model_name_or_path model_revision from_scratch dtype use_peft lora_r lora_alpha "
    "lora_target_modules use_dora load_in_4bit optim dataset_name dataset_config dataset_train_split "
    "dataset_columns dataset_text_field dataset_label_field max_length packing packing_strategy "
    "assistant_only_loss completion_only_loss"
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
# What a run reads: the setting that names it, and the field of the record with its fingerprint.
MATERIAL = {"dataset_name": "data", "model_name_or_path": "model"}
# Where a run writes and what it prints: without influence on the training or its speed.
NO_DIFFERENCE = {
    "output_dir", "run_name", "config", "fresh", "fit", "verbose", "disable_tqdm", "log_level", "log_level_replica",
    "dataset_num_proc",
}  # fmt: skip

PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "peft", "bitsandbytes", "deepspeed", "tokenizers", "safetensors",
    "numpy", "liger-kernel", "flash-attn",
)  # fmt: skip
# Variables that can change what a run computes: which GPUs, in which order sums are added up, which
# kernels, switches of libraries. Those that only say where something lies are left out.
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES OMP_NUM_THREADS MKL_NUM_THREADS CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE PYTHONHASHSEED "
    "NCCL_* GLOO_* ACCELERATE_* FSDP_* DS_* TORCH_* TORCHINDUCTOR_* PYTORCH_* HF_* TRANSFORMERS_*"
).split()
_ONLY_A_PLACE = ("*_HOME", "*_DIR", "*_CACHE", "*_PATH", "*_FILE", "TORCH_ELASTIC_*")
_LARGEST_FILE = 1 << 20  # a recipe, a YAML or a JSON for an engine is some kilobytes

# What each field means: `recipes show --help` prints it. Trainer's results stand beside them.
FIELDS = {
    "status": "running, finished, preempted, interrupted, out_of_memory or failed",
    "error": "why it failed",
    "recipe": "the recipe's name; `settings.recipe` is what was typed",
    "recipe_files": "the files that a recipe of the user's own was read from",
    "engine": "the engine that trained, such as DDP or DeepSpeed ZeRO-2",
    "world_size": "processes in all",
    "local_world_size": "processes on each node",
    "data_parallel_size": "processes, or groups of them, that got examples of their own",
    "started": "when it began: local time with its offset",
    "ended": "when it ended",
    "command": "train.py and its arguments",
    "launcher": "the launcher and its arguments; empty if there was none",
    "accelerate_config": "the Accelerate YAML that the launcher read; null if there was none",
    "files": "path -> content of the recipe's files, the Accelerate YAML and the JSONs for an engine, or its hash",
    "paths": "setting -> the file or folder that it named, absolute",
    "folder": "the folder where it was started, from which relative paths count",
    "environment": "environment variables that can change what it computes, as the user had set them",
    "run": "its id, which its checkpoints bear, and the checkpoint that it began from if one was named",
    "data": "a hash of the local data, or of the demonstration's, or the Hub's commit; null if unknown",
    "model": "a hash of the local model's files, or the Hub's commit; null if unknown or from scratch",
    "classes": "of a classifier: the names of its outputs, in their order",
    "sessions": "each start that trained: when, from which step, seconds, status, processes, versions",
    "settings": "every setting: its value, the source it came from, and the reason",
    "checksum": "of all else in it",
    "versions": "of Python and the libraries; null if not installed",
    "code": "our version, a hash of our source, and a checkout's commit, with -dirty if it was changed",
    "hardware": "GPUs, CPU and cores of the first process, and what follows from them",
    "model_files": "size and checksum of each file of the saved model, its configuration and tokenizer",
    "log_history": "what Trainer logged, losses among it",
    "global_step": "optimizer steps, those of an earlier run that it resumed among them",
    "model_step": "the step of the saved model",
    "best_step": "the step of the best evaluated model",
    "num_parameters": "parameters of the model",
    "first_loss": "the first logged loss",
    "final_loss": "the last logged loss",
    "step_time": "seconds of a steady step",
    "step_time_off": "seconds by which that may be off, as far as stretches of the run differ",
    "exchanges_per_step": "how often processes exchange gradients in an optimizer step",
    "samples_per_second": "examples, in steady steps",
    "tokens_per_second": "tokens, in steady steps",
    "peak_memory_bytes": "peak memory",
    "peak_memory_of": "which memory that is",
}


# --- Reading and writing --------------------------------------------------------------------------


def read(folder: str | Path) -> Json:
    """The record in a folder. Empty if it is missing or damaged."""
    return read_json(Path(folder) / NAME)[0] or {}


def read_intact(folder: str | Path) -> Json:
    """The record in a folder as it was written. Empty if it is missing, or one bit of it has
    changed: neither what was trained can be told from it nor which run that was.
    """
    return intact(Path(folder) / NAME)


def intact(file: Path) -> Json:
    """A sealed JSON without its seal. Empty if it is missing, or one bit of it has changed."""
    found = read_json(file)[0] or {}
    return found if found.pop("checksum", None) == _checksum_of(found) else {}


def sealed(content: Json) -> Json:
    """The content with a checksum of all else in it."""
    content = {name: value for name, value in content.items() if name != "checksum"}
    return {**content, "checksum": _checksum_of(content)}


def _checksum_of(content: Json) -> str:
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write(folder: str | Path, content: Json, name: str = NAME) -> None:
    """Replace the record, sealed, or another JSON in one step: neither a reader nor a crash ever
    sees half of it.
    """
    content = recorded.plain(content)
    text = json.dumps(sealed(content) if name == NAME else content, indent=2)
    write_whole(Path(folder) / name, text.encode())


def note_out_of_memory(folder: Path, facts: Json) -> None:
    """Leave out_of_memory.json with `facts`, and the status: rank 0 may hang until it is killed."""
    with contextlib.suppress(OSError):
        write(folder, facts, OUT_OF_MEMORY)
        if (record := read(folder)).get("status") == "running":
            write(folder, {**record, "status": "out_of_memory"})


def forget_out_of_memory(folder: Path) -> None:
    """Remove what an earlier run left about its end."""
    with contextlib.suppress(OSError):
        (folder / OUT_OF_MEMORY).unlink()


@contextlib.contextmanager
def kept_record(
    run: RunSpec,
    world: World,
    data_commit: str | None = None,
    kept: Json | None = None,
    identity: Json | None = None,
    classes: list[str] | None = None,
    step: int = 0,
) -> Iterator[Json]:
    """Write run.json: `running`, then `finished`, `preempted`, `interrupted`, `out_of_memory` or
    `failed`. Yields the results, which the training fills in.

    `kept` are fields of an earlier start's record that a resume keeps, `identity` tells this run
    from others (checkpoints.new_run), `classes` are a classifier's names. `step` is where this
    start begins.

    Rank 0 writes it. If another rank runs out of memory, rank 0 only sees a lost connection;
    out_of_memory.json, which that rank has left, tells the cause.
    """
    results: Json = {}
    content, kept = started(run, world.size, data_commit), kept or {}
    content |= {**kept, "run": identity, "settings": content["settings"] | kept.get("settings", {})}
    content |= {"classes": classes} if classes else {}
    session = {name: content[name] for name in ("started", "world_size", "versions")} | {"from_step": step}
    content["sessions"] = [*kept.get("sessions", []), session]
    folder, began, ended = Path(run["output_dir"]), time.monotonic(), {"status": "finished"}
    if world.is_main:
        write(folder, content)
    try:
        yield results
    except BaseException as error:
        ended = {"status": _status(error, folder)}
        if not isinstance(error, (KeyboardInterrupt, Preempted)):
            ended["error"] = hide(f"{type(error).__name__}: {error}", secrets_of(run))
        raise
    finally:
        ended["ended"] = now()
        session |= {"status": ended["status"], "ended": ended["ended"], "seconds": time.monotonic() - began}
        # A full disk may be why it failed: that is what to report.
        with contextlib.suppress(*([] if ended["status"] == "finished" else [OSError])):
            if world.is_main:
                write(folder, content | ended | results)


def several(record: Json) -> str:
    """The differences between the starts of a resumed run, in words; empty if there are none."""
    sessions = record.get("sessions") or [{}]
    worlds = dict.fromkeys(str(session.get("world_size")) for session in sessions)
    found = [f"on {' and then '.join(worlds)} processes"] if len(worlds) > 1 else []
    if any(session.get("versions") != sessions[0].get("versions") for session in sessions):
        found.append("with several versions of the libraries")
    return " and ".join(found)


def _status(error: BaseException, folder: Path) -> str:
    if isinstance(error, Preempted):
        return "preempted"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "out_of_memory" if ran_out(error) or (folder / OUT_OF_MEMORY).exists() else "failed"


def now() -> str:
    """Local time with its offset, in ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def changes(old: Json, run: RunSpec, names: list[str]) -> dict[str, tuple[Any, Any]]:
    """Settings among `names` that differ from an earlier record, as name -> (then, now)."""
    then = {name: entry["value"] for name, entry in old.get("settings", {}).items()}
    if not (then.get("packing") and run["packing"]):
        then.pop("packing_strategy", None)
    return {name: (then[name], run[name]) for name in names if name in then and then[name] != run[name]}


# --- What a run is, and what is around it ---------------------------------------------------------


def started(run: RunSpec, world_size: int, data_commit: str | None = None, yaml: str | None = None) -> Json:
    """The record of a run that begins now, without secrets: its settings, and all else that it
    depends on. `data_commit` is that of data from the Hub, `yaml` the Accelerate YAML of a run that
    is not launched yet.
    """
    launcher = launcher_words()
    yaml = yaml or _accelerate_config(launcher)
    settings = {name: run.setting(name) for name in sorted(run)}
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
        **material(run, data_commit),
        "settings": {name: {**vars(each), "value": shown(name, each.value)} for name, each in settings.items()},
        "folder": str(Path.cwd()),
        "launcher": launcher,
        "accelerate_config": yaml,
        "files": _files(run, yaml),
        "paths": recorded.places_of(run),
        "environment": environment(),
        "code": code(),
        "versions": versions(),
        "hardware": {**run.hardware.as_dict(), "cpu": cpu()},
    }
    return hide(content, secrets_of(run))


def material(run: RunSpec, data_commit: str | None = None) -> Json:
    """The fingerprints of what a run reads: its data, and the model that it starts from with its
    configuration and tokenizer. `data_commit` is that of data from the Hub.
    """
    data = fingerprints.of_data(run["dataset_name"]) or (f"commit {data_commit}" if data_commit else None)
    return {"data": data, "model": fingerprints.of_model(run["model_name_or_path"], run["model_revision"])}


def secrets_of(run: RunSpec) -> set[str]:
    """The tokens among the settings, and those in the environment."""
    tokens = {str(setting.value) for name, setting in run.given.items() if shown(name, setting.value) == HIDDEN}
    return tokens | in_environment()


def environment() -> dict[str, str]:
    """The variables that matter, of those that the user has set."""
    return {name: value for name, value in sorted(first_environment().items()) if _matters(name)}


def _matters(name: str) -> bool:
    left_out = SECRET_NAME.search(name) or any(fnmatch(name, pattern) for pattern in _ONLY_A_PLACE)
    return not left_out and any(fnmatch(name, pattern) for pattern in ENVIRONMENT)


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: legal.version(name) for name in PACKAGES}}


def cpu() -> str:
    """The processor's name, as Linux calls it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def code() -> Json:
    """Our version and a hash of our source; a checkout's commit, with -dirty if it was changed."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for file in sorted(path for name in ("recipes", "launch") for path in (root / name).rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    found = {"version": __version__, "source": digest.hexdigest()[:16]}
    if (root / ".git").exists():  # a repository around an installed package is somebody else's
        words = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
            found["commit"] = done.stdout.strip()
    return found


def launcher_words() -> list[str]:
    """The launcher's command line up to our script; empty if none started this process."""
    words = launcher_argv()
    return words[: words.index(sys.argv[0])] if sys.argv[0] in words else words


def by_accelerate(words: list[str]) -> bool:
    """True if the launcher is `accelerate launch` in one of its spellings, and not torchrun."""
    names = {Path(word).name for word in words}
    return bool(names & {"accelerate", "accelerate-launch", "accelerate.commands.launch", "launcher.py"})


def _accelerate_config(launcher: list[str]) -> str | None:
    """The Accelerate YAML that the launcher read: the one it was given, or the user's default."""
    words = [part for word in launcher for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if "--config_file" in words[:-1]:
        return str(Path(words[words.index("--config_file") + 1]).resolve())
    default = default_accelerate_config(os.environ) if by_accelerate(launcher) else None
    return str(default.resolve()) if default else None


def _files(run: RunSpec, yaml: str | None) -> dict[str, str]:
    """The content of the files that say what the run is, by absolute path: the recipe's own, the
    Accelerate YAML, and the JSONs that settings or the YAML name.
    """
    paths = [*run.recipe.files, run.recipe.engine if run.recipe.files else None, yaml]
    paths += [run[name] for name in ("deepspeed", "fsdp_config", "accelerator_config") if isinstance(run[name], str)]
    if yaml:
        paths.append(_deepspeed_file(yaml))
    contents = {str(expanded(path).resolve()): _text(expanded(path)) for path in paths if path}
    return {path: recorded_text(text) for path, text in contents.items() if text is not None}


def _deepspeed_file(yaml: str) -> str | None:
    with contextlib.suppress(UserError):
        section = read_yaml(yaml, "--config_file").get("deepspeed_config")
        if isinstance(section, dict) and deepspeed_json(section) is not None:
            return section["deepspeed_config_file"]
    return None


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8") if file.stat().st_size <= _LARGEST_FILE else None
    except (OSError, ValueError):
        return None
