"""What a rank leaves for torch elastic, as torch elastic itself reads it."""

import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch.host import elastic
from launch.host.elastic import is_reporter, write_error_file
from launch.host.world import World

LINES = "error  one: is wrong. Fix: this.\nerror  two: is wrong, too. Fix: that."


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The error files of two ranks. `files(rank)` is this process's from now on."""

    def of(rank: int) -> str:
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        file = str(tmp_path / str(rank) / "error.json")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file)
        return file

    return of


def box(*files: str) -> ChildFailedError:
    return ChildFailedError("train.py", {rank: ProcessFailure(rank, 1, 2, file) for rank, file in enumerate(files)})


def test_torchs_box_ends_with_our_lines(files):
    other, own = files(0), files(1)
    write_error_file(LINES)
    failed = box(other, own)
    assert failed.get_first_failure()[0] == 1
    assert [line.strip() for line in str(failed).splitlines()[-3:-1]] == LINES.splitlines()


def test_the_first_rank_comes_first_though_another_failed_in_the_same_second(files):
    waiting = files(1)
    write_error_file("of rank 1", printed=False)
    first = files(0)
    write_error_file("of rank 0")
    assert box(first, waiting).get_first_failure()[0] == 0


def test_the_time_is_that_of_the_failure_and_not_of_the_explanation(files):
    explained = files(1)
    write_error_file("out of memory", since=time.time() - 30)
    other = files(0)
    write_error_file("lost")
    assert box(other, explained).get_first_failure()[0] == 1


def test_nothing_is_written_without_torch_elastic(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    write_error_file(LINES)
    assert list(tmp_path.iterdir()) == []


def test_the_first_rank_of_a_node_reports(monkeypatch, files):
    monkeypatch.setattr(elastic, "_PATIENCE_SECONDS", 0)
    monkeypatch.setattr(elastic.signal, "signal", lambda *handler: None)
    files(1)
    assert is_reporter(World(4, 2, 2), LINES)
    assert is_reporter(World(4, 3, 2), LINES), "the first rank has not met the error"
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert not is_reporter(World(4, 3, 2), LINES), "without torch elastic nobody ends this rank"
