"""NVIDIA GPUs by name, for planning a run on a card that this machine does not have.

A card has three sizes: what it is sold as, what nvidia-smi shows as its total, and what CUDA and
torch can allocate. The driver keeps the difference of the last two, a quarter to nine tenths of a
GiB, so a plan must fit the third: `torch_bytes`, the least that was seen, since it varies with the
driver. ECC is as shipped: on for data centre cards, where it costs GDDR6 a sixteenth of the memory,
off for RTX A6000 and RTX 6000 Ada.

Peaks are for dense matrices with fp32 accumulation at the boost clock: half of what a datasheet
shows "with sparsity".
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from recipes.errors import mistake


@dataclass(frozen=True)
class KnownGpu:
    """`gigabytes` is the size on the box, `memory_bytes` nvidia-smi's total, `torch_bytes` torch's.

    `peak_flops` is FLOP/s in bf16, None for a card without it, which has `peak_fp16_flops` instead.
    `sources` says where the total was seen, then where the peak is from.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    peak_flops: float | None
    sources: tuple[str, ...]
    torch_bytes: int
    gigabytes: int
    peak_fp16_flops: float | None = None


def find(name: str, otherwise: str = "give its memory with --gpu_memory GB") -> KnownGpu:
    """The card that a user or a driver calls `name`. "H100" and "H200" alone are the SXM modules.

    Raises `UserError` for a name that is not in the catalogue, or belongs to several cards.
    `otherwise` is what to do about a card that is not in it.
    """
    chip, gigabytes = _read(name)
    same_chip = [gpu for gpu in CATALOGUE if _read(gpu.name)[0] == chip]
    cards = [gpu for gpu in same_chip if gigabytes in (None, gpu.gigabytes)]
    if len(cards) == 1:
        return cards[0]
    if cards:
        raise mistake("gpu", f"{name!r} is the name of {len(cards)} cards", f"write {_names(cards)}")
    near = same_chip or _nearest(chip)
    if near:
        otherwise = f"write {_names(near)} if that is the card, else {otherwise}"
    raise mistake("gpu", f"{name!r} is not in the catalogue", otherwise)


def _read(name: str) -> tuple[str, int | None]:
    """The chip and the size in GB, if any, of a card: ("a100", 80) of "NVIDIA A100-SXM4-80GB"."""
    spelling = re.sub(r"[^a-z0-9]+", " ", name.lower())
    size = re.search(r"\b(\d{2,3}) ?(gi?b?)?\b", spelling)
    if size:
        spelling = spelling.replace(size[0], " ", 1)
    chip = re.sub(r"nvidia|tesla|geforce|rtx|generation|tensor core|gpu|sxm\d?|hbm\d?e?| ", "", spelling)
    if not chip.startswith(("h", "v")):  # only of these chips is the PCIe card another product
        chip = chip.removesuffix("pcie")
    return chip, int(size[1]) if size else None


def _nearest(chip: str) -> list[KnownGpu]:
    """Cards with a similar name that begins with the same letters: an MI300X is not a 3090."""
    chips = {_read(gpu.name)[0] for gpu in CATALOGUE}
    near = difflib.get_close_matches(chip, {other for other in chips if _letters(other) == _letters(chip)})
    return [gpu for gpu in CATALOGUE if _read(gpu.name)[0] in near]


def _letters(chip: str) -> str:
    return chip[: len(chip) - len(chip.lstrip("abcdefghijklmnopqrstuvwxyz"))]


def _names(gpus: list[KnownGpu]) -> str:
    return " or ".join(gpu.name for gpu in gpus)


def _card(
    name: str,
    gigabytes: int,
    smi_mib: int,
    torch_mib: int,
    capability: tuple[int, int],
    peak: float | None,
    *sources: str,
    fp16: float | None = None,
) -> KnownGpu:
    """One row of the catalogue. Sizes are in MiB, as nvidia-smi and torch print them."""
    return KnownGpu(name, smi_mib * 2**20, capability, peak, sources, torch_mib * 2**20, gigabytes, fp16)


# Where nvidia-smi's total was seen (the first lists seven cards), and where the peaks are from.
_MODAL = "https://github.com/modal-labs/modal-client/pull/2797"
_CLUB = "https://github.com/noonghunna/club-3090/issues/"
_GLS = "https://github.com/thamada/"
_TITAN = "NVIDIA's product page, as in https://github.com/pytorch/torchtitan/blob/main/torchtitan/tools/utils.py"
_LIGHTNING = "as in https://github.com/Lightning-AI/pytorch-lightning, src/lightning/fabric/utilities/throughput.py"
_L40 = "as in https://www.mullet.se/product.html?product_id=355414"

# fmt: off
CATALOGUE = (
    _card("V100 16GB", 16, 16384, 16130, (7, 0), None,
          _GLS + "gls/blob/main/gls/V100_x8_smi.py",
          f"NVIDIA V100 datasheet, the SXM2 module, {_LIGHTNING}", fp16=125e12),
    _card("V100 32GB", 32, 32768, 32480, (7, 0), None,
          "https://github.com/Wan-Video/Wan2.1/issues/5",
          f"NVIDIA V100 datasheet, the SXM2 module, {_LIGHTNING}", fp16=125e12),
    _card("T4", 16, 15360, 14904, (7, 5), None,
          _MODAL,
          f"NVIDIA T4 datasheet, {_LIGHTNING}", fp16=65e12),
    _card("RTX 3090", 24, 24576, 24120, (8, 6), 71e12,
          _CLUB + "32",
          "NVIDIA GA102 whitepaper; 70 after rounding in https://github.com/apoorvkh/academic-pretraining/issues/3"),
    _card("A10", 24, 23028, 22587, (8, 6), 125e12,
          _MODAL,
          "NVIDIA A10 datasheet, as in https://github.com/karpathy/llm.c/pull/621"),
    _card("A10G", 24, 23028, 22587, (8, 6), 70e12,
          "https://github.com/NVIDIA/DCGM/issues/232",
          "https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference: less than the A10's"),
    _card("A30", 24, 24576, 24062, (8, 0), 165e12,
          "nvidia-smi in many public files; torch's total: https://github.com/LHRLAB/ChatKBQA/issues/2",
          "NVIDIA A30 datasheet, as in public MFU tables"),
    _card("A40", 48, 46068, 45416, (8, 6), 149.7e12,
          "https://github.com/nanoporetech/dorado/issues/319",
          "https://hmc-tech.com/gpu/nvidia-a100-vs-nvidia-a40"),
    _card("RTX A6000", 48, 49140, 48502, (8, 6), 154.8e12,
          _CLUB + "1047",
          "NVIDIA GA102 whitepaper, as in https://llmperf.net/categories/gpu/Nvidia-A6000-GPUs"),
    _card("A100 40GB", 40, 40960, 40326, (8, 0), 312e12, _MODAL, _TITAN),
    _card("A100 80GB", 80, 81920, 81038, (8, 0), 312e12, _MODAL, _TITAN),
    _card("RTX 4090", 24, 24564, 24081, (8, 9), 165.2e12,
          "https://github.com/RLinf/RLinf/issues/255",
          "https://hmc-tech.com/gpus/nvidia-geforce-rtx-4090-vs-nvidia-rtx-pro-5000-blackwell"),
    _card("L4", 24, 23034, 22563, (8, 9), 121e12,
          "https://github.com/speaches-ai/speaches/pull/438",
          f"NVIDIA L4 datasheet, {_LIGHTNING}"),
    _card("L40", 48, 46068, 45450, (8, 9), 181e12,
          "nvidia-smi in public files; torch's total in one of them",
          f"NVIDIA L40 datasheet, {_L40}"),
    _card("L40S", 48, 46068, 45450, (8, 9), 362e12,
          "https://github.com/akash-network/provider-configs/pull/99",
          f"NVIDIA L40S datasheet, {_L40}"),
    _card("RTX 6000 Ada", 48, 49140, 48502, (8, 9), 364e12,
          _GLS + "nvidia-smi/blob/main/gls/RTX6000Ada_x8_smi.py",
          "a quarter of the sparse fp8 peak, 1457, in its datasheet: https://github.com/atineoSE/coding-model-seeks-gpu"),
    _card("H100 PCIe", 80, 81559, 81008, (9, 0), 756e12,
          "nvidia-smi in many public files",
          _TITAN),
    _card("H100 SXM", 80, 81559, 81082, (9, 0), 989e12, _MODAL, _TITAN),
    _card("H100 NVL", 94, 95830, 95319, (9, 0), 835e12,
          "https://github.com/NVIDIA/gpu-admin-tools/issues/4",
          _TITAN),
    _card("H200 SXM", 141, 143771, 143068, (9, 0), 989e12,
          "https://github.com/sgl-project/sglang/issues/3196",
          _TITAN),
    _card("H200 NVL", 141, 143771, 143068, (9, 0), 835e12,
          "nvidia-smi in public files",
          "half of the sparse peak, 1671, on https://www.nvidia.com/en-us/data-center/h200"),
    _card("B200", 180, 183359, 182615, (10, 0), 2250e12,
          "https://github.com/NVIDIA/TensorRT-LLM/issues/10278",
          f"NVIDIA Blackwell datasheet, {_TITAN.partition(', ')[2]}"),
    _card("RTX 5090", 32, 32607, 32102, (12, 0), 209.5e12,
          _CLUB + "1229",
          "a quarter of the sparse peak summed in fp16, 838, in https://www.spheron.network/blog/nvidia-rtx-5090-specs"),
)
# fmt: on
