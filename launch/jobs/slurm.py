"""The target `slurm`: write the sbatch script of a job, submit it, and ask Slurm for its state."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.flags import whole
from launch.jobs.job import ASSUMED_GPU, SCRIPT, Job, Target, arguments, launch_words, preflight_command
from launch.output.submission import Submission, announce
from launch.terminal import console, print_problems
from recipes.errors import mistake
from recipes.flags import flag
from recipes.rules.facts import advice
from recipes.run import here
from recipes.run.files import expanded
from recipes.run.hardware import Hardware
from recipes.run.hardware import read as read_hardware
from recipes.run.place import Place

_SBATCH = "forwarded to sbatch"
_DIRECTIVES = "partition account qos time gpus_per_node cpus_per_task mem constraint reservation".split()

# The job's script. srun runs in the background, so that bash can handle signals meanwhile.
_SCRIPT = """\
#!/bin/bash
@directives@

# @title@
@environment@set -uo pipefail
max_restarts=@restarts@
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=@patience@

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=$(scontrol show node -o "$head_node" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

@command@

@container@launcher=@launcher@
# The whole command is one argument, because srun reads a separate : as the start of another job.
srun @options@ \\
    @inside@bash -c "@home@$launcher$(printf ' %q' "${command[@]}")" &
step=$!
told=no
tell() { scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null; }  # to the steps, not to this script
trap 'told=yes; tell' USR1  # Slurm sends USR1 before the time limit, to this script alone
trap tell TERM

code=0
while kill -0 "$step" 2>/dev/null; do  # a signal ends `wait` before the process ends
    wait "$step" && code=0 || code=$?
done
((code == 0)) && exit 0

job=$(scontrol show job "$SLURM_JOB_ID")
case $job in *PreemptTime=[0-9]*) told=yes ;; esac
case $job in *JobState=CANCELLED*) told=no ;; esac
restarts=${SLURM_RESTART_COUNT:-0}
if [ "$told" = yes ] && ((restarts < max_restarts)); then
    echo "told to stop: requeueing, restart $((restarts + 1)) of $max_restarts" >&2
    trap - USR1 TERM
    scontrol requeue "$SLURM_JOB_ID" && sleep 600  # Slurm ends this script meanwhile
fi
exit "$code"
"""

# Every folder has the same path inside a container as outside, so that no argument has to change.
_CONTAINER = """\
folders=(@folders@)
export HF_HOME=${HF_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/huggingface}
for folder in "$PWD" "$HOME" "$HF_HOME" "${HF_HUB_CACHE-}" "${HF_DATASETS_CACHE-}"; do
    [ -z "$folder" ] || folders+=("$folder")
done
mkdir -p "${folders[@]}" || exit 1
binds=$(printf '%s\\n' "${folders[@]}" | sort -u | sed 's/.*/&:&/' | paste -sd ,)
@more@# Set HOME and HF_HOME again inside: the image may change them. PYTHONNOUSERSITE hides packages in HOME.
printf -v home 'export HOME=%q HF_HOME=%q PYTHONNOUSERSITE=1' "$HOME" "$HF_HOME"
@runner@
"""

_APPTAINER = """\
runner=$(command -v apptainer || command -v singularity) || {
    echo "neither apptainer nor singularity is on this node: load a module that has one of them (--module)" >&2
    exit 1
}
container=("$runner" exec --nv --pwd "$PWD" --bind "$binds" @image@)"""

_PYXIS = 'container=(--container-image=@image@ "--container-mounts=$binds" "--container-workdir=$PWD")'


def _filled(template: str, **values: object) -> str:
    """Replace each `@name@` of the template with its value. An `@name@` inside a value stays."""
    return re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), template)


@dataclass(frozen=True)
class Slurm(Target):
    """The flags of `recipes submit slurm`. Flags of sbatch keep their names, and sbatch checks
    their values. `module` and `venv` prepare the environment of the job.
    """

    HELP = "a Slurm cluster, through sbatch"
    ASK_EVERY = 5  # Slurm's controller serves many users

    partition: str | None = flag(None, _SBATCH)
    account: str | None = flag(None, _SBATCH)
    qos: str | None = flag(None, _SBATCH)
    time: str | None = flag(None, "time limit, as Slurm writes it: minutes, 8:00:00, 2-12, 2-12:00:00, UNLIMITED")
    gpus_per_node: str | None = flag(None, "GPUs of each node: 4, or a100:4; also the default of --processes_per_node")
    cpus_per_task: int | None = flag(
        None, "cores of a node for its processes and their data loading [the cluster's default, often 1]"
    )
    mem: str | None = flag(None, "memory of a node: 64G, or 0 for all of it")
    constraint: str | None = flag(None, _SBATCH)
    reservation: str | None = flag(None, _SBATCH)
    job_name: str | None = flag(None, "name of the job [the recipe]")
    module: tuple[str, ...] = flag((), "environment modules to load, in this order")
    venv: str | None = flag(None, "virtual environment to activate on the nodes; not used with a container")
    container_image: str | None = flag(
        None, "run in a container with python and accelerate: FILE.sif by apptainer, any other image by pyxis"
    )
    container_mounts: tuple[str, ...] = flag(
        (), "SRC[:DST[:FLAGS]] to mount, besides folders that the run names, the home folder and the current one"
    )
    signal_seconds: int = flag(120, "tell the run to save and stop this many seconds before the time limit [120]")
    max_restarts: int = flag(10, "how often a preempted or timed-out run is requeued [10]", type=whole)

    @property
    def python(self) -> str:
        """Return `python3` if the job loads an environment, else this Python, by its path."""
        return "python3" if self.venv or self.module or self.container_image else sys.executable

    def place(self, processes: int | None, nodes: int = 1, accelerate_config: str | None = None) -> Place:
        """Return the nodes, with assumed GPUs. Raises `UserError` for a wrong --gpus_per_node."""
        found = re.fullmatch(r"(?:[^:,=]+:)?(\d{1,4})", self.gpus_per_node or "0", re.ASCII)
        if found is None:
            what = f"{self.gpus_per_node!r} is neither N nor TYPE:N"
            raise mistake("gpus_per_node", what, "--gpus_per_node 4, or a100:4")
        gpus = int(found[1])
        processes = processes or max(1, gpus)
        out = console(stderr=True)
        if not gpus:
            what = "is not given, so the job has no GPU and trains on CPU cores"
            print_problems([advice("gpus_per_node", what, "--gpus_per_node 4")], out)
        elif not self.cpus_per_task:
            what = "is not given, so the cluster decides how many cores load data, often one"
            print_problems([advice("cpus_per_task", what, f"--cpus_per_task {8 * processes}")], out)
        hardware = Hardware((ASSUMED_GPU,) * gpus, self.cpus_per_task or processes, liger=read_hardware().liger)
        packages = None if self.python == sys.executable else frozenset[str]()
        return here(nodes * processes, accelerate_config, processes, hardware=hardware, packages=packages)

    def render(self, job: Job) -> str:
        """Return an sbatch script with one task per node, which starts the launcher. Raises
        `UserError` if the job's name cannot be part of a file's name.
        """
        if re.search(r"[/%]", self.job_name or ""):  # Slurm would silently write no log
            raise mistake("job_name", f"{self.job_name} cannot name the log file", "use letters, digits and .,:@+=-")
        directives: dict[str, object] = {"job-name": self.job_name or job.run.recipe.name, "output": "%x-%j.log"}
        directives |= {"nodes": job.nodes, "ntasks-per-node": 1}
        directives |= {key.replace("_", "-"): getattr(self, key) for key in _DIRECTIVES if getattr(self, key)}
        directives |= {"signal": f"B:USR1@{self.signal_seconds}", "open-mode": "append"}
        # sbatch reads quotes as a shell does, and expands nothing.
        texts = {key: shlex.quote(str(value).replace("\n", " ")) for key, value in directives.items()}
        lines = [f"#SBATCH --{key}={text}" for key, text in texts.items()]
        lines.append(f"#SBATCH --{'requeue' if self.max_restarts else 'no-requeue'}")
        # `set -u` comes later, because modules and environments read variables that may not be set.
        environment = f"module load {shlex.join(self.module)} || exit 1\n" if self.module else ""
        if self.venv and not self.container_image:
            environment += f"source {shlex.quote(str(expanded(self.venv) / 'bin' / 'activate'))} || exit 1\n"
        # Since Slurm 22.05, srun does not inherit --cpus-per-task.
        options = [f"--nodes={job.nodes}", "--ntasks-per-node=1"]
        options += [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []
        return _filled(
            _SCRIPT,
            directives="\n".join(lines),
            title=job.title,
            environment=environment,
            restarts=self.max_restarts,
            patience=max(30, self.signal_seconds - 10),
            command="\n".join(arguments(job)),
            container=self._container(job) if self.container_image else "",
            launcher=shlex.quote(self._launcher(job)),
            options=" ".join([*options, "--export=ALL", "--kill-on-bad-exit=1", "--wait=60", "--label"]),
            inside='"${container[@]}" ' if self.container_image else "",
            home="$home; " if self.container_image else "",
        )

    def _launcher(self, job: Job) -> str:
        """Return the command of each node. It calls our launcher, because Accelerate's own dies of
        SIGUSR1 (of SIGTERM too with one process), and Slurm then kills ranks before a save.
        """
        launcher, meeting = [shlex.join(launch_words(job, self.python))], []
        if job.nodes > 1:
            where = '--machine_rank "$SLURM_NODEID" --main_process_ip "$MASTER_ADDR" --main_process_port'
            launcher += [f'{where} "$MASTER_PORT" --rdzv_backend static --same_network']
            if job.launched == "deepspeed":  # the default, pdsh, logs in to the other nodes
                launcher += ["--deepspeed_multinode_launcher standard"]
            meeting = [f'{where} "$((MASTER_PORT - 10000))"']
        return " ".join([*preflight_command(job, self.python, meeting), "exec", *launcher])

    def _container(self, job: Job) -> str:
        """Return bash that sets 2 commands: `container` starts the image; `home` runs first in it.

        apptainer (or singularity, with the same options) runs FILE.sif; pyxis, a plugin of srun,
        runs any other image. Both programs accept folders as SRC:DST,SRC:DST. The container uses
        the image's python and accelerate, and our package from its path. The options come from the
        documentation and source of apptainer and pyxis: each site must try its image and settings.
        """
        image = self.container_image or ""
        more = "".join(f",{mount if ':' in mount else f'{mount}:{mount}'}" for mount in self.container_mounts)
        runner = _filled(_APPTAINER if image.endswith(".sif") else _PYXIS, image=shlex.quote(image))
        binds = f"binds+={shlex.quote(more)}\n" if more else ""
        return _filled(_CONTAINER, folders=shlex.join(mounted(job)), more=binds, runner=runner)

    def send(self, text: str, job: Job) -> int:
        """Give the script to sbatch. Raises `UserError` with Slurm's message if sbatch refuses."""
        job_id = _ask(["sbatch", "--parsable"], text).strip().partition(";")[0]
        log = Path.cwd() / f"{self.job_name or job.run.recipe.name}-{job_id}.log"  # by `--output=%x-%j.log`
        submission = Submission("slurm", job.title, str(log), job_id)
        announce(job.folder, submission, {"log": str(log)}, cancel=f"scancel {job_id}")
        return 0

    @classmethod
    def state(cls, submission: Submission) -> str:
        """Return Slurm's state, such as `PENDING (Resources)`; empty once Slurm forgets the job."""
        shown = _ask(["scontrol", "show", "job", "-o", submission.job], tolerated="Invalid job id")
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        waits = fields.get("JobState") == "PENDING" and fields.get("Reason", "None") != "None"
        return f"PENDING ({fields['Reason']})" if waits else fields.get("JobState", "")

    @classmethod
    def is_over(cls, state: str) -> bool:
        waiting_or_running = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED")
        return state.partition(" ")[0] not in waiting_or_running


def _ask(words: list[str], text: str = "", tolerated: str = "") -> str:
    """Return a Slurm command's output for the input `text`; "" if its error contains `tolerated`.
    Raises `UserError` with Slurm's own message for other failures, or if the command is missing.
    """
    if shutil.which(words[0]) is None:
        fix = "repeat this command on a login node of the cluster"
        raise mistake("slurm", f"there is no {words[0]} on this machine", fix)
    # SBATCH_* would override the script that a dry run shows. Inside a job, that job's SLURM_*
    # would contradict the script: srun accepts SLURM_MEM_PER_CPU or SLURM_MEM_PER_NODE, not both.
    left_out = ("SBATCH_", "SLURM_") if "SLURM_JOB_ID" in os.environ else ("SBATCH_",)
    kept = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS")
    environment = {k: v for k, v in os.environ.items() if k.startswith(kept) or not k.startswith(left_out)}
    done = subprocess.run(words, input=text, capture_output=True, text=True, env=environment)
    if done.returncode != 0 and not (tolerated and tolerated in done.stderr):
        message = " ".join(re.sub(r"(sbatch|scontrol): error:", "", done.stderr).split())
        fix = "list what this cluster has: `sinfo -o '%P %l %m %G %f'`; test its controller: `scontrol ping`"
        raise mistake("slurm", f"Slurm reports: {message or 'nothing'}", fix)
    return done.stdout


# --- The folders that a container sees ------------------------------------------------------------


def mounted(job: Job) -> list[str]:
    """Return the folders that a container must see, besides those that the script finds itself.

    The folders are those of our package, of the Accelerate YAML, and of each file or folder that
    a setting names by a path that is absolute or leaves the current folder. A missing output folder
    is listed too: the job creates it. Links are not resolved, as the container has the same paths.
    """
    found = [str(SCRIPT.parent), str(SCRIPT.parents[1] / "recipes"), str(Path(job.config).parent)]
    values = [job.run[name] for name in job.run.given] + [job.run.recipe.file]
    texts = [str(text) for value in values for text in (value if isinstance(value, list | tuple) else [value])]
    for text in texts:
        if text.startswith(("/", "~/", "..")):
            path = os.path.normpath(Path.cwd() / expanded(text))
            existing = [*filter(os.path.isdir, (path, os.path.dirname(path)))]  # noqa: PTH120
            found += [path] if text == job.run["output_dir"] else existing[:1]
    return [folder for folder in dict.fromkeys(found) if folder != "/"]
