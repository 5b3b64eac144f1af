"""Jobs for Azure ML as a test makes them, as the SDK would send them, and as a node runs them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch.host.processes import free_port
from tests.support.waiting import PATIENCE


def sent(file: Path) -> dict:
    """The body of the request that Azure's SDK would make of a YAML."""
    sdk = pytest.importorskip("azure.ai.ml")
    return sdk.load_job(str(file))._to_job()._to_rest_object().as_dict()["properties"]


def run_on_nodes(body: dict, code: Path, output: Path, nodes: int = 2, **inputs: object) -> list[int]:
    """Run a job's command, its references filled in, as Azure ML does: once on each node, in the
    uploaded code.

    Returns the exit codes.
    """
    values = {"outputs.run": shlex.quote(str(output)), **{f"inputs.{name}": str(inputs[name]) for name in inputs}}
    command = re.sub(r"\$\{\{([\w.]+)\}\}", lambda found: values[found.group(1)], body["command"])
    environment = {"WORLD_SIZE": str(nodes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": ""}
    started = [
        subprocess.Popen(
            ["bash", "-c", command], cwd=code, env={**os.environ, **environment, "NODE_RANK": rank, "RANK": rank}
        )
        for rank in map(str, range(nodes))
    ]
    return [node.wait(timeout=PATIENCE) for node in started]
