"""What a person told the launcher: threads of its processes, and how many of them."""

import os
import subprocess
import sys

import pytest

from launch.host.parent import Parent, own_threads
from launch.host.world import World, alone_by_mistake
from tests.support.running import ROOT

SHOW = "import os; from launch.host.parent import own_threads; os.write(1, f'own {own_threads()}\\n'.encode())"
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "1"}
STANDARD = str(ROOT / "accelerate_configs" / "standard.yaml")
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", STANDARD]


def told(*argv, tmp_path, **environment):
    """What each process of this launcher takes for a person's own number of threads."""
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    surrounding = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment = {**surrounding, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([*argv, str(script)], capture_output=True, text=True, env=environment)
    return sorted(line for line in done.stdout.splitlines() if line.startswith("own"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        [*ACCELERATE, "--num_processes", "2", "--main_process_port", "0"],
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"],
    ],
)
def test_a_real_launchers_number_is_not_a_persons(launcher, tmp_path):
    assert told(*launcher, tmp_path=tmp_path) == ["own None"] * 2
    assert told(*launcher, tmp_path=tmp_path, OMP_NUM_THREADS="3") == ["own 3"] * 2


@pytest.mark.slow
def test_the_flag_of_accelerate_launch_is_a_persons_choice(tmp_path):
    flag = ["--num_processes", "2", "--main_process_port", "0", "--num-cpu-threads-per-process=2"]
    assert told(*ACCELERATE, *flag, tmp_path=tmp_path) == ["own 2"] * 2


def test_one_process_where_several_were_asked_for_is_advised_about():
    two = Parent(("accelerate", "launch", "--num_processes", "2", "train.py"))
    advice = alone_by_mistake(World(), LAUNCHED, two)
    assert [problem.severity for problem in advice] == ["advice"] and "--multi_gpu --num_processes 2" in advice[0].fix
    assert not alone_by_mistake(World(2, 0, 2), LAUNCHED, two)
    assert not alone_by_mistake(World(), {}, two)
    assert not alone_by_mistake(World(), LAUNCHED, Parent(("accelerate", "launch", "--num-processes=1", "train.py")))
    assert not alone_by_mistake(World(), LAUNCHED, Parent(("bash",)))


@pytest.mark.slow
@pytest.mark.parametrize("yaml", [None, "single.yaml"])
def test_the_advice_starts_the_processes(yaml, tmp_path):
    config = ["--config_file", str(ROOT / "accelerate_configs" / yaml)] if yaml else []
    launcher = [*ACCELERATE[:3], *config, "--num_processes", "2"]
    assert len(told(*launcher, tmp_path=tmp_path)) == 1
    assert len(told(*launcher, "--multi_gpu", "--main_process_port", "0", tmp_path=tmp_path)) == 2


def test_without_a_launcher_it_is_a_persons():
    assert own_threads({"OMP_NUM_THREADS": "1"}, Parent()) == 1
    assert own_threads({}, Parent()) is None


def test_what_a_launcher_was_started_with_is_a_persons():
    assert own_threads(LAUNCHED, Parent()) is None
    assert own_threads(LAUNCHED, Parent(environment={"OMP_NUM_THREADS": "1"})) == 1
    assert own_threads(LAUNCHED, Parent(environment={"OMP_NUM_THREADS": "-1"})) is None  # accelerate makes 1 of it


@pytest.mark.parametrize(("text", "threads"), [("4,2", 4), ("0", None), ("all", None), ("", None)])
def test_values_that_openmp_takes_and_does_not_take(text, threads):
    assert own_threads({"OMP_NUM_THREADS": text}, Parent()) == threads
