"""A `Job` is one resolved run with its nodes and processes. A `Target` is a place to send jobs to.

Every target renders the same `Job`.
"""

import contextlib
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from launch.data.columns import require_columns
from launch.host.launcher import LAUNCHER
from launch.host.processes import last_lines
from launch.host.secrets import refuse_tokens, without_secrets
from launch.output.submission import Submission
from launch.terminal import console, plural, print_problems
from recipes.errors import mistake
from recipes.flags import flag
from recipes.rules.check import require_legal
from recipes.run import RunSpec, resolve, with_fit, with_flags
from recipes.run.engine import from_yaml
from recipes.run.hardware import Gpu
from recipes.run.place import Place, launch_yaml

SCRIPT = Path(__file__).resolve().parents[1] / "train.py"

# The GPU assumed on nodes that cannot be inspected from here. train.py checks again on the node.
ASSUMED_GPU = Gpu("GPU of compute capability 8.0", (8, 0), 80 << 30)


@dataclass(frozen=True)
class Job:
    """A run and its number of nodes. `argv` are train.py's arguments, `config` an Accelerate YAML.

    With `preflight` every node runs `recipes doctor` first; after a failed check nothing starts.
    """

    run: RunSpec
    nodes: int
    argv: tuple[str, ...]
    config: str
    script: str = str(SCRIPT)
    preflight: bool = False

    @property
    def launched(self) -> str:
        """The engine that `accelerate launch` starts. train.py may start another engine itself."""
        return from_yaml(self.config).kind

    @property
    def folder(self) -> Path:
        """The output folder as the user wrote it, perhaps relative to the current folder."""
        return Path(self.run["output_dir"])

    @property
    def command(self) -> list[str]:
        """The script and its arguments. Each `$` is doubled if torch elastic would expand it."""
        argv = [self.script, *self.argv]
        return argv if self.launched == "single" else [word.replace("$", "$$") for word in argv]

    @property
    def title(self) -> str:
        world = f"{plural(self.nodes, 'node')} x {plural(self.run.local_world_size, 'process')}"
        return f"{self.run.recipe.name} on {self.run.engine_title}, {world}, batch {self.run.batch}"


def checked_job(
    recipe: str | None,
    argv: Sequence[str],
    place: Place,
    data: Sequence[str] = (),
    preflight: bool = False,
    starts_here: bool = False,
) -> Job:
    """Return the job that runs train.py with the arguments `argv` in `place`. Check the run first.

    If `recipe` is None, `argv` or --config's file may name the recipe; the default is `standard`.
    `data` names the data that the target mounts (`--data`). With `starts_here`, train.py starts
    next in this terminal, so train.py prints the advice itself, and no text of the job is stored.

    Raises `UserError` with every problem of the run, or if the engine starts only one of several
    requested processes, or if an access token would be stored in the job's text.
    """
    words = ["--recipe", recipe, *argv] if recipe else list(argv)
    run = with_fit(resolve(words, place, {"dataset_name": list(data)} if data else {}, "--data"))
    advice = require_legal(run) + require_columns(run)
    if advice and not starts_here:
        print_problems(advice, console(stderr=True))
    if run.engine.kind == "single" and run.world_size > 1:
        what = f"{run.recipe.name} trains in one process, but {run.world_size} processes are asked for"
        raise mistake("num_processes", what, "use one process, or --recipe standard")
    if not starts_here:
        refuse_tokens(run)
    argv = ("--recipe", run["recipe"], *with_flags(argv, {"recipe": None}))
    yaml = Path(place.yaml.source).resolve() if place.yaml else launch_yaml(run.recipe, run["deepspeed"])
    return Job(run, run.world_size // run.local_world_size, argv, str(yaml), preflight=preflight)


# --- Commands for bash ----------------------------------------------------------------------------


def launch_words(job: Job, python: str = sys.executable) -> list[str]:
    """Return the command of our launcher, with the options that are the same on every node.

    The launcher is started by its path, which works without an activated environment.
    """
    words = [python, str(LAUNCHER), "--config_file", job.config]
    words += ["--num_machines", str(job.nodes), "--num_processes", str(job.run.world_size)]
    if job.nodes == 1 and job.launched != "single":
        words += ["--main_process_port", "0"]  # any free port, because two runs may share a machine
    return words


def preflight_command(job: Job, python: str, meeting: Sequence[str] = ()) -> list[str]:
    """Return the bash words `recipes doctor ... &&` for the job's nodes; empty without `preflight`.

    `meeting` holds the flags by which several nodes find each other. The port in `meeting` must
    differ from the launcher's port.
    """
    if not job.preflight:
        return []
    # `python launch` runs the folder as a script: this package need not be installed on the nodes.
    doctor = shlex.join([python, str(SCRIPT.parent), "doctor"])
    return [doctor, "--nodes", str(job.nodes), "--num_processes", str(job.run.world_size), *meeting, "&&"]


def flag_lines(words: Sequence[str], quote: Callable[[str], str] = shlex.quote) -> list[str]:
    """Return a line for each flag and its values, with every word quoted."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(quote(word))
        else:
            lines[-1] += f" {quote(word)}"
    return lines


def arguments(job: Job) -> list[str]:
    """Return bash lines that set the array `command` to the script and its arguments."""
    comment = ["    # torch elastic reads $$ as $"] if any("$$" in word for word in job.command) else []
    return ["command=(", *comment, *(f"    {line}" for line in flag_lines(job.command)), ")"]


# --- Targets --------------------------------------------------------------------------------------


def one_of(choices: str, help: str, default: str | None = None) -> Any:
    """Declare a target's flag whose value is one of the words in `choices`."""
    return flag(default, help, choices=tuple(choices.split()))


@dataclass(frozen=True)
class Target:
    """A place to which jobs are sent, such as Slurm. Each subclass is a dataclass of its own flags.

    The class methods answer questions about a submitted job. Unless a subclass overrides
    `print_log`, the log must be a file that this machine can read.
    """

    HELP: ClassVar[str]  # one line for `recipes submit --help`
    WRITES_HERE: ClassVar[bool] = True  # the job writes to the output folder on this machine
    ASK_EVERY: ClassVar[float] = 0.2  # seconds between two requests for a job's state

    def place(self, processes: int | None, nodes: int = 1, accelerate_config: str | None = None) -> Place:
        """Return the job's nodes, each with `processes` ranks, by default one per known GPU."""
        raise NotImplementedError

    def render(self, job: Job) -> str:
        """Return the text to send, which a dry run prints. Raises `UserError` for wrong flags."""
        raise NotImplementedError

    def stage(self, job: Job, folder: Path) -> Path | None:
        """Write the files that the job uploads, and return their folder; None if there are none."""
        return None

    def check(self, text: str, job: Job) -> None:
        """Raise `UserError` if the text must not be sent, for example because it holds a secret."""
        without_secrets(text)

    def send(self, text: str, job: Job) -> int:
        """Send the text, record and print the submission, and return the exit code."""
        raise NotImplementedError

    @classmethod
    def state(cls, submission: Submission) -> str:
        """Return the job's state as the target names it; empty if the target has forgotten the job.

        Raises `UserError` if the target cannot be reached.
        """
        raise NotImplementedError

    @classmethod
    def is_over(cls, state: str) -> bool:
        """True if a job in this state neither waits nor runs."""
        return not state

    @classmethod
    def print_log(cls, submission: Submission, folder: Path, following: bool) -> None:
        """Print the job's log so far; with `following`, keep printing until the job has ended.

        Without `following`, raises `UserError` if there is no log.
        """
        log = Path(submission.log)
        if not following and not log.exists():
            state = cls.state(submission) or "the run has ended"
            fix = f"recipes logs -f {shlex.quote(str(folder))} if the run waits or runs; else submit it again"
            raise mistake("logs", f"there is no {log}: {state}", fix)
        follow(log, lambda: not following or cls.is_over(cls.state(submission)), seconds=cls.ASK_EVERY)


def follow(log: Path, ended: Callable[[], bool], start: int = 0, seconds: float = 0.2) -> None:
    """Print the log from byte `start` on, until `ended()` is true. The log may not exist yet.
    `seconds` is the time between two reads.
    """
    done = False
    while not done:
        done = ended()  # before reading, so that the last lines are read too
        with contextlib.suppress(FileNotFoundError), log.open("rb") as stream:
            stream.seek(start)
            sys.stdout.flush()
            start += sys.stdout.buffer.write(stream.read())
            sys.stdout.buffer.flush()
        time.sleep(0 if done else seconds)


def last_line(log: str) -> str:
    """Return a log's last line about a step, or else its last line; if `log` is a URL, the URL."""
    if not Path(log).is_file():
        return log if "://" in log else ""
    lines = [line.strip() for line in last_lines(Path(log), 1000) if line.strip()]
    about_steps = [line for line in lines if re.search(r"\bstep \d+", line)]
    return (about_steps or lines or [""])[-1][:80]
