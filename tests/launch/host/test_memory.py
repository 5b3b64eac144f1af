"""The memory of a process and of the machine: read, or said to be unknown."""

import psutil

from launch.host import memory
from launch.host.memory import Shortage
from launch.training.failure import shortage_in_words


def unreadable():
    raise PermissionError("/proc/meminfo")


def test_free_memory_that_cannot_be_read_is_unknown(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", unreadable)
    assert memory.free_ram() is None


def test_a_process_holds_at_most_its_peak():
    assert 0 < memory.resident() <= memory.peak(cuda=False) * 1.01  # pages are counted in batches


def test_a_shortage_says_only_what_is_known(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", unreadable)
    assert memory.shortage(MemoryError()) == Shortage(None, None)
    assert shortage_in_words(Shortage(None, None)) == "asked for more"
