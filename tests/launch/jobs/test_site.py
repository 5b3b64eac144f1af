"""The site file: a target's flags, written once; the command line wins, and mistakes are named."""

import pytest

from launch.cli import main
from launch.jobs.submit import site_defaults, site_file


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Writes the site file of this test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "accelerate-recipes").mkdir()
    return lambda text: site_file().write_text(text)


def dry_run(capsys, *words: str) -> list[str]:
    assert main(["submit", *words, "--dry_run"]) == 0
    return capsys.readouterr().out.splitlines()


def test_command_line_flags_override_site_yaml_and_a_dry_run_lists_those_from_site_yaml(write, capsys):
    write("slurm: {partition: gpu, time: 8:00:00, module: [cuda/12.6, nccl], venv: /shared/venv, max_restarts: 0}")
    script = dry_run(capsys, "slurm", "--partition", "debug", "--mem", "0")
    assert script[1].startswith(f"# From {site_file()}: --time 8:00:00 --module cuda/12.6 nccl")
    assert {"#SBATCH --partition=debug", "#SBATCH --time=8:00:00", "#SBATCH --no-requeue"} <= set(script)
    assert "module load cuda/12.6 nccl || exit 1" in script and "source /shared/venv/bin/activate || exit 1" in script
    assert not any("partition=" in line for line in dry_run(capsys, "slurm", "--partition", ""))


def test_site_yaml_values_are_read_as_written_and_not_as_yaml_types(write, capsys):
    """To YAML 8:00:00 is 28800, 010 is 8, and `on` is true."""
    text = "slurm:\n  time: 8:00:00\n  account: 010\n  gpus-per-node: 4\n  partition: on\n  module: cuda\n  qos:\n"
    write(text + "azureml: {compute: gpu-cluster, spot: no}\nlocal: {on_oom: next}\n")
    values = {"time": "8:00:00", "account": "010", "gpus_per_node": "4", "partition": "on", "module": ["cuda"]}
    assert site_defaults("slurm") == values and site_defaults("local") == {"on_oom": "next"}
    job = dry_run(capsys, "azureml")
    assert job[0] == f"# From {site_file()}: --compute gpu-cluster" and "compute: azureml:gpu-cluster" in job


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("slurm: {partiton: gpu}", "partiton: is not a flag of `recipes submit slurm`"),
        ("slrum: {partition: gpu}", "slrum: is not a target"),
        ("slurm: {cpus_per_task: many}", "'many' is not a whole number of at least 1"),
        ("slurm: gpu", "slurm: holds no flags"),
        ("local: {on_oom: never}", "invalid choice: 'never'"),
    ],
)
def test_a_mistake_in_site_yaml_is_reported_with_the_name_of_the_file(text, what, write, capsys):
    write(text)
    assert main(["submit", "local" if text.startswith("local") else "slurm", "--dry_run"]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert what in printed and "site.yaml" in printed


def test_site_yaml_is_in_the_users_configuration_folder_and_submit_help_prints_its_path(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert site_file() == tmp_path / ".config" / "accelerate-recipes" / "site.yaml"
    with pytest.raises(SystemExit):
        main(["submit", "slurm", "--help"])
    assert str(site_file()) in "".join(capsys.readouterr().out.split())
