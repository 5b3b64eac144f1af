"""Cases that run our commands as a user would: doctor, --measure, --fit and --on_oom next.

Models are initialised from a configuration and texts are generated, so nothing is downloaded.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu import speed
from tests.gpu.cases import Figures, Setup
from tests.support.running import ROOT, Outcome, launch, run
from tests.support.wide import LENGTH as WIDE_LENGTH
from tests.support.wide import texts_of, wide_model

GIB = 2**30
NOTE = "with a stand-in for the package datasets"
STEPS = 30
# Global batches that need more memory than there is, as one micro-batch: the plan for 0.5B and 64
# examples is 232 GiB. In a rehearsal RAM is limited, in GB.
BATCH, REHEARSED_BATCH, LIMIT = 64, 8, 1.7


class CommandFailed(RuntimeError):
    """A command did not do what the case expects. The last line says why."""


# --- The cases -----------------------------------------------------------------------------------


def doctor(setup: Setup) -> Figures:
    command = [sys.executable, "-m", "launch", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    checks = json.loads(done.stdout)["checks"]
    found = {check["title"]: check["found"] for check in checks}
    missing = re.findall(r"([\w-]+) missing", found["versions"])
    errors = [check["title"] for check in checks if check["status"] == "error"]
    if wrong := [title for title in errors if not (title == "versions" and missing)]:
        raise CommandFailed("; ".join(f"{title}: {found[title]}" for title in wrong))
    warnings = [check["title"] for check in checks if check["status"] == "warning"]
    return {
        "checks": len(checks),
        "warnings": ", ".join(warnings),
        "failed": ", ".join(errors),
        "matrices": found.get("matrices"),
        "context": found.get("CUDA context"),
        "pcie": found.get("PCIe"),
        "adam": found.get("CPU Adam"),
        "missing": missing,
    }


def parts_of_a_step(recipe: str, processes: int, setup: Setup) -> Figures:
    """Milliseconds of each part of a step, from the row that `train.py --measure` writes."""
    from recipes.catalog import RECIPES
    from recipes.scaling.timings import PARTS, WARM_UP_STEPS

    size, length, steps = ("tiny", 64, 6) if setup.rehearse else ("0.5B", speed.LENGTH, STEPS)
    model, data = material(setup, size, [length] * speed.GLOBAL_BATCH * (steps + WARM_UP_STEPS))
    output = _fresh(setup, f"parts-{recipe}-{processes}")
    flags = _flags(model, data, length, recipe=recipe, measure=output / "timings.jsonl")
    flags += ["--max_steps", str(steps + WARM_UP_STEPS), "--global_batch_size", str(speed.GLOBAL_BATCH)]
    config = "single.yaml" if processes == 1 else RECIPES[recipe]().engine
    _require_success(launch(*flags, output=output, processes=processes, config=config))
    row = json.loads((output / "timings.jsonl").read_text())
    shutil.rmtree(output)
    times = {f"{name}_ms": 1000 * row[name] for name in ("step_time", "pass_overhead", *PARTS) if name in row}
    return {**times, "peak_gib": row["peak_memory"] / GIB, **_note()}


def fit(setup: Setup) -> Figures:
    """The micro-batch that `--fit` finds, its peak, and what the planner expects of it."""
    model, data, length, flags = _memory_hungry(setup)
    output = _fresh(setup, "fit")
    flags = [*_flags(model, data, length, recipe="standard"), *flags, "--max_steps", "2"]
    _require_success(launch(*flags, "--fit", output=output, config="single.yaml"))
    found = json.loads((output / "fit.json").read_text())
    shutil.rmtree(output)
    tried = [f"{probe['micro_batch']} {'runs' if probe['fits'] else 'does not fit'}" for probe in found["probes"]]
    return {
        "micro_batch": found["micro_batch"],
        "accumulation": found["accumulation"],
        "peak_gib": found["peak_bytes"] / GIB,
        "planned_gib": _planned([*flags, "--per_device_train_batch_size", str(found["micro_batch"])], model),
        "tried": ", ".join(tried),
        **_note(),
    }


def out_of_memory(setup: Setup) -> Figures:
    """A real out of memory, after which `--on_oom next` continues with smaller micro-batches."""
    model, data, length, flags = _memory_hungry(setup)
    output = _fresh(setup, "out-of-memory")
    flags = [*_flags(model, data, length), *flags, "--max_steps", "2", "--output_dir", str(output)]
    first = flags[flags.index("--global_batch_size") + 1]
    command = [sys.executable, "-m", "launch", "submit", "local", "--recipe", "standard", "--processes_per_node", "1"]
    command += ["--on_oom", "next", "--", *flags, "--per_device_train_batch_size", first]
    outcome = run(command, output, cwd=ROOT)
    _require_success(outcome)
    smaller = re.findall(r"^out of memory: again, with batch (\d+) x (\d+)", outcome.output, flags=re.M)
    if not smaller:
        raise CommandFailed(f"memory did not run out at micro-batch {first}")
    shutil.rmtree(output)
    micro, accumulation = smaller[-1]
    return {
        "micro_batch": int(micro),
        "accumulation": int(accumulation),
        "peak_gib": outcome.record["peak_memory_bytes"] / GIB,
        "planned_gib": _planned(["--recipe", "standard", *flags, "--per_device_train_batch_size", micro], model),
        "tried": ", ".join([f"{size} out of memory" for size in (first, *(one for one, _ in smaller[:-1]))]),
        **_note(),
    }


# --- Models and data -----------------------------------------------------------------------------


def material(setup: Setup, size: str, lengths: list[int]) -> tuple[Path, Path]:
    """The folder of a model with its tokenizer, and a file of texts of these lengths in tokens."""
    from launch.data.demo import demo_tokenizer

    folder = setup.folder / "work"
    model, data = folder / size, folder / f"{size}-texts.jsonl"
    if not (model / "tokenizer.json").exists():  # written last
        speed.model_of(size).save_pretrained(model)
        demo_tokenizer().save_pretrained(model)
    return model, texts_of(data, lengths)


def _memory_hungry(setup: Setup) -> tuple[Path, Path, int, list[str]]:
    """A model, data, the length of its texts, and flags for a global batch.

    As one micro-batch it is too large: for the GPU, or in a rehearsal for a limit of RAM.
    """
    if not setup.rehearse:
        model, data = material(setup, "0.5B", [speed.LENGTH] * 2 * BATCH)
        return model, data, speed.LENGTH, ["--global_batch_size", str(BATCH)]
    folder, length = setup.folder / "work", WIDE_LENGTH // 2
    folder.mkdir(exist_ok=True)
    model, data = wide_model(folder / "wide"), texts_of(folder / "wide.jsonl", [length] * 2 * REHEARSED_BATCH)
    return model, data, length, ["--global_batch_size", str(REHEARSED_BATCH), "--memory_limit", str(LIMIT)]


def _flags(model: Path, data: Path, length: int, **others: Any) -> list[str]:
    flags = {"model_name_or_path": model, "dataset_name": data, "max_length": length, "save_strategy": "no", **others}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _fresh(setup: Setup, name: str) -> Path:
    """An empty output folder, so that no earlier attempt is resumed."""
    output = setup.folder / "work" / name
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    return output


def _planned(flags: list[str], model: Path) -> float:
    """GiB that the planner expects of a run, without the CUDA context: torch does not count it."""
    from transformers import AutoConfig

    from recipes.planner.plan import plan_run
    from recipes.run import resolve

    plan = plan_run(resolve(flags), AutoConfig.from_pretrained(model), 0, as_it_is=True)
    return (plan.components.total - plan.components.context) / GIB


# --- Running a command ---------------------------------------------------------------------------


def _note() -> Figures:
    """Whether `tests.gpu.__main__.stand_in` was needed."""
    import datasets

    return {"note": NOTE} if datasets.__version__.endswith("stand.in") else {}


def _require_success(outcome: Outcome) -> None:
    """Raises `ModuleNotFoundError` for a missing package, else `CommandFailed`."""
    print(outcome.output, flush=True)
    if outcome.code == 0 and outcome.record.get("status") == "finished":
        return
    if missing := re.search(r"No module named '([\w.]+)'", outcome.output):
        raise ModuleNotFoundError(missing[0], name=missing[1])
    raise CommandFailed(f"exit code {outcome.code}: {_reason(outcome.output)}")


def _reason(output: str) -> str:
    """The line that says why a training failed: not the launcher's traceback, which comes last."""
    errors = re.findall(r"^(?:\[rank\d+\]: *)?([\w.]*Error: .*)$", output, flags=re.M)
    lines = output.partition("Traceback (most recent call last)")[0].strip().splitlines()
    return (errors or lines[-1:] or ["no output"])[0]
