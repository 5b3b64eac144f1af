"""The global batch: split exactly over any world, or refused with sizes that work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.errors import UserError
from recipes.run.batch import split

sizes = st.integers(1, 4096)
worlds = st.integers(1, 64)


@given(share=st.integers(1, 512), world=worlds, cap=st.integers(1, 64))
def test_the_global_batch_is_kept_on_any_world(share, world, cap):
    batch = split(share * world, world, cap)
    assert batch.micro * batch.accumulation * batch.data_parallel == share * world


@given(share=st.integers(1, 512), world=worlds, cap=st.integers(1, 64))
def test_no_larger_micro_batch_within_the_cap_would_do(share, world, cap):
    batch = split(share * world, world, cap)
    assert batch.micro <= cap
    assert not [size for size in range(batch.micro + 1, cap + 1) if share % size == 0]


@given(total=sizes, world=worlds, cap=st.integers(1, 64))
def test_a_batch_that_cannot_be_split_is_refused_with_batches_that_can(total, world, cap):
    try:
        split(total, world, cap)
    except UserError as error:
        suggestions = [int(word) for word in error.problems[0].fix.split() if word.isdigit()]
        assert suggestions
        assert all(split(size, world, cap).total == size for size in suggestions)


@pytest.mark.parametrize(
    ("cap", "world", "expected"),
    [(4, 1, (4, 4)), (4, 2, (4, 2)), (8, 1, (8, 2)), (8, 2, (8, 1)), (1, 1, (1, 16)), (1, 2, (1, 8)), (8, 4, (4, 1))],
)
def test_sixteen_is_split_as_the_recipes_promise(cap, world, expected):
    batch = split(16, world, cap)
    assert (batch.micro, batch.accumulation) == expected


def test_an_explicit_micro_batch_wins_over_the_cap():
    assert split(48, 2, cap=4, micro=12).accumulation == 2


def test_an_explicit_accumulation_sets_the_micro_batch():
    assert split(48, 2, cap=4, accumulation=3).micro == 8


def test_micro_batch_and_accumulation_together_set_the_global_batch():
    assert split(16, 2, cap=4, micro=12, accumulation=2, total_is_explicit=False).total == 48


def test_three_that_contradict_each_other_are_refused():
    with pytest.raises(UserError, match="contradicts"):
        split(16, 2, cap=4, micro=12, accumulation=2, total_is_explicit=True)


def test_the_reason_names_the_numbers():
    assert split(96, 2, cap=12).reason == "micro-batch 12: largest divisor of 96/2 = 48 up to 12"
