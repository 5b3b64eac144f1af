"""What train.py leaves to scripts of one's own: other objectives, losses and collators."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.support.running import ROOT, run

TURNS = [{"role": "user", "content": "Say {}."}, {"role": "assistant", "content": "{}, {}."}]


def rows_of(script, number):
    said = [{**turn, "content": turn["content"].format(number, number)} for turn in TURNS]
    if "sft" in script:
        return {"messages": said}
    if "dpo" in script:
        return {"prompt": said[:1], "chosen": said[1:], "rejected": [{"role": "assistant", "content": "No."}]}
    return {"text": f"Example {number} of a text. " * 3}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fast", "sharded"])
@pytest.mark.parametrize("script", ["trl_trainers.py sft", "trl_trainers.py dpo", "custom_loss.py"])
def test_example_scripts_on_two_ranks_change_over_half_of_the_weight_tensors(script, recipe, tiny_model, tmp_path):
    data, output = tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(rows_of(script, number)) + "\n" for number in range(64)))
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{recipe}.yaml"]
    words += ["--num_processes", "2", "--main_process_port", "0", *f"tests/examples/{script}".split()]
    done = run([*words, recipe, str(tiny_model), str(data), str(output)], output, cwd=ROOT)
    assert done.code == 0, done.output[-3000:]
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_model, output))
    moved = [name for name in after if not torch.equal(before[name], after[name].to(before[name].dtype))]
    assert len(moved) > len(after) / 2
