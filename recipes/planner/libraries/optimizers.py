"""What the optimizers that Trainer offers keep, and what an update asks for and gives back.

Read from the source of torch 2.13 (torch/optim), transformers 5.23 (trainer_optimizer.py, and
Adafactor in optimization.py) and bitsandbytes 0.50 (backends/cpu/ops.py), and compared with real
updates in tests/recipes/planner/test_optimizers.py. On a GPU bitsandbytes' updates are one kernel
(backends/cuda/ops.py): they ask for nothing, and neither does torch's fused AdamW.
"""

from __future__ import annotations

from itertools import pairwise

from recipes.planner.shapes import TRAINED, Weights
from recipes.run import RunSpec

FP32 = 4

# Numbers that an optimizer keeps per trained parameter, by the start of `optim` without "paged_".
# Every other one keeps two, as Adam does. Adafactor keeps a row and a column of each matrix.
_MOMENTS = {"sgd": 0, "lomo": 0, "adalomo": 0, "adafactor": 0.01, "lion": 1, "adagrad": 1, "rmsprop": 1, "ademamix": 3}
_IN_8_BITS = 1 + FP32 / 256  # a byte, and an fp32 scale per block of 256: bitsandbytes (blockwise) and torchao
_IN_4_BITS = 0.5 + FP32 / 128  # torchao/optim/adam.py: blocks of 128

# Temporaries of an update, in copies of a parameter: without weight decay, and how many more with.
# Of all parameters at once, as torch's optimizers do it on a GPU (foreach):
_OF_ALL = {"adamw_torch": (1, 0), "adagrad": (2, 0), "rmsprop": (1, 1), "sgd": (0, 1)}
# Of one parameter after the other, on a CPU (_single_tensor_adamw and so on):
_OF_ONE = {"adamw_torch": (2, 0), "adagrad": (1, 1), "rmsprop": (1, 1), "sgd": (0, 1)}
# bitsandbytes' on a CPU, in fp32. In 8 bits they unpack the moments first, and pack them again.
_OF_BITSANDBYTES = {"adam": (3, 0), "ademamix": (4, 0), "lion": (3, 0), "rmsprop": (3, 1)}
_OF_BITSANDBYTES_IN_8_BITS = {"adam": 5, "ademamix": 9 + 1 / 4 + 4 / 256, "lion": 5, "rmsprop": 3}


def moments(run: RunSpec) -> float:
    """Numbers that the optimizer keeps of each trained parameter."""
    optim = str(run["optim"])
    kept = next((count for name, count in _MOMENTS.items() if optim.removeprefix("paged_").startswith(name)), 2)
    if optim not in ("sgd", "rmsprop"):
        return kept
    words = (run["optim_args"] or "").replace(" ", "").split(",")
    given = dict(word.split("=") for word in words if word.count("=") == 1)
    return kept + (float(given.get("momentum", 0)) > 0) + (given.get("centered", "").lower() in ("true", "1", "yes"))


def few_bits(run: RunSpec) -> float | None:
    """Bytes of a number that it keeps in 8 or 4 bits, None for another optimizer."""
    optim = str(run["optim"])
    return _IN_8_BITS if "8bit" in optim else _IN_4_BITS if "4bit" in optim else None


def embeddings_stay_in_fp32(run: RunSpec) -> bool:
    """With bitsandbytes, Trainer keeps the moments of embeddings in fp32, with torchao not."""
    return few_bits(run) is not None and not str(run["optim"]).startswith("adamw_torch")


def width_of_moments(run: RunSpec, trained_bytes: int) -> int:
    """Bytes of a number that is not kept in few bits: those of its parameter, with torch's own."""
    return FP32 if _of_bitsandbytes(run) or run["optim"] == "adafactor" else trained_bytes


def requests_of_update(run: RunSpec, weights: Weights, width: int) -> list[list[int]]:
    """Bytes that an update asks for, in groups: one group is freed when the next is asked for.

    `width`: bytes of a trained parameter. Of one parameter after the other, a loop keeps a
    temporary of the one before: `denom` of Adam, `update` of Adafactor. Trainer updates norms and
    biases apart, and they are small.
    """
    optim, decays = str(run["optim"]), run["weight_decay"] > 0
    if run.hardware.cuda and optim != "adafactor":
        copies, more = _OF_ALL.get(optim, (0, 0))
        trained = [size for size, kind in weights.sizes if kind == TRAINED] or [weights.trained]
        return [[size * width for size in trained] * (copies + decays * more)]
    matrices = weights.matrices or ((min(weights.trained, weights.largest_parameter), False),)
    if _of_bitsandbytes(run):
        in_16_bits = width < FP32
        return [[round(FP32 * size * (_of_one_in_fp32(run, table) + in_16_bits))] for size, table in matrices]
    copies, more = (2 if width == FP32 else 4, 0) if optim == "adafactor" else _OF_ONE.get(optim, (0, 0))
    width = FP32 if optim == "adafactor" else width
    sizes = [size for size, _ in matrices]
    if not copies:
        return [[size * width] * (decays * more) for size in sizes]
    pairs = list(pairwise(sizes)) or [(sizes[0], 0)]
    return [[max(pair) * width] * (copies + decays * more) + [min(pair) * width] for pair in pairs]


def bytes_of_update(run: RunSpec, weights: Weights, width: int) -> int:
    """The most that an update asks for at once, of parameters with `width` bytes."""
    return max(sum(group) for group in requests_of_update(run, weights, width))


def _of_bitsandbytes(run: RunSpec) -> bool:
    optim = str(run["optim"]).removeprefix("paged_")
    return optim.startswith(("lion", "ademamix", "rmsprop_bnb", "adamw_bnb", "adamw_8bit", "adamw_32bit"))


def _of_one_in_fp32(run: RunSpec, is_embedding: bool) -> float:
    """Copies in fp32 that bitsandbytes makes of a parameter in its update on a CPU."""
    optim = str(run["optim"])
    name = next(name for name in ("ademamix", "adam", "lion", "rmsprop") if name in optim)
    if few_bits(run) and not is_embedding:
        return _OF_BITSANDBYTES_IN_8_BITS[name]
    copies, more = _OF_BITSANDBYTES[name]
    return copies + more * (run["weight_decay"] > 0)
