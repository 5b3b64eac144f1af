"""What a plan says of a run in words: which attention was planned, what is not counted."""

from __future__ import annotations

from recipes.planner.shapes import EAGER, LOADING, LOOP, MATH, Traced
from recipes.run import RunSpec

_KEEPS = "which keeps batch x heads x length x length numbers in every layer"


def notes(run: RunSpec, traced: Traced, traceable: bool, has_liger: bool, moment: str) -> tuple[str, ...]:
    """Of attention that is not a fused kernel, of Liger and torch.compile, and of a closed form.

    What Llama keeps from forward to backward is 0.64 to 0.86 of it if compiled (aot_eager with the
    partitioner of inductor, torch 2.13).
    """
    found = []
    if not traceable:
        found.append("this model cannot be traced: activations and logits are estimated from its shape")
    if moment == LOADING:
        found.append("loading needs most, not steps: each GPU has all weights in 4 bits until they are sharded")
    if LOOP in traced.kernels:
        found.append("planned as transformers' own loop over a sequence: with a package of kernels the peak is lower")
        found.append("what torch caches is not counted: nvidia-smi shows more")
    if run["use_liger_kernel"] and not (has_liger and traceable):
        found.append("planned without Liger's kernels, so the real peak is lower: they are not known for this model")
    if run["torch_compile"] or run["torch_compile_backend"] or run["torch_compile_mode"]:
        found.append("what torch.compile fuses or computes again is not counted: the real peak is lower")
        if (run["torch_compile_mode"] or "default") not in ("default", "max-autotune-no-cudagraphs"):
            found[-1] += ", or with CUDA graphs higher, as their memory is apart"
    if EAGER in traced.kernels:
        asked = "as asked for" if run["attn_implementation"] == "eager" else "this model's own"
        found.append(f"attention is planned as eager ({asked}), {_KEEPS}")
    if MATH in traced.kernels:
        found.append(f"no fused kernel of torch takes this attention on this card: the math kernel runs, {_KEEPS}")
    return tuple(found)
