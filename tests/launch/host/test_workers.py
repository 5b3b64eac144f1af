"""A DataLoader worker that cannot send a batch ends, so that the training ends too and says why."""

import errno
import multiprocessing
import sys

import torch
from torch.utils.data import DataLoader

from launch.host.files import end_workers_that_cannot_send, storage_failure


class Unsendable:
    """A batch whose file cannot be opened when it is sent."""

    def __reduce__(self):
        raise OSError(errno.EMFILE, "made for a test")


def wait_for_its_batch():
    """As a training does. In a process of its own: the DataLoader must not outlive the test."""
    end_workers_that_cannot_send()
    torch.set_num_threads(1)
    loader = DataLoader([1, 2], num_workers=1, collate_fn=lambda _: Unsendable(), timeout=60)
    try:
        next(iter(loader))
    except RuntimeError as error:
        sys.exit(3 if storage_failure(error) else 4)


def test_a_training_fails_and_does_not_hang_if_a_dataloader_worker_cannot_send_its_batch():
    process = multiprocessing.get_context("fork").Process(target=wait_for_its_batch)
    process.start()
    process.join(120)
    assert process.exitcode == 3
