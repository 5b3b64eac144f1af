"""Compilation, and settings that cost time in every step."""

from __future__ import annotations

from recipes import legal
from recipes.errors import Problem
from recipes.rules.facts import advice, gradient_accumulation_kwargs, in_yaml, is_true, problem, rule, uses_fsdp
from recipes.run import nearest


@rule
def yaml_compiles_what_the_arguments_do_not(run):
    """A dynamo backend in the YAML compiles despite `torch_compile=False`; DeepSpeed ignores it."""
    backend = run.engine.dynamo_backend
    if backend == "no":
        return
    if run.engine.kind == "deepspeed":
        yield in_yaml(run, "dynamo_config", "is ignored under DeepSpeed", "--torch_compile", "advice")
    elif not run["torch_compile"]:
        what = f"{backend} compiles a run whose torch_compile is off"
        yield in_yaml(run, "dynamo_config", what, "remove it from the YAML, or --torch_compile")


@rule
def compile_backend_is_known(run):
    """`ValueError: 'FOO' is not a valid DynamoBackend`, when the Trainer is built."""
    backend = run["torch_compile_backend"]
    known = [name.lower() for name in legal.accelerate_choices()["DynamoBackend"]] if backend else []
    if backend and backend.lower() not in known:
        fix = nearest(backend.lower(), known) or "one of " + ", ".join(known)
        yield problem(run, "torch_compile_backend", f"there is no backend {backend!r}", fix)


@rule
def compile_settings_compile(run):
    """A backend or a mode turns `torch_compile` on, even with `torch_compile false`."""
    for name in ("torch_compile_backend", "torch_compile_mode"):
        if run[name] and run.explicit("torch_compile") and not run["torch_compile"]:
            yield problem(run, name, "turns torch_compile on, which is switched off", f"leave {name} out")


@rule
def compiling_needs_one_shape(run):
    """`accelerate launch` compiles with dynamic=False: every new length is compiled again."""
    if run["torch_compile"] and not run["packing"]:
        yield advice(
            run, "torch_compile", "compiles again for every new length of a batch", "--packing, or leave it out"
        )


@rule
def syncing_each_batch_is_slow(run):
    """`sync_each_batch` reduces gradients once for every micro-batch, not once a step.

    Under FSDP it saves the memory of gradients that are not scattered.
    """
    if uses_fsdp(run):
        return
    if is_true(gradient_accumulation_kwargs(run).get("sync_each_batch")) and run["gradient_accumulation_steps"] > 1:
        what = f"sync_each_batch reduces gradients {run['gradient_accumulation_steps']} times a step"
        yield advice(run, "accelerator_config", what, "leave it out unless memory requires it")


@rule
def counting_tokens_costs_a_sync(run):
    """A gather and a host sync in every micro-step."""
    if run["include_num_input_tokens_seen"] not in (False, "no"):
        what = "costs a gather and a host sync in every micro-step"
        yield advice(run, "include_num_input_tokens_seen", what, "leave it out: the summary counts tokens")


@rule
def logging_costs_a_sync(run):
    """Every log is an all-gather and a host sync."""
    if run.explicit("logging_steps") and run["logging_steps"] == 1 and run["logging_strategy"] == "steps":
        yield advice(run, "logging_steps", "1 costs an all-gather and a host sync every step", "--logging_steps 10")


@rule
def shared_memory_is_fast(run):
    """NCCL_SHM_DISABLE=1 works around a broken or tiny /dev/shm, and is slower elsewhere."""
    if is_true(run.environment.get("NCCL_SHM_DISABLE", "0")):
        what = "is slower: it turns off NCCL's shared-memory transport"
        yield Problem("NCCL_SHM_DISABLE", what, "unset it, unless /dev/shm is broken or tiny", "environment", "advice")
