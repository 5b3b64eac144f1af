"""What CUDA and the host take here, measured and kept for the next plan.

recipes/planner/measured.py reads it. Nothing of this may cost a run: what cannot be read is not
kept, and what cannot be kept is said in a line by whoever asked.
"""

from __future__ import annotations

import json
import os
import platform

from launch.doctor.machine import driver, smi_rows
from launch.host.files import write_whole
from recipes.errors import Failure
from recipes.legal.schema import version
from recipes.planner.measured import CONTEXT, HOST, MOST_ROWS, catalogue_name, file_in, is_context, rows
from recipes.run import Json
from recipes.run.files import read_json


def keep_own_context(card: str, several: bool) -> None:
    """At the end of a training: keep what CUDA takes of this process's GPU, if that can be read.

    `several`: it is one of several processes. Raises `Failure` if it cannot be written.
    """
    size = outside_torch()
    if size is not None:
        keep_context(card, several, size)


def keep_context(card: str, several: bool, size: int) -> None:
    """Keep it for such a card, driver and torch, unless more was measured before: a context grows
    with the kernels that a process has called. Raises `Failure` if it cannot be written.
    """
    made = {"driver": driver()[0] or "unknown", "torch": version("torch")}
    key = {"card": catalogue_name(card), **made, "several": several}
    before = [row["bytes"] for row in rows(CONTEXT, os.environ) if _is_of(row, key) and is_context(row.get("bytes"))]
    if max(before, default=0) < size:
        keep(CONTEXT, key, {"bytes": size})


def outside_torch() -> int | None:
    """Bytes of its GPU that are taken beside what torch has reserved in this process; None if
    nvidia-smi names another process there.
    """
    import torch

    device = torch.cuda.current_device()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    if sum(uuid in row for row in smi_rows("--query-compute-apps=gpu_uuid,pid")) > 1:
        return None
    free, total = torch.cuda.mem_get_info(device)
    size = total - free - torch.cuda.memory_reserved(device)
    return size if is_context(size) else None


def keep_host(card: str, processes: int, adam: float, pcie: float) -> None:
    """Keep seconds per parameter of Adam, and bytes per second between a GPU and the host.

    Raises `Failure` if it cannot be written.
    """
    key = {"card": catalogue_name(card), "processes": processes, "computer": platform.node()}
    keep(HOST, key, {"adam": adam, "pcie": pcie})


def keep(kind: str, key: Json, values: Json) -> None:
    """Add a row to the file, instead of the one with this key, and in place of a damaged file.

    Raises `Failure` if it cannot be written. Of two processes that do so at once, one wins.
    """
    file = file_in(os.environ)
    others = [row for row in rows(kind, os.environ) if not _is_of(row, key)]
    content = {**(read_json(file)[0] or {}), kind: [*others, {**key, **values}][-MOST_ROWS:]}
    try:
        write_whole(file, json.dumps(content, indent=1).encode())
    except OSError as error:
        raise Failure(f"{file} cannot be written: {error.strerror}") from None


def _is_of(row: Json, key: Json) -> bool:
    return all(row.get(name) == value for name, value in key.items())
