"""The catalogue of GPUs: every spelling finds its card, no other name does, sizes are possible."""

import pytest

from recipes.errors import UserError
from recipes.run.gpus import CATALOGUE, find
from recipes.run.hardware import Gpu, Hardware

SPELLINGS = {
    "V100 16GB": ["Tesla V100-SXM2-16GB", "v100 16", "v100_16gb"],
    "T4": ["Tesla T4", "t4", "NVIDIA T4 16GB"],
    "RTX 3090": ["NVIDIA GeForce RTX 3090", "rtx3090", "3090", "rtx-3090-24gb"],
    "A10": ["NVIDIA A10", "a10 24GB"],
    "A10G": ["NVIDIA A10G", "a10g"],
    "RTX A6000": ["NVIDIA RTX A6000", "a6000", "rtx_a6000"],
    "A100 40GB": ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "a100 40"],
    "A100 80GB": ["NVIDIA A100 80GB PCIe", "a100-80gb", "A100 80GB", "A100_80 GiB", " a100  80g "],
    "L40": ["NVIDIA L40", "L40 48GB"],
    "L40S": ["NVIDIA L40S", "l40s"],
    "RTX 6000 Ada": ["NVIDIA RTX 6000 Ada Generation", "6000-ada", "rtx6000ada"],
    "H100 PCIe": ["NVIDIA H100 PCIe", "h100-pcie-80gb"],
    "H100 SXM": ["NVIDIA H100 80GB HBM3", "h100", "H100-80GB", "h100 sxm5", "NVIDIA H100 Tensor Core GPU"],
    "H100 NVL": ["NVIDIA H100 NVL", "h100nvl", "H100 NVL 94GB"],
    "H200 SXM": ["NVIDIA H200", "h200", "H200-141GB"],
    "H200 NVL": ["NVIDIA H200 NVL", "h200_nvl"],
    "B200": ["NVIDIA B200", "b200 180GB"],
    "RTX 5090": ["NVIDIA GeForce RTX 5090", "5090"],
}
CARDS = pytest.mark.parametrize("gpu", CATALOGUE, ids=lambda gpu: gpu.name)


def refusal(name):
    with pytest.raises(UserError) as error:
        find(name)
    (problem,) = error.value.problems
    assert problem.subject == "gpu"
    return problem


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_card_is_found_in_every_spelling(name):
    assert {find(spelling).name for spelling in SPELLINGS[name]} == {name}


@CARDS
def test_a_card_is_found_by_its_own_name_and_size(gpu):
    assert find(gpu.name) is gpu
    assert find(f"nvidia-{gpu.name.lower().split(' sxm')[0].removesuffix('gb')}") is gpu


@pytest.mark.parametrize("name, both", [("a100", "A100 40GB or A100 80GB"), ("Tesla V100", "V100 16GB or V100 32GB")])
def test_a_name_of_two_cards_is_refused_with_both(name, both):
    problem = refusal(name)
    assert problem.what == f"{name!r} is the name of 2 cards"
    assert problem.fix == f"write {both}"


@pytest.mark.parametrize(
    "name, near",
    [
        ("h800", "H100 SXM"),  # a chip that is nearly one of ours
        ("rtx 4090 48gb", "RTX 4090"),  # a card of ours with more memory than it is sold with
        ("A100 60GB", "A100 40GB or A100 80GB"),
    ],
)
def test_an_unknown_card_is_refused_with_the_nearest(name, near):
    problem = refusal(name)
    assert problem.what == f"{name!r} is not in the catalogue"
    assert near in problem.fix
    assert "--gpu_memory GB" in problem.fix


@pytest.mark.parametrize("name", ["", "80GB", "gtx 1660", "MI300X", "NVIDIA GH200 480GB"])
def test_a_name_like_no_other_leaves_the_memory(name):
    assert refusal(name).fix == "give its memory with --gpu_memory GB"


@pytest.mark.parametrize(
    "name",
    [
        "RTX 4090 Laptop GPU",
        "RTX 3090 Ti",
        "RTX 4090 D",
        "Quadro RTX 6000",
        "A100X",
        "L40G",
        "H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_another_card_is_not_taken_for_ours(name):
    refusal(name)


@CARDS
def test_the_figures_are_possible(gpu):
    assert gpu.torch_bytes < gpu.memory_bytes <= gpu.gigabytes * 2**30
    assert gpu.torch_bytes > 0.95 * gpu.gigabytes * 10**9
    assert 200 * 2**20 < gpu.memory_bytes - gpu.torch_bytes < 2**30  # what the driver keeps
    assert len(gpu.sources) == 2
    assert all(gpu.sources)


@CARDS
def test_bf16_needs_capability_8(gpu):
    assert (gpu.peak_flops is not None) == (gpu.capability >= (8, 0))
    assert (gpu.peak_fp16_flops is None) == (gpu.capability >= (8, 0))
    assert 50e12 < (gpu.peak_flops or gpu.peak_fp16_flops) < 3e15


@pytest.mark.parametrize("name", [spelling for spellings in SPELLINGS.values() for spelling in spellings])
def test_a_machine_with_the_card_knows_its_peak(name):
    gpu = find(name)
    assert Hardware((Gpu(name, gpu.capability, gpu.torch_bytes),)).peak_flops == gpu.peak_flops


def test_no_two_cards_share_a_name():
    assert len({gpu.name for gpu in CATALOGUE}) == len(CATALOGUE) == 23
