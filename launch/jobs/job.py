"""A job: one resolved run, and the nodes and processes that will run it.

Every target renders the same job.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.host.launcher import LAUNCHER
from launch.host.secrets import refuse_secrets
from launch.terminal import console, plural, print_problems
from recipes.errors import mistake
from recipes.rules.check import require_legal
from recipes.run import RunSpec, here, resolve, with_fit
from recipes.run.engine import launch_yaml
from recipes.run.engine_sources import from_yaml
from recipes.run.files import find_yaml
from recipes.run.hardware import Gpu, Hardware

SCRIPT = Path(__file__).resolve().parents[1] / "train.py"
THIS_ACCELERATE = (sys.executable, str(LAUNCHER))  # works without an activated environment

# A node that cannot be looked at from here. train.py checks again on the node itself.
ASSUMED_GPU = Gpu("GPU of compute capability 8.0", (8, 0), 80 << 30)


@dataclass(frozen=True)
class Node:
    """What is known of a node before the job runs there; `processes` is how many it will run.

    `packages` are installed there besides our own requirements; None if it uses this installation.
    `data` is what the target mounts there (`--data`), which becomes --dataset_name.
    """

    hardware: Hardware
    processes: int
    packages: frozenset[str] | None = None
    data: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """`argv` is train.py's command line; `config` the Accelerate YAML.

    `shutdown_seconds` is the time between a signal to stop and the kill.
    With `preflight` every node runs `recipes doctor` first; after a failed check nothing starts.
    """

    run: RunSpec
    nodes: int
    processes_per_node: int
    argv: tuple[str, ...]
    config: str
    script: str = str(SCRIPT)
    shutdown_seconds: int = 110
    preflight: bool = False

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def launched(self) -> str:
        """What `accelerate launch` starts: train.py may start another engine under it."""
        return from_yaml(self.config).kind

    @property
    def folder(self) -> Path:
        """The output folder as the user wrote it: relative to the current folder."""
        return Path(self.run["output_dir"])

    @property
    def command(self) -> list[str]:
        """The script and its arguments. torch elastic fills in macros, and reads `$$` as `$`."""
        argv = [self.script, *self.argv]
        return argv if self.launched == "single" else [word.replace("$", "$$") for word in argv]

    @property
    def title(self) -> str:
        world = f"{plural(self.nodes, 'node')} x {plural(self.processes_per_node, 'process')}"
        return f"{self.run.recipe.name} on {self.run.engine_title}, {world}, batch {self.run.batch}"


def checked_job(
    recipe: str | None,
    argv: Sequence[str],
    node: Node,
    nodes: int = 1,
    preflight: bool = False,
    accelerate_config: str | None = None,
    says_advice: bool = True,
) -> Job:
    """The job of a legal run on `nodes` such nodes. Advice is printed, with `says_advice`: not
    where train.py follows at once, which says it.

    Raises `UserError` with every problem.
    """
    run = run_on(node, recipe, argv, nodes, accelerate_config)
    advice = require_legal(run)
    if advice and says_advice:
        print_problems(advice, console(stderr=True))
    return job_of(run, nodes, node.processes, argv, preflight, accelerate_config)


def run_on(
    node: Node, recipe: str | None, argv: Sequence[str], nodes: int = 1, accelerate_config: str | None = None
) -> RunSpec:
    """The run of train.py on `nodes` such nodes, not yet checked.

    `recipe` is None if --config's file names it, or if it is the default. `accelerate_config` is
    the file or name of an Accelerate YAML that replaces the recipe's own.
    """
    words = ["--recipe", recipe, *argv] if recipe else list(argv)
    data = {"dataset_name": list(node.data)} if node.data else {}
    place = here(
        nodes * node.processes, accelerate_config, node.processes, hardware=node.hardware, packages=node.packages
    )
    return with_fit(resolve(words, place, data, "--data"))


def job_of(
    run: RunSpec,
    nodes: int,
    processes_per_node: int,
    argv: Sequence[str],
    preflight: bool = False,
    accelerate_config: str | None = None,
    is_stored: bool = True,
) -> Job:
    """The job of a legal run.

    Raises `UserError` for a world the engine cannot start; and for a secret in `argv`, if the job's
    text `is_stored`.
    """
    if run.engine.kind == "single" and run.world_size > 1:
        raise mistake(
            "processes_per_node",
            f"{run.recipe.name} trains in one process, {run.world_size} are asked for",
            "one process, or --recipe standard",
        )
    argv = ("--recipe", run["recipe"], *argv)
    if is_stored:
        refuse_secrets(run, argv)
    own = launch_yaml(run.recipe, run["deepspeed"])
    config = find_yaml(accelerate_config).resolve() if accelerate_config else own
    return Job(run, nodes, processes_per_node, argv, str(config), preflight=preflight)


def refuse_fresh(job: Job, fix: str) -> None:
    """Raises `UserError` for --fresh in a job that its target may start again."""
    if job.run["fresh"]:
        raise mistake("fresh", "would move the run aside again at every restart of the job", fix)


def launch_command(job: Job, accelerate: Sequence[str], rank: str, address: str, port: str) -> list[str]:
    """`accelerate launch` and its options, quoted for bash.

    `rank`, `address` and `port` are bash expressions.
    """
    argv = quoted(launch_words(job, accelerate))
    if job.nodes > 1:
        argv += ["--machine_rank", rank, "--main_process_ip", address, "--main_process_port", port]
        argv += ["--rdzv_backend", "static", "--same_network"]
        if job.launched == "deepspeed":
            argv += ["--deepspeed_multinode_launcher", "standard"]  # the default, pdsh, logs in to the other nodes
    return argv


def launch_words(job: Job, accelerate: Sequence[str] = THIS_ACCELERATE) -> list[str]:
    """`accelerate launch` and its options, as far as they are the same on every node."""
    words = [*accelerate, "--config_file", job.config]
    words += ["--num_machines", str(job.nodes), "--num_processes", str(job.processes)]
    if job.nodes == 1 and job.launched != "single":
        words += ["--main_process_port", "0"]  # any free port: two runs may share a machine
    return words


def preflight_command(job: Job, python: str, rank: str, address: str, port: str) -> list[str]:
    """`recipes doctor` for the job's world and `&&`, for bash; empty without a preflight.

    `port` must differ from the launcher's, which another job on the node may hold already.
    """
    if not job.preflight:
        return []
    # `python launch` runs the folder, as a script: this package need not be installed on the nodes.
    argv = [*quoted([python, str(SCRIPT.parent)]), "doctor"]
    argv += ["--nodes", str(job.nodes), "--num_processes", str(job.processes)]
    if job.nodes > 1:
        argv += ["--machine_rank", rank, "--main_process_ip", address, "--main_process_port", port]
    return [*argv, "&&"]


def quoted(words: Sequence[str]) -> list[str]:
    """Each word quoted, so that bash passes it on unchanged."""
    return [shlex.quote(word) for word in words]


def flag_lines(words: Sequence[str], quote: Callable[[str], str] = shlex.quote) -> list[str]:
    """Quoted words: one line for each flag and its values."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(quote(word))
        else:
            lines[-1] += f" {quote(word)}"
    return lines


def arguments(job: Job) -> list[str]:
    """A bash array of the script and its arguments."""
    comment = ["    # torch elastic reads $$ as $"] if any("$$" in word for word in job.command) else []
    return ["command=(", *comment, *(f"    {line}" for line in flag_lines(job.command)), ")"]
