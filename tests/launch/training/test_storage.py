"""What a machine does to a run's files: one line, exit 1, and the same command finishes the run."""

import os
import resource
import shlex
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import save_file

from launch.host.files import storage_failure
from tests.support.running import SCRIPT, launch_quickly, model_flags, train_here

STEPS = ["--max_steps", "6", "--save_steps", "2", "--logging_steps", "2"]
needs_mounts = pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a file system")


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


@pytest.fixture
def happens(monkeypatch):
    """Lets something happen once, as soon as a run calls a method at a step or later."""

    def at(method: str, step: int, what) -> None:
        owner, _, name = method.rpartition(".")
        original, left = getattr(getattr(transformers, owner), name), [what]

        def called(self, *args, **kwargs):
            if self.state.global_step >= step and left:
                left.pop()()
            return original(self, *args, **kwargs)

        monkeypatch.setattr(getattr(transformers, owner), name, called)

    return at


IN_A_CHECKPOINT = ("Trainer._save_optimizer_and_scheduler", 4)
FAILURES = {  # the system's words, and the start of the remedy; run.json cannot be written either
    "full": (Disk.fill, "No space left on device", "Make room"),
    "read-only": (Disk.turn_read_only, "cannot be written any more: Read-only file system", "Make it"),
}


@needs_mounts
@pytest.mark.parametrize("name", FAILURES)
def test_a_save_that_the_disk_does_not_take_is_one_line(name, happens, disk, tiny_model, texts):
    do, what, remedy = FAILURES[name]
    happens(*IN_A_CHECKPOINT, lambda: do(disk))
    failed = train_here(tiny_model, texts, disk.run, *STEPS)
    (line,) = [line for line in failed.output.splitlines() if what in line]
    assert (failed.code, failed.record["status"]) == (1, "running"), failed.output
    assert f"Saved: {disk.run}/checkpoint-2. {remedy}" in line and "Traceback" not in failed.output

    disk.mend()
    resumed = train_here(tiny_model, texts, disk.run, *STEPS)
    assert f"resuming from {disk.run}/checkpoint-2" in resumed.output
    assert resumed.record["status"] == "finished"


@needs_mounts
@pytest.mark.slow
def test_of_several_ranks_all_end(disk, tiny_model, texts, tmp_path):
    """Rank 0 meets it in the middle of a checkpoint, while the other waits for it."""
    change = f"cat /dev/zero > {disk.folder}/filler"
    script = tmp_path / "train.py"
    script.write_text(
        "import os, subprocess, sys\nfrom transformers import Trainer\nfrom launch.train import main\n"
        "original = Trainer._save_optimizer_and_scheduler\n"
        "def save(self, folder):\n"
        f"    if self.state.global_step >= 4 and os.environ['RANK'] == '0': os.system({change!r} + ' 2> /dev/null')\n"
        "    original(self, folder)\n"
        "Trainer._save_optimizer_and_scheduler = save\nsys.exit(main())\n"
    )
    flags = [*model_flags(tiny_model, texts), *STEPS]
    failed = launch_quickly(*flags, output=disk.run, script=script)
    assert failed.code == 1 and "Traceback" not in failed.output
    assert failed.output.count(FAILURES["full"][1]) == 1, failed.output
    disk.mend()
    assert launch_quickly(*flags, output=disk.run).record["status"] == "finished"


@pytest.mark.slow
def test_too_many_open_files_are_one_line(tiny_model, texts, tmp_path):
    """In a process of its own, since files stay open in a test's."""
    code = (
        "import resource, sys\nfrom launch.train import main\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\nsys.exit(main())"
    )
    flags = [*model_flags(tiny_model, texts), "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    words = [sys.executable, "-c", code, *flags, "--dataloader_num_workers", "2"]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert "Too many open files" in ended.stderr and "ulimit -n" in ended.stderr


# --- How libraries say it -------------------------------------------------------------------------

BIG = {"weight": torch.ones(100_000)}


@pytest.fixture
def small_files():
    """No file may be larger than 100,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("save", [torch.save, save_file], ids=["torch", "safetensors"])
def test_what_a_library_does_not_say_the_folder_does(save, small_files, tmp_path):
    with pytest.raises(Exception) as caught:
        save(BIG, str(tmp_path / "file"))
    assert "ulimit -f" in storage_failure(caught.value, tmp_path).remedy


def test_a_folder_that_is_gone_is_named_and_one_that_was_not_made_yet_is_not(tmp_path):
    gone = tmp_path / "gone"
    with pytest.raises(RuntimeError) as caught:
        torch.save(BIG, str(gone / "file"))
    assert storage_failure(caught.value, gone).what == f"{gone} cannot be written any more: No such file or directory"
    assert storage_failure(KeyError("labels"), gone) is None


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(122, "Disk quota exceeded", "out/optimizer.pt"), "Disk quota exceeded"),
        (RuntimeError("open file failed with strerror: Disk quota exceeded"), "Disk quota exceeded"),
        (OSError(5, "Input/output error", "out/model.safetensors"), "out/model.safetensors cannot be read or written"),
        (OSError(116, "Stale file handle", "out/run.json"), "Stale file handle"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. out of shared memory."), "/dev/shm"),
        (RuntimeError("Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"), "/dev/shm is full"),
    ],
)
def test_failures_that_no_test_can_have_here_are_known_by_their_words(error, what, tmp_path):
    assert what in storage_failure(error, tmp_path).what


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        KeyError("labels"),
        FileNotFoundError(2, "No such file or directory", "launch/nothing.json"),
        PermissionError(13, "Permission denied", "/etc/shadow"),
        RuntimeError("Connection closed by peer [127.0.0.1]:1234"),
    ],
)
def test_any_other_error_keeps_its_traceback(error, tmp_path):
    assert storage_failure(error, tmp_path) is None


@pytest.mark.slow
@needs_mounts
def test_no_shared_memory_for_workers_is_one_line(tmp_path, tiny_model, texts):
    flags = [*model_flags(tiny_model, texts), *STEPS, "--dataloader_num_workers", "1", "--output_dir", str(tmp_path)]
    train = shlex.join([sys.executable, str(SCRIPT), *flags])
    words = ["unshare", "--mount", "bash", "-c", f"mount -t tmpfs -o size=64k none /dev/shm && exec {train}"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert "/dev/shm is full" in done.stderr and "Traceback" not in done.stderr


def test_the_cause_of_an_error_counts(tmp_path):
    try:
        try:
            raise OSError(24, "Too many open files", "data.jsonl")
        except OSError as error:
            raise ValueError("the file cannot be read") from error
    except ValueError as error:
        assert "Too many open files" in storage_failure(error, tmp_path).what
