"""The output folder: files are not overwritten or moved by surprise, or written by two runs."""

import json
import os
import shutil

import pytest
import torch

from launch.host.world import World
from launch.output import record
from launch.output.resume import find_earlier_run
from recipes.errors import UserError
from recipes.run import here, resolve
from recipes.run.files import shipped
from tests.support.running import losses, read_record, train_here

TWO_STEPS = "--max_steps 2 --save_steps 2 --save_total_limit 9 --logging_steps 1 --learning_rate 1e-3".split()
FOUR_STEPS = "--max_steps 4 --save_steps 2 --save_total_limit 9 --logging_steps 1 --learning_rate 1e-3".split()


@pytest.fixture(scope="module")
def finished_run(tiny_model, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    train_here(tiny_model, texts, folder, *FOUR_STEPS)
    return folder


@pytest.fixture
def finished(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "finished")


@pytest.fixture
def stopped(finished):
    """As it was when the run had been killed after its second step."""
    shutil.rmtree(finished / "checkpoint-4")
    (finished / "model.safetensors").unlink()
    (finished / "run.json").write_text(json.dumps({**read_record(finished), "status": "running"}))
    return finished


def test_fresh_does_not_move_the_current_folder(finished, tiny_model, texts, monkeypatch):
    monkeypatch.chdir(finished)
    outcome = train_here(tiny_model, texts, ".", *FOUR_STEPS, "--fresh")
    assert outcome.code == 2 and "is or holds the current folder" in outcome.output
    assert (finished / "checkpoint-4").exists()


def test_fresh_leaves_a_folder_alone_that_holds_no_run(tiny_model, texts, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    train_here(tiny_model, texts, tmp_path / "out", *FOUR_STEPS, "--fresh")
    assert (tmp_path / "out" / "thesis.txt").exists() and not (tmp_path / "out.old-1").exists()


def test_the_model_that_is_trained_is_not_overwritten(tiny_model, texts, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    before = (model / "model.safetensors").read_bytes()
    outcome = train_here(model, texts, model, *FOUR_STEPS)
    assert outcome.code == 2 and "would be overwritten" in outcome.output
    assert (model / "model.safetensors").read_bytes() == before


def test_a_checkpoint_that_is_named_does_not_overwrite_a_finished_run(finished, tiny_model, texts):
    before = (finished / "model.safetensors").read_bytes()
    named = ["--resume_from_checkpoint", str(finished / "checkpoint-2")]
    outcome = train_here(tiny_model, texts, finished, *FOUR_STEPS, *named)
    assert outcome.code == 2 and (finished / "model.safetensors").read_bytes() == before


def test_a_checkpoint_that_is_named_says_what_it_ignores(finished, tiny_model, texts, tmp_path):
    named = ["--resume_from_checkpoint", str(finished / "checkpoint-2")]
    flags = ["0.5" if word == "1e-3" else word for word in FOUR_STEPS]
    outcome = train_here(tiny_model, texts, tmp_path / "other", *flags, *named)
    assert "learning_rate 0.5 is ignored by a resume: 0.001 is kept" in outcome.output


def test_a_second_run_is_refused_while_one_is_writing(tiny_model, texts, tmp_path):
    import fcntl

    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as a run holds it
    try:
        outcome = train_here(tiny_model, texts, tmp_path, *FOUR_STEPS)
    finally:
        os.close(handle)
    assert outcome.code == 2 and "another run is writing" in outcome.output


def test_the_folder_is_free_again_after_a_run(finished, tiny_model, texts):
    assert train_here(tiny_model, texts, finished, *FOUR_STEPS).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--label_smoothing_factor 0.1",
        "--data_seed 9",
        "--neftune_noise_alpha 5",
        "--train_sampling_strategy sequential",
    ],
)
def test_a_changed_objective_or_order_is_reported(flags, stopped, tiny_model, texts):
    outcome = train_here(tiny_model, texts, stopped, *FOUR_STEPS, *flags.split())
    assert f"{flags.split()[0][2:]} changes from" in outcome.output


def test_data_with_other_contents_are_another_training(stopped, finished_run, tiny_model, texts, tmp_path):
    moved = tmp_path / texts.name
    moved.write_text(texts.read_text().replace("Example 3 ", "Sample 3 "))
    record = json.loads((stopped / "run.json").read_text())
    # As if the file at this path had been replaced.
    record["settings"]["dataset_name"]["value"] = str(moved)
    del record["checksum"]
    (stopped / "run.json").write_text(json.dumps(record))
    outcome = train_here(tiny_model, moved, stopped, *FOUR_STEPS)
    assert outcome.code == 2 and "not what it holds now" in outcome.output


def _flip_a_bit(model):
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (model / "model.safetensors").write_bytes(content)


def _add_dropout(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))


def _exchange_two_tokens(model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.fixture(scope="module", params=["", "--use_peft"], ids=["full", "LoRA"])
def trained_from(request, tiny_model, texts, tmp_path_factory):
    """A folder with a copy of the model and a run of two steps from it, and the flags for four."""
    folder, more = tmp_path_factory.mktemp("from"), request.param.split()
    shutil.copytree(tiny_model, folder / "model")
    assert train_here(folder / "model", texts, folder / "run", *TWO_STEPS, *more).code == 0
    return folder, [*FOUR_STEPS, *more]


@pytest.mark.parametrize("change", [_flip_a_bit, _add_dropout, _exchange_two_tokens])
def test_a_run_is_not_resumed_from_another_model_at_the_same_place(change, trained_from, texts, tmp_path):
    shutil.copytree(trained_from[0], tmp_path, dirs_exist_ok=True)
    before = (tmp_path / "run" / "run.json").read_bytes()
    record = json.loads(before)
    record["settings"]["model_name_or_path"]["value"] = str(tmp_path / "model")  # as if it had begun here
    del record["checksum"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    change(tmp_path / "model")
    outcome = train_here(tmp_path / "model", texts, tmp_path / "run", *trained_from[1])
    assert outcome.code == 2 and "model as it was, not what it holds now" in outcome.output
    assert not (tmp_path / "run" / "checkpoint-4").exists()


def test_a_run_is_resumed_where_its_model_has_moved(trained_from, texts, tmp_path):
    shutil.copytree(trained_from[0], tmp_path, dirs_exist_ok=True)
    outcome = train_here(tmp_path / "model", texts, tmp_path / "run", *trained_from[1])
    assert outcome.code == 0 and "resuming from" in outcome.output


def test_a_branch_of_the_hub_that_has_moved_is_another_model(tiny_model, texts, tmp_path, monkeypatch):
    """Without a network transformers reads the cache, which is laid out as after two downloads."""
    hub = tmp_path / "hub" / "models--org--name"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(tiny_model, hub / "snapshots" / commit)
    (hub / "refs").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    outcomes = []
    pinned = [*FOUR_STEPS, "--model_revision", "a" * 40]
    for commit, flags in (("a" * 40, TWO_STEPS), ("b" * 40, FOUR_STEPS), ("b" * 40, pinned)):
        (hub / "refs" / "main").write_text(commit)
        outcomes.append(train_here("org/name", texts, tmp_path / "run", *flags))
    assert [outcome.code for outcome in outcomes] == [0, 2, 0], outcomes
    assert f"Fix: --model_revision {'a' * 40}" in " ".join(outcomes[1].output.split())


# Patience 2, and the first evaluation stays the best: it stops at the third, in step 6.
STOPS_EARLY = (
    "--eval_strategy steps --eval_steps 2 --save_steps 2 --save_total_limit 9 --load_best_model_at_end "
    "--metric_for_best_model loss --greater_is_better true --early_stopping_patience 2 --max_steps 16 "
    "--learning_rate 1e-3 --logging_steps 1 --dataset_train_split train[:90%] --dataset_test_split train[90%:]"
).split()


@pytest.fixture(scope="module")
def stopped_early(tiny_model, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("early")
    train_here(tiny_model, texts, folder, *STOPS_EARLY)
    return folder


@pytest.mark.parametrize("step", [2, 4, 6])
def test_early_stopping_stops_at_the_same_step_after_a_resume(step, stopped_early, tiny_model, texts, tmp_path):
    assert read_record(stopped_early)["global_step"] == 6
    folder = shutil.copytree(stopped_early, tmp_path / "run")
    for later in range(step + 2, 8, 2):
        shutil.rmtree(folder / f"checkpoint-{later}")
    (folder / "run.json").write_text(json.dumps({**read_record(folder), "status": "running"}))
    resumed = train_here(tiny_model, texts, folder, *STOPS_EARLY)
    assert "resuming from" in resumed.output and resumed.record["global_step"] == 6


def test_a_trained_classifier_keeps_the_numbers_of_its_classes(tiny_model, tmp_path):
    """Where its classes are numbered otherwise than the data's would be, it is not trained on
    swapped labels.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    names = {0: "pos", 1: "neg"}
    labels = {name: number for number, name in names.items()}
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, id2label=names, label2id=labels)
    model.score.weight.data.mul_(20)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    rows = [{"text": f"row {n}", "label": "NEG" if n % 3 else "POS"} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    flags = ["--task", "sequence_classification", "--max_steps", "1"]
    outcome = train_here(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "out", *flags)

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    expected = [
        model(**tokenizer(row["text"], return_tensors="pt"), labels=torch.tensor([labels[row["label"].lower()]])).loss
        for row in rows
    ]
    assert losses(outcome)[0] == pytest.approx(torch.stack(expected).mean().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("FSDP2", "were written with FSDP2, and one process cannot read them"),
        ("DeepSpeed ZeRO-2, optimizer offload", "optimizer offload, and one process cannot read them"),
    ],
)
def test_checkpoints_of_another_engine_are_not_resumed(engine, words, stopped, tiny_model, texts):
    (stopped / "run.json").write_text(json.dumps({**read_record(stopped), "engine": engine, "checksum": None}))
    outcome = train_here(tiny_model, texts, stopped, *FOUR_STEPS)
    assert outcome.code == 2 and words in " ".join(outcome.output.split())


def finished_with(engine, tmp_path):
    """A sharded run on FSDP2, whose folder holds one that another engine has finished."""
    run = resolve(
        ["--recipe", "sharded", "--output_dir", str(tmp_path)],
        here(2, accelerate_config=str(shipped("sharded.yaml")), environment={}),
    )
    record.write(tmp_path, {**record.started(run, 2), "status": "finished", "engine": engine})
    return run


def test_a_finished_run_of_the_same_engine_has_nothing_left_to_train(tmp_path):
    assert find_earlier_run(finished_with("FSDP2", tmp_path), World(2)).finished


@pytest.mark.parametrize("engine", ["FSDP1", "DDP"])
def test_checkpoints_of_another_engine_are_refused(engine, tmp_path):
    with pytest.raises(UserError, match=f"written with {engine}, and FSDP2 cannot read them"):
        find_earlier_run(finished_with(engine, tmp_path), World(2))
