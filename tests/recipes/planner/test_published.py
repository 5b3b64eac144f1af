"""The memory of CUDA and NCCL as it was read on such a GPU, or else the largest value."""

import pytest

from recipes.planner.memory import context_of
from recipes.run.hardware import Gpu
from tests.recipes.planner.small import run_of
from tests.support.runs import machine


@pytest.mark.parametrize(
    ("card", "world", "mib", "source"),
    [
        ("Tesla T4", 1, 141, "published for "),
        ("A100", 1, 426, "published for "),
        ("NVIDIA L4", 1, 770, "the largest known value, measured on an H200 ("),
        ("a GPU of 24 GB", 1, 770, "the largest known value, measured on an H200 ("),
        ("NVIDIA H200", 2, 770 + 546, "measured on an H200 ("),
    ],
)
def test_planned_cuda_context_is_the_known_or_the_largest_one_and_includes_nccl(card, world, mib, source):
    context, found = context_of(run_of(hardware=machine(Gpu(card, (8, 0), 24 << 30), world), world=world))
    assert round(context / 2**20) == mib and found.startswith(source)
