"""A DataLoader worker that cannot send a batch ends, so that the training ends too and says why."""

import errno
import multiprocessing
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from launch.host.files import end_workers_that_cannot_send, storage_failure

FORK = multiprocessing.get_context("fork")


class Unsendable:
    """A batch whose file cannot be opened when it is sent."""

    def __init__(self, code):
        self.code = code

    def __reduce__(self):
        raise OSError(self.code, "made for a test")


def collate_without_files(_):
    return Unsendable(errno.EMFILE)


def wait_for_its_batch():
    """As a training does. In a process of its own: the DataLoader must not outlive the test."""
    end_workers_that_cannot_send()
    torch.set_num_threads(1)
    loader = DataLoader([1, 2], num_workers=1, collate_fn=collate_without_files, timeout=60)
    try:
        next(iter(loader))
    except RuntimeError as error:
        failure = storage_failure(error)
        sys.exit(3 if failure and "ulimit -n" in failure.remedy else 4)


def fail_in_a_thread(code):
    """As the thread does that hands over the file of a batch."""
    end_workers_that_cannot_send()
    error = OSError(code, "made for a test")
    sys.excepthook(OSError, error, None)


def exit_code_of(target, *arguments):
    process = FORK.Process(target=target, args=arguments)
    process.start()
    process.join(120)
    return process.exitcode


def test_a_batch_that_cannot_be_sent_ends_the_wait_for_it():
    assert exit_code_of(wait_for_its_batch) == 3


@pytest.mark.parametrize(("code", "ends"), [(errno.EMFILE, errno.EMFILE), (errno.ENFILE, errno.ENFILE), (errno.EIO, 0)])
def test_a_file_that_cannot_be_handed_over_ends_the_worker_and_no_other_error_does(code, ends):
    assert exit_code_of(fail_in_a_thread, code) == ends
