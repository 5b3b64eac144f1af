"""The valid world: a model, data of every kind, files of settings, a finished run with its records.

Every command in `seeds` is legal in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.campaigns.legality.material import write_material

_SITE = "slurm: {partition: gpu, time: 8:00:00, module: [cuda/12.6]}\nazureml: {compute: gpus}\n"
_CONFIG = """\
recipe: standard
learning_rate: 5e-5
max_steps: 3
per_device_train_batch_size: 2
report_to: [none]
lr_scheduler_kwargs: {}
use_cpu: true
output_dir: out
"""
_MIXTURE = """\
dataset_name:
- {name: data/texts.jsonl, weight: 3, split: 'train[:10]'}
- {name: data/pairs.jsonl, weight: 1, columns: {prompt: prompt}}
"""
_OWN = """\
base: standard
purpose: Fine-tuning on our tickets.
micro_batch_cap: 4
engine: standard.yaml
changes:
  learning_rate: [2.0e-5, "best of the three that we tried"]
  warmup_steps: [2, "as in the paper"]
"""
_ON_TOP = 'base: mine.yaml\npurpose: Shorter.\nchanges:\n  max_steps: [5, "a trial"]\n'
_PYTHON = """\
from recipes.catalog import fast


def mine():
    return fast().but("mine", "ours", learning_rate=(1e-5, "tried"))
"""
_DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
    "bf16": {"enabled": "auto"},
    "gradient_clipping": 1.0,
}
_TIMINGS = [
    {
        "num_processes": world, "epoch_time": 100.0 / world, "name": "ours", "recipe": "fast", "samples": 1600,
        "global_batch": 16, "micro_batch": 16 // world, "step_time": 1.0 / world, "communication": 0.01 * world,
        "forward": 0.3 / world, "backward": 0.5 / world, "optimizer": 0.02, "no_sync_step": 0.9 / world,
        "no_sync_step_max": 0.95 / world, "syncs": 1, "collectives": 4, "sync_bytes": 10**6, "link_bandwidth": 1e9,
        "link_latency": 1e-5, "workers": 2, "accuracy": 0.9,
    }
    for world in (1, 2, 4)
]  # fmt: skip
RUN = "--model_name_or_path model --dataset_name data/texts.jsonl --max_length 64 --save_steps 1".split()
RUN += "--recipe baseline --output_dir run --logging_steps 1".split()


def write_world(folder: Path) -> Path:
    """The folder `world` in this one. Takes some ten seconds, in processes that end."""
    world = folder / "world"
    subprocess.run([sys.executable, "-m", __spec__.name, str(folder), str(world)], check=True)
    return world


def _write(folder: Path, world: Path) -> None:
    material = write_material(folder / "material")
    world.mkdir()
    (world / "model").symlink_to(material / "models" / "llama")
    (world / "data").mkdir()
    _write_data(world / "data", material / "data")
    _write_settings(world)
    _write_timings(world)
    os.chdir(world)
    _train(world)


def _write_data(data: Path, texts: Path) -> None:
    from datasets import Dataset, DatasetDict

    for name in ("texts.jsonl", "texts.txt", "pairs.jsonl", "chats.jsonl", "labels.csv"):
        shutil.copy(texts / name, data / name)
    rows = [json.loads(line) for line in (texts / "texts.jsonl").read_text().splitlines()][:20]
    chats = [json.loads(line)["messages"] for line in (texts / "chats.jsonl").read_text().splitlines()][:20]
    ids = [list(row["text"].encode()) for row in rows]
    tokens = [{"input_ids": row, "labels": row, "attention_mask": [1] * len(row)} for row in ids]
    says = [{"from": ("human", "gpt")[number % 2], "value": row["text"]} for number, row in enumerate(rows)]
    kinds = {
        "sharegpt": [{"conversations": says[:4], "system": "Be short."} for _ in rows],
        "alpaca": [{"instruction": row["text"], "output": "yes", "history": [["a", "b"]]} for row in rows],
        "mixed": [*rows[:5], *({"messages": [*chat, {**chat[-1], "weight": 0}]} for chat in chats[:5])],
        "tools": [{"messages": chat, "tools": json.dumps([{"name": "add", "parameters": {}}])} for chat in chats],
        "chat_pairs": [{"prompt": chat[:1], "completion": chat[1:]} for chat in chats],
        "tokens": tokens,
        "numbers": [{**row, "label": number % 3} for number, row in enumerate(rows)],
        "names": [{**row, "label": ("bad", "good")[number % 2]} for number, row in enumerate(rows)],
    }
    for name, content in kinds.items():
        _write_lines(data / f"{name}.jsonl", content)
        Dataset.from_list(content).to_parquet(data / f"{name}.parquet")
    (data / "texts.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (data / "chats.json").write_text(json.dumps([{"messages": chat} for chat in chats]), encoding="utf-8")
    (data / "texts.csv").write_text('text\n"one, ""two"""\n' + "three\n" * 20, encoding="utf-8")
    (data / "pairs.csv").write_text("prompt,completion\n" + "a,b\n" * 20, encoding="utf-8")
    Dataset.from_list(rows).to_parquet(data / "texts.parquet")
    (data / "folder").mkdir()
    for name in ("train", "test"):
        _write_lines(data / "folder" / f"{name}.jsonl", rows)
    splits = DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows))
    splits.save_to_disk(data / "saved")


def _write_lines(file: Path, rows: list) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_settings(world: Path) -> None:
    from recipes.run.files import shipped

    for file in sorted(shipped("").glob("*.yaml")):
        shutil.copy(file, world / file.name)
    (world / "accelerate_with_json.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\n"
        "deepspeed_config:\n  deepspeed_config_file: deepspeed.json\n  zero3_init_flag: false\n",
        encoding="utf-8",
    )
    texts = {
        "config.yaml": _CONFIG,
        "mixture.yaml": _MIXTURE,
        "mine.yaml": _OWN,
        "on_top.yaml": _ON_TOP,
        "mine.py": _PYTHON,
    }
    texts["deepspeed.json"] = json.dumps(_DEEPSPEED)
    texts["accelerator.json"] = json.dumps({"split_batches": False})
    texts["site/accelerate-recipes/site.yaml"] = _SITE
    job = shipped("fast.yaml", "azureml").read_text(encoding="utf-8")
    repository = Path(__file__).parents[3]
    texts["azure.yaml"] = job.replace("code: ..", f"code: {repository}").replace(
        "path: environment", f"path: {shipped('environment', 'azureml')}"
    )
    for name, text in texts.items():
        (world / name).parent.mkdir(parents=True, exist_ok=True)
        (world / name).write_text(text, encoding="utf-8")


def _write_timings(world: Path) -> None:
    _write_lines(world / "timings.jsonl", _TIMINGS)
    columns = list(_TIMINGS[0])
    lines = [",".join(columns), *(",".join(str(row[name]) for name in columns) for row in _TIMINGS)]
    (world / "timings.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _train(world: Path) -> None:
    """A run that is finished, one that has to go on from its second step, and an adapter."""
    from launch.output import record
    from launch.output.submission import Submission, note
    from launch.train import main
    from recipes.run import fitted, here, resolve
    from recipes.run.hardware import read

    if main([*RUN, "--max_steps", "2"]) != 0:
        raise RuntimeError("the run that is to be damaged did not train")
    if main([*("adapter" if word == "run" else word for word in RUN), "--max_steps", "1", "--use_peft"]) != 0:
        raise RuntimeError("the adapter did not train")
    shutil.copytree("run", "unfinished")
    unfinished = json.loads(Path("run/run.json").read_text())
    del unfinished["global_step"]
    unfinished["settings"]["output_dir"]["value"] = "unfinished"
    record.write("unfinished", {**unfinished, "status": "preempted"})
    submitted = "2026-01-01T00:00:00+0000"
    for folder in ("run", "unfinished"):
        (Path(folder) / "train.log").write_text("step 1/2\nstep 2/2\n")
        note(Path(folder), Submission("local", "a run", str(world / folder / "train.log"), submitted=submitted))
    note_of_slurm = Submission("slurm", "a run", str(world / "slurm" / "1.out"), job="1", submitted=submitted)
    Path("slurm").mkdir()
    Path("slurm/1.out").write_text("step 1/2\n")
    note(Path("slurm"), note_of_slurm)
    facts = {"asked_bytes": 1, "free_bytes": 1, "next": {"per_device_train_batch_size": 1}}
    Path("run/out_of_memory.json").write_text(json.dumps(facts))
    run = resolve([*RUN, "--max_steps", "2"], here(hardware=read()))
    fit = {"micro_batch": 4, "accumulation": 4, "peak_bytes": 10**9, "holds_for": fitted.identity(run)}
    Path("run/fit.json").write_text(json.dumps(fit))


if __name__ == "__main__":
    _write(Path(sys.argv[1]), Path(sys.argv[2]))
