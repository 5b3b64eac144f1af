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

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def read_slowly():
    time.sleep(60)

rank = int(os.environ["RANK"])
heartbeat._BEAT_SECONDS, heartbeat._SILENT_SECONDS = 0.2, 1
distributed.init_process_group("gloo", timeout=timedelta(seconds=4))
try:
    with heartbeat.heartbeat(rank, 2, 4):
        distributed.all_reduce(torch.ones(1))
        if rank == 1:
            open(sys.argv[2], "w").write(str(os.getpid()))
            globals()[sys.argv[1]]()
        distributed.all_reduce(torch.ones(1))
except heartbeat.RankHangs as error:
    print(f"rank {rank}, {error.is_reporter}: {error}", flush=True)
    os.kill(int(open(sys.argv[2]).read()), signal.SIGKILL)
    os._exit(1)
"""


@pytest.mark.parametrize(
    ("what", "noted", "place"),
    [
        ("stop", 1, ") in "),
        ("read_slowly", 0, ") in read_slowly, "),
    ],
)
def test_a_rank_that_others_wait_for_is_named_and_a_silence_noted_before(what, noted, place, tmp_path):
    script, log = tmp_path / "rank.py", tmp_path / "log"
    script.write_text(WORLD)
    with log.open("wb") as stream:
        codes = fork_ranks(2, dict(os.environ), [str(script), what, str(tmp_path / "pid")], stream.fileno())
    output = log.read_text()
    assert codes == [1, -signal.SIGKILL], output
    (line,) = [line for line in output.splitlines() if line.startswith("rank 0, True: rank 1 (pid ")]
    assert place in line and line.endswith("did not answer within 4 s (ddp_timeout)")
    assert output.count("no answer for 1 s. Is it stopped?") == noted


# --- Before the process group ---------------------------------------------------------------------

NODE = """\
import os, signal, sys, time
from launch.host import heartbeat
from launch.host.signals import end_with_parent
from launch.host.world import World
from recipes.errors import Failure

end_with_parent()
rank, what = int(os.environ["RANK"]), sys.argv[1]
heartbeat._BEAT_SECONDS = 0.2
try:
    with World(2, rank, 1).meeting(timeout=3):
        if rank == 1 and what == "slow":
            time.sleep(7)
            open(sys.argv[2], "w").close()
        if rank == 1 and what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
    print(f"rank {rank} goes on, all have read: {os.path.exists(sys.argv[2])}", flush=True)
except Failure as error:
    print(f"rank {rank}: {error}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "printed"),
    [
        ("slow", "rank 0 goes on, all have read: True"),
        ("stopped", "rank 0: rank 1 has given no sign of life for 3 s (ddp_timeout)"),
    ],
)
def test_a_node_that_reads_longer_than_the_timeout_is_waited_for_unless_it_is_stopped(what, printed, tmp_path):
    script, port = tmp_path / "node.py", str(free_port())
    script.write_text(NODE)
    common = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", port]
    with group() as started:
        for number in "01":
            words = [sys.executable, "-m", "torch.distributed.run", *common, "--node_rank", number]
            started.append(start([*words, str(script), what, str(tmp_path / "read")], subprocess.PIPE))
        assert started[0].stdout.readline().decode() == f"{printed}\n"
