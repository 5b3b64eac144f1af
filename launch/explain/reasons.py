"""The reason that `recipes explain` prints for each row, worded by what the row's numbers show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launch.explain.topics import SEQUENCES, STEPS, Measured, Row, Topic, Variant

ALIKE = 1.05  # times as fast: the medians of a few steps are not more precise


def _accumulation(variant: Variant, row: Row, measured: Measured) -> str:
    first, at_each = measured.rows[:2]
    if row is first:
        return "the reference: one backward, one synchronisation, the activations of all 8 in memory at once"
    if not variant.divide:
        times = f"{row.gradient / first.gradient:.2f} times"
        return (
            f"{variant.micro_batches} means are added up: {times} the gradient, as if the learning rate were {times} "
            f"as high; {_instead(row, first)}"
        )
    if not variant.no_sync:
        return (
            f"DDP averages after every backward, {row.synchronisations:g} times where once is enough, and sends "
            f"{row.sent_bytes / first.sent_bytes:g} times the bytes; {gradient_words(row)}"
        )
    return (
        f"gradients stay on their rank until the last backward; {gradient_words(row)}; against all 8 at once "
        f"{memory_words(row, first)}, {speed_words(row, first)}; against synchronising each time "
        f"{speed_words(row, at_each)}"
    )


def _amp(variant: Variant, row: Row, measured: Measured) -> str:
    first = measured.rows[0]
    if row is first:
        return "the reference: 24 significant bits, down to 1e-38"
    if variant.dtype == "bf16":
        effect = f"{gradient_words(row)}; {_cost(variant, row, measured)}"
        return f"8 significant bits with fp32's range: nothing to scale; {effect}"
    if not variant.scale:
        return (
            f"11 significant bits, but nothing below 6e-8: {row.lost:.0%} of the gradient's values became zero; "
            f"{gradient_words(row)}; {_instead(row, first)}"
        )
    skipped = f", {row.skipped_steps} steps skipped to find the scale" if row.skipped_steps else ""
    return (
        f"the loss is multiplied before backward and the gradient divided after, {row.lost:.1%} became zero{skipped}; "
        f"{gradient_words(row)}; {_cost(variant, row, measured)}"
    )


def _both(variant: Variant, row: Row, measured: Measured) -> str:
    first = measured.rows[0]
    if row is first:
        return "the reference: the whole batch in fp32, its gradient clipped to a norm of 1"
    if variant.clip == "scaled":
        return (
            f"the scaled gradient was cut to a norm of 1, and unscale_ then left {size_of(row.gradient)} of it; "
            f"{_instead(row, first)}"
        )
    effect = f"{gradient_words(row)}; {_cost(variant, row, measured)}"
    if variant.scale:
        return f"scale each loss, then once an optimizer step unscale_, clip, step, update; {effect}"
    if variant.dtype == "bf16":
        inside = " inside no_sync" if variant.micro_batches > 1 else " alone"
        return f"autocast{inside}, nothing to scale; {effect}"
    return f"each loss divided by {variant.micro_batches}, one synchronisation; {effect}"


_REASONS: dict[str, Callable[[Variant, Row, Measured], str]] = {
    "accumulation": _accumulation,
    "amp": _amp,
    "both": _both,
}


def reason_for(topic: str, variant: Variant, row: Row, measured: Measured) -> str:
    """What a row shows, by its own numbers."""
    return _REASONS[topic](variant, row, measured)


def notes_on(topic: Topic, measured: Measured) -> list[str]:
    notes = [
        f"memory: {measured.memory_of}",
        "speed: medians of steps, the variants in turns; syncs and sent: per step and rank, counted by a hook in DDP",
        f"loss: on the same examples after {STEPS} steps of SGD, {measured.loss_before:.2f} before",
        "gradient: its norm in the first step, as SGD gets it, relative to the first row; off: the relative difference",
    ]
    if topic.gradients_of:
        notes += [
            "zeroed: values of the gradient that are zero here and not in the first row",
            f"the loss is divided and the learning rate multiplied, so that gradients are as small as with a mean over "
            f"{topic.gradients_of:,} tokens instead of {SEQUENCES * measured.tokens:,}",
            "autocast keeps weights and gradients in fp32, so DDP sends fp32; --ddp_comm_hook sends 16 bits",
        ]
    notes += _reversed_here(topic, measured)
    if any(not variant.divide for variant in topic.variants):
        quicker, slower = sorted(row.seconds for row in measured.rows[-2:])
        notes.append(
            f"the last two rows do the same work: that one took {slower / quicker:.2f} times as long is this machine's "
            "noise"
        )
        notes.append(
            "Adam divides by the gradient's own size, which hides a loss that was not divided; but clipping starts "
            "at an eighth of the intended norm, and weight decay that is added to the gradient counts an eighth"
        )
    return notes


def _reversed_here(topic: Topic, measured: Measured) -> list[str]:
    """That a CPU shows the reverse of tensor cores, where it does."""
    pairs = list(zip(topic.variants, measured.rows, strict=True))
    in_fp32 = {variant.micro_batches: row for variant, row in reversed(pairs) if variant.dtype == "fp32"}
    slower = [
        f"{variant.name} {speed_words(row, in_fp32[variant.micro_batches])} as in fp32"
        for variant, row in pairs
        if variant.dtype == "bf16" and _slower(row, in_fp32[variant.micro_batches])
    ]
    if measured.backend != "gloo" or not slower:
        return []
    return [
        f"this CPU shows the reverse of tensor cores: {'; '.join(slower)}. They compute 16 bits faster than fp32 "
        "(NVIDIA's data sheet of the A100: 312 TFLOPS in bf16 and fp16, 156 in TF32, 19.5 in fp32)"
    ]


# --- Parts of a reason ----------------------------------------------------------------------------


def gradient_words(row: Row) -> str:
    if row.difference < 1e-5:  # what fp32 rounds off
        return f"the same gradient (to {size_of(row.difference)})"
    return f"the gradient is off by {row.difference:.1%}"


def _instead(row: Row, other: Row) -> str:
    """The losses of both rows."""
    words = ["not finite" if loss is None else f"{loss:.2f}" for loss in (row.loss, other.loss)]
    return f"loss {words[0]} as well" if words[0] == words[1] else f"loss {words[0]} instead of {words[1]}"


def _cost(variant: Variant, row: Row, measured: Measured) -> str:
    """Memory and time compared with the first row."""
    first = measured.rows[0]
    return f"{memory_words(row, first)}, {speed_words(row, first)}{_no_units(variant, row, measured)}"


def memory_words(row: Row, other: Row) -> str:
    share = row.peak_bytes / other.peak_bytes
    return "as much memory" if 0.98 < share < 1.02 else f"{abs(1 - share):.0%} {'less' if share < 1 else 'more'} memory"


def speed_words(row: Row, other: Row) -> str:
    ratio = other.seconds / row.seconds
    if 1 / ALIKE < ratio < ALIKE:
        return "as fast here"
    if not clearly_differs(row, other):
        return f"x {ratio:.2f} here, which noise can make"
    return f"{ratio:.1f} times as fast here" if ratio > 1 else f"takes {1 / ratio:.1f} times as long here"


def _slower(row: Row, other: Row) -> bool:
    return row.seconds > other.seconds and clearly_differs(row, other)


def clearly_differs(row: Row, other: Row) -> bool:
    """Whether one takes longer than the other by more than so few steps leave open."""
    leave_open = row.off * row.seconds + other.off * other.seconds
    return abs(row.seconds - other.seconds) > max((ALIKE - 1) * other.seconds, leave_open)


def _no_units(variant: Variant, row: Row, measured: Measured) -> str:
    """Why 16 bits were slower, if that is known, else ""."""
    slower = _slower(row, measured.rows[0])
    if variant.dtype == "fp32" or not slower or measured.backend != "gloo":
        return ""
    return (
        f" (this CPU has no {variant.dtype} arithmetic)"
        if cpu_computes_in(variant.dtype, _cpu_flags()) is False
        else ""
    )


def cpu_computes_in(dtype: str, flags: frozenset[str]) -> bool | None:
    """Whether an x86 CPU with these flags computes in "bf16" or "fp16", None if it has no flags."""
    return bool(flags & {f"avx512_{dtype}", f"amx_{dtype}"}) if flags else None  # Linux: asm/cpufeatures.h


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def size_of(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")
