"""The catalogue of GPUs: every spelling finds its card, no other name does, sizes are possible."""

import pytest

from recipes.errors import UserError
from recipes.run.hardware import Gpu, Hardware
from recipes.run.known_gpus import CATALOGUE, find

SPELLINGS = {
    "V100 16GB": ["Tesla V100-SXM2-16GB", "v100 16", "v100_16gb"],
    "T4": ["Tesla T4", "t4", "NVIDIA T4 16GB"],
    "RTX 3090": ["NVIDIA GeForce RTX 3090", "rtx3090", "3090", "rtx-3090-24gb"],
    "A10": ["NVIDIA A10", "a10 24GB"],
    "A10G": ["NVIDIA A10G", "a10g"],
    "RTX A6000": ["NVIDIA RTX A6000", "a6000", "rtx_a6000"],
    "A100 40GB": ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "a100 40"],
    "A100 80GB": ["NVIDIA A100 80GB PCIe", "a100-80gb", "A100 80GB", "A100_80 GiB", " a100  80g "],
    "L40S": ["NVIDIA L40S", "l40s"],
    "RTX 6000 Ada": ["NVIDIA RTX 6000 Ada Generation", "6000-ada", "rtx6000ada"],
    "H100 PCIe": ["NVIDIA H100 PCIe", "h100-pcie-80gb"],
    "H100 SXM": ["NVIDIA H100 80GB HBM3", "h100", "H100-80GB", "h100 sxm5", "NVIDIA H100 Tensor Core GPU"],
    "H100 NVL": ["NVIDIA H100 NVL", "h100nvl", "H100 NVL 94GB"],
    "H200 SXM": ["NVIDIA H200", "h200", "H200-141GB"],
}
UNKNOWN = [
    "", "80GB", "gtx 1660", "MI300X", "NVIDIA GH200 480GB", "RTX 4090 Laptop GPU", "RTX 3090 Ti", "RTX 4090 D",
    "Quadro RTX 6000", "A100X", "L40G", "H100 80GB HBM3 MIG 1g.10gb",
]  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_gpu_is_found_by_every_spelling_of_its_name_with_its_peak_flops(name):
    for spelling in SPELLINGS[name]:
        gpu = find(spelling)
        here = Hardware((Gpu(spelling, gpu.capability, gpu.memory_bytes),))
        assert (gpu.name, here.peak_flops) == (name, gpu.peak_flops)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("a100", "write A100 40GB or A100 80GB"),
        ("Tesla V100", "write V100 16GB or V100 32GB"),
        ("A100 60GB", "one of A100 40GB, A100 80GB; or, for `recipes plan`, --gpu_memory GB"),
    ],
)
def test_a_gpu_name_that_matches_none_or_several_is_refused_and_the_gpus_of_its_chip_are_listed(name, fix):
    with pytest.raises(UserError) as error:
        find(name)
    assert [problem.fix for problem in error.value.problems] == [fix]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_gpu_that_is_not_in_the_catalogue_is_refused_and_has_no_peak_flops(name):
    with pytest.raises(UserError, match=r"is not a known GPU"):
        find(name)
    assert Hardware((Gpu(name, (8, 0), 2**30),)).peak_flops is None


@pytest.mark.parametrize("gpu", CATALOGUE, ids=lambda gpu: gpu.name)
def test_memory_and_peak_flops_of_each_gpu_in_the_catalogue_are_plausible(gpu):
    assert find(gpu.name) is gpu
    most = gpu.gigabytes * 2**30 - 200 * 2**20  # the driver keeps some
    assert 0.95 * gpu.gigabytes * 10**9 < gpu.memory_bytes < most
    assert (gpu.peak_flops is not None) == (gpu.peak_fp16_flops is None) == (gpu.capability >= (8, 0))
    assert 50e12 < (gpu.peak_flops or gpu.peak_fp16_flops) < 3e15
