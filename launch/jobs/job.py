"""A job: one resolved run, and the nodes and processes that are to run it. Every target renders the same one."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import UserError, mistake
from recipes.run import RunSpec
from recipes.run.engine import shipped

SCRIPT = Path(__file__).resolve().parents[1] / "train.py"
THIS_ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")  # also where its environment is not activated

# Tokens of Hugging Face, GitHub, GitLab, OpenAI and AWS, web tokens, keys of Azure storage, and passwords in addresses,
# by how each starts and how long it is.
SECRET = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{20,}|glpat-[\w-]{15,}|\bsk-[\w-]{20,}"
    r"|\bAKIA[A-Z0-9]{16}\b|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}|[?&]sig=[\w%]{20,}|AccountKey=\S{20,}|://[^\s/:@]+:[^\s/@]+@"
)


@dataclass(frozen=True)
class Job:
    """`argv` are train.py's own words; `config` the Accelerate YAML; `shutdown_seconds` how long a signal leaves.

    With `preflight` every node runs `recipes doctor` first, and where it finds a fault the launcher never starts.
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
    def folder(self) -> Path:
        """The output folder, as it was written: relative to the current one."""
        return Path(self.run["output_dir"])

    @property
    def words(self) -> list[str]:
        """The script and its words as the launcher wants them: torch elastic reads `$$` as `$` and fills in macros."""
        words = [self.script, *self.argv]
        return words if self.run.engine.kind == "single" else [word.replace("$", "$$") for word in words]

    @property
    def title(self) -> str:
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        world = f"{nodes} x {self.processes_per_node} process{'es' * (self.processes_per_node > 1)}"
        return f"{self.run.recipe.name} on {self.run.engine.title}, {world}, batch {self.run.batch}"


def job_of(run: RunSpec, nodes: int, processes_per_node: int, argv: Sequence[str], preflight: bool = False) -> Job:
    """The job of a legal run. Raises `UserError` for a world the engine cannot start, or a secret in the words."""
    if run.engine.kind == "single" and run.world_size > 1:
        raise mistake(
            "processes_per_node",
            f"{run.recipe.name} trains in one process, {run.world_size} are asked for",
            "--nodes 1 --processes_per_node 1, or --recipe standard",
        )
    words = ("--recipe", run.recipe.name, *argv)
    _refuse_secrets(run, words)
    return Job(run, nodes, processes_per_node, words, str(shipped(run.recipe.engine)), preflight=preflight)


def launch_words(job: Job, accelerate: Sequence[str], rank: str, address: str, port: str) -> list[str]:
    """`accelerate launch` and its options, quoted for bash; `rank`, `address` and `port` are bash already."""
    words = [*quoted(accelerate), "--config_file", shlex.quote(job.config)]
    words += ["--num_machines", str(job.nodes), "--num_processes", str(job.processes)]
    if job.nodes > 1:
        words += ["--machine_rank", rank, "--main_process_ip", address, "--main_process_port", port]
        words += ["--rdzv_backend", "static", "--same_network"]
        if job.run.engine.kind == "deepspeed":
            words += ["--deepspeed_multinode_launcher", "standard"]  # the default, pdsh, logs in to the other nodes
    elif job.run.engine.kind != "single":
        words += ["--main_process_port", "0"]  # any free one: two runs may share a machine
    return words


def preflight_words(job: Job, python: str, rank: str, address: str, port: str) -> list[str]:
    """The doctor of the job's world and `&&`, for bash, before the launcher; nothing where it is not asked for.

    `port` must not be the launcher's, which another job on the node may hold already.
    """
    if not job.preflight:
        return []
    # A folder, as train.py is a script: the nodes need not have this package installed.
    words = [
        *quoted([python, str(SCRIPT.parent)]),
        "doctor",
        "--nodes",
        str(job.nodes),
        "--num_processes",
        str(job.processes),
    ]
    if job.nodes > 1:
        words += ["--machine_rank", rank, "--main_process_ip", address, "--main_process_port", port]
    return [*words, "&&"]


def quoted(words: Sequence[str]) -> list[str]:
    """Words for bash, which reads each back as it was."""
    return [shlex.quote(word) for word in words]


def flag_lines(words: Sequence[str], quote: Callable[[str], str] = shlex.quote) -> list[str]:
    """Quoted words, a flag with its values a line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(quote(word))
        else:
            lines[-1] += f" {quote(word)}"
    return lines


def arguments(job: Job) -> list[str]:
    """A bash array of the script and its words."""
    comment = ["    # torch elastic reads $$ as $"] if any("$$" in word for word in job.words) else []
    return ["command=(", *comment, *(f"    {line}" for line in flag_lines(job.words)), ")"]


def _refuse_secrets(run: RunSpec, words: Sequence[str]) -> None:
    """A job's text is stored by schedulers and clouds, and read by others."""
    named = [name for name in run.given if name.endswith("_token") and run[name]]
    looks = [word.partition("=")[0] if word.startswith("--") else "argument" for word in words if SECRET.search(word)]
    if named or looks:
        raise _secret((named or looks)[0])


def without_secrets(text: str) -> str:
    """A job's text as it would be sent. Raises `UserError` where a flag of the target has put a secret into it."""
    found = SECRET.search(text)
    if found:
        raise _secret(f"{found.group()[:6]}...")
    return text


def _secret(subject: str) -> UserError:
    what = "looks like a secret, and would be written into the job, where others can read it"
    return mistake(subject, what, "HF_TOKEN or the like in the environment of the job, or `hf auth login` there")
