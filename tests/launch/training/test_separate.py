"""Which models keep the examples of a row apart, and what becomes of a run whose model does not."""

import pytest
import torch
from transformers import AutoConfig
from transformers import AutoModelForCausalLM as CausalLM

from launch.training import separate
from launch.training.separate import with_separate_examples
from recipes.errors import UserError
from tests.support.models import SMALL, load, problem, run_with, save
from tests.support.running import train_here

of = AutoConfig.for_model
WIDTHS = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2}
LFM2 = of("lfm2", **WIDTHS, layer_types=["conv", "full_attention"])
HYBRID = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8}
JAMBA = of("jamba", **WIDTHS, **HYBRID, use_mamba_kernels=False)
OPT = of("opt", **SMALL, ffn_dim=32, word_embed_proj_dim=32, max_position_embeddings=64)

# Of the sizes that transformers gives them, from one to hundreds of billions of weights, and small.
APART = [of("llama"), of("llama", **SMALL, intermediate_size=64), of("gpt2"), of("gemma3"), of("mixtral")]
MIXED = [
    LFM2, of("lfm2", num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"]), JAMBA, of("jamba"),
    of("bamba"), of("recurrent_gemma"), of("mamba2"), OPT, of("opt"), of("gpt_oss", num_hidden_layers=4),
]  # fmt: skip


def packs(config, **settings) -> bool:
    run, _ = with_separate_examples(run_with("somebody/model", **settings), config)
    return run["packing"]


# --- Which ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*APART, *MIXED], ids=lambda config: config.model_type)
def test_recipe_fast_turns_packing_off_if_packed_examples_influence_each_other_in_the_model(config):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    run, advice = with_separate_examples(run_with("somebody/model", recipe="fast"), config)
    says = f"is off: {config.model_type} models let the examples of a packed row see each other"
    assert run["packing"] is (config in APART)
    assert [(one.what, one.severity) for one in advice] == ([] if run["packing"] else [(says, "advice")])
    assert torch.equal(before, torch.get_rng_state())  # as in a run that tries nothing


def test_explicit_packing_is_refused_if_packed_examples_influence_each_other_in_the_model(tmp_path):
    settings = {"packing": True}
    for config in (APART[1], of("gpt2", vocab_size=260, n_embd=32, n_layer=2, n_head=2)):
        assert load(run_with(save(CausalLM.from_config(config), tmp_path / config.model_type), **settings))
    mixes = save(CausalLM.from_config(LFM2), tmp_path / "lfm2")
    assert problem(run_with(mixes, **settings)).subject == "packing"


def test_flash_attention_isolates_packed_examples_in_opt_but_not_in_a_mamba_hybrid():
    assert packs(OPT, attn_implementation="flash_attention_2", recipe="fast") and not packs(OPT, recipe="fast")
    assert not packs(JAMBA, attn_implementation="flash_attention_2", recipe="fast")


def test_packing_is_off_or_refused_if_a_model_is_too_large_to_test_whether_packed_examples_mix(monkeypatch):
    monkeypatch.setattr(separate, "_MOST_WEIGHTS", 0)
    run, (advice,) = with_separate_examples(run_with("somebody/model", recipe="fast"), APART[1])
    assert not run["packing"] and "it is unknown whether" in advice.what
    with pytest.raises(UserError, match="it is unknown whether"):
        packs(APART[1], packing=True)


# --- As users meet it ----------------------------------------------------------------------------


def test_recipe_fast_trains_opt_without_packing_and_prints_the_reason(tmp_path, texts):
    model = save(CausalLM.from_config(OPT), tmp_path / "opt")
    outcome = train_here(model, texts, tmp_path / "out", "--recipe", "fast", "--max_steps", "1")
    assert "advice " in outcome.output and "error " not in outcome.output
    assert outcome.code == 0 and "opt models let the examples of a packed row see each other" in outcome.output
    assert outcome.record["settings"]["packing"]["value"] is False
