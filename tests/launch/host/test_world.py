"""The world and the engine: read from what the launcher announced, and never guessed."""

import os

import pytest
import torch

from launch.host.world import World, launched, prepare_environment, require_launcher, use_threads
from recipes.errors import UserError
from recipes.run import here, resolve
from recipes.run.engine import from_environment
from recipes.run.hardware import Gpu, Hardware
from tests.support.running import run_ranks

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}
ZERO_3 = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
}


def test_rank_world_size_and_engine_are_read_from_the_launchers_environment_variables():
    assert launched({}) == World(1, 0, 1)  # a process started by hand
    assert launched(TORCHRUN) == World(size=8, rank=5, local_size=4)
    engine = from_environment({**TORCHRUN, **ZERO_3})
    assert (engine.kind, engine.zero_stage, engine.offload_param) == ("deepspeed", 3, "cpu")


@pytest.mark.parametrize(("recipe", "threads"), [("memory", 3), ("sharded", None)])
def test_optimizer_offload_divides_the_cpu_cores_as_threads_among_the_processes(recipe, threads, monkeypatch):
    """`accelerate launch` leaves each process one thread."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    hardware = Hardware((Gpu("A100", (8, 0), 80 << 30),) * 2, cores=6)
    run = resolve(["--recipe", recipe], here(2, recipe, hardware=hardware, environment={}))
    before = torch.get_num_threads()
    use_threads(run, World(2, 0, 2))
    used = torch.get_num_threads()
    torch.set_num_threads(before)
    assert used == (threads or before)


@pytest.mark.parametrize("asked", ["True", "False"])
def test_use_regional_compilation_overrides_the_launchers_environment_variable(asked, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "the launcher's")
    prepare_environment(resolve(["--torch_compile", "--use_regional_compilation", asked]))
    assert os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] == asked


def test_processes_of_mpirun_are_refused_but_not_a_launcher_or_a_shell_that_srun_started():
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        with pytest.raises(UserError, match="a model of their own"):
            require_launcher({variable: "4"})
    require_launcher({"SLURM_STEP_NUM_TASKS": "2", **TORCHRUN})  # one process a node, with a launcher in it
    require_launcher({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PTY_PORT": "1"})  # a shell


DECIDE = """
import torch.distributed as dist
from launch.host.world import launched, leave_group
from recipes.errors import mistake

def refuse():
    raise mistake('output_dir', 'cannot be written', 'another folder')

def fail():
    raise PermissionError('no entry')

dist.init_process_group("gloo")
world = launched()
for decision in (lambda: world.rank, refuse, fail):
    try:
        result = world.decide(decision)
    except Exception as error:
        result = type(error).__name__
    print(f"rank {world.rank}: {result}\\n", end="", flush=True)
leave_group()
"""


def test_all_ranks_get_the_result_or_error_of_a_decision_of_rank_0(tmp_path):
    (tmp_path / "decide.py").write_text(DECIDE)
    codes, output = run_ranks(2, dict(os.environ), [str(tmp_path / "decide.py")])
    assert codes == [0, 0], output
    decided = [[line[8:] for line in output.splitlines() if line.startswith(f"rank {rank}: ")] for rank in (0, 1)]
    assert decided == [["0", "UserError", "PermissionError"], ["0", "UserError", "Failure"]]


JOIN = """
from launch.host.world import launched, process_group
from recipes.errors import UserError
from recipes.run import here, resolve

world = launched()
run = resolve(["--use_cpu", "--per_device_train_batch_size", str(4 - 2 * world.rank), "--output_dir", "out"], here())
try:
    with process_group(run, world):
        print("joined")
except UserError as error:
    print(f"{error}\\n", end="", flush=True)
"""


def test_ranks_with_different_micro_batches_are_refused_with_the_smallest_as_the_fix(tmp_path, monkeypatch):
    """Nodes with different GPUs have different copies of fit.json."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "join.py").write_text(JOIN)
    output = run_ranks(2, dict(os.environ), [str(tmp_path / "join.py")])[1]
    assert output.count("micro-batches: 2, 4") == output.count("Fix: --per_device_train_batch_size 2") == 2, output
