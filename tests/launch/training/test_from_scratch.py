"""A model from its configuration alone: random weights, the same for a seed on any hardware."""

import pytest
import torch
from packaging.version import parse
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, __version__

from launch.data.demo import demo_tokenizer
from tests.support.models import change, load, run_with
from tests.support.running import ROOT, launch_quickly, losses, model_flags, train_here

STEPS = "--from_scratch --max_steps 2 --logging_steps 1 --learning_rate 1e-3".split()
SMALL = {"vocab_size": 260, "eos_token_id": 256, "bos_token_id": None, "pad_token_id": 257}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2),
    "tied gpt2": GPT2Config(
        **SMALL, n_embd=32, n_layer=2, n_head=2, n_positions=256, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
}
ENGINES = [("sharded", 2), ("memory", 2), ("memory_zero3", 1), ("memory_zero3", 2)]


def described(folder, config):
    config.save_pretrained(folder)
    demo_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    """A config.json and a tokenizer, no weights."""
    return described(tmp_path_factory.mktemp("described"), CONFIGS[request.param])


@pytest.fixture(scope="module")
def one_process(folder, texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("one")
    return train_here(folder, texts, output, *STEPS), output


def test_from_scratch_trains_a_model_from_its_config_and_saves_it_for_transformers(folder, one_process):
    outcome, output = one_process
    assert outcome.code == 0 and f"{folder} from scratch" in outcome.output
    assert outcome.record["settings"]["from_scratch"]["value"] is True
    model = AutoModelForCausalLM.from_pretrained(output)
    assert outcome.record["num_parameters"] == model.num_parameters()  # tied ones count once
    assert losses(outcome)[0] == pytest.approx(5.56, abs=0.3)  # log 260: it knows nothing


def test_the_seed_decides_the_initial_weights_of_from_scratch(folder):
    models = [load(run_with(str(folder), from_scratch=True, seed=seed)) for seed in (1, 1, 2)]
    one, same, other = (torch.cat([weight.detach().flatten() for weight in model.parameters()]) for model in models)
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize(
    ("recipe", "processes"), [("standard", 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in ENGINES)]
)
def test_from_scratch_has_the_same_losses_on_every_engine(recipe, processes, folder, one_process, texts, tmp_path):
    old = parse(__version__) < parse("5.23")
    if old and recipe == "memory_zero3" and "gpt2" in (folder / "config.json").read_text():
        pytest.skip("this transformers initialises weights of GPT-2 that ZeRO-3 has emptied")
    flags = ["--recipe", recipe, *model_flags(folder, texts), *STEPS]
    flags += ["--bf16", "false"] if recipe.startswith("memory") else []
    script = ROOT / ("tests/support/fsdp_on_cpu.py" if recipe == "sharded" else "launch/train.py")
    how = dict(processes=processes, config=f"{recipe}.yaml", script=script, env={"DS_ACCELERATOR": "cpu"})
    outcome = launch_quickly(*flags, output=tmp_path, **how)
    assert outcome.code == 0, outcome.output
    assert losses(outcome) == pytest.approx(losses(one_process[0]), rel=1e-5)


def test_from_scratch_ignores_the_quantization_config_of_a_model(tmp_path):
    described(tmp_path, CONFIGS["llama"])
    change(tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    model = load(run_with(str(tmp_path), from_scratch=True))
    assert not hasattr(model.config, "quantization_config")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
