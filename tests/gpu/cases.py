"""The measurements on GPUs, each in a process of its own: the doctor, the speed of trainings, and
memory against the plan.

A step trains 16 sequences of 2048 tokens: random ones in the hand-written loop, generated texts in
the recipes, which are trained by `recipes train --measure`. Models are initialised from a
configuration, so nothing is downloaded. The first steps are not timed.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from launch.host import processes
from launch.host.memory import ran_out
from tests.gpu import memory
from tests.support.running import ROOT, run
from tests.support.wide import texts_of

Figures = dict[str, Any]
OK, OUT_OF_MEMORY = "ok", "out of memory"
GIB = 2**30
LENGTH, GLOBAL_BATCH, STEPS, VOCABULARY, RATE = 2048, 16, 20, 32_000, 1e-4
COMMAND = [sys.executable, "-m", "launch"]
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "0.5B": {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 20, "num_attention_heads": 20},
    "1.2B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20, "num_attention_heads": 16},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}
# Flags of `recipes train`. All sequences have one length: none needs packing.
RECIPES = {
    "baseline": "--recipe baseline",
    "standard": "--recipe standard",
    "fast": "--recipe fast",
    "memory": "--recipe memory",
    "fast, 8-bit Adam": "--recipe fast --optim adamw_bnb_8bit",
}
VARIANTS = {
    "fast, no compile": "--recipe fast --torch_compile false",
    "fast, micro 16": "--recipe fast --per_device_train_batch_size 16",
    "fast, checkpointing": "--recipe fast --gradient_checkpointing",
}
LORA = "--recipe fast --use_peft --dtype bfloat16 --gradient_checkpointing"
SHARED = ("standard", "fast", "sharded")  # measured on all GPUs too


@dataclass(frozen=True)
class Case:
    """One measurement, which takes about `seconds` on an H100, with imports and compilation.

    `measure` gets a folder for models and outputs; it returns figures by their names.
    """

    group: str
    name: str
    seconds: int
    measure: Callable[[Path], Figures]


def all_cases(rehearse: bool, gpus: int = 1) -> list[Case]:
    """The cases for a machine with this number of GPUs, the most valuable first; or those of a
    rehearsal, with tiny models.
    """

    def speed(size: str, name: str, measure: Callable[..., Figures], *how: Any, seconds: int = 120) -> Case:
        return Case("speed", f"{size} {name}", seconds, partial(measure, size, *how, rehearse))

    sizes, small, large = (["tiny"], "tiny", "tiny") if rehearse else (["0.5B", "1.2B"], "0.5B", "7B")
    cases = [Case("doctor", "doctor", 60, doctor)]
    for size in sizes:
        cases += [speed(size, "loop", loop, False, seconds=40), speed(size, "loop, compiled", loop, True)]
        cases += [speed(size, name, recipe, flags) for name, flags in RECIPES.items()]
    cases.append(speed(large, "LoRA", recipe, LORA, seconds=240))
    cases += [Case("memory", str(one), 50, partial(memory.measure, one)) for one in memory.cases(rehearse)]
    cases += [speed(small, name, recipe, flags) for name, flags in VARIANTS.items()]
    shared = SHARED if gpus > 1 else ()
    return cases + [
        speed("0.5B", f"{name}, {gpus} GPUs", recipe, f"--recipe {name} --num_processes {gpus}") for name in shared
    ]


# --- A process for each ---------------------------------------------------------------------------


def measured(name: str, work: Path, rehearse: bool, deadline: float) -> dict[str, Any]:
    """The row of a case: its status and figures, and the end of its log if it failed.

    At the deadline it is killed with all that it started: what is left on a GPU changes the figures
    of the next case.
    """
    asked = {"name": name, "work": str(work), "rehearse": rehearse}
    began = time.monotonic()
    with processes.ask("tests.gpu.cases", [asked]) as (child,):
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(deadline)
        over = child.process.poll() is None
        row = child.answer or {"status": f"failed: {'over its deadline' if over else child.end()}"}
        if row["status"].startswith("failed"):
            row["log"] = child.end(lines=60)
        for process in psutil.Process(child.process.pid).children(recursive=True) if over else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def main(folder: str) -> None:
    """Measure in this process, which was asked for one case."""
    asked = processes.request(folder)
    (case,) = (case for case in all_cases(asked["rehearse"], gpu_count()) if case.name == asked["name"])
    try:
        row = {"status": OK, "figures": case.measure(Path(asked["work"]))}
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [type(error).__name__]
        row = {"status": OUT_OF_MEMORY if ran_out(error) else f"failed: {lines[-1][:160]}"}
    processes.answer(folder, row)


def gpu_count() -> int:
    from recipes.run import hardware

    return max(1, len(hardware.read().gpus))


# --- What is measured -----------------------------------------------------------------------------


def doctor(work: Path) -> Figures:
    done = subprocess.run([*COMMAND, "doctor", "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    checks = json.loads(done.stdout)["checks"]
    wrong = [f"{check['title']}: {check['found']}" for check in checks if check["status"] in ("error", "warning")]
    found = {check["title"]: check["found"] for check in checks}
    return {"checks": len(checks), "not ok": "; ".join(wrong), "matrices": found.get("matrices")}


def loop(size: str, compiled: bool, rehearse: bool, work: Path) -> Figures:
    """The hand-written loop: plain PyTorch in bf16 autocast."""
    import torch

    from launch.training.timing import peak_memory
    from recipes.scaling.timings import WARM_UP_STEPS
    from tests.support.loop import loop_steps

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    steps, length = _shape(rehearse)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of(size, device=device)
    rows = torch.randint(0, VOCABULARY, (GLOBAL_BATCH * steps, length), generator=torch.Generator().manual_seed(0))
    batch = {"micro": 8, "accumulation": GLOBAL_BATCH // 8, "learning_rate": RATE, "bf16": True, "device": device}
    trained = loop_steps(torch.compile(model) if compiled else model, rows, steps=steps, **batch)
    seconds = [seconds for _, seconds in trained]
    step_time = statistics.mean(seconds[WARM_UP_STEPS:])
    tokens = GLOBAL_BATCH * length / step_time
    return {
        "tokens/s": tokens,
        "MFU": _mfu(tokens, model, length),
        "step ms": step_time * 1000,
        "peak GiB": peak_memory()["peak_memory_bytes"] / GIB,
        "start s": sum(seconds) - len(seconds) * step_time,
    }


def recipe(size: str, flags: str, rehearse: bool, work: Path) -> Figures:
    """A training by `recipes train`: speed, memory, and the parts of a step from --measure's row.

    `start s` is what the first steps took longer than the others, compilation among it.
    """
    from launch.data.demo import demo_tokenizer
    from recipes.scaling.timings import PARTS

    steps, length = _shape(rehearse)
    model, output = work / size, work / "out"
    if not (model / "tokenizer.json").exists():  # written last
        model_of(size, "bfloat16").save_pretrained(model)
        demo_tokenizer().save_pretrained(model)
    shutil.rmtree(output, ignore_errors=True)  # so that nothing is resumed
    output.mkdir()
    data = texts_of(work / f"{size}.jsonl", [length] * GLOBAL_BATCH * steps)
    own = {"model_name_or_path": model, "dataset_name": data, "max_length": length, "max_steps": steps}
    own |= {"learning_rate": RATE, "global_batch_size": GLOBAL_BATCH, "save_strategy": "no"}
    own |= {"measure": output / "timings.jsonl", "output_dir": output}
    own |= {} if "--num_processes" in flags else {"num_processes": 1}
    words = [word for name, value in own.items() for word in (f"--{name}", str(value))]
    outcome = run([*COMMAND, "train", *flags.split(), *words], output, cwd=ROOT)
    print(outcome.output, flush=True)
    if outcome.record.get("status") != "finished":
        errors = re.findall(r"^(?:\[rank\d+\]: *)?((?:[\w.]*Error: |error  ).*)$", outcome.output, flags=re.M)
        raise RuntimeError(f"exit code {outcome.code}: {(errors or ['see the log'])[0]}")
    row, tokens = json.loads((output / "timings.jsonl").read_text()), outcome.record["tokens_per_second"]
    of_one = tokens / row["num_processes"]
    return {
        "tokens/s": tokens,
        "MFU": None if "--use_peft" in flags else _mfu(of_one, model_of(size, device="meta"), length),
        "step ms": 1000 * row["step_time"],
        "peak GiB": row["peak_memory"] / GIB,
        "start s": outcome.record["train_runtime"] - steps * row["step_time"],
        "parts of a step, ms": ", ".join(f"{name} {1000 * row[name]:.1f}" for name in PARTS if row.get(name)),
    }


def _shape(rehearse: bool) -> tuple[int, int]:
    """Steps of a training, and tokens of a sequence."""
    from recipes.scaling.timings import WARM_UP_STEPS

    return (WARM_UP_STEPS + 3, 64) if rehearse else (WARM_UP_STEPS + STEPS, LENGTH)


def model_of(size: str, dtype: str = "float32", device: str = "cpu"):
    """A Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False, **SIZES[size])
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype))


def _mfu(tokens_per_second: float, model, length: int) -> float | None:
    """The share of the GPU's peak; the input embedding, which is not tied, is a lookup."""
    from recipes.planner.speed import model_flops
    from recipes.run import hardware

    peak, flops = hardware.read().peak_flops, model_flops(model.num_parameters(True), model.config, length)
    return tokens_per_second * flops / peak if peak else None
