"""A rank that does not answer is named by those that wait for it, in a process group and before."""

import os

import pytest

from tests.support.running import run_ranks

RANK = """\
import os, signal, sys, time
from datetime import timedelta
import torch
from torch import distributed
from launch.host import world
from recipes.errors import Failure

rank, (where, what, note) = int(os.environ["RANK"]), sys.argv[1:]
world._BEAT_SECONDS, world._SILENT_SECONDS = 0.2, 1

def stop():
    time.sleep(1)  # until the other rank has seen a sign of life
    os.kill(os.getpid(), signal.SIGSTOP)

def read_slowly():
    time.sleep(60 if where == "group" else 9)

def delay():
    if rank == 1:
        open(note, "w").write(str(os.getpid()))
        globals()[what]()

def group():
    distributed.init_process_group("gloo", timeout=timedelta(seconds=4))
    with world.World(2, rank).heartbeat(4):
        distributed.all_reduce(torch.ones(1))
        delay()
        distributed.all_reduce(torch.ones(1))

def meeting():
    began = time.monotonic()
    with world.World(2, rank).meeting(timeout=6):
        delay()
    print(f"rank {rank} has waited: {time.monotonic() - began > 8}\\n", end="", flush=True)

try:
    globals()[where]()
except Failure as error:
    print(f"rank {rank}: {error}\\n", end="", flush=True)
    os.kill(int(open(note).read()), signal.SIGKILL)
    os._exit(1)
"""
TIMED_OUT = "did not answer within 4 s (ddp_timeout)"
NOTED = "no answer for 1 s. Is it stopped?"


@pytest.mark.parametrize(
    ("where", "what", "said"),
    [
        ("group", "stop", ["rank 0: rank 1 (pid ", TIMED_OUT, NOTED]),
        ("group", "read_slowly", ["rank 0: rank 1 (pid ", TIMED_OUT]),
        ("meeting", "stop", ["rank 0: rank 1 has given no sign of life for 6 s (ddp_timeout)", NOTED]),
        ("meeting", "read_slowly", ["rank 0 has waited: True", "rank 1 has waited: True"]),
    ],
)
def test_a_rank_that_exceeds_ddp_timeout_is_named_but_a_slow_start_is_waited_for(where, what, said, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    codes, output = run_ranks(2, dict(os.environ), [str(tmp_path / "rank.py"), where, what, str(tmp_path / "pid")])
    assert all(words in output for words in said), output
    assert (NOTED in output) == (NOTED in said)
    assert (codes == [0, 0]) == ("has waited" in said[0])
