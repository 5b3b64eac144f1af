"""What `recipes explain` compares, and the numbers that it measures of each variant."""

from __future__ import annotations

from dataclasses import dataclass

RANKS = 2
SEQUENCES = 8  # of each rank, in each optimizer step
STEPS = 11
MEASURED = "measured.json"


@dataclass(frozen=True)
class Variant:
    """One way to take the same optimizer step.

    `clip`: the gradient's norm is limited when it is "unscaled" (right) or still "scaled" (wrong).
    `goal`: its heading in the table of goals, empty if it is not in it.
    """

    name: str
    micro_batches: int = 1
    dtype: str = "fp32"
    no_sync: bool = True
    divide: bool = True
    scale: bool = False
    clip: str = ""
    goal: str = ""


@dataclass(frozen=True)
class Topic:
    """Variants to compare with the first.

    `gradients_of`: make gradients as small as a mean over so many tokens would; 0 leaves them.
    """

    what: str
    variants: tuple[Variant, ...]
    gradients_of: int = 0


BOTH = Topic(
    "accumulation beside 16 bits: what each is for, and together: where to scale, unscale, clip and step",
    (
        Variant("fp32, 1 micro-batch of 8", clip="unscaled"),
        Variant("fp32, 4 of 2, no_sync", 4, clip="unscaled", goal="accumulation"),
        Variant("bf16, 1 micro-batch of 8", dtype="bf16", clip="unscaled", goal="mixed precision (bf16)"),
        Variant("bf16, 4 of 2, no_sync", 4, "bf16", clip="unscaled", goal="both"),
        Variant("fp16, scaler, 4 of 2, no_sync", 4, "fp16", scale=True, clip="unscaled"),
        Variant("the same, clipped while scaled", 4, "fp16", scale=True, clip="scaled"),
    ),
)
TOPICS = {
    "accumulation": Topic(
        "the same batch at once or in parts, with and without no_sync",
        (
            Variant("1 micro-batch of 8"),
            Variant("8 of 1, synchronised each time", 8, no_sync=False),
            Variant("8 of 1, no_sync", 8),
            Variant("8 of 1, no_sync, loss not divided", 8, divide=False),
        ),
    ),
    "amp": Topic(
        "fp32, bf16, and fp16 with and without a gradient scaler",
        (
            Variant("fp32"),
            Variant("bf16", dtype="bf16"),
            Variant("fp16", dtype="fp16"),
            Variant("fp16, scaler", dtype="fp16", scale=True),
        ),
        gradients_of=2**20,  # a large batch: with the few tokens of this one almost nothing underflows
    ),
    "both": BOTH,
}


@dataclass(frozen=True)
class Row:
    """What rank 0 measured of a variant.

    `seconds`: of an optimizer step, the median; `off`: the share of it that noise may make.
    `synchronisations` and `sent_bytes` (which each rank gives to the all-reduce): in one step.
    `gradient`: the norm in the first step, as the optimizer gets it; `difference`: of that gradient
    from the first row's, relative; `lost`: the share of its values that are zero here and not
    there. `loss`: None if it is not finite.
    """

    seconds: float
    peak_bytes: int
    synchronisations: float
    sent_bytes: float
    loss: float | None
    gradient: float
    difference: float
    lost: float
    skipped_steps: int
    off: float = 0.0


@dataclass(frozen=True)
class Measured:
    """All rows, and what they share.

    `tokens` in a sequence, `loss_before` the first step; `memory_of` says what `peak_bytes` counts.
    """

    backend: str
    parameters: int
    tokens: int
    loss_before: float
    memory_of: str
    rows: tuple[Row, ...]
