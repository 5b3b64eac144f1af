"""The memory of a process."""

import psutil

from launch.host import memory


def test_the_peak_of_memory_includes_memory_that_was_freed():
    now = psutil.Process().memory_info().rss
    assert len(bytearray(b"x") * (300 << 20))  # freed at once
    assert memory.peak(False) > now + (200 << 20)
