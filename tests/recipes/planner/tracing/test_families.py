"""Traces of many families beside a real micro-batch of the same model on this CPU."""

import pytest
from transformers import (
    BertConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GPTJConfig,
    JambaConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MllamaConfig,
    MptConfig,
    Qwen3NextConfig,
)

from recipes.planner.shapes import Case
from recipes.planner.tracing.trace import at_length, loop_unit, trace
from tests.recipes.planner.small import peak, planned
from tests.recipes.planner.tracing.real import real_peak

_SHAPE = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
_SIZED = {**_GROUPED, "head_dim": 16}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,  # as large as those of the queries: for others a CPU has no fused kernel
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LINEAR = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_CROSS = {**_GROUPED, "cross_attention_layers": [], "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
FAMILIES = {
    "bert": BertConfig(**_SHAPE, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
    "llama": LlamaConfig(**_GROUPED),
    "falcon": FalconConfig(vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
    "deepseek_v3": DeepseekV3Config(**_SHAPE, num_key_value_heads=4, **_LATENT),
    "gemma3_text": Gemma3TextConfig(**_SIZED),
    "gemma3": Gemma3Config(text_config=_SIZED, vision_config={**_VISION, "image_size": 28, "patch_size": 14}),
    "mllama": MllamaConfig(text_config=_CROSS),
    "qwen3_next": Qwen3NextConfig(**_SIZED, **_LINEAR),
    "gptj": GPTJConfig(n_embd=64, n_layer=2, n_head=4, vocab_size=500, rotary_dim=8),
    "mpt": MptConfig(vocab_size=500, d_model=64, n_layers=2, n_heads=4),
    "mamba": MambaConfig(vocab_size=500, hidden_size=64, num_hidden_layers=2),
    "mamba2": Mamba2Config(
        vocab_size=500, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16, n_groups=1
    ),
    "jamba": JambaConfig(**_GROUPED, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
}


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_trace_takes_what_a_real_micro_batch_takes(name, autocast):
    config = FAMILIES[name]
    task = "sequence_classification" if name == "bert" else "causal_lm"
    case = Case(2, 64, task, autocast=autocast)
    planned, real = peak(trace(config, case)), real_peak(config, case, padding=8)
    assert 0.98 * real < planned < 1.2 * real  # autocast on a GPU keeps more in fp32 than on a CPU


def test_values_smaller_than_queries_have_a_fused_kernel_on_a_gpu():
    config = FAMILIES["deepseek_v3"].__class__(**{**_SHAPE, "num_key_value_heads": 4, **_LATENT, "v_head_dim": 16})
    traced = trace(config, Case(2, 64))
    assert traced.kernels == {"efficient"}
    assert peak(traced) < peak(trace(FAMILIES["deepseek_v3"], Case(2, 64)))


@pytest.mark.parametrize("name", ["falcon", "deepseek_v3", "gemma3", "mllama"])
def test_a_plan_needs_no_closed_form(name):
    plan = planned("--max_length", "64", config=FAMILIES[name], recipe="standard")
    assert all(entry.traced for entry in plan.recipes)


@pytest.mark.parametrize("case", [{}, {"autocast": "bfloat16"}, {"checkpointing": True}], ids=str)
@pytest.mark.parametrize(("name", "unit", "length"), [("mamba", 8, 100), ("jamba", 8, 100), ("qwen3_next", 64, 384)])
def test_short_sequences_stand_for_a_long_one_in_a_model_that_loops_over_it(name, unit, length, case):
    config = FAMILIES[name]
    assert loop_unit(config, "causal_lm") == unit
    three = [trace(config, Case(2, unit * times, **case)) for times in (1, 2, 3)]
    real = trace(config, Case(2, length, **case))
    assert peak(at_length(three, length / unit)) == pytest.approx(peak(real), rel=0.02)


@pytest.mark.parametrize("name", ["llama", "bert", "gemma3", "falcon", "mamba2"])
def test_other_models_have_no_such_loop(name):
    assert loop_unit(FAMILIES[name], "sequence_classification" if name == "bert" else "causal_lm") is None


def test_a_plan_of_a_model_that_loops_says_so_and_is_made_in_seconds():
    plan = planned("--max_length", "4096", config=FAMILIES["mamba"], recipe="standard", gpu_memory=80)
    (entry,) = plan.recipes
    assert entry.traced and "with a package of kernels the peak is lower" in " ".join(entry.notes)
