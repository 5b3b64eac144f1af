"""Rules about engines and processes, and what happens without them."""

from __future__ import annotations

import pytest

from recipes.rules.check import check
from recipes.run import resolve
from recipes.run.engine import shipped
from tests.support.real_failures import ZERO_2, assert_fires, run_launch_command, torchrun, train
from tests.support.runs import A100, TWO_GPUS, Run, machine, yaml

pytestmark = pytest.mark.usefixtures("fresh_state")

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "several_processes_on_a_cpu_need_use_cpu": (Run("--use_cpu false", world=2), Run("--use_cpu true", world=2)),
    "single_engine_starts_one_process": (
        Run(yaml=yaml("'NO'"), world=2),
        Run(yaml=yaml("MULTI_GPU"), world=2),
    ),
    "mpirun_starts_no_ranks": (
        Run(yaml=yaml("'NO'", "mpirun_config: {mpirun_hostfile: h}"), world=2),
        Run(yaml=yaml("MULTI_GPU", "mpirun_config: {mpirun_hostfile: h}"), world=2),
    ),
    "processes_have_a_gpu_each": (Run(world=4, hardware=TWO_GPUS), Run(world=2, hardware=TWO_GPUS)),
    "one_process_uses_one_gpu": (
        Run("--recipe baseline", hardware=TWO_GPUS),
        Run("--recipe baseline", hardware=machine(A100)),
    ),
    "recipe_has_its_own_engine": (
        Run("--recipe memory", yaml="sharded.yaml", hardware=TWO_GPUS),
        Run("--recipe memory", yaml="memory_zero3.yaml"),
    ),
    "fsdp_needs_a_gpu": (Run(yaml="sharded.yaml"), Run(yaml="sharded.yaml", hardware=machine(A100))),
    "fsdp_and_deepspeed_exclude_each_other": (
        Run("--recipe memory --fsdp full_shard", yaml="memory.yaml"),
        Run("--recipe memory", yaml="memory.yaml"),
    ),
    "fsdp_argument_needs_a_distributed_launch": (
        Run("--recipe baseline --fsdp full_shard"),
        Run("--recipe standard --fsdp full_shard", yaml="standard.yaml"),
    ),
    "ddp_backend_needs_processes": (
        Run("--recipe baseline --ddp_backend gloo"),
        Run("--recipe standard --ddp_backend gloo", world=2),
    ),
    "cpu_threads_are_a_count": (
        Run(environment={"OMP_NUM_THREADS": "4,2"}),
        Run(environment={"OMP_NUM_THREADS": "4"}),
    ),
    "nccl_needs_a_gpu": (
        Run("--ddp_backend nccl", world=2),
        Run("--ddp_backend nccl", world=2, hardware=TWO_GPUS),
    ),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("cpu_threads_are_a_count", Run(environment={"OMP_NUM_THREADS": ""}), "OMP_NUM_THREADS"),
    ("cpu_threads_are_a_count", Run(environment={"OMP_NUM_THREADS": "-1"}), "OMP_NUM_THREADS"),
    ("single_engine_starts_one_process", Run(yaml=yaml("MULTI_CPU", processes=2), world=2), "distributed_type"),
    ("single_engine_starts_one_process", Run("--recipe baseline", world=2), "distributed_type"),
    (
        "single_engine_starts_one_process",
        Run(yaml=yaml("MULTI_CPU", "mpirun_config: {mpirun_ccl: '1'}"), world=2),
        "distributed_type",
    ),
    ("recipe_has_its_own_engine", Run("--recipe sharded", yaml="standard.yaml"), "recipe"),
    ("fsdp_needs_a_gpu", Run("--fsdp full_shard", yaml="standard.yaml", world=2), "fsdp"),
]

# rule, another run in which the rule does not fire
LEGAL_AFTER_ALL = [
    ("single_engine_starts_one_process", Run(world=2, yaml=yaml("MULTI_CPU", "mpirun_config: {mpirun_hostfile: h}"))),
    ("recipe_has_its_own_engine", Run("--recipe sharded", yaml="sharded.yaml", hardware=TWO_GPUS)),
    ("processes_have_a_gpu_each", Run(world=4, hardware=TWO_GPUS, yaml=yaml("MULTI_GPU", "num_machines: 2"))),
    ("fsdp_needs_a_gpu", Run("--fsdp full_shard", yaml="standard.yaml", world=2, hardware=TWO_GPUS)),
]


def test_a_machine_without_mpirun_cannot_start_it(write_yaml, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    file = write_yaml("'NO'", "mpirun_config: {mpirun_hostfile: hosts}")
    with pytest.raises(OSError, match="mpirun or mpiexec were not found"):
        run_launch_command(file)
    assert_fires("mpirun_starts_no_ranks", {}, world=1, config=file)


@pytest.mark.parametrize("type_", ["'NO'", "MULTI_CPU"])
def test_no_and_multi_cpu_start_one_process(type_, write_yaml, monkeypatch):
    from accelerate.commands import launch

    started = []
    monkeypatch.setattr(launch, "simple_launcher", started.append)
    file = write_yaml(type_)
    run_launch_command(file)
    assert [args.num_processes for args in started] == [2]  # one command, though two were asked for
    assert_fires("single_engine_starts_one_process", {}, world=2, config=file)


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        ("fsdp_and_deepspeed_exclude_each_other", dict(fsdp="full_shard"), "together with --deepspeed"),
        (
            "weights_alone_cannot_find_the_best",
            dict(save_only_model=True, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch"),
            "DeepSpeed can't be used with `save_only_model`",
        ),
    ],
)
def test_trainer_refuses_beside_deepspeed(rule, settings, message, tmp_path):
    pytest.importorskip("deepspeed")
    with pytest.raises(ValueError, match=message):
        train(tmp_path, evaluates=True, deepspeed=dict(ZERO_2), **settings)
    assert_fires(rule, {"deepspeed": ZERO_2, **settings})


@pytest.mark.slow
def test_two_ranks_without_use_cpu_train_two_models(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert torchrun(tmp_path, {"use_cpu": False}).count("TRAINED 1 ") == 2
    assert_fires("several_processes_on_a_cpu_need_use_cpu", {"use_cpu": False}, world=2)


@pytest.mark.slow
def test_fsdp_on_a_cpu_is_plain_ddp(tmp_path):
    output = torchrun(tmp_path, {}, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    assert output.count("TRAINED 2 MULTI_CPU DistributedDataParallel") == 2
    assert_fires("fsdp_needs_a_gpu", {}, world=2, config=shipped("sharded.yaml"))


@pytest.mark.parametrize(
    ("text", "launched", "severity"),
    [("abc", False, "error"), ("4,2", False, "error"), ("0", False, "advice"), ("abc", True, "advice")],
)
def test_threads_that_accelerate_launch_cannot_read_are_an_error(text, launched, severity):
    run = resolve([], environment={"OMP_NUM_THREADS": text}, launched=launched)
    assert [problem.severity for problem in check(run) if problem.subject == "OMP_NUM_THREADS"] == [severity]


@pytest.mark.parametrize("text", ["abc", "", "4,2"])
def test_accelerate_launch_fails_with_such_threads(text, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(ValueError, match="invalid literal for int"):
        run_launch_command(shipped("single.yaml"))
