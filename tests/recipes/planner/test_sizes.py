"""A size such as 7B stands for the shape of a public model with about as many parameters."""

import pytest

from recipes.planner.sizes import PUBLIC, description, read_config
from recipes.planner.trace import weigh

# As huggingface.co counts the weights of some.
COUNTED = {"SmolLM2-135M": 134_515_008, "Qwen2.5-0.5B": 494_032_768, "Qwen3-0.6B": 596_049_920}
COUNTED |= {"Llama-3.2-1B": 1_235_814_400, "Qwen2.5-7B": 7_615_616_512, "Llama-3.1-8B": 8_030_261_248}


@pytest.mark.parametrize("shape", PUBLIC, ids=lambda shape: shape.source)
def test_the_size_of_a_public_model_gives_a_config_with_its_exact_parameter_count(shape):
    assert COUNTED.get(shape.source.partition("/")[2]) in (None, shape.parameters)
    size = f"{shape.parameters / 1e9:.4g}B"
    assert weigh(read_config(size), "causal_lm").total == shape.parameters
    assert description(size).startswith(f"the shape of {shape.source}: ")
    assert read_config(shape.source).hidden_size == shape.width  # without a network
    assert "could not be read from the Hub" in description(shape.source)


@pytest.mark.parametrize("size", ["40M", "77M", "0.25B", "1B", "8.36B", "200B", "2000B"])
def test_an_arbitrary_size_gives_a_config_within_two_percent_of_that_parameter_count(size):
    asked = float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
    assert weigh(read_config(size), "causal_lm").total == pytest.approx(asked, rel=0.02)
    assert description(size).startswith("a shape like that of ")
