"""The CPU cores that this process may use: its affinity, or its cgroup's limit if that is less.

A container's limit (`docker --cpus`, Kubernetes' `limits`) is a share of time that the kernel
counts in a cgroup: no affinity shows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """At least 1: a limit of 1.5 cores counts as 1. `root` is where /proc and /sys are."""
    affine = hasattr(os, "sched_getaffinity")  # of a Slurm job or a container, not of the machine
    cores = len(os.sched_getaffinity(0)) if affine else os.cpu_count() or 1
    return max(1, int(min([cores, *_limits(root)])))


def _limits(root: Path) -> Iterator[float]:
    """The limits of this process's cgroup and of those above it, in cores."""
    for folder, mount in _cgroups(root):
        for group in (folder, *folder.parents):
            limit = _limit(group)
            if limit is not None:
                yield limit
            if group == mount:
                break


def _limit(group: Path) -> float | None:
    """The limit that one cgroup sets, in cores; None if it sets none."""
    try:
        if (group / "cpu.max").exists():  # version 2
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max" and -1 are no limit
        return None


def _cgroups(root: Path) -> Iterator[tuple[Path, Path]]:
    """The folder of this process's cgroup and the mount that holds it, for every hierarchy of CPUs.

    Version 2 has one hierarchy, under the name "". In a container the path may be the host's, and
    the mount shows a part of it: see cgroups(7) and proc_pid_mountinfo(5).
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    groups = (line.split(":", 2) for line in lines if line.count(":") > 1)
    own = {name: path for _, names, path in groups for name in names.split(",")}
    for line in mounts:
        left, _, right = line.partition(" - ")
        inside, point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        controller = {"cgroup2": "", "cgroup": "cpu"}.get(kind)
        if controller not in own or (controller and controller not in options.split(",")):
            continue
        mount, path = root / point.lstrip("/"), Path(own[controller])
        yield (mount / path.relative_to(inside) if path.is_relative_to(inside) else mount), mount
