"""A cgroup's limit counts as cores, in either version, wherever a container mounts it."""

import pytest

from recipes.run import cores
from recipes.run.cores import usable_cores

V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 32 0:30 {inside} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "34 32 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
HOST_V1 = V1.format(inside="/")
HYBRID = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)


def machine(folder, cgroup, mounts, **limits):
    """A folder with /proc and /sys as on a machine with these limits, by the path of their file."""
    files = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts}
    files |= {f"sys/fs/cgroup/{path}": text for path, text in limits.items()}
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text + "\n")
    return folder


def version_1(path, quota, period="100000"):
    return {f"{path}/cpu.cfs_quota_us": quota, f"{path}/cpu.cfs_period_us": period}


CASES = {
    "no limit": ("0::/user.slice", V2, {"user.slice/cpu.max": "max 100000"}, 8),
    "two cores": ("0::/user.slice", V2, {"user.slice/cpu.max": "200000 100000"}, 2),
    "of a group above": ("0::/a/b/c", V2, {"a/cpu.max": "300000 100000", "a/b/c/cpu.max": "max 100000"}, 3),
    "the least of all": ("0::/a/b", V2, {"a/cpu.max": "300000 100000", "a/b/cpu.max": "400000 100000"}, 3),
    "another group's": ("0::/a/b", V2, {"a/b/c/cpu.max": "100000 100000", "d/cpu.max": "100000 100000"}, 8),
    "a container's own root": ("0::/", V2, {"cpu.max": "400000 100000"}, 4),
    "one core and a half": ("0::/", V2, {"cpu.max": "150000 100000"}, 1),
    "half a core": ("0::/", V2, {"cpu.max": "50000 100000"}, 1),
    "more than there are": ("0::/", V2, {"cpu.max": "6400000 100000"}, 8),
    "version 1": ("5:cpu,cpuacct:/job\n3:memory:/x", HOST_V1, version_1("cpu,cpuacct/job", "500000"), 5),
    "version 1 without": ("5:cpu,cpuacct:/job", HOST_V1, version_1("cpu,cpuacct/job", "-1"), 8),
    "version 1 in docker, which names the host's path": (
        "5:cpu,cpuacct:/docker/4f",
        V1.format(inside="/docker/4f"),
        version_1("cpu,cpuacct", "200000"),
        2,
    ),
    "both versions": (
        "1:cpu:/a\n0::/",
        f"{HYBRID}\n{V1_MEMORY}\n{V1.format(inside='/')}",
        version_1("cpu,cpuacct/a", "700000"),
        7,
    ),
    "a group of the host that the container cannot see": ("0::/../../b", V2, {"cpu.max": "200000 100000"}, 2),
    "files that are not as expected": ("0::/\nnonsense", V2, {"cpu.max": "fast"}, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cores_of_a_process_under_a_limit(case, tmp_path):
    cgroup, mounts, limits, expected = CASES[case]
    assert usable_cores(machine(tmp_path, cgroup, mounts, **limits)) == expected


def test_a_machine_without_cgroups_has_the_cores_of_its_affinity(tmp_path):
    assert usable_cores(tmp_path) == 8
