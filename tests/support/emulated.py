"""Trainings that are slow for a known reason: a forward pass that sleeps, a link of known rate.

As a script this is one rank of such a training: it enters the network namespace that the
environment names, and runs launch/train.py. The forward pass sleeps as if a GPU computed, so that
other load on the machine changes little.
"""

import contextlib
import ctypes
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from recipes.scaling.timings import Timing, read

# $PACE seconds per example. With $ON_ONE_CORE the processes compute for that long instead, all on
# one core.
PAUSE = """\
seconds = float(os.environ["PACE"]) * len(input_ids)
if os.environ["RANK"] == "1":
    seconds *= float(os.environ.get("PACE_OF_RANK_1", 1))
if "ON_ONE_CORE" in os.environ:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
else:
    time.sleep(seconds)"""
STEPS = 6


@contextlib.contextmanager
def link(rate: str) -> Iterator[str]:
    """A network namespace whose loopback passes `rate` (as tc writes it); yields its name.

    Needs root.
    """
    name = f"recipes-{os.getpid()}"
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "lo", "mtu", "1500", "up")
        _ip("netns", "exec", name, *f"tc qdisc add dev lo root tbf rate {rate} burst 32kb latency 400ms".split())
        yield name
    finally:
        _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def can_emulate_links() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return False
    try:
        with link("100mbit"):
            return True
    except subprocess.CalledProcessError:
        return False


def timing(
    model: Path, texts: Path, processes: int, batch: int, *flags: str, namespace: str = "", **environment: str
) -> Timing:
    """The row of a training of `batch` examples per step, in micro-batches of at most 4.

    A forward pass takes 40 ms per example.
    """
    from tests.support.running import launch_quickly

    words = ["--recipe", "standard", "--model_name_or_path", str(model), "--trust_remote_code", "--max_length", "16"]
    words += ["--dataset_name", str(texts), "--max_steps", str(STEPS + 3), "--save_strategy", "no"]
    words += ["--run_name", "paced", "--global_batch_size", str(batch), "--optim", "sgd"]
    with tempfile.TemporaryDirectory() as folder:
        words += [*flags, "--measure", f"{folder}/timing.jsonl"]
        paced = {"PACE": "0.04", "NETWORK_NAMESPACE": namespace, **environment}
        if namespace:
            paced["GLOO_SOCKET_IFNAME"] = "lo"
        done = launch_quickly(*words, output=Path(folder) / "out", processes=processes, env=paced, script=__file__)
        assert done.code == 0, done.output
        return read([Path(folder) / "timing.jsonl"])[0]


def _enter(namespace: str) -> None:
    with Path("/var/run/netns", namespace).open() as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "cannot enter", namespace)


def _load_slowly(seconds: float) -> None:
    """Collating a micro-batch takes this much longer."""
    from launch.data.batches import Pad

    collate = Pad.__call__

    def slow(self, rows):
        time.sleep(seconds)
        return collate(self, rows)

    Pad.__call__ = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    cores = sorted(os.sched_getaffinity(0))
    own = 0 if "ON_ONE_CORE" in os.environ else int(os.environ["RANK"]) % len(cores)
    os.sched_setaffinity(0, {cores[own]})  # as many threads in every world: one
    if os.environ["NETWORK_NAMESPACE"]:
        _enter(os.environ["NETWORK_NAMESPACE"])
    if "SLOW_DATA" in os.environ:
        _load_slowly(float(os.environ["SLOW_DATA"]))
    script = Path(__file__).resolve().parents[2] / "launch" / "train.py"
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")
