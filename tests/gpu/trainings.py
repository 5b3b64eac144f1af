"""Trainings on one GPU, and our commands as a user runs them: recipes, fit, out of memory, doctor.

A step trains 16 sequences of 2048 tokens: random ones in the hand-written loop and in plain
Trainer, generated texts in the recipes, which are trained by `recipes train --measure`. Models are
initialised from a configuration, so nothing is downloaded. The first steps are not timed.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.running import ROOT, Outcome, run
from tests.support.wide import LENGTH as WIDE_LENGTH
from tests.support.wide import texts_of, wide_model

Figures = dict[str, Any]
GIB = 2**30
LENGTH, GLOBAL_BATCH, STEPS, VOCABULARY, RATE = 2048, 16, 20, 32_000, 1e-4
RECIPES_COMMAND, STANDARD = [sys.executable, "-m", "launch"], ["--recipe", "standard"]
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "0.5B": {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 20, "num_attention_heads": 20},
    "1.2B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20, "num_attention_heads": 16},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}
# Global batches that need more memory than there is, as one micro-batch: the plan for 0.5B and 64
# examples is 232 GiB. In a rehearsal RAM is limited, in GB.
BATCH, REHEARSED_BATCH, LIMIT = 64, 8, 1.7


class CommandFailed(RuntimeError):
    """A command did not do what the case expects. The last line says why."""


# --- In this process ------------------------------------------------------------------------------


def loop(size: str, compiled: bool, work: Path, rehearse: bool) -> Figures:
    """The hand-written loop: plain PyTorch in bf16 autocast."""
    import torch

    from tests.support.loop import loop_steps

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    steps, length = _shape(rehearse)
    model = model_of(size)
    batch = {"micro": 8, "accumulation": GLOBAL_BATCH // 8, "learning_rate": RATE, "bf16": True, "device": _device()}
    forward = torch.compile(model) if compiled else model
    trained = loop_steps(forward, rows(GLOBAL_BATCH * steps, length), steps=steps, **batch)
    return _figures(model, length, [seconds for _, seconds in trained])


def plain_trainer(size: str, work: Path, rehearse: bool) -> Figures:
    """Trainer as it is, but for the batch and the length of the training."""
    from transformers import Trainer, TrainingArguments

    steps, length = _shape(rehearse)
    quiet = {"save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    accumulation = {"gradient_accumulation_steps": GLOBAL_BATCH // 8}  # of Trainer's own 8 examples
    args = TrainingArguments(str(work / "plain"), max_steps=steps, **accumulation, **quiet)
    data = [{"input_ids": row, "labels": row} for row in rows(GLOBAL_BATCH * steps, length)]
    clock = _clock()
    trainer = Trainer(model_of(size), args, train_dataset=data, callbacks=[clock])
    trainer.train()
    seconds = [end - start for start, end in zip(clock.times, clock.times[1:], strict=False)]
    return _figures(trainer.model, length, seconds)


def _clock():
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Reads the time at the beginning and after each step, when the GPU has done its work."""

        def on_train_begin(self, args, state, control, **kwargs):
            self.times = [time.perf_counter()]

        def on_step_end(self, args, state, control, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    return Clock()


def _shape(rehearse: bool) -> tuple[int, int]:
    """Steps of a training, and tokens of a sequence."""
    from recipes.scaling.timings import WARM_UP_STEPS

    return (WARM_UP_STEPS + 3, 64) if rehearse else (WARM_UP_STEPS + STEPS, LENGTH)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def model_of(size: str, dtype: str = "float32", device: str = ""):
    """A Llama on the GPU if there is one, where random weights take no time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False, **SIZES[size])
    with torch.device(device or _device()):
        return LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype))


def rows(count: int, length: int):
    import torch

    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))


def _figures(model, length: int, seconds: Sequence[float]) -> Figures:
    """The figures of a training from its model and the seconds of each step."""
    from launch.training.timing import peak_memory
    from recipes.scaling.timings import WARM_UP_STEPS

    step_time = statistics.mean(seconds[WARM_UP_STEPS:])
    tokens = GLOBAL_BATCH * length / step_time
    return {
        "step_ms": step_time * 1000,
        "tokens_per_second": tokens,
        "mfu": _mfu(tokens, model, length),
        "peak_gib": peak_memory()["peak_memory_bytes"] / GIB,
        "start_s": sum(seconds) - len(seconds) * step_time,
    }


def _mfu(tokens_per_second: float, model, length: int) -> float | None:
    """The share of the GPU's peak; the input embedding, which is not tied, is a lookup."""
    from recipes.planner.speed import model_flops
    from recipes.run import hardware

    peak, parameters = hardware.read().peak_flops, model.num_parameters(exclude_embeddings=True)
    return tokens_per_second * model_flops(parameters, model.config, length) / peak if peak else None


# --- Commands -------------------------------------------------------------------------------------


def recipe(size: str, flags: list[str], work: Path, rehearse: bool) -> Figures:
    """A training by `recipes train`: speed, memory, and the parts of a step from --measure's row.

    `start_s` is what the first steps took longer than the others, compilation among it.
    """
    from recipes.scaling.timings import PARTS

    steps, length = _shape(rehearse)
    model, data = _material(work, size, [length] * GLOBAL_BATCH * steps)
    output = _fresh(work)
    words = _flags(model, data, length, measure=output / "timings.jsonl", max_steps=steps, learning_rate=RATE)
    words += ["--global_batch_size", str(GLOBAL_BATCH), "--output_dir", str(output)]
    outcome = _succeeded("train", *(["--num_processes", "1"] * ("--num_processes" not in flags)), *flags, *words)
    row, record = json.loads((output / "timings.jsonl").read_text()), outcome.record
    speed = record["tokens_per_second"] / row["num_processes"]
    parts = [f"{name} {1000 * row[name]:.1f}" for name in PARTS if row.get(name)]
    return {
        **row,
        "step_ms": 1000 * row["step_time"],
        "tokens_per_second": record["tokens_per_second"],
        "mfu": None if "--use_peft" in flags else _mfu(speed, model_of(size, device="meta"), length),
        "peak_gib": row["peak_memory"] / GIB,
        "start_s": record["train_runtime"] - steps * row["step_time"],
        "parts": ", ".join(parts),
    }


def fit(work: Path, rehearse: bool) -> Figures:
    """The micro-batch that `--fit` finds, its peak, and what the planner expects of it."""
    model, flags = _memory_hungry(work, rehearse)
    output = Path(flags[-1])
    _succeeded("train", *STANDARD, "--num_processes", "1", *flags, "--fit")
    found = json.loads((output / "fit.json").read_text())
    tried = [f"{probe['micro_batch']} {'runs' if probe['fits'] else 'does not fit'}" for probe in found["probes"]]
    return {
        "micro_batch": found["micro_batch"],
        "accumulation": found["accumulation"],
        "peak_gib": found["peak_bytes"] / GIB,
        "planned_gib": _planned([*STANDARD, *flags, "--per_device_train_batch_size", str(found["micro_batch"])], model),
        "tried": ", ".join(tried),
    }


def out_of_memory(work: Path, rehearse: bool) -> Figures:
    """A real out of memory, after which `--on_oom next` continues with smaller micro-batches."""
    model, flags = _memory_hungry(work, rehearse)
    first = flags[flags.index("--global_batch_size") + 1]
    own = [*STANDARD, "--processes_per_node", "1", "--on_oom", "next"]
    outcome = _succeeded("submit", "local", *own, "--", *flags, "--per_device_train_batch_size", first)
    smaller = re.findall(r"^out of memory: again, with batch (\d+) x (\d+)", outcome.output, flags=re.M)
    if not smaller:
        raise CommandFailed(f"memory did not run out at micro-batch {first}")
    micro, accumulation = smaller[-1]
    return {
        "micro_batch": int(micro),
        "accumulation": int(accumulation),
        "peak_gib": outcome.record["peak_memory_bytes"] / GIB,
        "planned_gib": _planned([*STANDARD, *flags, "--per_device_train_batch_size", micro], model),
        "tried": ", ".join(f"{size} out of memory" for size in (first, *(one for one, _ in smaller[:-1]))),
    }


def doctor(work: Path, rehearse: bool) -> Figures:
    done = subprocess.run([*RECIPES_COMMAND, "doctor", "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    checks = json.loads(done.stdout)["checks"]
    wrong = [f"{check['title']}: {check['found']}" for check in checks if check["status"] in ("error", "warning")]
    return {"checks": len(checks), "wrong": "; ".join(wrong)} | {check["title"]: check["found"] for check in checks}


def _material(work: Path, size: str, lengths: list[int]) -> tuple[Path, Path]:
    """The folder of a model with its tokenizer, and a file of texts of these lengths in tokens."""
    from launch.data.demo import demo_tokenizer

    model = work / size
    if not (model / "tokenizer.json").exists():  # written last
        model_of(size, "bfloat16").save_pretrained(model)
        demo_tokenizer().save_pretrained(model)
    return model, texts_of(work / f"{size}.jsonl", lengths)


def _memory_hungry(work: Path, rehearse: bool) -> tuple[Path, list[str]]:
    """A model, and flags for two steps of a global batch, the folder of the output last.

    As one micro-batch it is too large: for the GPU, or in a rehearsal for a limit of RAM.
    """
    if rehearse:
        batch, length, limit = REHEARSED_BATCH, WIDE_LENGTH // 2, ["--memory_limit", str(LIMIT)]
        model, data = wide_model(work / "wide"), texts_of(work / "wide.jsonl", [length] * 2 * batch)
    else:
        batch, length, limit = BATCH, LENGTH, []
        model, data = _material(work, "0.5B", [length] * 2 * batch)
    flags = _flags(model, data, length, global_batch_size=batch, max_steps=2)
    return model, [*flags, *limit, "--output_dir", str(_fresh(work))]


def _flags(model: Path, data: Path, length: int, **others: Any) -> list[str]:
    flags = {"model_name_or_path": model, "dataset_name": data, "max_length": length, "save_strategy": "no", **others}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _fresh(work: Path) -> Path:
    """An empty output folder, so that nothing is resumed."""
    output = work / "out"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    return output


def _planned(flags: list[str], model: Path) -> float:
    """GiB that the planner expects of a run, without the CUDA context: torch does not count it."""
    from transformers import AutoConfig

    from recipes.planner.plan import plan_run
    from recipes.run import resolve

    plan = plan_run(resolve(flags), AutoConfig.from_pretrained(model))
    return (plan.components.total - plan.components.context) / GIB


def _succeeded(*words: str) -> Outcome:
    """The outcome of one of our commands. Raises `CommandFailed` with the line that says why."""
    output = Path(words[words.index("--output_dir") + 1])
    outcome = run([*RECIPES_COMMAND, *words], output, cwd=ROOT)
    print(outcome.output, flush=True)
    if outcome.code or outcome.record.get("status") != "finished":
        errors = re.findall(r"^(?:\[rank\d+\]: *)?((?:[\w.]*Error: |error  ).*)$", outcome.output, flags=re.M)
        lines = outcome.output.partition("Traceback (most recent call last)")[0].strip().splitlines()
        raise CommandFailed(f"exit code {outcome.code}: {(errors or lines[-1:] or ['no output'])[0]}")
    return outcome
