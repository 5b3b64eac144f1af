"""Models with BatchNorm: a lone example is refused where it would fail, and nowhere else."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from launch.data.demo import demo_tokenizer
from launch.data.load import Data
from tests.support.models import load, run_with
from tests.support.running import launch_quickly, model_flags, train_here

# `on` is what BatchNorm normalises: the mean of a sequence, or its tokens.
CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class Config(PreTrainedConfig):
    model_type = "own"

    def __init__(self, on="mean", vocab_size=260, hidden_size=8, **kwargs):
        self.on, self.vocab_size, self.hidden_size = on, vocab_size, hidden_size
        super().__init__(**kwargs)


class Classifier(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = torch.nn.BatchNorm1d(config.hidden_size)
        self.classifier = torch.nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        tokens = self.embedding(input_ids)
        if self.config.on == "mean":
            pooled = self.norm(tokens.mean(1))
        else:
            pooled = self.norm(tokens.transpose(1, 2)).mean(2)
        logits = self.classifier(pooled)
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
"""
AUTO_MAP = {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.Classifier"}
FLAGS = "--task sequence_classification --trust_remote_code --num_train_epochs 1".split()


@pytest.fixture(params=["mean", "tokens"])
def on(request):
    return request.param


@pytest.fixture
def own_model(on, tmp_path):
    folder = tmp_path / f"own-{on}"
    folder.mkdir()
    (folder / "own.py").write_text(CODE)
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "on": on, "auto_map": AUTO_MAP}))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    AutoModelForSequenceClassification.from_config(config, trust_remote_code=True).save_pretrained(folder)
    demo_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path):
    def write(count: int):
        file = tmp_path / f"{count}.jsonl"
        file.write_text("".join(json.dumps({"text": f"number {n}", "label": "ab"[n % 2]}) + "\n" for n in range(count)))
        return file

    return write


def test_batch_norm_fails_on_one_value_per_channel():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        torch.nn.BatchNorm1d(4)(torch.ones(1, 4))


def test_a_micro_batch_of_one_is_refused_where_it_fails(on, own_model, rows, tmp_path):
    outcome = train_here(own_model, rows(8), tmp_path / "out", *FLAGS, "--per_device_train_batch_size", "1")
    assert outcome.code == (2 if on == "mean" else 0), outcome.output
    assert ("BatchNorm needs 2" in outcome.output) == (on == "mean")


def test_a_lone_last_example_is_refused_where_it_fails(on, own_model, rows, tmp_path):
    batch = "--per_device_train_batch_size 4 --global_batch_size 4".split()
    outcome = train_here(own_model, rows(9), tmp_path / "out", *FLAGS, *batch)
    assert outcome.code == (2 if on == "mean" else 0), outcome.output
    fixed = train_here(own_model, rows(9), tmp_path / "fixed", *FLAGS, *batch, "--dataloader_drop_last")
    assert fixed.code == 0, fixed.output
    short = train_here(own_model, rows(9), tmp_path / "short", *FLAGS[:3], *batch, "--max_steps", "2")
    assert short.code == 0, short.output


@pytest.mark.parametrize("on", ["tokens"], indirect=True)
def test_the_trial_leaves_the_model_as_it_was(own_model):
    torch.manual_seed(0)
    run = run_with(
        str(own_model), task="sequence_classification", trust_remote_code=True, per_device_train_batch_size=1
    )
    model = load(run, Data(None, None, None, "labelled texts", ["bad", "good"]))
    assert torch.equal(model.norm.running_mean, torch.zeros(8)) and model.norm.num_batches_tracked == 0


@pytest.mark.slow
@pytest.mark.parametrize("on", ["mean"], indirect=True)
def test_several_processes_are_told_of_sync_batch_norm(own_model, rows, tmp_path):
    flags = [*model_flags(own_model, rows(8)), *FLAGS]
    outcome = launch_quickly(*flags, output=tmp_path / "out", processes=2, config="standard.yaml")
    assert outcome.code == 0, outcome.output
    assert "convert_sync_batchnorm" in outcome.output
