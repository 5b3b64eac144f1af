"""More of anything never allocates less. What torch caches beside it is another matter.

A caching allocator cuts new tensors from the pieces of old ones. If more of something makes them
fit better, less is reserved. So the plan of a smaller run can lie above that of a greater one, by
no more than it caches: in 120 pairs of runs it did in 11, by 2.6 % at most (the margin is 6 %), and
for 200 and 256 tokens of a Gemma 3 by 5.4 %.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from recipes.planner.fits import MARGIN, Estimator, Planner
from tests.recipes.planner.small import run_of

FLAGS = ("", "--gradient_checkpointing true", "--use_peft true", "--packing false", "--fp16 false --optim adamw_torch")
AXES = ("batch", "length", "layers", "vocabulary", "evaluation")


@dataclass(frozen=True)
class Training:
    """`evaluation` is the batch of an evaluation, 0 without any."""

    batch: int
    length: int
    layers: int
    vocabulary: int
    evaluation: int
    recipe: str
    flags: str

    def planned(self, usable: int):
        evaluation = ["--eval_strategy", "steps", "--per_device_eval_batch_size", str(self.evaluation)]
        argv = ["--max_length", str(self.length), "--gradient_accumulation_steps", "2"]
        argv += ["--per_device_train_batch_size", str(self.batch), *self.flags.split()]
        run = run_of(self.recipe, *argv, *(evaluation if self.evaluation else []), world=2)
        return Planner(estimator(self.layers, self.vocabulary), usable).at(run, self.batch)


@cache
def estimator(layers: int, vocabulary: int) -> Estimator:
    widths = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    return Estimator(LlamaConfig(**widths, num_hidden_layers=layers, vocab_size=vocabulary))


trainings = st.builds(
    Training,
    batch=st.integers(1, 6),
    length=st.integers(2, 40).map(lambda eighths: 8 * eighths),
    layers=st.integers(1, 6),
    vocabulary=st.integers(300, 3000),
    evaluation=st.sampled_from([0, 1, 8, 40]),
    recipe=st.sampled_from(["standard", "standard", "sharded", "memory"]),
    flags=st.sampled_from(FLAGS),
)
PLENTY = 1 << 40


MORE = {"less": trainings, "axis": st.sampled_from(AXES), "more": st.integers(1, 8), "share": st.floats(0.98, 1.02)}


def check(less: Training, axis: str, more: int, share: float) -> None:
    """`share` puts the GPU near to what the greater one takes."""
    steps = {"length": 8, "vocabulary": 100}
    greater = replace(less, **{axis: getattr(less, axis) + more * steps.get(axis, 1)})
    small, large = (training.planned(PLENTY) for training in (less, greater))
    cached = small.components.cached
    assert small.components.allocated <= large.components.allocated
    assert small.total_bytes - cached <= large.total_bytes
    usable = round(large.total_bytes * (1 + MARGIN) * share)
    if greater.planned(usable).fits:
        assert less.planned(usable + math.ceil(cached * (1 + MARGIN))).fits


@settings(max_examples=5, deadline=None)
@given(**MORE)
def test_more_of_anything_allocates_no_less_and_fits_no_better_but_for_the_cache(less, axis, more, share):
    check(less, axis, more, share)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(**MORE)
def test_more_of_anything_allocates_no_less_in_many_trainings(less, axis, more, share):
    check(less, axis, more, share)
