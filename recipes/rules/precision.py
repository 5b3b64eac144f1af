"""The types a run computes in and stores its weights in: fp32, tf32, bf16, fp16."""

from __future__ import annotations

from recipes.rules.facts import advice, in_yaml, mixed_precision, problem, rule, uses_deepspeed


@rule
def one_precision(run):
    """`At most one of fp16 and bf16 can be True, but not both`"""
    for first, second in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
        if run[first] and run[second]:
            yield problem(run, first, f"and {second} are both on", f"--{first} false, or --{second} false")


@rule
def bf16_needs_sm80(run):
    """A T4 or V100 only emulates bf16, several times slower than fp16; torch calls it supported."""
    if not run.hardware.cuda or run["use_cpu"] or run.hardware.capability >= (8, 0):
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
    if run["fp16"] and (run["use_cpu"] or not run.hardware.cuda) and not uses_deepspeed(run):
        yield advice(run, "fp16", "does nothing on a CPU: this run trains in fp32", "--bf16, or leave it out")


@rule
def tf32_needs_sm80(run):
    """`ValueError: --tf32 requires Ampere or a newer GPU arch, cuda>=11 and torch>=1.7`"""
    if run["tf32"] and run.hardware.capability < (8, 0):
        yield problem(run, "tf32", "needs a GPU of compute capability 8.0", "leave it out")


@rule
def yaml_precision_agrees_with_arguments(run):
    """`mixed_precision: bf16` in the YAML turns bf16 on, despite `bf16=False`."""
    asked = "bf16" if run["bf16"] else "fp16" if run["fp16"] else "no"
    given = run.engine.mixed_precision
    if given in ("no", asked) or (given == "fp8" and asked == "no") or given not in ("bf16", "fp16", "fp8"):
        return
    fix = f"mixed_precision: '{asked}'" if given == "fp8" else f"mixed_precision: 'no', or --{given} for the run"
    what = f"{given} contradicts the run, which asks for {'fp32' if asked == 'no' else asked}"
    yield in_yaml(run, "mixed_precision", what, fix)


@rule
def fp16_weights_cannot_be_unscaled(run):
    """`ValueError: Attempting to unscale FP16 gradients.` in the first step."""
    if run["dtype"] == "float16" and mixed_precision(run) == "fp16" and not run["use_peft"] and not uses_deepspeed(run):
        yield problem(
            run,
            "dtype",
            "float16 weights cannot be trained with fp16",
            "--dtype float32: fp16 still computes in 16 bits",
        )


@rule
def sixteen_bit_weights_lose_small_updates(run):
    """Weights in 16 bits round most of AdamW's updates away."""
    if run["dtype"] == "float32" or run["use_peft"] or uses_deepspeed(run):
        return
    if run["dtype"] == "float16" and mixed_precision(run) == "fp16":
        return  # fails altogether: fp16_weights_cannot_be_unscaled
    yield advice(
        run,
        "dtype",
        f"{run['dtype']} weights round small updates away",
        "--dtype float32 with --bf16, which computes in 16 bits",
    )
