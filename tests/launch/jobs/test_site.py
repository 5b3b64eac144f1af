"""The site file: a target's flags, written once; the command line wins, and mistakes are named."""

import os
from pathlib import Path

import pytest

from launch.cli import main
from launch.jobs import site


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Writes the site file of this test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "accelerate-recipes").mkdir()
    return lambda text: site.path().write_text(text)


def dry_run(capsys, *words: str) -> list[str]:
    assert main(["submit", *words, "--dry_run"]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys, *words: str) -> str:
    assert main(["submit", *words, "--dry_run"]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_its_values_are_the_flags_of_every_job(write, capsys):
    write("slurm: {partition: gpu, account: lab, module: [cuda/12.6, nccl], venv: /shared/venv, max_restarts: 0}")
    script = dry_run(capsys, "slurm")
    assert {"#SBATCH --partition=gpu", "#SBATCH --account=lab", "#SBATCH --no-requeue"} <= set(script)
    assert "module load cuda/12.6 nccl || exit 1" in script and "source /shared/venv/bin/activate || exit 1" in script


def test_the_command_line_wins_and_the_dry_run_says_so(write, capsys):
    write("slurm: {partition: gpu, time: 8:00:00}")
    script = dry_run(capsys, "slurm", "--partition", "debug", "--mem", "0")
    assert script[1] == f"# From {site.path()}: --time 8:00:00"
    assert script[2] == "# From the command line: --partition debug --mem 0"
    assert {"#SBATCH --partition=debug", "#SBATCH --time=8:00:00"} <= set(script)


def test_a_value_of_several_lines_stays_in_its_comment(write, capsys):
    write('slurm: {venv: "/a\\ntouch broken", module: ["b\\u2028c"]}')
    script = dry_run(capsys, "slurm")
    assert script[1].startswith("# From") and script[2].startswith("#SBATCH")


def test_an_empty_value_on_the_command_line_takes_one_away(write, capsys):
    write("slurm: {partition: gpu}")
    assert not any("partition=" in line for line in dry_run(capsys, "slurm", "--partition", ""))


def test_values_are_read_as_they_are_written(write):
    """To YAML 8:00:00 is 28800, 010 is 8, and `on` is true."""
    write("slurm:\n  time: 8:00:00\n  account: 010\n  gpus-per-node: 4\n  partition: on\n  module: cuda\n  qos:\n")
    values = {"time": "8:00:00", "account": "010", "gpus_per_node": "4", "partition": "on", "module": ("cuda",)}
    assert site.defaults("slurm") == values


def test_without_a_file_nothing_is_said(write, capsys):
    assert site.defaults("slurm") == {}
    assert not any(line.startswith("# From") for line in dry_run(capsys, "slurm"))


def test_it_serves_every_target(write, capsys):
    write("azureml: {compute: gpu-cluster, spot: no}\nlocal: {on_oom: next}\n")
    job = dry_run(capsys, "azureml")
    assert "compute: azureml:gpu-cluster" in job
    assert job[0] == f"# From {site.path()}: --compute gpu-cluster"
    assert site.defaults("local") == {"on_oom": "next"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("slurm: {partiton: gpu}", "partiton: is not a flag of `recipes submit slurm`"),
        ("slurm: {partiton: gpu}", "Fix: partition"),
        ("slrum: {partition: gpu}", "slrum: is not a target"),
        ("slurm: {nodes: 2}", "nodes: is not a flag of `recipes submit slurm`"),
        ("slurm: {cpus_per_task: many}", "'many' is not a whole number of at least 1"),
        ("slurm: {partition: [a, b]}", "is not a single value"),
        ("slurm: {module: {a: b}}", "is not a list of texts"),
        ("slurm: gpu", "slurm: holds no flags"),
        ("partition: gpu", "partition: is not a target"),
        ("slurm: {qos: a, qos: b}", "'qos' twice"),
        ("slurm: {qos: a", "is not valid YAML"),
        ("- slurm", "holds a list"),
        ("slurm: {time: 8h}", "'8h' is not a time limit that Slurm reads"),
        ("azureml: {spot: maybe}\nslurm: {}", None),
        ("local: {on_oom: never}", None),
    ],
)
def test_a_mistake_is_named_with_its_file(text, what, write, capsys):
    write(text)
    if what is None:
        target = text.partition(":")[0]
        assert "is not" in refused(capsys, target)
        return
    printed = refused(capsys, "slurm")
    assert what in printed and "site.yaml" in printed


def test_the_help_names_the_file(write, capsys):
    with pytest.raises(SystemExit):
        main(["submit", "slurm", "--help"])
    assert str(site.path()) in "".join(capsys.readouterr().out.split())


def test_it_is_in_the_users_configuration_folder(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert site.path() == Path(os.environ["HOME"]) / ".config" / "accelerate-recipes" / "site.yaml"
