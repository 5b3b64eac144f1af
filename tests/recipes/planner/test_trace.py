"""Traces against published readings, whole optimizer steps and each other."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from recipes.planner import trace as tracing
from recipes.planner.footprint import need
from recipes.planner.live_bytes import LiveBytes
from recipes.planner.shapes import Case
from recipes.planner.trace import SHALLOW, at_batch, layers_are_equal, of_depth, trace, weigh, with_layers
from tests.benchmarks.published import BERT_LARGE, MIB, predicted
from tests.recipes.planner.small import SMALL, run_of


@pytest.mark.parametrize("reading", BERT_LARGE, ids=str)
def test_plans_are_within_six_percent_of_published_readings_of_bert_large(reading):
    assert predicted(reading).gpu.total / MIB == pytest.approx(reading.mib, rel=0.06)


def two_whole_steps(config, case: Case, accumulation: int) -> int:
    """Peak bytes of two whole optimizer steps on fake tensors, with AdamW's state and update."""
    with FakeTensorMode(), tracing._attention_of_a_gpu():
        model = tracing._model(config, case)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        live = LiveBytes()
        inputs = tracing._inputs(config, case)
        with tracing._Operations(), live:
            for tensor in [*model.parameters(), *model.buffers()]:
                live._count(tensor)
            for _ in range(2):
                for _ in range(accumulation):
                    model(**inputs).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return max(map(sum, live.moments))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("accumulation", "checkpointing"), [(1, False), (2, False), (1, True)])
def test_the_arithmetic_equals_the_peak_of_two_whole_steps(name, accumulation, checkpointing):
    config = SMALL[name]
    case = Case(4, 64, checkpointing=checkpointing)
    run = run_of("standard", "--fp16", "false", "--optim", "adamw_torch")
    needed = need(run, weigh(config, "causal_lm"), trace(config, case), accumulation, context=0)
    assert needed.gpu.total == pytest.approx(two_whole_steps(config, case, accumulation), rel=0.02)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_two_traces_give_every_other_micro_batch(name, autocast):
    one, two, three, nine = (trace(SMALL[name], Case(batch, 64, autocast=autocast)) for batch in (1, 2, 3, 9))
    assert peak(at_batch(two, three, 1)) == pytest.approx(peak(one), rel=0.002)
    assert peak(at_batch(two, three, 9)) == pytest.approx(peak(nine), rel=0.01)


def peak(traced):
    return max(map(sum, traced.moments))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("case", [Case(2, 64), Case(2, 64, autocast="bfloat16"), Case(2, 64, checkpointing=True)])
def test_two_shallow_models_give_a_deep_one(name, case):
    own = {key: value for key, value in SMALL[name].to_dict().items() if key not in ("layer_types", "n_layer")}
    deep = type(SMALL[name])(**{**own, "num_hidden_layers": 7})
    assert layers_are_equal(deep, weigh(deep, "causal_lm"), "causal_lm")
    shallow, deeper = (trace(with_layers(deep, layers), case) for layers in (SHALLOW, SHALLOW + 1))
    extrapolated, real = of_depth(shallow, deeper, 7), trace(deep, case)
    for part in ((0, 1), (2,), (0, 1, 2)):  # without gradients, gradients alone, all
        fullest = [max(sum(moment[at] for at in part) for moment in one.moments) for one in (extrapolated, real)]
        assert fullest[0] == pytest.approx(fullest[1], rel=1e-3)
