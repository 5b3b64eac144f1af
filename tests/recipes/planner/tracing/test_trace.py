"""Traces against published readings, whole optimizer steps and each other."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DeepseekV3Config, Gemma2Config, Gemma3TextConfig, GptOssConfig

from recipes.planner.footprint import Memory
from recipes.planner.shapes import Case
from recipes.planner.tracing import trace as tracing
from recipes.planner.tracing.kernels import Operations, packaged_attention
from recipes.planner.tracing.live_bytes import LiveBytes
from recipes.planner.tracing.trace import at_batch, depths, trace, trace_shallow, weigh
from tests.benchmarks.published import BERT_LARGE, MIB, planned
from tests.recipes.planner.small import SHAPE, SMALL, peak, run_of


@pytest.mark.parametrize("reading", BERT_LARGE, ids=str)
def test_plans_are_within_two_percent_of_published_readings_of_bert_large(reading):
    assert planned(reading).total / MIB == pytest.approx(reading.mib, rel=0.02)


def two_whole_steps(config, case: Case, accumulation: int) -> int:
    """Peak bytes of two whole optimizer steps on fake tensors, with AdamW's state and update."""
    with FakeTensorMode(), packaged_attention(case.mask):
        model = tracing._model(config, case)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        live = LiveBytes()
        inputs = tracing._inputs(config, case)
        with Operations(), live:
            for tensor in [*model.parameters(), *model.buffers()]:
                live.count(tensor)
            for _ in range(2):
                for _ in range(accumulation):
                    model(**inputs).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return peak(live)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("accumulation", "checkpointing"), [(1, False), (2, False), (1, True)])
def test_the_arithmetic_equals_the_peak_of_two_whole_steps(name, accumulation, checkpointing):
    config = SMALL[name]
    case = Case(4, 64, checkpointing=checkpointing)
    run = run_of("standard", "--fp16", "false", "--optim", "adamw_torch")
    memory = Memory(run, weigh(config, "causal_lm"), trace(config, case), accumulation, context=0)
    assert memory.gpu.total == pytest.approx(two_whole_steps(config, case, accumulation), rel=0.02)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_two_traces_give_every_other_micro_batch(name, autocast):
    one, two, three, nine = (trace(SMALL[name], Case(batch, 64, autocast=autocast)) for batch in (1, 2, 3, 9))
    assert peak(at_batch(two, three, 1)) == pytest.approx(peak(one), rel=0.002)
    assert peak(at_batch(two, three, 9)) == pytest.approx(peak(nine), rel=0.01)
    assert (at_batch(two, three, 9).allocations == nine.allocations).all()


_DEEP = {
    **{
        name: type(config)(
            **{
                **{key: value for key, value in config.to_dict().items() if key not in ("layer_types", "n_layer")},
                "num_hidden_layers": 7,
            }
        )
        for name, config in SMALL.items()
    },
    "gemma2, two kinds in turn": Gemma2Config(**SHAPE | {"num_hidden_layers": 9}, num_key_value_heads=2, head_dim=32),
    "gpt_oss, two kinds in turn": GptOssConfig(
        **SHAPE | {"num_hidden_layers": 8},
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "gemma3, six kinds in turn": Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 27}, num_key_value_heads=2, head_dim=32
    ),
    "deepseek_v3, three other layers first": DeepseekV3Config(
        **SHAPE | {"num_hidden_layers": 9},
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=2,
        topk_group=1,
    ),
}


@pytest.mark.parametrize("name", _DEEP)
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 64),
        Case(2, 64, autocast="bfloat16"),
        Case(2, 64, checkpointing=True),
        Case(2, 64, dtype="bfloat16"),
        Case(2, 64, dtype="bfloat16", checkpointing=True),
    ],
)
def test_two_shallow_models_give_a_deep_one(name, case):
    deep = _DEEP[name]
    extrapolated, _ = trace_shallow(deep, weigh(deep, "causal_lm"), case)
    real = trace(deep, case)
    assert (extrapolated.allocations == real.allocations).all() and extrapolated.made_forward == real.made_forward


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("aaaaaaa", (1, 2, 6)),
        ("aaaaab" * 4 + "aa", (14, 20, 2)),
        ("ababababa", (5, 7, 2)),
        ("dddmmmmmmm", (4, 5, 6)),
        ("abcdefgh", None),
        ("aaaa", (1, 2, 3)),
        ("aa", None),
    ],
)
def test_the_shallow_models_end_as_the_deep_one_does(kinds, found):
    assert depths(kinds) == found
