"""The demonstration's tokenizer and model."""

import pytest

from tests.support.models import load, loss_of, run_with

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.mark.parametrize("text", ["def f(x):\n\treturn 'a  .'\r\n", "naïve 漢字 😀\x00", " a , b . ", ""])
def test_the_demonstration_tokenizer_decodes_to_exactly_the_same_text(text, tokenizer):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_demonstration_model_begins_at_the_loss_of_random_guessing():
    """ln(260) is 5.56: a start far above it wastes the first steps."""
    assert loss_of(load(run_with(max_length=256))).item() == pytest.approx(5.56, abs=0.6)
