"""The memory of CUDA and NCCL as it was read on such a GPU, or else the largest value."""

import pytest

from recipes.planner.published import context_of
from recipes.run.hardware import Gpu, Hardware
from tests.recipes.planner.small import run_of

MIB = 2**20


def context(name: str, world: int = 1):
    return context_of(run_of(hardware=Hardware((Gpu(name, (8, 0), 24 << 30),) * world, cores=8), world=world))


@pytest.mark.parametrize(("card", "mib"), [("Tesla T4", 141), ("A100", 426)])
def test_planned_cuda_context_has_the_size_published_for_the_gpu(card, mib):
    found = context(card)
    assert round(found.bytes / MIB) == mib and found.source.startswith("published for ")


@pytest.mark.parametrize("card", ["NVIDIA L4", "a GPU of 24 GB"])
def test_a_gpu_without_a_published_cuda_context_is_planned_with_the_largest_known_one(card):
    found = context(card)
    assert found.bytes == 770 * MIB and found.source.startswith("the largest known value, measured on an H200 (")


def test_several_processes_are_planned_with_nccl_memory_beside_the_cuda_context():
    assert context("NVIDIA H200", world=2).bytes == (770 + 546) * MIB
