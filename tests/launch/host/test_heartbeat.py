"""A rank that does not answer is named, by the ranks that wait for it."""

import os
import signal
import subprocess
import sys

import pytest

from launch.host.processes import free_port, group, start
from tests.support.running import fork_ranks

WORLD = """\
import os, signal, sys, time
from datetime import timedelta
import torch
from torch import distributed
from launch.host import heartbeat

rank, what = int(os.environ["RANK"]), sys.argv[1]
heartbeat._BEAT_SECONDS = 0.2
heartbeat._SILENT_SECONDS = float(sys.argv[2])
distributed.init_process_group("gloo", timeout=timedelta(seconds=4))

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def read_slowly():
    time.sleep(60)

try:
    with heartbeat.heartbeat(rank, 2, 4):
        distributed.all_reduce(torch.ones(1))
        if rank == 1:
            open(sys.argv[3], "w").write(str(os.getpid()))
            {"stopped": stop, "busy": read_slowly, "slow": lambda: time.sleep(2)}[what]()
        distributed.all_reduce(torch.ones(1))
except heartbeat.RankHangs as error:
    print(f"rank {rank}, {error.is_reporter}: {error}", flush=True)
    os.kill(int(open(sys.argv[3]).read()), signal.SIGKILL)
    os._exit(1)
"""


@pytest.fixture
def world(tmp_path):
    """The exit codes and the output of two ranks of which the last one is `what`."""

    def run(what: str, silent_seconds: float = 60) -> tuple[list[int], str]:
        script, log = tmp_path / "rank.py", tmp_path / "log"
        script.write_text(WORLD)
        with log.open("wb") as stream:
            argv = [str(script), what, str(silent_seconds), str(tmp_path / "pid")]
            codes = fork_ranks(2, dict(os.environ), argv, stream.fileno())
        return codes, log.read_text()

    return run


def test_a_rank_that_is_stopped_is_named_within_the_timeout(world):
    codes, output = world("stopped")
    assert codes == [1, -signal.SIGKILL], output
    assert "rank 0, True: rank 1 (pid " in output and "did not answer within 4 s (ddp_timeout)" in output


def test_a_rank_that_is_busy_is_named_with_what_it_does(world):
    codes, output = world("busy")
    assert codes == [1, -signal.SIGKILL], output
    assert "the other ranks waited in vain within 4 s (ddp_timeout) for rank 1" in output
    assert "read_slowly" in output


def test_a_rank_that_is_only_slow_is_not(world):
    codes, output = world("slow", silent_seconds=0.9)
    assert codes == [0, 0] and "answer" not in output, output


def test_a_silence_is_noted_before_the_timeout(world):
    _, output = world("stopped", silent_seconds=1)
    assert "has not answered for 1 s: is it stopped?" in output


# --- Before the process group ---------------------------------------------------------------------

NODE = """\
import os, signal, sys, time
from launch.host import heartbeat
from launch.host.signals import end_with_parent
from recipes.errors import Failure

end_with_parent()
rank, what = int(os.environ["RANK"]), sys.argv[1]
heartbeat._BEAT_SECONDS = 0.2
try:
    with heartbeat.meeting(rank, 2, timeout=3):
        if rank == 1 and what == "slow":
            time.sleep(7)
            open(sys.argv[2], "w").close()
        if rank == 1 and what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
    print(f"rank {rank} goes on, all have read: {os.path.exists(sys.argv[2])}", flush=True)
except Failure as error:
    print(f"rank {rank}: {error}", flush=True)
"""


@pytest.fixture
def nodes(tmp_path):
    """The output of two nodes with one rank each, of which the second is `what`: of the first only,
    if the second is stopped.
    """

    def run(what: str) -> list[str]:
        script, port = tmp_path / "node.py", str(free_port())
        script.write_text(NODE)
        common = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", port]
        for number in "01":
            words = [sys.executable, "-m", "torch.distributed.run", *common, "--node_rank", number, str(script), what]
            words.append(str(tmp_path / "read"))
            started.append(start(words, subprocess.PIPE))
        if what == "stopped":
            return [started[0].stdout.readline().decode()]
        return [node.communicate()[0].decode() for node in started]

    with group() as started:
        yield run


def test_a_node_that_reads_longer_than_the_timeout_is_waited_for(nodes):
    first, second = nodes("slow")
    assert "rank 0 goes on, all have read: True" in first and "rank 1 goes on" in second


def test_a_node_that_is_stopped_while_it_reads_is_named(nodes):
    assert "rank 1 has given no sign of life for 3 s (ddp_timeout)" in nodes("stopped")[0]
