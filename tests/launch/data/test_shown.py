"""The example that a run prints before it trains shows what is learned."""

import pytest

from launch.cli import main
from tests.support.rows import answer, jsonl, user
from tests.support.running import train_here


@pytest.fixture
def chats(tmp_path):
    return jsonl(tmp_path, [{"messages": [user("Where is it?"), answer("Under Orders.")]}] * 24)


@pytest.mark.parametrize("how", [(), ("--packing",), ("--dataset_streaming", "--packing")])
def test_the_banner_marks_which_text_of_the_first_example_counts_for_the_loss(how, tiny_model, chats, tmp_path):
    done = train_here(tiny_model, chats, tmp_path / "out", "--assistant_only_loss", "--max_steps", "1", *how)
    (line,) = (line for line in done.output.splitlines() if line.startswith("example"))
    assert "Where is it?" in line.partition("«")[0] and "Under Orders." in line.partition("«")[2].partition("»")[0]
    has_few_steps = "is 16, so an epoch of 24 sequences has only 2 steps" in done.output
    assert has_few_steps == (how == ("--packing",))


def test_recipes_prepare_with_the_flag_show_prints_packed_examples_one_by_one(tiny_model, chats, tmp_path, capsys):
    flags = f"--model_name_or_path {tiny_model} --dataset_name {chats} --packing --max_length 128 --show 2"
    assert main(["prepare", *flags.split()]) == 0
    assert capsys.readouterr().out.count("«") == 2
