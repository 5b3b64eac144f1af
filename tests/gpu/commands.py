"""Everything about speed that needs a card: the doctor, and the parts of a step of baseline beside standard and fast.

    python -m tests.gpu.commands [--size 0.5B] [--output outputs/gpu_scaling]

On one GPU it measures one process, on several all sizes up to them. Prints the doctor's lines and the report's
verdicts; the pictures, tables and the page are in OUTPUT/report (pictures need matplotlib). The model is made from a
config: nothing is fetched.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from launch.training.demo import demo_tokenizer
from tests.gpu.speed import LENGTH, SIZES, model_of
from tests.support.running import ROOT
from tests.support.wide import texts_of


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu_scaling"))
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--repeats", default="3")
    parser.add_argument("--steps", default="30")
    options = parser.parse_args()
    recipes = [sys.executable, "-m", "launch"]
    subprocess.run([*recipes, "doctor"], cwd=ROOT, check=False)

    folder = options.output.resolve()
    model, data = folder / options.size, folder / "texts.jsonl"
    model_of(options.size).save_pretrained(model)
    demo_tokenizer().save_pretrained(model)
    texts_of(data, [LENGTH] * 2048)
    sizes = [str(size) for size in (1, 2, 4, 8) if size <= max(1, torch.cuda.device_count())]
    training = ["--model_name_or_path", str(model), "--dataset_name", str(data), "--max_length", str(LENGTH)]
    measure = [*recipes, "scale", "run", "--repeats", options.repeats, "--steps", options.steps]
    measure += ["--output", str(folder), "--scaling", "strong"]
    for names, worlds in ((["baseline"], sizes[:1]), (["standard", "fast"], sizes)):
        subprocess.run([*measure, "--recipe", *names, "--num_processes", *worlds, *training], cwd=ROOT, check=True)
    report = ["scale", "report", str(folder / "timings.jsonl"), "--output", str(folder / "report")]
    subprocess.run([*recipes, *report], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
