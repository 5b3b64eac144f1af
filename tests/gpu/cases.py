"""The measurements on GPUs, each in a process of its own: the speed of trainings, the parts of a
step, and memory against the plan.

A step trains 16 sequences of 2048 tokens, the same ones in the hand-written loop and in the
recipes, which train.py trains. Models are initialised from a configuration, so nothing is
downloaded. Several cases run at once, so that one compiles while another is timed: after its first
step, which may compile, a case has the GPU for itself. The first three steps are not timed.
"""

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from launch.host import processes
from launch.host.memory import ran_out
from recipes.run import hardware
from tests.gpu import memory
from tests.support.running import read_record
from tests.support.wide import texts_of

Figures = dict[str, Any]
OK, OUT_OF_MEMORY = "ok", "out of memory"
GIB = 2**30
LENGTH, GLOBAL_BATCH, STEPS, VOCABULARY, RATE = 2048, 16, 7, 32_000, 1e-4
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "0.5B": {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 20, "num_attention_heads": 20},
    "1.2B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20, "num_attention_heads": 16},
    "3B": {"hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32, "num_attention_heads": 20},
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
WHOLE = "--use_regional_compilation false"
VARIANTS = {
    "fast, whole compile": f"--recipe fast {WHOLE}",
    "fast, micro 16": "--recipe fast --per_device_train_batch_size 16",
    "fast, no compile": "--recipe fast --torch_compile false",
    "fast, no compile, optimizer not fused": "--recipe fast --torch_compile false --optim adamw_torch",
    "fast, no compile, fixed segments": "--recipe fast --torch_compile false --expandable_segments false",
    "fast, whole compile, sdpa": f"--recipe fast {WHOLE} --attn_implementation sdpa",
    "fast, whole compile, no Liger": f"--recipe fast {WHOLE} --use_liger_kernel false",
    "fast, checkpointing": "--recipe fast --gradient_checkpointing",
}
LORA = "--recipe fast --use_peft --per_device_train_batch_size 4"


@dataclass(frozen=True)
class Case:
    """One measurement, which takes about `seconds` on an H200, with imports and compilation, and
    `gib` GiB of its memory.

    `measure` gets a folder for models and outputs; it returns figures by their names.
    """

    group: str
    name: str
    seconds: int
    measure: Callable[[Path], Figures]
    plan: Callable[[str], Figures] | None = None  # of memory, for a GPU by its name
    gib: int = 62


def all_cases(rehearse: bool) -> list[Case]:
    """The cases for one GPU, the most valuable first; or those of a rehearsal, with tiny models."""

    def speed(size: str, name: str, measure: Callable[..., Figures], *how: Any, seconds: int = 35) -> Case:
        gib = 70 if "micro 16" in name else 64 if name in ("loop", "LoRA") else 50
        gib = {"0.5B": gib // 2, "3B": 2 * gib}.get(size, gib)
        return Case("speed", f"{size} {name}", seconds, partial(measure, size, *how, rehearse), gib=gib)

    large, small, lora = ("tiny", "tiny", "tiny") if rehearse else ("1.2B", "0.5B", "7B")
    cases: list[Case] = []
    for size in dict.fromkeys((large, small)):
        cases += [speed(size, "loop", loop, False, seconds=25), speed(size, "loop, compiled", loop, True)]
        cases += [speed(size, name, recipe, flags) for name, flags in RECIPES.items()]
        if size == large:
            cases.append(speed(lora, "LoRA", recipe, LORA, seconds=60))
            cases.append(speed(lora, "LoRA, whole compile", recipe, f"{LORA} {WHOLE}", seconds=160))
            cases.append(Case("parts of a step", f"{size} parts", 25, partial(parts, size, rehearse)))
            cases += [speed(size, name, recipe, flags) for name, flags in VARIANTS.items()]
    cases += [] if rehearse else [speed("3B", "fast", recipe, RECIPES["fast"])]
    for one in memory.cases(rehearse):
        cases.append(Case("memory", str(one), 25, partial(memory.measure, one), partial(memory.predicted, one)))
    return cases


# --- A process for each ---------------------------------------------------------------------------


def measured(name: str, work: Path, rehearse: bool, deadline: float) -> dict[str, Any]:
    """The row of a case: its status and figures, and the end of its log if it failed.

    The process is forked from one that has imported everything; but bitsandbytes starts CUDA when
    it is imported, which a fork cannot use. At the deadline the process is killed with all that it
    started: what is left on a GPU changes the figures of the next case.
    """
    began = time.monotonic()
    context = multiprocessing.get_context(
        "spawn" if find_spec("bitsandbytes") and hardware.read().cuda else "forkserver"
    )
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.support.preloaded"])
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
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), "TORCHINDUCTOR_COMPILE_THREADS": "5"}
    try:
        (case,) = (case for case in all_cases(rehearse) if case.name == name)
        row = {"status": OK, "figures": case.measure(work)}
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [type(error).__name__]
        row = {"status": OUT_OF_MEMORY if ran_out(error) else f"failed: {lines[-1][:160]}"}
    sys.stdout.flush()
    (folder / "part").write_text(json.dumps(row))
    (folder / "part").replace(folder / "answer.json")


# --- What is measured -----------------------------------------------------------------------------


def loop(size: str, compiled: bool, rehearse: bool, work: Path) -> Figures:
    """The hand-written loop: plain PyTorch in bf16 autocast, on the same weights and rows."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
    first = [next(trained)] if compiled else []
    with _alone(work / "gpu"):
        losses, seconds = zip(*first, *trained, strict=True)
    step_time = statistics.median(seconds[WARM_UP_STEPS:])
    return _speed(step_time, model, length) | {"start s": seconds[0] - step_time, "mean loss": statistics.mean(losses)}


def recipe(size: str, flags: str, rehearse: bool, work: Path) -> Figures:
    """A training by train.py in this process: its speed and its memory.

    `start s` is what the first step took longer than the others, compilation among it.
    """
    steps, length = _shape(rehearse)
    clock = _clock(work)
    record = _trained(size, flags, rehearse, work, lambda trainer: trainer.add_callback(clock))
    step_time = clock.step_time()
    model = None if "--use_peft" in flags else model_of(size, device="meta")
    start = record["train_runtime"] - clock.waited - steps * step_time
    return _speed(step_time, model, length) | {"start s": start, "mean loss": record["train_loss"]}


def parts(size: str, rehearse: bool, work: Path) -> Figures:
    """The milliseconds of a step's parts as train.py measures them, and those of the same steps in
    the trace of torch's profiler.
    """
    from torch.autograd import DeviceType
    from torch.profiler import profile, record_function
    from transformers import TrainerCallback

    from recipes.scaling.timings import WARM_UP_STEPS, read

    profiler, file = profile(), work / "parts.jsonl"

    class Profiled(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == WARM_UP_STEPS:
                profiler.start()

        def on_step_end(self, args, state, control, **_):
            if state.global_step == state.max_steps:
                profiler.stop()

    def named(trainer) -> None:
        trainer.add_callback(Profiled())
        for owner, name in (trainer, "compute_loss"), (trainer.accelerator, "clip_grad_norm_"):
            setattr(owner, name, record_function(name)(getattr(owner, name)))

    _trained(size, f"--recipe standard --measure {file}", rehearse, work, named)
    (timing,) = read([file])
    events = list(profiler.events())
    device = max((one.device_type for one in events), key=lambda kind: kind == DeviceType.CUDA)
    names = ("compute_loss", "clip_grad_norm_", "Optimizer.step")
    spans = [one for one in events if one.device_type == device and one.name.startswith(names)]
    spans.sort(key=lambda one: one.time_range.start)
    traced = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    for span, following in pairwise(spans):
        if span.name == "compute_loss":  # what follows on the GPU is its backward
            traced["forward"] += span.time_range.end - span.time_range.start
            traced["backward"] += following.time_range.start - span.time_range.end
        elif span.name == "clip_grad_norm_":
            traced["optimizer"] += following.time_range.end - span.time_range.start
    steps = _shape(rehearse)[0] - WARM_UP_STEPS
    figures: Figures = {}
    for part, microseconds in traced.items():
        measured, trace = getattr(timing, part), microseconds / steps / 1e6
        figures |= {
            f"{part} ms": measured * 1e3,
            f"{part} in the trace": trace * 1e3,
            f"{part} off": measured / trace - 1,
        }
    return figures


def _trained(size: str, flags: str, rehearse: bool, work: Path, prepare: Callable[[Any], None]) -> dict[str, Any]:
    """The run.json of a training by train.py in this process. `prepare` gets its trainer."""
    from launch.train import main
    from launch.training import trainer

    steps, length = _shape(rehearse)
    folder, data = _prepared(size, length, steps, work)
    output, build = Path(tempfile.mkdtemp(dir=work)), trainer.build_trainer
    own = {"model_name_or_path": folder, "dataset_name": data, "max_length": length, "max_steps": steps}
    own |= {"learning_rate": RATE, "global_batch_size": GLOBAL_BATCH, "save_strategy": "no"}
    own |= {"train_sampling_strategy": "sequential", "output_dir": output}

    def prepared(*built, **more):
        result = build(*built, **more)
        prepare(result)
        return result

    trainer.build_trainer = prepared
    code = main([*flags.split(), *(word for name, value in own.items() for word in (f"--{name}", str(value)))])
    sys.stdout.flush()
    record = read_record(output)
    shutil.rmtree(output)
    if record.get("status") != "finished":
        raise RuntimeError(record.get("error") or f"exit code {code}")
    return record


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock: the GPU's, so that no other case uses it meanwhile, or a model's."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _clock(work: Path):
    """A callback that times the steps on the GPU's own clock, without waiting for the GPU."""
    import torch
    from transformers import TrainerCallback

    from recipes.scaling.timings import WARM_UP_STEPS

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.turn, self.marks, self.waited = contextlib.ExitStack(), [], 0.0

        def on_step_begin(self, args, state, control, **_):
            if state.global_step == int(args.torch_compile):
                began = time.perf_counter()
                self.turn.enter_context(_alone(work / "gpu"))
                self.waited = time.perf_counter() - began
            if state.global_step == WARM_UP_STEPS:
                self._mark()

        def on_step_end(self, args, state, control, **_):
            if state.global_step > WARM_UP_STEPS:
                self._mark()
            if state.global_step == state.max_steps:
                self.step_time()
                self.turn.close()

        def _mark(self) -> None:
            cuda = torch.cuda.is_available()
            self.marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
            if cuda:
                self.marks[-1].record()

        def step_time(self) -> float:
            """The median, in seconds."""
            if not torch.cuda.is_available():
                return statistics.median(after - before for before, after in pairwise(self.marks))
            torch.cuda.synchronize()
            return statistics.median(before.elapsed_time(after) for before, after in pairwise(self.marks)) / 1000

    return Clock()


def _speed(step_time: float, model, length: int) -> Figures:
    """Tokens a second, the share of the GPU's peak if all weights are trained, and memory."""
    from recipes.planner.speed import model_flops

    tokens, peak = GLOBAL_BATCH * length / step_time, hardware.read().peak_flops
    figures: Figures = {"tokens/s": tokens, "MFU": None, "step ms": step_time * 1000}
    if peak and model is not None:  # the input embedding, which is not tied, is a lookup
        computing = sum(one.numel() for one in model.parameters()) - model.get_input_embeddings().weight.numel()
        figures["MFU"] = tokens * model_flops(computing, model.config, length) / peak
    return figures | {f"{name} GiB": size / GIB for name, size in memory.peaks().items()}


def _prepared(size: str, length: int, steps: int, work: Path) -> tuple[Path, Path]:
    """A model's folder, and a file of texts: one text fills one row."""
    model, data = work / size, work / f"{length}.jsonl"
    with _alone(work / f"{size}.lock"):
        if not model.exists():  # made by another process: this one has not chosen torch's allocator yet
            maker = multiprocessing.get_context("spawn").Process(target=_save_model, args=(size, model))
            maker.start()
            maker.join()
            texts_of(data, [length] * GLOBAL_BATCH * steps)
    return model, data


def _save_model(size: str, folder: Path) -> None:
    from launch.data.demo import demo_tokenizer

    model_of(size, "bfloat16").save_pretrained(folder)
    demo_tokenizer().save_pretrained(folder)


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
