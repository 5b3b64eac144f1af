"""Rules about DDP and FSDP, and what happens without them."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yaml import safe_load

from launch.host.heartbeat import limit_waits
from recipes.rules.check import check
from recipes.run import resolve
from recipes.run.engine import from_yaml, shipped
from recipes.run.hardware import Hardware
from recipes.run.parallelism import from_section
from tests.support.real_failures import BY_NAME, arguments, assert_fires, run_ranks, torchrun, train
from tests.support.runs import A100, CLASSIFY, DS, H100, TWO_GPUS, Run, ds_json, groups, machine, yaml

pytestmark = pytest.mark.usefixtures("fresh_state")

TWO = {"tensor_parallel": {"autotp_size": 2}}

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "sizes_of_groups_are_counts": (Run(yaml=groups(dp_shard=0)), Run(yaml=groups(dp_shard=1))),
    "sequences_are_not_divided_by_deepspeed": (
        Run(yaml=groups("DEEPSPEED", sp=2), world=2),
        Run(yaml=groups("DEEPSPEED", sp=1), world=2),
    ),
    "sequences_are_not_divided_over_a_ring": (
        Run(yaml=groups(cp=2), world=2, hardware=TWO_GPUS),
        Run(yaml=groups(dp_shard=2), world=2, hardware=TWO_GPUS),
    ),
    "tensor_parallelism_is_deepspeeds": (
        Run(yaml=groups("MULTI_GPU", tp=2), world=2),
        Run(DS, files=ds_json(tensor_parallel={"autotp_size": 2}), world=2),
    ),
    "megatron_has_its_own_trainer": (Run(yaml=yaml("MEGATRON_LM")), Run(yaml=yaml("DEEPSPEED"))),
    "tensor_parallel_sizes_are_counts": (
        Run(DS, files=ds_json(tensor_parallel={"autotp_size": "two"})),
        Run(DS, files=ds_json(tensor_parallel={"autotp_size": 0})),
    ),
    "tensor_parallelism_needs_a_lower_stage": (
        Run(DS, files=ds_json(tensor_parallel={"autotp_size": 2}, zero_optimization={"stage": 3}), world=2),
        Run(DS, files=ds_json(tensor_parallel={"autotp_size": 2}), world=2),
    ),
    "tensor_parallelism_leaves_the_batch_to_trainer": (
        Run(DS, files=ds_json(tensor_parallel={"autotp_size": 2}, train_batch_size=16), world=2),
        Run(DS, files=ds_json(tensor_parallel={"autotp_size": 2}, train_batch_size="auto"), world=2),
    ),
    "tensor_parallelism_shares_batches_and_tokens": (
        Run(f"{DS} --average_tokens_across_devices false", files=ds_json(tensor_parallel={"autotp_size": 2}), world=2),
        Run(f"{DS} --average_tokens_across_devices false", files=ds_json(), world=2),
    ),
    "tensor_parallelism_counts_no_accuracy": (
        Run(f"{DS} {CLASSIFY} --eval_strategy epoch", files=ds_json(tensor_parallel={"autotp_size": 2}), world=2),
        Run(f"{DS} {CLASSIFY}", files=ds_json(tensor_parallel={"autotp_size": 2}), world=2),
    ),
    "tensor_parallelism_trains_every_weight": (
        Run(f"{DS} --use_peft", files=ds_json(tensor_parallel={"autotp_size": 2}), world=2),
        Run(DS, files=ds_json(tensor_parallel={"autotp_size": 2}), world=2),
    ),
    "tensor_parallelism_knows_the_model": (
        Run(
            f"{DS} --model_name_or_path m",
            files={**ds_json(**TWO), "m/config.json": {"model_type": "mixtral"}},
            world=2,
        ),
        Run(
            f"{DS} --model_name_or_path m", files={**ds_json(**TWO), "m/config.json": {"model_type": "qwen2"}}, world=2
        ),
    ),
    "deepspeed_shards_no_sequences": (
        Run(DS, files=ds_json(sequence_parallel_size=2, train_batch_size="auto"), world=2),
        Run(DS, files=ds_json(sequence_parallel_size=1, train_batch_size="auto"), world=2),
    ),
    "replicas_and_shards_make_the_world": (
        Run(yaml=groups(dp_replicate=2, dp_shard=4), world=4, hardware=machine(A100, 4)),
        Run(yaml=groups(dp_replicate=2, dp_shard=2), world=4, hardware=machine(A100, 4)),
    ),
    "replicas_and_shards_are_of_fsdp2": (
        Run(yaml=groups(version=1, dp_shard=2), world=2, hardware=TWO_GPUS),
        Run(yaml=groups(version=2, dp_shard=2), world=2, hardware=TWO_GPUS),
    ),
    "cpu_ranks_take_no_sizes": (
        Run(yaml=groups("MULTI_GPU", dp_shard=2), world=2),
        Run(yaml=groups("MULTI_GPU", dp_shard=1), world=2),
    ),
    "static_graph_needs_accumulation_one": (
        Run("--ddp_static_graph true --gradient_accumulation_steps 2", world=2),
        Run("--ddp_static_graph true --gradient_accumulation_steps 1", world=2),
    ),
    "reentrant_checkpointing_needs_find_unused_off": (
        Run(
            "--gradient_checkpointing --ddp_find_unused_parameters true"
            ' --gradient_checkpointing_kwargs {"use_reentrant":true}'
        ),
        Run("--gradient_checkpointing --ddp_find_unused_parameters true"),
    ),
    "ddp_settings_need_ddp": (
        Run("--recipe memory --ddp_bucket_cap_mb 50", yaml="memory.yaml"),
        Run("--ddp_bucket_cap_mb 50", yaml="standard.yaml"),
    ),
    "bf16_compression_needs_nccl": (Run("--ddp_comm_hook bf16", world=2), Run("--ddp_comm_hook fp16", world=2)),
    "nccl_timeout_is_an_argument": (Run(environment={"NCCL_TIMEOUT": "60"}), Run(environment={"NCCL_DEBUG": "INFO"})),
}

ALSO_FIRES = [
    (
        "tensor_parallelism_knows_the_model",  # it has no plan
        Run(f"{DS} --model_name_or_path m", files={**ds_json(**TWO), "m/config.json": {"model_type": "gpt2"}}, world=2),
        "autotp_size",
    ),
    (
        "tensor_parallelism_shares_batches_and_tokens",
        Run(
            f'{DS} --accelerator_config {{"dispatch_batches":true}}',
            files=ds_json(tensor_parallel={"autotp_size": 2}),
            world=2,
        ),
        "accelerator_config",
    ),
    (
        "replicas_and_shards_are_of_fsdp2",  # DDP shards nothing
        Run(yaml=groups("MULTI_GPU", dp_shard=2), world=2, hardware=TWO_GPUS),
        "dp_shard_size",
    ),
    (
        "replicas_and_shards_make_the_world",  # DeepSpeed shards nothing, and still wants the processes
        Run(yaml=groups("DEEPSPEED", dp_replicate=2)),
        "dp_shard_size",
    ),
    (
        "replicas_and_shards_are_of_fsdp2",  # nothing to shard across
        Run(yaml=groups(dp_replicate=2), world=2, hardware=TWO_GPUS),
        "dp_shard_size",
    ),
    (
        "deepspeed_shards_no_sequences",  # it trains, and divides nothing
        Run(DS, files=ds_json(sequence_parallel_size=2), world=2),
        "sequence_parallel_size",
    ),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    (
        "static_graph_needs_accumulation_one",
        Run("--ddp_static_graph true --gradient_accumulation_steps 2"),
    ),  # one process
    (
        "static_graph_needs_accumulation_one",  # reduces in every micro-step, and trains
        Run(
            "--ddp_static_graph true --gradient_accumulation_steps 2"
            ' --accelerator_config {"gradient_accumulation_kwargs":{"sync_each_batch":true}}',
            world=2,
        ),
    ),
    ("static_graph_needs_accumulation_one", Run("--ddp_static_graph true", world=2, yaml="memory.yaml")),
    (
        "reentrant_checkpointing_needs_find_unused_off",  # a static graph knows which parameters it uses
        Run(
            "--gradient_checkpointing --ddp_find_unused_parameters true --ddp_static_graph true"
            ' --gradient_checkpointing_kwargs {"use_reentrant":true}'
        ),
    ),
]


@settings(max_examples=40, deadline=None)
@given(replicate=st.integers(1, 8), shard=st.integers(1, 8), world=st.integers(1, 16), cuda=st.booleans())
def test_the_sizes_that_a_message_asks_for_are_accepted(replicate, shard, world, cuda):
    def found(**sizes):
        content = safe_load(groups(**sizes)) | {"mixed_precision": "no"}
        engine = replace(from_yaml(shipped("sharded.yaml")), raw=content, source="y.yaml")
        engine = replace(engine, parallelism=from_section(content["parallelism_config"], "y.yaml"))
        hardware = machine(H100, world) if cuda else Hardware()
        run = resolve(["--global_batch_size", "720720"], world_size=world, hardware=hardware, engine=engine)
        problems = [problem for problem in check(run) if "parallelism_config" in problem.subject]
        return [problem for problem in problems if problem.severity == "error"]

    def written(fix):
        """The sizes as a user would write them after reading the fix."""
        sizes = {name: int(size) for name, size in re.findall(r"parallelism_config_(\w+)_size (\d+)", fix)}
        assert sizes or "leave" in fix
        return sizes or {"dp_replicate": 1, "dp_shard": 1}

    problems = found(dp_replicate=replicate, dp_shard=shard)
    assert len(problems) <= 1
    if problems:
        assert found(**written(problems[0].fix)) == []


def test_ddp_settings_wrap_nothing_in_one_process(tmp_path):
    trainer = train(tmp_path, ddp_bucket_cap_mb=1)
    assert type(trainer.model_wrapped) is type(trainer.model)
    assert_fires("ddp_settings_need_ddp", {"recipe": "baseline", "ddp_bucket_cap_mb": 1})


def timeout_of_the_world() -> timedelta:
    import torch

    return torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout


def test_with_use_cpu_the_world_has_the_timeout_that_we_give_to_torch(one_rank, tmp_path, monkeypatch):
    """Trainer gives it none, and torch's own is half an hour."""
    monkeypatch.setattr("torch.distributed.distributed_c10d.default_pg_timeout", timedelta(minutes=30))
    limit_waits(77)
    arguments(tmp_path, ddp_timeout=99)
    assert timeout_of_the_world() == timedelta(seconds=77)


def test_nccl_timeout_changes_no_timeout(gpu_rank, tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_TIMEOUT", "7")
    arguments(tmp_path, use_cpu=False, ddp_timeout=77)
    assert timeout_of_the_world() == timedelta(seconds=77)
    assert_fires("nccl_timeout_is_an_argument", {}, environment={"NCCL_TIMEOUT": "7"})


STATIC = {"ddp_static_graph": True, "gradient_accumulation_steps": 2}
REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "ddp_find_unused_parameters": True,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "settings", "processes", "message"),
    [
        ("static_graph_needs_accumulation_one", STATIC, 2, "expect_autograd_hooks_ INTERNAL ASSERT FAILED"),
        ("reentrant_checkpointing_needs_find_unused_off", REENTRANT, 1, "Expected to mark a variable ready only once"),
        ("nccl_needs_a_gpu", {"ddp_backend": "nccl"}, 1, "nccl is not available"),
    ],
)
def test_ranks_fail(rule, settings, processes, message, tmp_path):
    output = torchrun(tmp_path, settings, processes)
    assert message in output and "TRAINED" not in output
    assert_fires(rule, settings, world=processes)


@pytest.mark.slow
def test_static_graph_with_accumulation_works_in_one_process(tmp_path):
    assert torchrun(tmp_path, STATIC, 1).count("TRAINED 1 MULTI_CPU DistributedDataParallel") == 1
    run = resolve([], settings=STATIC, world_size=1, hardware=Hardware(), environment={})
    assert not list(BY_NAME["static_graph_needs_accumulation_one"](run))


@pytest.mark.slow
def test_static_graph_trains_when_every_micro_batch_is_reduced(tmp_path):
    settings = {**STATIC, "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    assert torchrun(tmp_path, settings).count("TRAINED 2 ") == 2
    run = resolve([], settings=settings, world_size=2, hardware=Hardware(), environment={})
    assert not list(BY_NAME["static_graph_needs_accumulation_one"](run))


@pytest.mark.slow
def test_bf16_compression_on_a_cpu_is_a_type_error(tmp_path):
    script = tmp_path / "hook.py"
    script.write_text(
        "import torch\n"
        "from accelerate import DistributedDataParallelKwargs, DDPCommunicationHookType, PartialState\n"
        "PartialState(cpu=True)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16).register_comm_hook(model)\n",
        encoding="utf-8",
    )
    assert "TypeError: BF16 all reduce communication hook required" in run_ranks([str(script)], 1)
    assert_fires("bf16_compression_needs_nccl", {"ddp_comm_hook": "bf16"}, world=2)
