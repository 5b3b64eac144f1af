"""The types a run computes in and stores its weights in: fp32, tf32, bf16, fp16, fp8."""

from __future__ import annotations

from recipes import legal
from recipes.rules.facts import (
    advice,
    available,
    deepspeed_file,
    fsdp_section,
    in_yaml,
    is_true,
    mapping,
    mixed_precision,
    on_gpu,
    problem,
    rule,
    sections,
    uses_deepspeed,
)
from recipes.run import RunSpec


@rule
def one_precision(run):
    """`At most one of fp16 and bf16 can be True, but not both`"""
    for first, second in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
        if run[first] and run[second]:
            yield problem(run, first, f"and {second} are both on", f"--{first} false, or --{second} false")


@rule
def bf16_needs_sm80(run):
    """A T4 or V100 only emulates bf16, several times slower than fp16; torch calls it supported."""
    if not on_gpu(run) or run.hardware.capability >= (8, 0):
        return
    capability = ".".join(map(str, run.hardware.capability))
    for name in ("bf16", "bf16_full_eval"):
        if run[name]:
            yield problem(
                run, name, f"is only emulated on compute capability {capability}", "--fp16, with --bf16 false"
            )


@rule
def fp16_needs_a_gpu(run):
    """On a CPU `fp16=True` changes nothing: the run trains in fp32 and reports fp16."""
    if run["fp16"] and not on_gpu(run) and not uses_deepspeed(run):
        yield advice(run, "fp16", "does nothing on a CPU: this run trains in fp32", "--bf16 instead, or leave it out")


@rule
def fp16_under_deepspeed_needs_hardware(run):
    """`ValueError: Type fp16 is not supported on your device.`, on most CPUs."""
    if uses_deepspeed(run) and not on_gpu(run) and mixed_precision(run) == "fp16" and not run.hardware.fp16_on_cpu:
        yield problem(run, "fp16", "is not supported by DeepSpeed on this CPU", "--bf16, with --fp16 false")


def _deepspeed_enables(run: RunSpec, name: str) -> object:
    """`enabled` of bf16 or fp16 in the DeepSpeed JSON; None if it says nothing."""
    return mapping((deepspeed_file(run) or {}).get(name)).get("enabled")


@rule
def deepspeed_evaluates_as_it_trains(run):
    """`ds bf16.enabled=False vs hf bf16|bf16_full_eval=True`, or it also trains in bf16, silently.

    Only a DeepSpeed JSON of `--deepspeed` that does not mention the type leaves the training alone.
    """
    if not uses_deepspeed(run):
        return
    for name in ("bf16", "fp16"):
        enabled = _deepspeed_enables(run, name)
        if not run[f"{name}_full_eval"] or mixed_precision(run) == name or enabled is False:
            continue  # False contradicts: deepspeed_json_agrees_with_arguments
        if run["deepspeed"] is None or enabled is not None:
            trained = mixed_precision(run).replace("no", "fp32")
            what = f"DeepSpeed evaluates in the type that it trains in, and this run asks for {trained}"
            fix = f"--{name} with --{trained} false" if trained in ("bf16", "fp16") else f"--{name}"
            yield problem(run, f"{name}_full_eval", what, f"leave it out, or {fix}")


# --- fp8 ------------------------------------------------------------------------------------------

# Backend of accelerate's fp8 -> the module it needs, and its distribution.
_FP8_PACKAGES = {
    "AO": ("torchao", "torchao"),
    "TE": ("transformer_engine", "transformer-engine"),
    "MSAMP": ("msamp", "ms-amp"),
}
_LEAST_FP8_CAPABILITY = (8, 9)


def _fp8_backend(run: RunSpec) -> str:
    """The backend that the YAML or the launcher names; empty if accelerate takes what it finds."""
    section = dict(sections(run)).get("fp8_config", {})
    named = section.get("backend", section.get("fp8_backend"))
    if named is None and not run.engine.raw:
        named = run.environment.get("ACCELERATE_FP8_BACKEND")
    return "" if named in (None, "NO") else str(named)


def _trains_in_fp8(run: RunSpec) -> bool:
    """Or would, without arguments that contradict it."""
    return "fp8" in (mixed_precision(run), run.engine.mixed_precision)


@rule
def fp8_has_a_backend(run):
    """`FP8 is not available on this machine`, or `'ao' is not a valid FP8BackendType`.

    The launcher's own help writes the backends in lower case, and then no process starts.
    """
    if not _trains_in_fp8(run):
        return
    backend = _fp8_backend(run)
    known = [name for name in legal.accelerate_choices()["FP8BackendType"] if name != "NO"]
    if backend and backend not in known:
        fix = "backend: " + (backend.upper() if backend.upper() in known else " or ".join(known))
        yield in_yaml(run, "fp8_config", f"there is no backend {backend!r}", fix)
        return
    wanted = [backend] if backend else known
    if any(available(run, _FP8_PACKAGES[name][0]) for name in wanted if name in _FP8_PACKAGES):
        return
    package = _FP8_PACKAGES.get(backend, _FP8_PACKAGES["AO"])[1]
    here = run.elsewhere is None
    what = f"fp8 needs the package {package}" + ("" if here else ", and it is not installed here")
    fix = f"pip install {package}" if here else f"have {package} where it will run"
    yield in_yaml(run, "mixed_precision", what, fix, "error" if here else "advice")


@rule
def fp8_needs_sm89(run):
    """`insufficient for FP8 mixed precision training ... Will use FP16 instead.`, in the log alone.

    On a CPU torchao computes in fp8 all the same. The other two are packages for GPUs, read in
    their documentation.
    """
    if not _trains_in_fp8(run):
        return
    card = run.hardware.capability
    if not on_gpu(run):
        if _fp8_backend(run) in ("TE", "MSAMP"):
            yield in_yaml(run, "fp8_config", f"{_fp8_backend(run)} trains on GPUs only", "backend: AO")
    elif card < _LEAST_FP8_CAPABILITY:
        what = f"fp8 needs compute capability 8.9, and the GPU has {card[0]}.{card[1]}"
        yield in_yaml(run, "mixed_precision", what, "mixed_precision: 'no'")


@rule
def fp8_fits_the_engine(run):
    """`ds bf16.enabled=True vs hf bf16|bf16_full_eval=False`: Trainer compares with its own types.

    And `torchao with FSDP2 and cpu_ram_efficient_loading is not supported`, and MS-AMP with FSDP.
    """
    if not _trains_in_fp8(run):
        return
    if uses_deepspeed(run):
        what = "fp8 does not train under DeepSpeed with Trainer"
        yield in_yaml(run, "mixed_precision", what, "mixed_precision: bf16, with --bf16, or another engine")
    if run.engine.kind != "fsdp":
        return
    if _fp8_backend(run) == "MSAMP":
        yield in_yaml(run, "fp8_config", "MS-AMP does not train under FSDP", "backend: AO")
    elif _fp8_backend(run) in ("AO", "") and _loads_on_one_rank(run):
        what = "torchao cannot load like this under FSDP"
        yield in_yaml(run, "fsdp_cpu_ram_efficient_loading", what, "fsdp_cpu_ram_efficient_loading: false")


def _loads_on_one_rank(run: RunSpec) -> bool:
    """FSDP's cpu_ram_efficient_loading, which the launcher turns on if the YAML does not say."""
    launched = run.environment.get("FSDP_CPU_RAM_EFFICIENT_LOADING", True)
    return is_true(fsdp_section(run).get("cpu_ram_efficient_loading", launched))


# --- tf32 and the weights -------------------------------------------------------------------------


@rule
def tf32_needs_sm80(run):
    """`ValueError: --tf32 requires Ampere or a newer GPU arch, cuda>=11 and torch>=1.7`"""
    if run["tf32"] and run.hardware.capability < (8, 0):
        yield problem(run, "tf32", "needs a GPU of compute capability 8.0", "leave it out")


@rule
def yaml_precision_agrees_with_arguments(run):
    """`mixed_precision: bf16` in the YAML turns bf16 on, despite `bf16=False`.

    TrainingArguments that say fp16 or bf16 win over the YAML: as asked, if the user wrote them.
    """
    asked = "bf16" if run["bf16"] else "fp16" if run["fp16"] else "no"
    given = run.engine.mixed_precision
    if given in ("no", asked) or (given == "fp8" and asked == "no") or given not in ("bf16", "fp16", "fp8"):
        return
    if given != "fp8" and asked != "no" and run.explicit(asked):
        yield in_yaml(run, "mixed_precision", f"{given} is ignored: --{asked} wins", "mixed_precision: 'no'", "advice")
        return
    fix = f"mixed_precision: 'no', or --{given} for the run"
    if given == "fp8":
        fix = f"mixed_precision: '{asked}', or --{asked} false for fp8"
    what = f"{given} contradicts the run, which asks for {'fp32' if asked == 'no' else asked}"
    yield in_yaml(run, "mixed_precision", what, fix)


@rule
def fp16_weights_cannot_be_unscaled(run):
    """`ValueError: Attempting to unscale FP16 gradients.` in the first step."""
    if _unscales_its_weights(run):
        yield problem(
            run,
            "dtype",
            "float16 weights cannot be trained with fp16",
            "--dtype float32: fp16 still computes in 16 bits",
        )


def _unscales_its_weights(run: RunSpec) -> bool:
    """On a CPU `fp16` does nothing, so that nothing is scaled there."""
    if run["use_peft"] or uses_deepspeed(run) or not on_gpu(run):
        return False
    return run["dtype"] == "float16" and mixed_precision(run) == "fp16"


@rule
def sixteen_bit_weights_lose_small_updates(run):
    """Weights in 16 bits round most of AdamW's updates away."""
    if run["dtype"] == "float32" or run["use_peft"] or uses_deepspeed(run):
        return
    if _unscales_its_weights(run):
        return  # fails altogether: fp16_weights_cannot_be_unscaled
    yield advice(
        run,
        "dtype",
        f"{run['dtype']} weights round small updates away",
        "--dtype float32 with --bf16, which computes in 16 bits",
    )
