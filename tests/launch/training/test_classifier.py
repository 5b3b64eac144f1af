"""A classifier from the command line to run.json: what it learns, and how good it is."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from launch.data.demo import demo_tokenizer
from tests.support.running import launch_quickly, losses, model_flags, train_here

TASK = ["--task", "sequence_classification"]
EVAL = [*TASK, *"--eval_strategy steps --logging_steps 1 --learning_rate 3e-3".split()]
SPLIT = [*EVAL, *"--dataset_train_split train[:48] --dataset_test_split train[48:]".split()]
NAMES = ("even", "third")
LABELS = {
    "single_label_classification": lambda n: (10, 20, 10**9)[n % 3],
    "multi_label_classification": lambda n: [name for divisor, name in enumerate(NAMES, 2) if not n % divisor],
    "regression": lambda n: (n % 3) * 500.25 - 100,
}


def written(folder, label):
    file = folder / "rows.jsonl"
    rows = [{"text": f"number {n} " * (1 + n % 3), "label": label(n)} for n in range(64)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module", params=LABELS)
def trained(request, tiny_model, tmp_path_factory):
    """The problem type, the outcome of a run that the column alone told it, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    data = written(folder, LABELS[request.param])
    return (
        request.param,
        train_here(tiny_model, data, folder / "out", *SPLIT, "--eval_steps", "2", "--max_steps", "4"),
        folder,
    )


BEST = {"single_label_classification": "f1_macro", "multi_label_classification": "f1_micro", "regression": "mse"}
OUTPUTS = {
    "single_label_classification": ["10", "20", "1000000000"],
    "multi_label_classification": ["even", "third"],
    "regression": ["label"],
}


def test_the_data_line_and_the_record_say_what_is_learned(trained):
    kind, outcome, _ = trained
    assert outcome.code == 0 and outcome.record["settings"]["problem_type"]["value"] == kind
    several, numbers = "multi-label: 2 labels", "regression: numbers from -100 to 900.5"
    words = {"multi_label_classification": several, "regression": numbers}
    assert words.get(kind, "3 classes") in outcome.output


def test_the_saved_model_is_one_of_plain_transformers(trained):
    kind, _, folder = trained
    config = AutoModelForSequenceClassification.from_pretrained(folder / "out").config
    assert config.problem_type == kind and list(config.id2label.values()) == OUTPUTS[kind]
    assert config.label2id == {name: number for number, name in enumerate(OUTPUTS[kind])}


def test_its_figures_are_in_the_record_and_printed(trained):
    kind, outcome, _ = trained
    assert f"eval_{BEST[kind]}" in outcome.record and f"eval_{BEST[kind]}" in outcome.output
    assert outcome.record["classes"] == OUTPUTS[kind]
    assert not any("per_class" in entry for entry in outcome.record["log_history"])
    if kind == "regression":
        assert "per_class" not in outcome.record
    else:
        assert set(outcome.record["per_class"]) <= set(OUTPUTS[kind])
        assert "precision  recall" in outcome.output


def label_of(row, kind):
    """As a user of plain transformers writes it."""
    if kind == "regression":
        return torch.tensor([row["label"]])
    if kind == "multi_label_classification":
        return torch.tensor([[float(name in row["label"]) for name in NAMES]])
    return torch.tensor([OUTPUTS[kind].index(str(row["label"]))])


def test_the_eval_loss_is_that_of_the_saved_model_in_plain_transformers(trained):
    kind, outcome, folder = trained
    model = AutoModelForSequenceClassification.from_pretrained(folder / "out")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()][48:]
    total = 0.0
    for row in rows:
        ids = demo_tokenizer()(row["text"], truncation=True, max_length=64, return_tensors="pt")["input_ids"]
        total += model(input_ids=ids, labels=label_of(row, kind)).loss.item()
    assert outcome.record["eval_loss"] == pytest.approx(total / len(rows), rel=1e-4)


def test_the_best_model_by_its_metric_is_kept(trained, tiny_model, tmp_path):
    kind, _, folder = trained
    best = ["--load_best_model_at_end", "--metric_for_best_model", BEST[kind], "--eval_steps", "1", "--max_steps", "4"]
    outcome = train_here(tiny_model, folder / "rows.jsonl", tmp_path, *SPLIT, *best)
    figures = [entry[f"eval_{BEST[kind]}"] for entry in outcome.record["log_history"] if "eval_loss" in entry][:4]
    wanted = min(figures) if kind == "regression" else max(figures)
    assert outcome.record["best_step"] == 1 + figures.index(wanted)
    assert outcome.record[f"eval_{BEST[kind]}"] == wanted


def test_it_resumes_whether_the_type_is_written_or_not(trained, tiny_model):
    kind, _, folder = trained
    data, again = folder / "rows.jsonl", [*SPLIT, "--eval_steps", "2", "--max_steps"]
    as_written = train_here(tiny_model, data, folder / "out", *again, "5", "--problem_type", kind)
    assert as_written.code == 0 and "resuming from" in as_written.output
    as_told = train_here(tiny_model, data, folder / "out", *again, "6")
    assert as_told.code == 0 and as_told.record["global_step"] == 6


def test_a_best_model_of_before_the_resume_has_its_figures_too(tiny_model, tmp_path):
    data = written(tmp_path, LABELS["single_label_classification"])
    flags = "--eval_strategy steps --eval_steps 1 --load_best_model_at_end --learning_rate 0 --max_steps".split()
    flags = [*TASK, *SPLIT[len(EVAL) :], *flags]
    assert train_here(tiny_model, data, tmp_path / "out", *flags, "2").code == 0
    outcome = train_here(tiny_model, data, tmp_path / "out", *flags, "3")
    assert (outcome.record["model_step"], outcome.record["global_step"]) == (1, 3)
    assert sum(figures["examples"] for figures in outcome.record["per_class"].values()) == 16


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["memory", "memory_zero3"])
def test_deepspeed_does_not_round_the_numbers_to_learn(recipe, tiny_model, tmp_path):
    """Trainer casts all floats of a batch to bf16 for it: 1001 would be learned as 1000."""
    data = written(tmp_path, lambda n: 1001.0 + n % 2)
    flags = [*TASK, "--max_steps", "1", "--logging_steps", "1"]
    plain = train_here(tiny_model, data, tmp_path / "plain", *flags)
    flags += [*model_flags(tiny_model, data), "--recipe", recipe]
    outcome = launch_quickly(
        *flags, output=tmp_path / "zero", processes=2, config=f"{recipe}.yaml", env={"DS_ACCELERATOR": "cpu"}
    )
    assert losses(outcome)[0] == pytest.approx(losses(plain)[0], rel=2e-4)  # 1000 for 1001 is 2e-3
