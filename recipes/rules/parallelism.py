"""What DDP and FSDP require of the other settings."""

from __future__ import annotations

from recipes.errors import Problem
from recipes.rules.facts import (
    advice,
    fsdp_section,
    gradient_accumulation_kwargs,
    in_yaml,
    is_true,
    mapping,
    problem,
    rule,
    sections,
    uses_ddp,
    uses_fsdp,
)


@rule
def static_graph_needs_accumulation_one(run):
    """DDP's static graph expects a reduction in the first backward: with accumulation it aborts.

    One process works, and so does accumulation that reduces every micro-batch (`sync_each_batch`).
    """
    if not run["ddp_static_graph"] or run["gradient_accumulation_steps"] == 1 or run.world_size == 1:
        return
    if uses_ddp(run) and not is_true(gradient_accumulation_kwargs(run).get("sync_each_batch")):
        yield problem(
            run,
            "ddp_static_graph",
            f"cannot be combined with gradient_accumulation_steps {run['gradient_accumulation_steps']}",
            "leave it out, or raise per_device_train_batch_size until accumulation is 1",
        )


@rule
def reentrant_checkpointing_needs_find_unused_off(run):
    """`Expected to mark a variable ready only once` in the first backward, even of one process."""
    kwargs = mapping(run["gradient_checkpointing_kwargs"])
    if (
        not run["gradient_checkpointing"]
        or not kwargs.get("use_reentrant")
        or run["ddp_static_graph"]
        or not uses_ddp(run)
    ):
        return
    if run["ddp_find_unused_parameters"] or (run["ddp_find_unused_parameters"] is None and run["use_peft"]):
        fix = "gradient_checkpointing_kwargs '{\"use_reentrant\": false}', or --ddp_find_unused_parameters false"
        yield problem(run, "gradient_checkpointing_kwargs", "use_reentrant fails with ddp_find_unused_parameters", fix)


_ONLY_DDP = (
    "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers",
    "ddp_static_graph",
    "gradient_as_bucket_view",
)


@rule
def ddp_settings_need_ddp(run):
    """DeepSpeed, FSDP and a single process do not read them."""
    if uses_ddp(run):
        return
    ignored = [name for name in _ONLY_DDP if run.explicit(name) and run[name] is not None]
    if run["ddp_comm_hook"] != "no":
        ignored.append("ddp_comm_hook")
    for name in ignored:
        yield advice(run, name, f"is ignored: the engine is {run.engine.title}, not DDP", "leave it out")


@rule
def bf16_compression_needs_nccl(run):
    """`TypeError: BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+`"""
    if run["ddp_comm_hook"] == "bf16" and uses_ddp(run) and (run["use_cpu"] or not run.hardware.cuda):
        yield problem(
            run, "ddp_comm_hook", "bf16 needs NCCL, and NCCL needs GPUs", "--ddp_comm_hook fp16, or leave it out"
        )


@rule
def ddp_timeout_is_not_for_cpus(run):
    """With `use_cpu`, Trainer creates the process group without the timeout."""
    if run.explicit("ddp_timeout") and run["use_cpu"]:
        yield advice(run, "ddp_timeout", "is ignored with use_cpu", "leave it out")


@rule
def nccl_timeout_is_an_argument(run):
    """Nothing reads NCCL_TIMEOUT: the process group's timeout is `ddp_timeout`."""
    if "NCCL_TIMEOUT" in run.environment:
        what = "has no effect on the process group's timeout"
        yield Problem("NCCL_TIMEOUT", what, "--ddp_timeout SECONDS", "environment", "advice")


@rule
def fsdp_checkpoints_activations_once(run):
    """`activation_checkpointing in FSDP config and ... argument can't both be set to True`"""
    if not uses_fsdp(run) or not run["gradient_checkpointing"]:
        return
    if is_true(fsdp_section(run).get("activation_checkpointing")):
        yield problem(run, "gradient_checkpointing", "is on in fsdp_config too", "keep the one in fsdp_config")


@rule
def fsdp_version_two_is_chosen(run):
    """The launcher's default is FSDP1, which Trainer deprecates. Trainer's own default is FSDP2."""
    section = dict(sections(run)).get("fsdp_config")
    if run.engine.kind != "fsdp" or section is None:
        return
    version = section.get("fsdp_version", section.get("version", 1))
    if str(version) == "1":
        what = "1, which accelerate uses if the key is missing, is deprecated"
        yield in_yaml(run, "fsdp_version", what, "fsdp_version: 2", "advice")


@rule
def efficient_loading_needs_synchronisation(run):
    """`When using --fsdp_cpu_ram_efficient_loading set --fsdp_sync_module_states to True`

    `fsdp_cpu_ram_efficient_loading` is true by default.
    """
    section = dict(sections(run)).get("fsdp_config", {})
    synchronises = section.get("fsdp_sync_module_states", section.get("sync_module_states", True))
    efficient = section.get("fsdp_cpu_ram_efficient_loading", section.get("cpu_ram_efficient_loading", True))
    if run.engine.kind == "fsdp" and not synchronises and efficient:
        fix = "fsdp_sync_module_states: true, or fsdp_cpu_ram_efficient_loading: false"
        yield in_yaml(
            run, "fsdp_sync_module_states", "false contradicts fsdp_cpu_ram_efficient_loading, which needs it", fix
        )
