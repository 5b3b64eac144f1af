"""`recipes scale run`: measure one training at several world sizes and recipes, as rows of timings.

The runs of different sizes alternate, so that other load on the machine slows all sizes alike. On
a machine without GPUs, each process gets the same number of cores at every size, as if the cores
were its GPU.
"""

import argparse
import contextlib
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from launch.flags import Commands, count
from launch.host import processes
from launch.host.secrets import without_secrets
from launch.jobs.job import Job, checked_job
from launch.jobs.local import Local
from launch.scaling.plots import NO_PICTURES
from launch.terminal import duration, plural
from recipes.errors import mistake
from recipes.rules.facts import installed
from recipes.run import Settings, with_flags
from recipes.run.hardware import read as read_hardware
from recipes.run.hardware import usable_cores
from recipes.scaling.advice import BEFORE, Advice, advise, applied
from recipes.scaling.analyse import Series, Size, analyse
from recipes.scaling.causes import milliseconds
from recipes.scaling.timings import WARM_UP_STEPS, Timing, append, name_of, read, require_room

TIMINGS = "timings.jsonl"
_LAST_LINES = 15
_SET_HERE = ("output_dir", "measure", "max_steps", "num_train_epochs", "recipe", "fit_only")


@dataclass(frozen=True)
class Point:
    """A training to measure, at one world size and one global batch."""

    recipe: str
    num_processes: int
    global_batch: int
    series: tuple[str, ...]  # the kinds of scaling that the point belongs to
    changed: Settings = field(default_factory=dict)  # the flags of the advice that this point tries
    applied: str = ""
    predicted: float | None = None

    @property
    def title(self) -> str:
        world = plural(self.num_processes, "process")
        return f"{self.applied or self.recipe}, {world}, global batch {self.global_batch}"


_FLAGS = f"""
--repeats N      runs of each size [3]
--steps N        measured steps per run, after {WARM_UP_STEPS} warm-up steps [20]
--name NAME      name of the training in the report [the model's]
--output FOLDER  folder for timings.jsonl and logs [outputs/scale]
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "run",
        prog="recipes scale run",
        help="measure a training at several world sizes and recipes",
        description="Measure a training at several world sizes and recipes, or try the advice of the report.",
        usage="recipes scale run [--num_processes N ...] [--recipe NAME ...] [--scaling strong weak] [--repeats N] "
        "[--steps N] [--name NAME] [--output FOLDER] [--apply [KEY]] [any train.py flags]",
    )
    sizes = "world sizes [1, 2, 4, ... up to the number of GPUs; 1 and 2 without GPUs]"
    parser.add_argument("--num_processes", type=count, nargs="+", help=sizes)
    parser.add_argument("--recipe", nargs="+", help="recipes to measure [standard]")
    kinds = "strong: the same global batch at every size; weak: the same batch per process [both]"
    parser.add_argument("--scaling", nargs="+", choices=("strong", "weak"), default=["strong", "weak"], help=kinds)
    parser.takes(scale_run, _FLAGS, repeats=3, steps=20, output="outputs/scale")
    applying = "try the report's first advice, or the advice with this KEY, in turn with the measured settings"
    parser.add_argument("--apply", nargs="?", const="", metavar="KEY", help=applying)


def scale_run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    for flag in (word.partition("=")[0] for word in argv if word.startswith("--")):
        if flag.removeprefix("--").replace("-", "_") in _SET_HERE:
            raise mistake(flag, "is set by `recipes scale run`", f"leave {flag} out; use --output FOLDER or --steps N")
    folder = Path(options.output)
    file = folder / TIMINGS
    if options.apply is None:
        name = options.name or name_of(checked_job(None, argv, Local().place(1)).run)
        found = points(argv, options.scaling, sizes=options.num_processes, recipes=options.recipe)
        _refuse_another_training(file, name, argv)
    else:
        if argv:
            raise mistake(argv[0], "does not go with --apply, which repeats the measured runs", f"leave {argv[0]} out")
        if not file.exists():
            raise mistake("apply", f"there is no {file} yet", f"first run `recipes scale run --output {folder}`")
        series, size = _chosen(analyse(read([file])), options)
        name, argv = size.typical.name, shlex.split(size.typical.command)
        found = _before_and_after(size, _find(options.apply, advise(size, series), size))
    for point in found:  # check all points before the first one starts
        _job(point, argv, options.steps, folder)
    require_room(file)
    (folder / "logs").mkdir(exist_ok=True)
    if not installed("matplotlib"):
        print(NO_PICTURES, file=sys.stderr)
    print(f"{len(found)} trainings x {options.repeats} runs x {options.steps} steps; timings go to {file}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = _measure_in_turns(found, argv, name, folder, steps=options.steps, repeats=options.repeats)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the timings measured so far are in {file}", file=sys.stderr)
        return 130
    if not file.stat().st_size:
        print("\nnothing was measured: every run failed", file=sys.stderr)
        return 1
    for tried in applied(read([file])):
        if tried.title == found[-1].applied:
            print(f"\n{tried.title}: {tried.words}")
    print(f"\nrecipes scale report {shlex.quote(str(file))} --output {shlex.quote(str(folder / 'report'))}")
    return 1 if failed else 0


def points(
    argv: Sequence[str],
    scaling: Sequence[str],
    sizes: Sequence[int] | None = None,
    recipes: Sequence[str] | None = None,
) -> list[Point]:
    """Return the points to measure: by default the recipe `standard` at 1, 2, 4, ... processes.
    Raises `UserError` for an illegal run, or a batch that weak scaling cannot split evenly.
    """
    gpus = len(read_hardware().gpus)
    sizes = sorted(set(sizes or [size for size in (1, 2, 4, 8, 16) if size <= (gpus or 2)]))
    found = []
    for recipe in recipes or ["standard"]:
        batch = checked_job(recipe, argv, Local().place(1)).run.batch.total
        if "weak" in scaling and batch % sizes[-1]:
            what = f"a global batch of {batch} cannot be split evenly over {sizes[-1]} processes"
            raise mistake("global_batch_size", what, f"set --global_batch_size to a multiple of {sizes[-1]}")
        batches: dict[tuple[int, int], list[str]] = {}
        for size in sizes:
            for kind in scaling:
                at = batch if kind == "strong" else batch // sizes[-1] * size
                batches.setdefault((size, at), []).append(kind)
        found += [Point(recipe, size, at, tuple(kinds)) for (size, at), kinds in batches.items()]
    return found


def _refuse_another_training(file: Path, name: str, argv: Sequence[str]) -> None:
    """Raise `UserError` if the file holds another training with this name, because the analysis
    treats rows with the same name as one training.
    """
    if not file.exists() or not file.stat().st_size:  # empty if an earlier run ended before its first row
        return
    now = shlex.join(argv)
    for then in {row.command for row in read([file]) if row.name == name} - {now}:
        what = f"{file} holds timings of {name} with {then or 'no flags'}; this run has {now or 'no flags'}"
        raise mistake("output", what, "choose another --output, or another --name for this training")


def _job(point: Point, argv: Sequence[str], steps: int, folder: Path) -> Job:
    """Return a point's job with output in `folder`. Raises `UserError` if the run is not legal."""
    flags = {
        "global_batch_size": point.global_batch,
        "max_steps": WARM_UP_STEPS + steps,
        "output_dir": folder,
        "measure": folder / TIMINGS,
        **point.changed,
    }
    return checked_job(point.recipe, with_flags(argv, flags), Local().place(point.num_processes))


def _measure_in_turns(
    points: list[Point], argv: Sequence[str], name: str, folder: Path, steps: int, repeats: int
) -> list[Point]:
    """Measure every point `repeats` times, and reverse the order after each round.
    Return the points that failed. A failed point is not measured again.
    """
    largest = max(point.num_processes for point in points)
    failed: list[Point] = []
    began = time.monotonic()
    for repeat in range(repeats):
        if repeat == 1:
            one = time.monotonic() - began
            print(f"a round took {duration(one)}, so about {duration(one * (repeats - 1))} are left", flush=True)
        for point in points if repeat % 2 == 0 else reversed(points):
            if point in failed:
                continue
            with _on_cores(point.num_processes, largest):
                row = _measure(point, argv, steps, folder, repeat + 1)
            if row is None:
                failed.append(point)
                continue
            row = replace(row, name=name, command=shlex.join(argv), applied=point.applied, predicted=point.predicted)
            append(folder / TIMINGS, [replace(row, scaling=kind) for kind in point.series])
            speed = f"{(row.samples or 0) / row.epoch_time:.3g} samples/s"
            took = f"{milliseconds(row.step_time or 0)} per step, {speed}"
            print(f"{repeat + 1}/{repeats}  {point.title}: {took}", flush=True)
    return failed


def _measure(point: Point, argv: Sequence[str], steps: int, folder: Path, repeat: int) -> Timing | None:
    """Measure a run and keep only its log. If the run fails, print the log's end, return None."""
    log = folder / "logs" / f"{re.sub('[^A-Za-z0-9]+', '-', point.title)}-{repeat}.log"
    with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as place:
        job = _job(point, argv, steps, Path(place))
        with log.open("wb") as stream:
            code = _run(without_secrets(Local().render(job)), stream)
        if code == 0:
            return read([Path(place) / TIMINGS])[0]
    print(f"{point.title}: failed, exit code {code}; the end of {log}:", file=sys.stderr)
    print("\n".join(processes.last_lines(log, _LAST_LINES)), file=sys.stderr, flush=True)
    return None


def _run(text: str, log: IO[bytes]) -> int:
    """Run a job's script, return its exit code. On an interrupt, end the training and re-raise."""
    process = processes.start(["bash", "-c", text, "recipes"], log)
    try:
        return process.wait()
    except BaseException:
        process.terminate()  # the script forwards the signal to the training
        process.wait()
        raise


@contextlib.contextmanager
def _on_cores(world_size: int, most: int) -> Iterator[None]:
    """Without GPUs, give each process as many cores as a process has in the largest world."""
    if read_hardware().cuda or not hasattr(os, "sched_setaffinity"):
        yield
        return
    all_cores = os.sched_getaffinity(0)
    own = sorted(all_cores)[: max(1, usable_cores() // most) * world_size]
    os.sched_setaffinity(0, own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


# --- Trying advice of the report -----------------------------------------------------------------


def _before_and_after(size: Size, advice: Advice) -> list[Point]:
    """Print the advice. Return two points: the training as measured, and with the advice."""
    row, batch, changed = size.typical, size.typical.global_batch or 0, dict(advice.flags)
    before = Point(row.recipe, row.num_processes, batch, (row.scaling,), {}, f"{BEFORE}: {advice.title}")
    processes = changed.pop("num_processes", row.num_processes)  # no flag of train.py
    after = replace(before, num_processes=processes, changed=changed, applied=advice.title)
    after = replace(after, predicted=advice.gain, global_batch=changed.get("global_batch_size", batch))
    print(f"{advice.title}: {advice.why}; predicted {advice.gain:.2f} times the throughput")
    return [before, after]


def _chosen(every: list[Series], options: argparse.Namespace) -> tuple[Series, Size]:
    """Return the series and the world size that match the flags. Of several matches, prefer strong
    scaling, then the largest world size. Raises `UserError` if nothing matches the flags.
    """
    found = [
        (series, size)
        for series in every
        for size in series.sizes
        if series.scaling in options.scaling
        and (not options.recipe or series.recipe in options.recipe)
        and (not options.num_processes or size.num_processes in options.num_processes)
        and (not options.name or series.name == options.name)
    ]
    if not found:
        there = ", ".join(f"{series.title} at {size.num_processes}" for series in every for size in series.sizes)
        raise mistake("apply", "no timings match these flags", f"set --recipe, --num_processes, --name as in: {there}")
    return max(found, key=lambda pair: (pair[0].scaling == "strong", pair[1].num_processes))


def _find(key: str, advice: list[Advice], size: Size) -> Advice:
    """Return the advice with this key, or the first advice if the key is empty. Only advice that
    changes flags is tried. Raises `UserError` if there is no such advice.
    """
    ready = [one for one in advice if one.flags]
    found = next((one for one in ready if key in ("", one.key)), None)
    if found:
        return found
    world, keys = plural(size.num_processes, "process"), [one.key for one in ready]
    fix = f"choose one of {', '.join(keys)}" if keys else "choose a --num_processes that the report has advice for"
    raise mistake("apply", f"the report has no advice {key or 'that can be tried'} for {world}", fix)
