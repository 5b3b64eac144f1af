"""Models with BatchNorm: a lone example is refused where it would fail, and nowhere else."""

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from launch.training.batches import has_batch_norm, require_batches_for_batch_norm
from recipes.errors import UserError
from tests.support.models import run_with


class Classifier(PreTrainedModel):
    """BatchNorm of the mean of a sequence, which a lone example has once, or of its tokens."""

    config_class = PreTrainedConfig

    def __init__(self, on):
        super().__init__(PreTrainedConfig())
        self.on, self.embedding, self.norm = on, torch.nn.Embedding(260, 8), torch.nn.BatchNorm1d(8)

    def forward(self, input_ids):
        tokens = self.embedding(input_ids).transpose(1, 2)
        return self.norm(tokens.mean(-1) if self.on == "mean" else tokens)


@pytest.mark.parametrize(
    ("chosen", "examples", "world", "refused"),
    [
        ({"per_device_train_batch_size": 1}, 8, "1", "per_device_train_batch_size"),
        ({"per_device_train_batch_size": 4}, 9, "1", "dataloader_drop_last"),
        ({"per_device_train_batch_size": 4}, 9, "2", None),  # accelerate fills the last batch up
        ({"per_device_train_batch_size": 4}, 8, "1", None),
        ({"per_device_train_batch_size": 4, "dataloader_drop_last": True}, 9, "1", None),
        ({"per_device_train_batch_size": 4, "max_steps": 2}, 9, "1", None),
    ],
)
@pytest.mark.parametrize("on", ["mean", "tokens"])
def test_a_lone_example_is_refused_where_it_fails(on, chosen, examples, world, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world)
    run, model = run_with(task="sequence_classification", global_batch_size=4, **chosen), Classifier(on)
    if on == "tokens" or refused is None:
        require_batches_for_batch_norm(run, model, examples)
        assert not model.norm.num_batches_tracked and not model.norm.running_mean.any()  # the trial has left no trace
        return
    with pytest.raises(UserError) as raised:
        require_batches_for_batch_norm(run, model, examples)
    assert raised.value.problems[0].subject == refused and "BatchNorm needs 2" in raised.value.problems[0].what


def test_several_processes_are_advised_unless_they_share_their_means():
    model = Classifier("mean")
    assert has_batch_norm(model) and not has_batch_norm(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))
