"""The memory of a process, as the kernel counts it."""

from launch.host import memory


def test_a_process_holds_at_most_its_peak():
    assert 0 < memory.resident() <= memory.peak(cuda=False) * 1.01  # pages are counted in batches
