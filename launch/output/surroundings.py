"""What a run depends on besides its settings: the launch, files, environment, code and machine."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from launch.host.launcher import first_environment, launcher_argv
from launch.host.secrets import SECRET_NAME, recorded_text
from recipes import __version__, legal
from recipes.errors import UserError
from recipes.run import Json, RunSpec, recorded
from recipes.run.engine_sources import deepspeed_json
from recipes.run.files import default_accelerate_config, expanded, read_yaml

PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "peft", "bitsandbytes", "deepspeed", "tokenizers", "safetensors",
    "numpy", "liger-kernel", "flash-attn",
)  # fmt: skip

# Variables that can change what a run computes, with the reason. Those that only say where
# something lies (caches, folders) are left out, and so is whatever may hold a secret.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "which GPUs",
    "OMP_NUM_THREADS": "threads add up in another order",
    "MKL_NUM_THREADS": "threads add up in another order",
    "CUBLAS_WORKSPACE_CONFIG": "deterministic kernels",
    "NVIDIA_TF32_OVERRIDE": "precision of matrix products",
    "PYTHONHASHSEED": "order of sets",
    "NCCL_*": "algorithms and links that add gradients up",
    "GLOO_*": "links between processes without GPUs",
    "ACCELERATE_*": "settings of the engine",
    "FSDP_*": "settings of the engine",
    "DS_*": "settings of DeepSpeed",
    "TORCH_*": "torch's switches",
    "TORCHINDUCTOR_*": "the compiler's switches",
    "PYTORCH_*": "the allocator's switches",
    "HF_*": "the Hub: offline, mirror",
    "TRANSFORMERS_*": "switches of transformers",
}
_ONLY_A_PLACE = ("*_HOME", "*_DIR", "*_CACHE", "*_PATH", "*_FILE", "TORCH_ELASTIC_*")
_LARGEST_FILE = 1 << 20  # a recipe, a YAML or a JSON for an engine is some kilobytes


def surroundings(run: RunSpec) -> Json:
    """The part of run.json that this module knows."""
    launcher = launcher_words()
    yaml = _accelerate_config(launcher)
    return {
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


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: legal.version(name) for name in PACKAGES}}


def environment() -> dict[str, str]:
    """The variables that matter, of those that the user has set."""
    variables = first_environment()
    return {name: value for name, value in sorted(variables.items()) if _matters(name)}


def _matters(name: str) -> bool:
    left_out = SECRET_NAME.search(name) or any(fnmatch(name, pattern) for pattern in _ONLY_A_PLACE)
    return not left_out and bool(why_it_matters(name))


def why_it_matters(name: str) -> str:
    """What a variable changes; empty if nothing that counts."""
    return next((why for pattern, why in ENVIRONMENT.items() if fnmatch(name, pattern)), "")


def cpu() -> str:
    """The processor's name, as Linux calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


# --- The code -------------------------------------------------------------------------------------


@cache
def code() -> Json:
    """Our version and a hash of our source; a checkout's commit, and whether it was changed."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for file in sorted(path for name in ("recipes", "launch") for path in (root / name).rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    found: Json = {"version": __version__, "source": digest.hexdigest()[:16]}
    if (root / ".git").exists():  # a repository around an installed package is somebody else's
        commit, changed = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "-uno")
        found |= {"commit": commit, "changed": bool(changed)} if commit else {}
    return found


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# --- The launch -----------------------------------------------------------------------------------


def launcher_words() -> list[str]:
    """The launcher's command line up to our script; empty if none started this process."""
    words = launcher_argv()
    return words[: words.index(sys.argv[0])] if sys.argv[0] in words else words


def by_accelerate(words: list[str]) -> bool:
    """Whether the launcher is `accelerate launch` in one of its spellings, and not torchrun."""
    names = {Path(word).name for word in words}
    return bool(names & {"accelerate", "accelerate-launch", "accelerate.commands.launch", "launcher.py"})


def _accelerate_config(launcher: list[str]) -> str | None:
    """The Accelerate YAML that the launcher read: the one it was given, or the user's default."""
    for number, word in enumerate(launcher):
        if word.startswith("--config_file="):
            return str(Path(word.partition("=")[2]).resolve())
        if word == "--config_file":
            return str(Path("".join(launcher[number + 1 : number + 2])).resolve())
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
    return {path: recorded_text(text, path.endswith(".py")) for path, text in contents.items() if text is not None}


def _deepspeed_file(yaml: str) -> str | None:
    try:
        section = read_yaml(yaml, "--config_file").get("deepspeed_config")
    except UserError:
        return None
    if not isinstance(section, dict) or deepspeed_json(section) is None:
        return None
    return section["deepspeed_config_file"]


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8") if file.stat().st_size <= _LARGEST_FILE else None
    except (OSError, ValueError):
        return None
