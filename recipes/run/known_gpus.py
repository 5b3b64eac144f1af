"""NVIDIA GPUs by name, for planning a run on a card that this machine does not have.

A GPU has three memory sizes: the size on the box, the total that nvidia-smi shows, and the memory
that CUDA and torch can allocate. The driver keeps 0.25 to 0.9 GiB of the total for itself, so a
plan must fit the third size, which varies with the driver: `memory_bytes` is the smallest seen.
The sizes hold with ECC as shipped. ECC is on in data centre GPUs, where it takes a sixteenth of
GDDR6 memory. ECC is off in RTX A6000 and RTX 6000 Ada.

Peaks are for dense matrices with fp32 accumulation at the boost clock: half of a datasheet's
figure "with sparsity". The table known_gpus.csv has sizes in MiB, as nvidia-smi and torch print
them, and the sources of the total and of the peak.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import UserError, mistake


@dataclass(frozen=True)
class Gpu:
    """A GPU with the memory that torch can allocate."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class KnownGpu(Gpu):
    """`gigabytes` is the size on the box. `peak_flops` is FLOP/s in bf16, None for a GPU without
    bf16, which has `peak_fp16_flops`.
    """

    gigabytes: int
    peak_flops: float | None
    peak_fp16_flops: float | None


def find(name: str) -> KnownGpu:
    """Find the GPU that a user or a driver calls `name`. "H100" and "H200" mean the SXM modules.

    Raises `UserError` for a name that is not in the table, or that several GPUs share.
    """
    chip, gigabytes = _read(name)
    same_chip = [gpu for gpu in CATALOGUE if _read(gpu.name)[0] == chip]
    cards = [gpu for gpu in same_chip if gigabytes in (None, gpu.gigabytes)]
    if len(cards) == 1:
        return cards[0]
    if cards:
        names = " or ".join(gpu.name for gpu in cards)
        raise mistake("gpu", f"{name!r} is the name of {len(cards)} cards", f"write {names}")
    fix = f"one of {', '.join(gpu.name for gpu in same_chip or CATALOGUE)}; or, for `recipes plan`, --gpu_memory GB"
    raise mistake("gpu", f"{name!r} is not a known GPU", fix)


def known(name: str) -> KnownGpu | None:
    """Find a GPU as `find` does; None where `find` raises, for example for a MIG slice."""
    try:
        return find(name)
    except UserError:
        return None


def _read(name: str) -> tuple[str, int | None]:
    """Read chip and GB from a name: ("a100", 80) from "NVIDIA A100-SXM4-80GB"; GB may be None."""
    spelling = re.sub(r"[^a-z0-9]+", " ", name.lower())
    size = re.search(r"\b(\d{2,3}) ?(gi?b?)?\b", spelling)
    if size:
        spelling = spelling.replace(size[0], " ", 1)
    chip = re.sub(r"nvidia|tesla|geforce|rtx|generation|tensor core|gpu|sxm\d?|hbm\d?e?| ", "", spelling)
    if not chip.startswith(("h", "v")):  # H100's and V100's PCIe cards have lower peaks than SXM modules
        chip = chip.removesuffix("pcie")
    return chip, int(size[1]) if size else None


def _card(row: dict[str, str]) -> KnownGpu:
    major, minor = map(int, row["capability"].split("."))
    peaks = [float(row[name]) * 1e12 if row[name] else None for name in ("bf16_tflops", "fp16_tflops")]
    return KnownGpu(row["name"], (major, minor), int(row["torch_mib"]) << 20, int(row["gigabytes"]), *peaks)


with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as _table:
    CATALOGUE = tuple(map(_card, csv.DictReader(_table)))
