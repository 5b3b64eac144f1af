"""The global batch: split exactly over any world, or refused with sizes that work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.errors import UserError
from recipes.run.batch import split
from recipes.run.engine import Parallelism

worlds, shares, caps = st.integers(1, 64), st.integers(1, 512), st.integers(1, 64)


@given(share=shares, world=worlds, cap=caps)
def test_the_global_batch_is_split_exactly_with_the_largest_micro_batch_up_to_the_cap(share, world, cap):
    batch = split(share * world, world, cap)
    assert batch.micro * batch.accumulation * world == batch.total == share * world
    assert batch.micro == max(size for size in range(1, cap + 1) if share % size == 0)


@given(total=st.integers(1, 4096), world=worlds, cap=caps, given=st.sampled_from(["", "micro", "accumulation"]))
def test_the_error_for_a_global_batch_that_cannot_be_split_names_some_that_can(total, world, cap, given):
    sizes = {given: 3} if given else {}
    try:
        assert split(total, world, cap, **sizes).total == total
    except UserError as error:
        totals, _, micro = error.problems[0].fix.partition("; or --per_device_train_batch_size ")
        assert not micro or split(total, world, cap, micro=int(micro)).total == total
        suggestions = [int(word) for word in totals.split() if word.isdigit()]
        assert suggestions and all(split(size, world, cap, **sizes).total == size for size in suggestions)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((16, 1, 4), (4, 4, "micro-batch 4: largest divisor of 16 = 16/1 that is at most 4")),
        ((16, 4, 8), (4, 1, "micro-batch 4: largest divisor of 4 = 16/4 that is at most 8")),
        ((48, 2, 4, 12), (12, 2, "accumulation: 48 / (12 x 2 processes)")),
        ((48, 2, 4, None, 3), (8, 3, "micro-batch: 48 / (3 x 2 processes)")),
        ((None, 2, 4, 12, 3), (12, 3, "micro-batch and accumulation were both given: they set the global batch")),
        ((48, 4, 4, 12, None, Parallelism(tp_size=2)), (12, 2, "accumulation: 48 / (12 x 2 groups of 2 processes)")),
    ],
)
def test_a_given_micro_batch_or_accumulation_wins_over_the_micro_batch_cap(arguments, expected):
    batch = split(*arguments)
    assert (batch.micro, batch.accumulation, batch.reason) == expected


def test_a_global_batch_that_contradicts_micro_batch_and_accumulation_is_refused():
    with pytest.raises(UserError, match="contradicts"):
        split(16, 2, cap=4, micro=12, accumulation=2)
