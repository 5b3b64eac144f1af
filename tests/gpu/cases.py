"""The measurements on GPUs, each in a process of its own: the doctor, the speed of trainings, and
memory against the plan.

A step trains 16 sequences of 2048 tokens: random ones in the hand-written loop, generated texts in
the recipes, which are trained by `recipes train --measure`. Models are initialised from a
configuration, so nothing is downloaded. The first steps are not timed.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
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
from tests.support.running import ROOT, read_record
from tests.support.wide import texts_of

Figures = dict[str, Any]
OK, OUT_OF_MEMORY = "ok", "out of memory"
GIB = 2**30
LENGTH, GLOBAL_BATCH, STEPS, VOCABULARY, RATE = 2048, 16, 10, 32_000, 1e-4
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
    "fast, no Liger": "--recipe fast --use_liger_kernel false",
    "fast, flex attention": "--recipe fast --attn_implementation flex_attention",
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
    plan: Callable[[str], Figures] | None = None  # of memory, for a GPU by its name


def all_cases(rehearse: bool, gpus: int = 1) -> list[Case]:
    """The cases for a machine with this number of GPUs, the most valuable first; or those of a
    rehearsal, with tiny models.
    """

    def speed(size: str, name: str, measure: Callable[..., Figures], *how: Any, seconds: int = 45) -> Case:
        return Case("speed", f"{size} {name}", seconds, partial(measure, size, *how, rehearse))

    sizes, large = (["tiny"], "tiny") if rehearse else (["0.5B", "1.2B"], "7B")
    cases = [Case("doctor", "doctor", 60, doctor)]
    for size in sizes:
        cases += [speed(size, "loop", loop, False, seconds=25), speed(size, "loop, compiled", loop, True)]
        cases += [speed(size, name, recipe, flags) for name, flags in RECIPES.items()]
    cases.append(speed(large, "LoRA", recipe, LORA, seconds=100))
    for one in memory.cases(rehearse):
        cases.append(Case("memory", str(one), 25, partial(memory.measure, one), partial(memory.predicted, one)))
    cases += [speed(size, name, recipe, flags) for size in sizes[::-1] for name, flags in VARIANTS.items()]
    shared = SHARED if gpus > 1 else ()
    return cases + [
        speed("0.5B", f"{name}, {gpus} GPUs", recipe, f"--recipe {name} --num_processes {gpus}") for name in shared
    ]


# --- A process for each ---------------------------------------------------------------------------


def measured(name: str, work: Path, rehearse: bool, deadline: float) -> dict[str, Any]:
    """The row of a case: its status and figures, and the end of its log if it failed.

    The process is forked from one that has imported everything. At the deadline it is killed with
    all that it started: what is left on a GPU changes the figures of the next case.
    """
    began = time.monotonic()
    context = multiprocessing.get_context(os.environ.get("GPU_START", "forkserver"))
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["tests.support.preloaded"])
    with tempfile.TemporaryDirectory(dir=work, ignore_cleanup_errors=True) as folder:
        process = context.Process(target=_measure, args=(name, rehearse, work, Path(folder)))
        process.start()
        process.join(deadline)
        over = process.exitcode is None
        left = psutil.Process(process.pid).children(recursive=True) if over else []
        process.kill()
        process.join()
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        end = "over its deadline" if over else processes.how_it_ended(process.exitcode or 0)
        row = json.loads(answer.read_text()) if answer.exists() else {"status": f"failed: {end}"}
        if row["status"].startswith("failed"):
            row["log"] = "\n".join(processes.last_lines(log, 60)) if log.exists() else ""
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def _measure(name: str, rehearse: bool, work: Path, folder: Path) -> None:
    """Measure one case in this process, which was forked for it."""
    with (folder / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    multiprocessing.set_start_method(None, force=True)  # for data loaders: not this process's own method
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")  # each case compiles for itself
    try:
        (case,) = (case for case in all_cases(rehearse, gpu_count()) if case.name == name)
        row = {"status": OK, "figures": case.measure(work)}
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [type(error).__name__]
        row = {"status": OUT_OF_MEMORY if ran_out(error) else f"failed: {lines[-1][:160]}"}
    sys.stdout.flush()
    (folder / "part").write_text(json.dumps(row))
    (folder / "part").replace(folder / "answer.json")


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
    """The hand-written loop: plain PyTorch in bf16 autocast, on the same weights and rows."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from launch.training.timing import peak_memory
    from recipes.scaling.timings import WARM_UP_STEPS
    from tests.support.loop import loop_steps

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    steps, length = _shape(rehearse)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder, data = _prepared(size, length, steps, work)
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    rows = torch.tensor(AutoTokenizer.from_pretrained(folder)(texts)["input_ids"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = {"micro": 8, "accumulation": GLOBAL_BATCH // 8, "learning_rate": RATE, "bf16": True, "device": device}
    trained = loop_steps(torch.compile(model) if compiled else model, rows, steps=steps, **batch)
    losses, seconds = zip(*trained, strict=True)
    step_time = statistics.mean(seconds[WARM_UP_STEPS:])
    tokens = GLOBAL_BATCH * length / step_time
    return {
        "tokens/s": tokens,
        "MFU": _mfu(tokens, model, length),
        "step ms": step_time * 1000,
        "peak GiB": peak_memory()["peak_memory_bytes"] / GIB,
        "start s": sum(seconds) - steps * step_time,
        "mean loss": round(statistics.mean(losses), 4),
    }


def recipe(size: str, flags: str, rehearse: bool, work: Path) -> Figures:
    """A training by train.py in this process: its speed and its memory.

    `start s` is what the first steps took longer than the others, compilation among it.
    """
    from launch.train import main

    steps, length = _shape(rehearse)
    folder, data = _prepared(size, length, steps, work)
    output = Path(tempfile.mkdtemp(dir=work))
    own = {"model_name_or_path": folder, "dataset_name": data, "max_length": length, "max_steps": steps}
    own |= {"learning_rate": RATE, "global_batch_size": GLOBAL_BATCH, "save_strategy": "no"}
    own |= {"train_sampling_strategy": "sequential", "output_dir": output}
    argv = [*flags.split(), *(word for name, value in own.items() for word in (f"--{name}", str(value)))]
    code = main(argv) if "--num_processes" not in flags else subprocess.call([*COMMAND, "train", *argv], cwd=ROOT)
    sys.stdout.flush()
    record = read_record(output)
    shutil.rmtree(output)
    if record.get("status") != "finished":
        raise RuntimeError(record.get("error") or f"exit code {code}")
    of_one = record["tokens_per_second"] / record["world_size"]
    return {
        "tokens/s": record["tokens_per_second"],
        "MFU": None if "--use_peft" in flags else _mfu(of_one, model_of(size, device="meta"), length),
        "step ms": 1000 * record["step_time"],
        "peak GiB": record["peak_memory_bytes"] / GIB,
        "start s": record["train_runtime"] - steps * record["step_time"],
        "mean loss": round(record["train_loss"], 4),
    }


def _prepared(size: str, length: int, steps: int, work: Path) -> tuple[Path, Path]:
    """A model's folder, and a file of texts: one text fills one row."""
    from launch.data.demo import demo_tokenizer

    model, data = work / size, work / f"{length}.jsonl"
    if not (model / "tokenizer.json").exists():  # written last
        model_of(size, "bfloat16").save_pretrained(model)
        demo_tokenizer().save_pretrained(model)
    return model, data if data.exists() else texts_of(data, [length] * GLOBAL_BATCH * steps)


def _shape(rehearse: bool) -> tuple[int, int]:
    """Steps of a training, and tokens of a sequence."""
    from recipes.scaling.timings import WARM_UP_STEPS

    return (WARM_UP_STEPS + 3, 64) if rehearse else (WARM_UP_STEPS + STEPS, LENGTH)


def model_of(size: str, dtype: str = "float32", device: str | None = None):
    """A Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False, **SIZES[size])
    with torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")):
        return LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype))


def _mfu(tokens_per_second: float, model, length: int) -> float | None:
    """The share of the GPU's peak; the input embedding, which is not tied, is a lookup."""
    from recipes.planner.speed import model_flops
    from recipes.run import hardware

    peak, flops = hardware.read().peak_flops, model_flops(model.num_parameters(True), model.config, length)
    return tokens_per_second * flops / peak if peak else None
