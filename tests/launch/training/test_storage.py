"""What a machine does to a run's files: one line, exit 1, and the same command finishes the run."""

import os
import subprocess
import sys

import pytest
from transformers import Trainer

from launch.host.files import storage_failure
from tests.support.running import train_here

STEPS = ["--max_steps", "6", "--save_steps", "2", "--logging_steps", "2"]


class Disk:
    """A small file system in memory. Everything that happens to it is the kernel's doing."""

    def __init__(self, folder):
        self.folder = folder
        self.run = folder / "run"

    def fill(self) -> None:
        free = os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize
        (self.folder / "filler").write_bytes(b"x" * free)

    def turn_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", self.folder], check=True)

    def mend(self) -> None:
        subprocess.run(["mount", "-o", "remount,rw", self.folder], check=True)
        subprocess.run(["rm", "-rf", self.folder / "filler"], check=True)


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m,nr_inodes=4000", "tmpfs", folder]).returncode:
        pytest.skip("mounting is not allowed here")
    disk = Disk(folder)
    yield disk
    disk.mend()
    subprocess.run(["umount", "-l", folder], check=True)


FAILURES = {  # the system's words, and the start of the remedy; run.json cannot be written either
    "full": (Disk.fill, "No space left on device", "Make room"),
    "read-only": (Disk.turn_read_only, "Read-only file system", "Make the disk writable"),
}


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a file system")
@pytest.mark.parametrize("name", FAILURES)
def test_a_run_on_a_full_or_read_only_disk_fails_in_one_line_and_can_resume(name, monkeypatch, disk, tiny_model, texts):
    (happens, what, remedy), save = FAILURES[name], Trainer._save_optimizer_and_scheduler

    def save_later(trainer, folder):
        if trainer.state.global_step == 4:
            happens(disk)
        save(trainer, folder)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_optimizer_and_scheduler", save_later)
        failed = train_here(tiny_model, texts, disk.run, *STEPS)
    (line,) = [line for line in failed.output.splitlines() if what in line]
    assert (failed.code, failed.record["status"]) == (1, "running"), failed.output
    assert f"Saved: {disk.run}/checkpoint-2. {remedy}" in line and "Traceback" not in failed.output

    disk.mend()
    resumed = train_here(tiny_model, texts, disk.run, *STEPS)
    assert f"resuming from {disk.run}/checkpoint-2" in resumed.output
    assert resumed.record["status"] == "finished"


@pytest.mark.parametrize(
    "words",
    [
        "DataLoader worker (pid 7) is killed by signal: Bus error. Out of shared memory?",
        "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)",
    ],
)
def test_a_shared_memory_error_is_recognised_by_its_message_and_advises_a_larger_dev_shm(words, tmp_path):
    _, remedy = storage_failure(RuntimeError(words), tmp_path)
    assert remedy.startswith("Make /dev/shm larger")


def test_an_error_counts_as_a_storage_failure_only_if_its_cause_is_an_os_error(tmp_path):
    error = ValueError("the file cannot be read")
    assert storage_failure(error, tmp_path) is None
    error.__cause__ = OSError(24, "Too many open files", "data.jsonl")
    assert storage_failure(error, tmp_path) == (str(error.__cause__), "Run `ulimit -n 4096`")
