"""Models with BatchNorm: a lone example is refused, and several processes are told apart."""

import pytest
import torch

from launch.training.model import has_batch_norm, require_batches_for_batch_norm
from recipes.errors import UserError
from tests.support.models import run_with

MODEL = torch.nn.Sequential(torch.nn.Embedding(260, 8), torch.nn.BatchNorm1d(8))


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
def test_a_lone_example_is_refused(chosen, examples, world, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world)
    run = run_with(task="sequence_classification", global_batch_size=4, **chosen)
    require_batches_for_batch_norm(run, torch.nn.Linear(2, 2), examples)
    if refused is None:
        require_batches_for_batch_norm(run, MODEL, examples)
        return
    with pytest.raises(UserError, match=f"{refused}: .* BatchNorm needs 2"):
        require_batches_for_batch_norm(run, MODEL, examples)


def test_several_processes_are_advised_unless_they_share_their_means():
    assert has_batch_norm(MODEL) and not has_batch_norm(torch.nn.SyncBatchNorm.convert_sync_batchnorm(MODEL))
