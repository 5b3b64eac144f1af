"""run.json, the record of a run: settings, environment, outcome. A damaged record is ignored."""

import contextlib
import hashlib
import json
import math
import platform
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
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
from recipes.run import HIDDEN, Json, RunSpec, Setting, fingerprints, recorded, shown
from recipes.run.files import default_accelerate_config, expanded, read_json, read_yaml

NAME = recorded.NAME
OUT_OF_MEMORY = "out_of_memory.json"

# If one of these settings differs, a checkpoint belongs to another run, with other weights or data.
IDENTITY = (
    "task problem_type model_name_or_path model_revision from_scratch dtype use_peft lora_r lora_alpha "
    "lora_target_modules use_dora load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant optim "
    "dataset_name dataset_config dataset_train_split dataset_columns dataset_text_field dataset_label_field "
    "max_length packing packing_strategy assistant_only_loss completion_only_loss"
).split()
# A resume keeps the old value of these settings from the checkpoint's state. resume.py refuses a
# new value that the user writes, but only prints a note for logging_steps, save_steps, eval_steps.
KEPT_BY_RESUME = (
    "logging_steps save_steps eval_steps learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon"
).split()
# A resume uses the new values of these settings, so the training is no longer the same.
CHANGES_COURSE = (
    "global_batch_size dataset_streaming seed data_seed train_sampling_strategy dataloader_drop_last ignore_data_skip "
    "lr_scheduler_type lr_scheduler_kwargs warmup_steps max_grad_norm max_steps num_train_epochs "
    "label_smoothing_factor neftune_noise_alpha lora_dropout bf16 fp16 tf32 early_stopping_patience"
).split()
# A resume refuses new values of these settings if the run compares its evaluations.
COMPARES_BY = ("metric_for_best_model", "greater_is_better", "dataset_test_split")
# The setting that names an input of a run -> the field of the record with its fingerprint.
MATERIAL = {"dataset_name": "data", "model_name_or_path": "model"}
# Settings for paths, prints, tokenizing and the start, which do not change the training itself.
NO_DIFFERENCE = {
    "output_dir", "run_name", "config", "fresh", "fit", "verbose", "disable_tqdm", "log_level", "log_level_replica",
    "dataset_num_proc",
}  # fmt: skip

PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "peft", "bitsandbytes", "deepspeed", "tokenizers", "safetensors",
    "numpy", "liger-kernel", "flash-attn",
)  # fmt: skip
# These variables can change the results of a run, as they choose GPUs, kernels, the order of sums
# or options of libraries. _ONLY_A_PLACE leaves out paths and the settings of torch elastic.
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES OMP_NUM_THREADS MKL_NUM_THREADS CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE PYTHONHASHSEED "
    "NCCL_* GLOO_* ACCELERATE_* FSDP_* DS_* TORCH_* TORCHINDUCTOR_* PYTORCH_* HF_* TRANSFORMERS_*"
).split()
_ONLY_A_PLACE = ("*_HOME", "*_DIR", "*_CACHE", "*_PATH", "*_FILE", "TORCH_ELASTIC_*")

# The meaning of each field, for `recipes show --help`. A record also holds Trainer's results.
FIELDS = {
    "status": "running, finished, preempted, interrupted, out_of_memory or failed",
    "error": "why the run failed",
    "recipe": "the recipe's name; `settings.recipe` is the name as typed",
    "engine": "the engine that trained, such as DDP or DeepSpeed ZeRO-2",
    "world_size": "number of processes",
    "local_world_size": "number of processes on each node",
    "data_parallel_size": "number of processes, or groups of processes, that got examples of their own",
    "started": "when the run began or last resumed, in UTC",
    "ended": "when the run ended",
    "command": "train.py and its arguments",
    "launcher": "the launcher and its arguments; empty if there was none",
    "accelerate_config": "the Accelerate YAML that the launcher read; null if there was none",
    "files": "path -> content (or hash) of the recipe's files, the Accelerate YAML and the engine's JSONs",
    "paths": "setting -> absolute path of the file or folder that the setting named",
    "folder": "the folder where the run was started, to which relative paths refer",
    "environment": "environment variables that can change what the run computes, as the user had set them",
    "run": "the run's id (also in its checkpoints), and the checkpoint that the run began from, if the user named one",
    "data": "a hash of the local or demonstration data, or the Hub's commit; null if unknown",
    "model": "a hash of the local model's files, or the Hub's commit; null if unknown or if no model is named",
    "classes": "names of a classifier's outputs, in the model's order",
    "chats": "false if the data are plain text, true if they hold messages as the chat template writes them",
    "sessions": "an entry per start that trained: time, steps before it, seconds, status, processes, versions",
    "changed": "settings that got another value in a resume, so that no single command repeats the training",
    "settings": "every setting: its value, the source it came from, and the reason",
    "checksum": "checksum of all other fields",
    "versions": "versions of Python and the libraries; null if not installed",
    "code": "version of this program, hash of its source, and a checkout's commit, with -dirty if changed",
    "hardware": "GPUs, CPU and cores of the first process, and whether Liger is installed there",
    "model_files": "size and checksum of each file of the saved model, its configuration and tokenizer",
    "log_history": "Trainer's log entries, such as losses",
    "global_step": "optimizer steps, including those before a resume",
    "model_step": "the step of the saved model",
    "best_step": "the step of the best evaluated model",
    "num_parameters": "parameters of the model",
    "first_loss": "the first logged loss",
    "final_loss": "the last logged loss",
    "step_time": "mean seconds per optimizer step, without the first steps",
    "step_time_off": "uncertainty of step_time in seconds, from differences between stretches of the run",
    "exchanges_per_step": "how often processes synchronize gradients in an optimizer step",
    "samples_per_second": "examples per second, from step_time",
    "tokens_per_second": "tokens per second, from step_time",
    "mfu": "model FLOPs utilisation; null for adapters, classifiers, unpacked rows, unknown GPUs, and unknown FLOPs",
    "peak_memory_bytes": "peak memory, in bytes",
    "peak_memory_of": "which memory peak_memory_bytes measures: the first GPU's or the first process's",
}


def new_run(began_from: Path | None = None, began_at: int = -1) -> Json:
    """Return a new run's identity, with the checkpoint (and its step) that the run begins from."""
    named = str(began_from.resolve()) if began_from else None
    return {"id": secrets.token_hex(8), "began_from": named, "began_at": began_at}


@dataclass(frozen=True)
class Earlier:
    """The run that the folder already holds, if any.

    `checkpoint` is the checkpoint to resume from. `finished` is True if nothing is left to train.
    `notes` are lines to print. `kept` holds the fields that the new record copies from the old
    record. `identity` identifies the folder's run if this run continues it, or else a new run.
    """

    checkpoint: Path | None = None
    step: int = 0
    finished: bool = False
    notes: list[str] = field(default_factory=list)
    kept: Json = field(default_factory=dict)
    identity: Json = field(default_factory=new_run)

    def as_it_trains(self, run: RunSpec) -> RunSpec:
        """Return the run as a resume trains it: some settings keep the value of the checkpoint."""
        kept = self.kept.get("settings", {}).items()
        return replace(run, given={**run.given, **{name: Setting(one["value"], "checkpoint") for name, one in kept}})


# --- Reading and writing --------------------------------------------------------------------------


def read(folder: str | Path, name: str = NAME) -> Json:
    """Return the record, or another JSON file, in a folder; empty if missing or not readable."""
    return read_json(Path(folder) / name)[0] or {}


def intact(folder: str | Path, name: str = NAME) -> Json:
    """Return run.json or a manifest without the checksum; empty if it is missing or any bit has
    changed, because a damaged record cannot show what was trained, or by which run.
    """
    found = read(folder, name)
    return found if found.pop("checksum", None) == _checksum_of(found) else {}


def sealed(content: Json) -> Json:
    """Return the content with a field `checksum`, which covers all other fields."""
    content = {name: value for name, value in content.items() if name != "checksum"}
    return {**content, "checksum": _checksum_of(content)}


def _checksum_of(content: Json) -> str:
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write(folder: str | Path, content: Json, name: str = NAME) -> None:
    """Write a JSON file atomically. If the file is run.json, add a checksum."""
    content = recorded.plain(content)
    text = json.dumps(sealed(content) if name == NAME else content, indent=2)
    write_whole(Path(folder) / name, text.encode())


def note_out_of_memory(folder: Path, facts: Json) -> None:
    """Write out_of_memory.json. Set the status in run.json too, because rank 0 may hang."""
    with contextlib.suppress(OSError):
        write(folder, facts, OUT_OF_MEMORY)
        if (record := read(folder)).get("status") == "running":
            write(folder, {**record, "status": "out_of_memory"})


def forget_out_of_memory(folder: Path) -> None:
    """Remove the out_of_memory.json of an earlier run."""
    with contextlib.suppress(OSError):
        (folder / OUT_OF_MEMORY).unlink()


@contextlib.contextmanager
def kept_record(
    run: RunSpec, world: World, earlier: Earlier, data_commit: str | None, about_data: Json
) -> Iterator[Json]:
    """Write run.json with the status `running`; at the end of the block with `finished`,
    `preempted`, `interrupted`, `out_of_memory` or `failed`. Yields a dict, which the training fills
    with the results. `data_commit` is the commit of Hub data, `about_data` holds further fields.

    Rank 0 writes the file. If another rank runs out of memory, rank 0 sees only a lost connection.
    Then the other rank writes out_of_memory.json, from which rank 0 learns the status.
    """
    results: Json = {}
    content, kept = started(run, data_commit), earlier.kept
    content |= {**about_data, **kept, "settings": content["settings"] | kept.get("settings", {})}
    content["run"] = earlier.identity
    session = {name: content[name] for name in ("started", "world_size", "versions")} | {"from_step": earlier.step}
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
        # The run may have failed because the disk is full: then report only the first error.
        with contextlib.suppress(*([] if ended["status"] == "finished" else [OSError])):
            if world.is_main:
                write(folder, content | ended | results)


def several(record: Json) -> str:
    """Describe a resume's changes (processes, versions, settings); empty if there are none."""
    sessions = record.get("sessions") or [{}]
    worlds = dict.fromkeys(str(session.get("world_size")) for session in sessions)
    found = [f"processes: {', then '.join(worlds)}"] if len(worlds) > 1 else []
    found += ["versions of the libraries"] * (len({str(one.get("versions")) for one in sessions}) > 1)
    changed = "; ".join([*found, *record.get("changed", ())])
    return changed and f"a resume changed the recorded run ({changed})"


def has_risen(record: Json) -> bool:
    """True if the training diverged. The batches of a good training differ by less than 20 %."""
    return (record.get("final_loss") or 0) > 1.2 * (record.get("first_loss") or math.inf)


def _status(error: BaseException, folder: Path) -> str:
    if isinstance(error, Preempted):
        return "interrupted" if "SIGINT" in str(error) else "preempted"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "out_of_memory" if ran_out(error) or (folder / OUT_OF_MEMORY).exists() else "failed"


def now() -> str:
    """Return the time in UTC, in ISO 8601. Such texts sort by time, on whichever machine."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime())


def changes(old: Json, run: RunSpec, names: list[str]) -> dict[str, tuple[Any, Any]]:
    """Return the settings among `names` that differ from an earlier record: name -> (then, now)."""
    then = {name: entry["value"] for name, entry in old.get("settings", {}).items()}
    if not (then.get("packing") and run["packing"]):
        then.pop("packing_strategy", None)
    return {name: (then[name], run[name]) for name in names if name in then and then[name] != run[name]}


# --- The fields of a record -----------------------------------------------------------------------


def started(run: RunSpec, data_commit: str | None = None, yaml: str | None = None) -> Json:
    """Return the record of a run that begins now, without secrets: its settings, and everything
    else that the run depends on. `data_commit` is the commit of data from the Hub. `yaml` is the
    Accelerate YAML of a run that is not launched yet.
    """
    words, script = launcher_argv(), sys.argv[0]
    launcher = words[: words.index(script)] if script in words else words  # up to our script
    yaml = yaml or _accelerate_config(launcher)
    settings = {name: run.setting(name) for name in sorted(run)}
    content = {
        "status": "running",
        "recipe": run.recipe.name,
        "engine": run.engine.title,
        "world_size": run.world_size,
        "local_world_size": run.local_world_size,
        "data_parallel_size": run.batch.data_parallel,
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
        "hardware": {**asdict(run.hardware), "cpu": cpu()},
    }
    return hide(content, secrets_of(run))


def material(run: RunSpec, data_commit: str | None = None) -> Json:
    """Return the fingerprints of a run's inputs: its data, and its starting model with
    configuration and tokenizer. `data_commit` is the commit of data from the Hub.
    """
    data = fingerprints.of_data(run["dataset_name"]) or (f"commit {data_commit}" if data_commit else None)
    return {"data": data, "model": fingerprints.of_model(run["model_name_or_path"], run["model_revision"])}


def secrets_of(run: RunSpec) -> set[str]:
    """Return the secret tokens among the settings and in the environment."""
    tokens = {str(setting.value) for name, setting in run.given.items() if shown(name, setting.value) == HIDDEN}
    return tokens | in_environment()


def environment() -> dict[str, str]:
    """Return the variables that the user has set and that can change what a run computes."""
    return {name: value for name, value in sorted(first_environment().items()) if _matters(name)}


def _matters(name: str) -> bool:
    left_out = SECRET_NAME.search(name) or any(fnmatch(name, pattern) for pattern in _ONLY_A_PLACE)
    return not left_out and any(fnmatch(name, pattern) for pattern in ENVIRONMENT)


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: legal.version(name) for name in PACKAGES}}


def cpu() -> str:
    """Return the processor's name as Linux reports it."""
    with contextlib.suppress(OSError):
        if named := re.search(r"model name\s*:(.*)", Path("/proc/cpuinfo").read_text(errors="replace")):
            return named[1].strip()
    return platform.processor() or platform.machine()


@cache
def code() -> Json:
    """Return our version, a hash of our source, and a clone's commit, with -dirty if changed."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for file in sorted(path for name in ("recipes", "launch") for path in (root / name).rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    found = {"version": __version__, "source": digest.hexdigest()[:16]}
    if (root / ".git").exists():  # only our own repository, not one around an installed package
        words = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
            found["commit"] = done.stdout.strip()
    return found


def by_accelerate(words: list[str]) -> bool:
    """True if the launcher is `accelerate launch`, by whatever name, and not torchrun."""
    names = {Path(word).name for word in words}
    return bool(names & {"accelerate", "accelerate-launch", "accelerate.commands.launch", "launcher.py"})


def _accelerate_config(launcher: list[str]) -> str | None:
    """Return the Accelerate YAML (--config_file or the default) that the launcher read, if any."""
    words = [part for word in launcher for part in (word.split("=", 1) if word.startswith("--") else [word])]
    words = ["--config_file" if word == "--config-file" else word for word in words]
    if "--config_file" in words[:-1]:
        return str(Path(words[words.index("--config_file") + 1]).resolve())
    default = default_accelerate_config() if by_accelerate(launcher) else None
    return str(default.resolve()) if default else None


def _files(run: RunSpec, yaml: str | None) -> dict[str, str]:
    """Return absolute path -> content (a hash if it seems secret) of the files that define the run:
    the recipe's files, the Accelerate YAML, and the JSONs that settings or the YAML name.
    """
    paths = [run.recipe.file, run.recipe.engine if run.recipe.file else None, yaml]
    paths += [run[name] for name in ("deepspeed", "fsdp_config", "accelerator_config") if isinstance(run[name], str)]
    if yaml:
        with contextlib.suppress(UserError):
            section = read_yaml(yaml, "--config_file").get("deepspeed_config")
            named = section.get("deepspeed_config_file") if isinstance(section, dict) else None
            paths.append(named if isinstance(named, str) else None)
    contents = {}
    for path in filter(None, paths):
        file = expanded(path).resolve()
        with contextlib.suppress(OSError, ValueError):
            contents[str(file)] = recorded_text(file.read_text(encoding="utf-8"))
    return contents
