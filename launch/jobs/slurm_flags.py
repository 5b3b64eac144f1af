"""The flags of the target `slurm`, and which values of them Slurm can mean.

sbatch refuses some mistakes, and reads others as something else: `--gpus-per-node gpu:4` as four
GPUs of a type named gpu, `--time -5` as millions of days. Both are refused here, before anything is
sent. tests/launch/jobs/test_slurm_values.py asks a real sbatch about every form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from launch.flags import whole
from recipes.errors import Problem, UserError
from recipes.flags import flag

_SBATCH = "as sbatch takes it"
_GPU_DIGITS = 4  # of a count: more GPUs than any node has would take all memory here
_LATEST_SIGNAL = 65535  # seconds; sbatch refuses more


@dataclass(frozen=True)
class Slurm:
    """The flags of this target, under Slurm's own names.

    `module` and `venv` prepare the environment of the job.
    """

    partition: str | None = flag(None, _SBATCH)
    account: str | None = flag(None, _SBATCH)
    qos: str | None = flag(None, _SBATCH)
    time: str | None = flag(None, "time limit, as Slurm writes it: minutes, 8:00:00, 2-12, 2-12:00:00, UNLIMITED")
    gpus_per_node: str | None = flag(None, "a count or type:count; also the processes of a node, unless they are given")
    cpus_per_task: int | None = flag(
        None, "cores of a node for its processes and their data loading [the cluster's default, often 1]"
    )
    mem: str | None = flag(None, "memory of a node: 64G, or 0 for all of it")
    constraint: str | None = flag(None, _SBATCH)
    reservation: str | None = flag(None, _SBATCH)
    job_name: str | None = flag(None, "[the recipe]")
    module: tuple[str, ...] = flag((), "environment modules to load, in this order")
    venv: str | None = flag(None, "virtual environment to activate on the nodes")
    container_image: str | None = flag(
        None, "run in a container with python and accelerate: FILE.sif by apptainer, any other image by pyxis"
    )
    container_mounts: tuple[str, ...] = flag(
        (), "SRC[:DST[:FLAGS]] for the container, besides what the run itself names, the home folder and this one"
    )
    signal_seconds: int = flag(120, "seconds before the time limit at which the run is told to save and stop [120]")
    max_restarts: int = field(
        default=10, metadata={"help": "how often a preempted or timed-out run is requeued [10]", "type": whole}
    )

    @property
    def prepares(self) -> bool:
        """Whether the nodes have their own installation.

        Otherwise this interpreter runs there, from a shared disk.
        """
        return bool(self.venv or self.module or self.container_image)

    @property
    def gpus(self) -> int:
        """GPUs of a node: 2 for `2` and for `a100:2`. 0 if none are asked for."""
        return int((self.gpus_per_node or "0").rpartition(":")[2])


def require_valid(slurm: Slurm) -> None:
    """Raises `UserError` with every value that Slurm would refuse, or would not read as meant."""
    problems = [*_of_gpus(slurm.gpus_per_node), *_of_time(slurm), *_of_memory(slurm.mem), *_of_container(slurm)]
    if problems:
        raise UserError(*problems)


def ignored(slurm: Slurm) -> Iterator[Problem]:
    """Advice about flags that do nothing beside others. A site file gives them to every job."""
    if slurm.container_image and slurm.venv:
        yield Problem("venv", "does nothing here: the container has its own python", severity="advice")
    if slurm.container_mounts and not slurm.container_image:
        yield Problem("container_mounts", "does nothing without --container_image", severity="advice")


def seconds(limit: str) -> int | None:
    """A time limit in seconds, as Slurm reads it; None for no limit, to which 0 belongs.

    Slurm counts a started minute as a whole one. Raises ValueError for what sbatch refuses and for
    negative numbers, which it takes for a limit of thousands of years.
    """
    if limit.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return None
    found = re.fullmatch(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})?", limit, re.ASCII)
    if not found or not limit:
        raise ValueError(limit)
    numbers = [int(part) for part in (found["rest"] or "0").split(":")]
    if found["days"]:  # hours:minutes:seconds, from the left
        hours, minutes, rest = [*numbers, 0, 0][:3]
        hours += 24 * int(found["days"])
    else:  # minutes, minutes:seconds, or hours:minutes:seconds
        hours = numbers.pop(0) if len(numbers) == 3 else 0
        minutes, rest = [*numbers, 0][:2]
    return (hours * 60 + minutes + -(-rest // 60)) * 60 or None


def _of_time(slurm: Slurm) -> Iterator[Problem]:
    if slurm.signal_seconds > _LATEST_SIGNAL:
        yield Problem("signal_seconds", f"{slurm.signal_seconds} is more than Slurm takes", f"at most {_LATEST_SIGNAL}")
    if not slurm.time:
        return
    try:
        limit = seconds(slurm.time)
    except ValueError:
        forms = "minutes, hours:minutes:seconds or days-hours, such as 90, 8:00:00 or 2-12"
        yield Problem("time", f"{slurm.time!r} is not a time limit that Slurm reads", forms)
        return
    # Slurm sends the signal at once then: the run would stop and be requeued again and again.
    if limit is not None and limit <= slurm.signal_seconds:
        what = f"{slurm.time} is {limit} s, and the run is told to stop {slurm.signal_seconds} s before its end"
        yield Problem("time", what, f"a longer limit, or --signal_seconds {limit // 2}")


def _of_gpus(text: str | None) -> Iterator[Problem]:
    if not text:
        return
    first, comma, _ = text.partition(",")
    if comma:
        what = f"{text!r} mixes GPUs: every step would wait for the slowest, and one micro-batch must fit them all"
        yield Problem("gpus_per_node", what, f"one type: {first}")
        return
    bare = re.sub(r"^(gres[:/])?gpus?:", "", text)
    if bare != text:
        what = f"{text!r} names gpu, which --gpus_per_node means already: Slurm would look for a type of that name"
        yield Problem("gpus_per_node", what, f"--gpus_per_node {bare}")
    elif not re.fullmatch(r"([\w.-]+:)?\d+", text, re.ASCII):
        yield Problem("gpus_per_node", f"{text!r} is not a count of GPUs", "--gpus_per_node 4, or a100:4")
    elif len(text.rpartition(":")[2]) > _GPU_DIGITS:
        yield Problem("gpus_per_node", f"{text[:40]!r} is more than a node can have", "--gpus_per_node 4")


def _of_memory(text: str | None) -> Iterator[Problem]:
    if text and not re.fullmatch(r"\d+([KMGT]B?)?", text, re.ASCII | re.IGNORECASE):
        fix = "a whole number of MB, or with K, M, G or T: 64G"
        yield Problem("mem", f"{text!r} is not an amount of memory that Slurm reads", fix)


def _of_container(slurm: Slurm) -> Iterator[Problem]:
    for mount in slurm.container_mounts:
        if not re.fullmatch(r"/[^,:]*(:/[^,:]*(:[^,:]*)?)?", mount):
            yield Problem("container_mounts", f"{mount!r} is not a mount", "SRC, SRC:DST or SRC:DST:ro, each from /")
