"""Compilation, and settings that cost time in every step."""

from __future__ import annotations

from recipes import legal
from recipes.errors import Problem
from recipes.rules.facts import (
    advice,
    available,
    gradient_accumulation_kwargs,
    in_yaml,
    is_true,
    known_config,
    missing,
    of_class,
    problem,
    rule,
    sections,
    uses_fsdp,
)
from recipes.run import RunSpec, nearest


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
        from_a_file = "remove it from the YAML" if run.engine.raw else "unset ACCELERATE_DYNAMO_BACKEND"
        yield in_yaml(run, "dynamo_config", what, f"{from_a_file}, or --torch_compile")


@rule
def compile_backend_is_known(run):
    """`'FOO' is not a valid DynamoBackend`; in the first step `Invalid backend: 'ofi'`, from torch.

    accelerate still names backends that torch has no more.
    """
    asked, in_file = run["torch_compile_backend"], run.engine.dynamo_backend
    if asked and not _is_backend(asked):
        yield problem(run, "torch_compile_backend", *_no_such_backend(asked))
    if run.engine.kind != "deepspeed" and not _is_backend(in_file):
        yield in_yaml(run, "dynamo_backend", *_no_such_backend(in_file))


def _is_backend(name: str) -> bool:
    return name.lower() == "no" or name.lower() in _backends()


def _backends() -> list[str]:
    """The backends that accelerate knows by name and torch can compile with, in lower case."""
    named = {name.lower() for name in legal.accelerate_choices()["DynamoBackend"]}
    return sorted(named & legal.compile_backends())


def _no_such_backend(name: str) -> tuple[str, str]:
    fix = nearest(name.lower(), _backends()) or "one of " + ", ".join(_backends())
    return f"torch has no backend {name!r}", fix


@rule
def compile_backend_is_installed(run):
    """`ImportError: Please install apache-tvm to use the tvm backend`, in the first step."""
    if _backend(run) == "tvm" and not available(run, "tvm"):
        yield missing(run, "torch_compile_backend", "apache-tvm", "tvm needs the package apache-tvm")


@rule
def compile_mode_is_known(run):
    """`RuntimeError: Unrecognized mode=..., should be one of: default, reduce-overhead, ...`

    Only inductor, torch's own compiler, reads a mode: the other backends ignore it.
    """
    section = dict(sections(run)).get("dynamo_config", {})
    in_file = section.get("dynamo_mode", section.get("mode", run.environment.get("ACCELERATE_DYNAMO_MODE")))
    asked = run["torch_compile_mode"]
    if asked is None and in_file is None:
        return
    modes = legal.compile_modes()
    fix = "one of " + ", ".join(modes)
    if asked and _backend(run) != "inductor":
        what = f"is ignored by the backend {_backend(run)}"
        yield advice(run, "torch_compile_mode", what, "leave it out, or --torch_compile_backend inductor")
    elif asked and modes and asked not in modes:
        yield problem(run, "torch_compile_mode", f"torch has no mode {asked!r}", fix)
    elif in_file is not None and modes and in_file not in modes and _compiles(run) and _backend(run) == "inductor":
        yield in_yaml(run, "dynamo_mode", f"torch has no mode {in_file!r}", fix)


def _backend(run: RunSpec) -> str:
    """The backend that compiles if anything does."""
    if run["torch_compile_backend"]:
        return run["torch_compile_backend"].lower()
    return "inductor" if _compiles(run) or run.engine.dynamo_backend == "no" else run.engine.dynamo_backend


def _compiles(run: RunSpec) -> bool:
    return bool(run["torch_compile"] or run["torch_compile_backend"] or run["torch_compile_mode"])


@rule
def compiling_has_a_backend(run):
    """The backend `no` compiles nothing, silently."""
    if (run["torch_compile_backend"] or "").lower() == "no":
        yield advice(run, "torch_compile_backend", "no compiles nothing", "leave it out, with --torch_compile false")


@rule
def compile_settings_compile(run):
    """A backend or a mode turns `torch_compile` on, even with `torch_compile false`."""
    for name in ("torch_compile_backend", "torch_compile_mode"):
        if run[name] and run.explicit("torch_compile") and not run["torch_compile"]:
            yield problem(run, name, "turns torch_compile on, which is switched off", f"leave {name} out")


@rule
def compiling_needs_one_shape(run):
    """`accelerate launch` compiles with dynamic=False: every new length is compiled again."""
    if _compiles(run) and not run["packing"]:
        yield advice(
            run, "torch_compile", "compiles again for every new length of a batch", "--packing, or leave it out"
        )


@rule
def the_model_can_checkpoint(run):
    """`ValueError: CTRLLMHeadModel does not support activation checkpointing.`"""
    if run["gradient_checkpointing"] and of_class(run, "supports_gradient_checkpointing") is False:
        what = f"is not supported by models of type {known_config(run)['model_type']}"
        yield problem(run, "gradient_checkpointing", what, "--gradient_checkpointing false")


@rule
def syncing_each_batch_is_slow(run):
    """`sync_each_batch` reduces gradients once for every micro-batch, not once a step.

    Under FSDP it saves the memory of gradients that are not scattered: `sharded` sets it.
    """
    if uses_fsdp(run) or not run.explicit("accelerator_config"):
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
