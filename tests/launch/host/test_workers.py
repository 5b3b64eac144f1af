"""A DataLoader worker that cannot send a batch ends, so that the training ends too and says why."""

import errno
import multiprocessing
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from launch.host.files import end_workers_that_cannot_send, storage_failure


class Unsendable:
    """A batch whose file cannot be opened when it is sent."""

    def __reduce__(self):
        raise OSError(errno.EMFILE, "made for a test")


def wait_for_its_batch(_):
    """As a training does. In a process of its own: the DataLoader must not outlive the test."""
    end_workers_that_cannot_send()
    torch.set_num_threads(1)
    loader = DataLoader([1, 2], num_workers=1, collate_fn=lambda _: Unsendable(), timeout=60)
    try:
        next(iter(loader))
    except RuntimeError as error:
        sys.exit(3 if storage_failure(error) else 4)


def fail_in_a_thread(code):
    """As the thread does that hands over the file of a batch."""
    end_workers_that_cannot_send()
    sys.excepthook(OSError, OSError(code, "made for a test"), None)


@pytest.mark.parametrize(
    ("target", "code", "ends"),
    [
        (wait_for_its_batch, 0, 3),
        (fail_in_a_thread, errno.EMFILE, 1),
        (fail_in_a_thread, errno.EIO, 0),  # another error
    ],
)
def test_a_worker_that_cannot_send_ends_and_so_does_the_wait_for_it(target, code, ends):
    process = multiprocessing.get_context("fork").Process(target=target, args=(code,))
    process.start()
    process.join(120)
    assert process.exitcode == ends
