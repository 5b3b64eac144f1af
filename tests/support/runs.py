"""Runs to resolve in tests: command lines, machines, Accelerate YAMLs and other files."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from recipes.rules import facts
from recipes.run import here, resolve
from recipes.run.hardware import Gpu, Hardware

CPU = Hardware()
T4 = Gpu("Tesla T4", (7, 5), 16 << 30)
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80 << 30)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30)
LOCAL = "compute_environment: LOCAL_MACHINE\n"


def machine(gpu: Gpu, count: int = 1, liger: bool = True) -> Hardware:
    return Hardware((gpu,) * count, cores=8 * count, liger=liger)


def resolved(argv: str | list[str] = "", world_size: int | None = None, settings: dict | None = None, **place):
    """The run of a command line and of settings, on a machine with two CPU cores."""
    words = argv.split() if isinstance(argv, str) else argv
    return resolve(words, here(world_size, **{"hardware": Hardware(cores=2), "environment": {}, **place}), settings)


@dataclass(frozen=True)
class Run:
    """What a user writes. `yaml` is a shipped file's name or a text; `files` are written for it.

    `world` is what --num_processes says, None without it.
    """

    argv: str = ""
    world: int | None = 1
    hardware: Hardware = CPU
    yaml: str = ""
    environment: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    elsewhere: frozenset[str] | None = None

    def resolve(self, folder: Path, monkeypatch):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(facts, "installed", lambda package: package not in self.missing)
        for name, content in self.files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        place = {"hardware": self.hardware, "environment": self.environment, "packages": self.elsewhere}
        return resolved(self.argv, self.world, accelerate_config=self._config(folder), **place)

    def _config(self, folder: Path) -> str:
        if "\n" not in self.yaml:
            return self.yaml
        file = folder / "accelerate.yaml"
        file.write_text(self.yaml, encoding="utf-8")
        return str(file)


def yaml(type_: str, *lines: str) -> str:
    return "\n".join([f"{LOCAL}distributed_type: {type_}", "num_processes: 1", *lines, ""])


def deepspeed(*lines: str) -> str:
    return yaml("DEEPSPEED", "deepspeed_config:", *(f"  {line}" for line in lines or ("zero_stage: 2",)))


def fsdp(*lines: str) -> str:
    return yaml("FSDP", "fsdp_config:", *(f"  {line}" for line in lines or ("fsdp_version: 2",)))


def groups(type_: str = "FSDP", **sizes: int) -> str:
    """An Accelerate YAML with sizes of its `parallelism_config`."""
    lines = [f"  parallelism_config_{name}_size: {size}" for name, size in sizes.items()]
    own = ["fsdp_config:", "  fsdp_version: 2"] if type_ == "FSDP" else []
    return yaml(type_, *own, "parallelism_config:", *lines)


def ds_json(**content) -> dict:
    batch = {"train_micro_batch_size_per_gpu": "auto"}
    return {"ds.json": {"zero_optimization": {"stage": 2}, **batch, **content}}


DS = "--deepspeed ds.json"
SGD = "--optim sgd"
EVAL = "--eval_strategy steps"
BEST = "--load_best_model_at_end"
TWO_GPUS = machine(A100, 2)
CLASSIFY = "--task sequence_classification --dataset_name d.csv"


def model(**config) -> dict:
    """The files of a model in the folder `m`, as far as rules read them. None leaves a key out."""
    content = {"model_type": "llama", "max_position_embeddings": 128, **config}
    content = {name: value for name, value in content.items() if value is not None}
    weights = "\2" + "\0" * 7 + "{}"  # safetensors without any: the header's length, and the header
    return {"m/config.json": content, "m/model.safetensors": weights, "m/tokenizer.json": {}}


MODEL = "--model_name_or_path ./m"
