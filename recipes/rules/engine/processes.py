"""Which engine runs the processes, how many there are, and whether this machine can run them."""

from __future__ import annotations

import re
import shutil

from recipes.errors import Problem
from recipes.rules.facts import advice, in_yaml, on_gpu, problem, rule, uses_deepspeed
from recipes.run import RunSpec
from recipes.run.engine import from_environment, from_yaml, launch_with, shipped


@rule
def several_processes_on_a_cpu_need_use_cpu(run):
    """Without a GPU and without `use_cpu`, two ranks train two separate models into one folder."""
    if run.world_size > 1 and not run.hardware.cuda and not run["use_cpu"]:
        yield problem(
            run, "use_cpu", f"is off without a GPU: {run.world_size} processes would train separate models", "--use_cpu"
        )


@rule
def mpirun_starts_no_ranks(run):
    """`OSError: mpirun or mpiexec were not found`, from the launcher that starts one process.

    Under mpirun train.py refuses several processes: each would train a model of its own.
    """
    if not _mpirun_hostfile(run) or run.engine.kind not in ("single", "multi_cpu"):
        return
    fix = "leave mpirun_config out, and distributed_type: MULTI_GPU for several processes"
    if run.world_size > 1 and not run.own_script:
        yield in_yaml(run, "mpirun_config", "starts processes that train.py cannot join into one training", fix)
    elif run.elsewhere is None and not any(map(shutil.which, ("mpirun", "mpiexec"))):
        yield in_yaml(run, "mpirun_config", "needs mpirun, which is not on this machine", fix)


def _mpirun_hostfile(run: RunSpec) -> object:
    section = run.engine.raw.get("mpirun_config")
    return section.get("mpirun_hostfile") if isinstance(section, dict) else None


_COUNTS = re.compile(r"\s*\+?0*[1-9]\d*\s*(,\s*\+?0*[1-9]\d*\s*)*")  # 4,2: the levels of a nested loop


@rule
def cpu_threads_are_a_count(run):
    """`ValueError: invalid literal for int() with base 10: 'abc'`, from accelerate launch; for 4,2
    too, which OpenMP takes. OpenMP itself ignores what is not a count.
    """
    text = run.environment.get("OMP_NUM_THREADS")
    if text is None or run.elsewhere is not None:
        return
    fix = "OMP_NUM_THREADS=4, or unset OMP_NUM_THREADS"
    if _accelerate_reads_threads(run) and not _is_int(text):
        what = f"{text!r} is not a whole number, and accelerate launch fails with it"
        yield Problem("OMP_NUM_THREADS", what, fix, "environment")
    elif not _COUNTS.fullmatch(text):
        what = f"{text!r} is not a count of threads from 1 up, and is ignored"
        yield Problem("OMP_NUM_THREADS", what, fix, "environment", "advice")


def _accelerate_reads_threads(run: RunSpec) -> bool:
    yaml = (run.launcher or run.engine).raw
    return not run.launched and not run.own_script and yaml.get("num_cpu_threads_per_process") is None


def _is_int(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


_ON_GPUS = 'To judge it for GPUs: recipes check --gpu "H100 80GB"'


@rule
def single_engine_starts_one_process(run):
    """`distributed_type: 'NO'` and `MULTI_CPU` start one process, whatever --num_processes says."""
    kind = run.engine.kind
    if run.world_size == 1 or not run.engine.raw or kind not in ("single", "multi_cpu"):
        return
    if _mpirun_hostfile(run):
        return  # mpirun starts them
    what = f"{run.engine.raw.get('distributed_type', 'NO')} starts one process, and {run.world_size} are asked for"
    is_default = kind == "single" and run.engine.source == str(shipped(run.recipe.engine))
    severity = "advice" if is_default else "error"  # the user did not choose that file, and can launch another
    fix = "distributed_type: MULTI_GPU, also for several CPU processes"
    yield in_yaml(run, "distributed_type", what, fix, severity)


@rule
def processes_have_a_gpu_each(run):
    """`CUDA error: invalid device ordinal`, or NCCL's `Duplicate GPU detected`."""
    if not on_gpu(run) or run["ddp_backend"] == "gloo":
        return  # with gloo, processes may share a GPU
    machines = run.engine.raw.get("num_machines", 1)
    machines = machines if isinstance(machines, int) and machines > 0 else 1
    here, gpus = min(run.local_world_size, -(-run.world_size // machines)), len(run.hardware.gpus)
    if here > gpus:
        what = f"{here} on this machine, which has {gpus} GPU{'s' * (gpus > 1)}"
        yield Problem("num_processes", what, f"--num_processes {gpus}", "the launch")


@rule
def one_process_uses_one_gpu(run):
    """The others stay idle: DataParallel would multiply the global batch, and is switched off."""
    if run.engine.kind != "single" or run.world_size > 1 or len(run.hardware.gpus) < 2 or run["use_cpu"]:
        return
    count = len(run.hardware.gpus)
    fix = f"{launch_with('standard.yaml')} --num_processes {count}"
    yield Problem("num_processes", f"1 uses one of {count} GPUs", fix, "the launch", "advice")


@rule
def recipe_has_its_own_engine(run):
    """Under plain DDP `sharded` shards nothing, a memory recipe offloads nothing: out of memory."""
    own = from_yaml(shipped(run.recipe.engine))
    if own.kind == "fsdp" and not run.hardware.shards and run.engine.kind not in ("fsdp", "deepspeed"):
        yield advice(run, "recipe", "shards nothing on a CPU: this is plain DDP", _ON_GPUS)
        return
    wanted = {"deepspeed": uses_deepspeed(run), "fsdp": run.engine.kind == "fsdp"}
    if not wanted.get(own.kind, True):
        what = f"is made for {own.title}, and the launch uses {run.engine.title}"
        fix = launch_with(run.recipe.engine)
        if run["deepspeed"]:
            what, fix = f"is made for {own.title}, and --deepspeed trains {run.engine.title}", "leave --deepspeed out"
        yield advice(run, "recipe", what, fix)


@rule
def fsdp_needs_a_gpu(run):
    """On a CPU an FSDP YAML or `--fsdp` silently trains plain DDP: nothing is sharded."""
    if run.hardware.shards or uses_deepspeed(run):
        return
    if run.engine.kind == "fsdp":
        what = "FSDP shards nothing on a CPU: this is plain DDP"
        yield in_yaml(run, "distributed_type", what, f"distributed_type: MULTI_GPU. {_ON_GPUS}", "advice")
    elif run["fsdp"] and not _is_started_alone(run):
        yield advice(run, "fsdp", "shards nothing on a CPU: this is plain DDP", f"leave it out. {_ON_GPUS}")


@rule
def fsdp_and_deepspeed_exclude_each_other(run):
    """`Using --fsdp xxx together with --deepspeed is not possible`"""
    if run["fsdp"] and uses_deepspeed(run):
        yield problem(run, "fsdp", "and DeepSpeed exclude each other", "leave one of them out")


@rule
def fsdp_argument_needs_a_distributed_launch(run):
    """`ValueError: Using fsdp only works in distributed training.`"""
    if run["fsdp"] and _is_started_alone(run):
        fix = launch_with("sharded.yaml")
        fix = fix if run.hardware.shards else "leave it out: it shards nothing on a CPU"
        yield problem(run, "fsdp", "needs a distributed launch", fix)


def _is_started_alone(run: RunSpec) -> bool:
    """Whether no launcher joins this process with others, not even with none."""
    if not run.own_script:
        return run.engine.kind == "single" and run.world_size == 1
    launched = from_environment(run.environment)  # a factory is called in the process that trains
    return launched is None or launched.kind == "single"


@rule
def ddp_backend_needs_processes(run):
    """`Default process group has not been initialized`, if one process is given a backend."""
    if run.explicit("ddp_backend") and run["ddp_backend"] and run.engine.kind == "single" and run.world_size == 1:
        yield problem(run, "ddp_backend", "is for several processes, and this run has one", "leave it out")


@rule
def nccl_needs_a_gpu(run):
    """`ValueError: Your assigned backend nccl is not available, please use gloo`

    The others are for accelerators too, but for mpi: torch may have been built with it.
    """
    if run["ddp_backend"] not in (None, "gloo", "mpi") and not on_gpu(run):
        name = run["ddp_backend"]
        needs = "GPUs" if name == "nccl" else "the accelerators that it is made for"
        yield problem(run, "ddp_backend", f"{name} needs {needs}", "leave it out: gloo is used on a CPU")
