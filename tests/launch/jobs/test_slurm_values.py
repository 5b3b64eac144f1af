"""Which values of Slurm's options are sent: the real sbatch is asked about each form."""

import re

import pytest

from launch.jobs.slurm_flags import Slurm, require_valid, seconds
from recipes.errors import UserError
from tests.support.slurm import NEEDS_SLURM

HOUR, DAY = 3600, 86400
TIMES = {
    "1": 60, "90": 90 * 60, "5:30": 360, "1:90": 180, "1:00:00": HOUR, "8:00:00": 8 * HOUR, "0:30": 60,
    "00:00:30": 60, "25:61:61": 26 * HOUR + 180, "1-0": DAY, "1-": DAY, "1-12": DAY + 12 * HOUR,
    "2-12:30": 2 * DAY + 12 * HOUR + 1800, "2-12:00:00": 2 * DAY + 12 * HOUR, "1-25:00:00": 2 * DAY + HOUR,
    "0": None, "0-0": None, "0:0": None, "-1": None, "UNLIMITED": None, "unlimited": None, "Infinite": None,
}  # fmt: skip
NO_TIMES = "abc 1h 30m 5s 1.5 1,5 +5 1:2:3:4 1-2:3:4:5 1-2-3 12:00: :30 5: UNLIM 1:00:00pm 1--2 -".split()
MISREAD = {"time": ["-5"], "gpus_per_node": ["gpu:2", "gres/gpu:2", "a100:2,h100:2", "many", "-1", "1k", "a100="]}
REFUSED = {
    "time": NO_TIMES,
    "mem": ["1.5G", "abc", "-1", "1GiB", "G", "1P", "4g,2"],
    "gpus_per_node": ["gpu:a100:2", "gres:gpu:2", "a100:", "2.5", "a100:2:3", "a100:two"],
}
TAKEN = {
    "time": list(TIMES),
    "mem": ["0", "1", "64G", "64g", "64GB", "100K", "1T"],
    "gpus_per_node": ["0", "2", "02", "a100:2"],
}


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


def asked(cluster, name: str, value: str) -> str:
    """The time limit of a job with this option. AssertionError if sbatch refuses it."""
    option = f"--{name.replace('_', '-')}={value}"
    words = ["sbatch", "--parsable", "--hold", "--output=/dev/null", option, "--wrap", "true"]
    job = cluster.run(*words).strip()
    shown = cluster.run("scontrol", "show", "job", job)
    cluster.run("scancel", job)
    return re.search(r"TimeLimit=(\S+)", shown).group(1)


def slurm(name: str, value: str) -> Slurm:
    return Slurm(**{name: value}, signal_seconds=1)


@pytest.mark.parametrize(("name", "value"), cases(TAKEN))
def test_what_sbatch_takes_is_sent(name, value):
    require_valid(slurm(name, value))


@pytest.mark.parametrize(("name", "value"), [*cases(REFUSED), *cases(MISREAD)])
def test_what_sbatch_refuses_or_misreads_is_one_line(name, value):
    with pytest.raises(UserError) as error:
        require_valid(slurm(name, value))
    assert len(error.value.problems) == 1 and error.value.problems[0].subject == name


@pytest.mark.parametrize("text", TIMES)
def test_a_time_limit_in_seconds(text):
    assert seconds(text) == TIMES[text]


@NEEDS_SLURM
@pytest.mark.parametrize("text", TIMES)
def test_slurm_reads_a_time_limit_so(cluster, text):
    limit = TIMES[text]
    days, rest = divmod(limit or 0, DAY)
    clock = f"{rest // HOUR:02}:{rest % HOUR // 60:02}:{rest % 60:02}"
    assert asked(cluster, "time", text) == ("UNLIMITED" if limit is None else f"{days}-{clock}" if days else clock)


@NEEDS_SLURM
@pytest.mark.parametrize(("name", "value"), [case for case in cases(TAKEN) if case[0] != "time"])
def test_slurm_takes(cluster, name, value):
    assert asked(cluster, name, value)


@NEEDS_SLURM
@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_slurm_refuses(cluster, name, value):
    with pytest.raises(AssertionError, match="Invalid"):
        asked(cluster, name, value)


@NEEDS_SLURM
def test_slurm_looks_for_a_type_of_gpu_named_gpu(cluster):
    """Which no cluster has."""
    with pytest.raises(AssertionError, match="Requested node configuration is not available"):
        cluster.run("sbatch", "--output=/dev/null", "--gpus-per-node=gpu:2", "--wrap", "true")


def test_the_gpus_of_a_node():
    assert [Slurm(gpus_per_node=text).gpus for text in (None, "2", "a100:4", "1g.10gb:3")] == [0, 2, 4, 3]


@pytest.mark.parametrize(("limit", "before"), [("2", 120), ("1:30", 120), ("0:10", 60)])
def test_a_run_that_would_be_told_to_stop_at_its_start_is_refused(limit, before):
    with pytest.raises(UserError, match="a longer limit, or --signal_seconds"):
        require_valid(Slurm(time=limit, signal_seconds=before))
    require_valid(Slurm(time="3", signal_seconds=before))


def test_everything_wrong_is_told_at_once():
    with pytest.raises(UserError) as error:
        require_valid(Slurm(time="8h", mem="all", gpus_per_node="a100:2,h100:2"))
    assert [problem.subject for problem in error.value.problems] == ["gpus_per_node", "time", "mem"]
