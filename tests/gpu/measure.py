"""Speed and memory of the recipes on one GPU, beside a hand-written loop; one call, one table.

    python -m tests.gpu.measure [--sizes 0.5B 1.2B] [--steps 20] [--output FILE.json]

Every case runs in a process of its own, on random tokens, 2048 a row, 16 rows a step. Tokens/s come from the steady
steps; MFU counts 6N + 6*layers*hidden*length FLOPs a token (causal attention counted half) against the dense bf16 peak.
Needs torch, transformers and accelerate only; a case that cannot run here says why in its row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LENGTH, GLOBAL_BATCH, VOCABULARY, RATE = 2048, 16, 32_000, 1e-4
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "0.5B": {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 20, "num_attention_heads": 20},
    "1.2B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20, "num_attention_heads": 16},
}
# What each case changes of its recipe. The loop is plain PyTorch in bf16 autocast, without and with torch.compile.
CASES: dict[str, dict] = {
    "loop": {},
    "loop compiled": {},
    "baseline": {"recipe": "baseline"},
    "standard": {"recipe": "standard", "packing": True},
    "fast": {"recipe": "fast"},
    "fast, no compile": {"recipe": "fast", "torch_compile": False},
    "fast, micro 16": {"recipe": "fast", "per_device_train_batch_size": 16},
    "fast, checkpointing": {"recipe": "fast", "gradient_checkpointing": True},
    "fast, 8-bit Adam": {"recipe": "fast", "optim": "adamw_bnb_8bit"},
}


def model_of(size: str):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False, **SIZES[size])
    return LlamaForCausalLM(config)


def rows(count: int, length: int):
    import torch

    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))


def run_loop(size: str, steps: int, length: int, compiled: bool) -> tuple[object, float, tuple[float, ...]]:
    import torch

    from launch.training.callbacks import Meter
    from tests.support.loop import loop_steps

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = model_of(size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    forward = torch.compile(model) if compiled else model
    trained = loop_steps(
        forward,
        rows(GLOBAL_BATCH * (steps + 4), length),
        steps=steps + Meter.WARM_UP_STEPS,
        micro=8,
        accumulation=GLOBAL_BATCH // 8,
        learning_rate=RATE,
        bf16=True,
        device=device,
    )
    losses, seconds = zip(*trained, strict=True)
    return model, statistics.mean(seconds[Meter.WARM_UP_STEPS :]), losses


def run_recipe(size: str, steps: int, length: int, recipe: str, **changes) -> tuple[object, float, list[float]]:
    import transformers

    import recipes
    from launch.training.callbacks import Meter
    from launch.training.trainer import RecipeTrainer, apply_ddp_settings
    from recipes.run import resolve

    with tempfile.TemporaryDirectory() as folder:
        own = {"max_steps": steps + Meter.WARM_UP_STEPS + 2, "learning_rate": RATE, "save_strategy": "no"}
        order = {"train_sampling_strategy": "sequential", "disable_tqdm": True}
        args = getattr(recipes, recipe)(folder, global_batch_size=GLOBAL_BATCH, **own, **order, **changes)
        meter = Meter()
        data = [{"input_ids": row, "labels": row} for row in rows(GLOBAL_BATCH * (steps + 8), length)]
        trainer = RecipeTrainer(model=model_of(size), args=args, train_dataset=data, callbacks=[meter])
        trainer.remove_callback(transformers.PrinterCallback)
        apply_ddp_settings(trainer, resolve(settings={"recipe": recipe}))
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return trainer.model, meter.step_time or float("nan"), losses


def measure(case: str, size: str, steps: int, length: int) -> dict:
    """One row, measured in this process."""
    from launch.training.results import flops_per_token, parameter_count, peak_memory
    from recipes.run import hardware

    if case.startswith("loop"):
        model, seconds, losses = run_loop(size, steps, length, case.endswith("compiled"))
    else:
        model, seconds, losses = run_recipe(size, steps, length, **CASES[case])
    tokens = GLOBAL_BATCH * length / seconds
    peak = hardware.read().peak_flops
    return {
        "parameters": parameter_count(model),
        "step_time": seconds,
        "tokens_per_second": tokens,
        "mfu": tokens * flops_per_token(model, length) / peak if peak else None,
        "peak_memory_bytes": peak_memory()["peak_memory_bytes"],
        "final_loss": losses[-1],
    }


def measured_apart(case: str, size: str, steps: int, length: int) -> dict:
    """The row of one case, from a process of its own; what went wrong if it did."""
    words = ["--case", case, "--sizes", size, "--steps", str(steps), "--length", str(length)]
    done = subprocess.run([sys.executable, "-m", "tests.gpu.measure", *words], capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:160]}


def table(found: dict[str, dict[str, dict]]) -> str:
    lines = ["| model | case | tokens/s | MFU | step | peak memory |", "|---|---|---|---|---|---|"]
    for size, cases in found.items():
        for case, row in cases.items():
            if "error" in row:
                lines.append(f"| {size} | {case} | {row['error']} | | | |")
                continue
            mfu = f"{row['mfu']:.1%}" if row["mfu"] else ""
            memory = f"{row['peak_memory_bytes'] / 2**30:.1f} GiB"
            speed = f"{row['tokens_per_second']:,.0f}"
            lines.append(f"| {size} | {case} | {speed} | {mfu} | {row['step_time'] * 1000:.0f} ms | {memory} |")
    return "\n".join(lines)


def versions() -> str:
    import accelerate
    import torch
    import transformers

    from recipes.run import hardware

    libraries = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, accelerate {accelerate.__version__}"
    )
    return f"{hardware.read()}, {libraries}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.5B", "1.2B"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="the numbers as JSON too")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.sizes[0], options.steps, options.length)))
        return 0
    found: dict[str, dict[str, dict]] = {size: {} for size in options.sizes}
    for size in options.sizes:
        for case in CASES:
            found[size][case] = measured_apart(case, size, options.steps, options.length)
            print(f"{size} {case}: {found[size][case]}", file=sys.stderr, flush=True)
    print(versions())
    print(table(found))
    if options.output:
        options.output.write_text(json.dumps({"machine": versions(), "rows": found}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
