"""Settings and records that a person has damaged: one answer with a fix, exit 2. A damaged note of
our own is ignored. Checkpoints and data have answers of their own: test_resume, test_bad_data.
"""

import json
from pathlib import Path

import pytest

from launch.cli import main
from launch.jobs.submit import submitted
from launch.output import submission
from launch.output.record import started
from recipes.run import here, resolve, with_fit

YAMLS = {
    "a date that does not exist": b"learning_rate: 2026-13-45\n",
    "a key that is a list": b"? [a, b]\n: 3\n",
    "another encoding": "run_name: café\n".encode("latin-1"),
}
SITE = "accelerate-recipes/site.yaml"  # of the configuration's folder
KINDS = {  # of YAMLs: the file, its first lines, and the command that reads it
    "config": ("mine.yaml", b"", "check --config mine.yaml"),
    "recipe": ("mine.yaml", b"base: fast\npurpose: ours\nchanges: {}\n", "check --recipe mine.yaml"),
    "accelerate": ("mine.yaml", b"distributed_type: MULTI_GPU\n", "check --accelerate_config mine.yaml"),
    "azure": ("mine.yaml", b"", "check --azureml mine.yaml"),
    "site": (SITE, b"", "submit slurm --gpus_per_node 2 --dry_run"),
}
FILES = {
    **{
        f"{kind}, {name}": (file, top + content, command)
        for kind, (file, top, command) in KINDS.items()
        for name, content in YAMLS.items()
    },
    "deepspeed, no object": ("mine.json", b"null", "check --deepspeed mine.json"),
}


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """What a command prints in a folder of its own that refuses a mistake."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def refused(*argv: str) -> str:
        code, printed = main(list(argv)), capsys.readouterr().err
        assert code == 2 and "Fix: " in printed and "Traceback" not in printed, printed
        return printed

    return refused


@pytest.mark.parametrize(("file", "content", "command"), FILES.values(), ids=FILES)
def test_a_malformed_yaml_or_json_file_is_named_and_refused(file, content, command, refused):
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_bytes(content)
    assert Path(file).name in refused(*command.split())


@pytest.mark.parametrize("name", ["cut off", "another encoding", "no settings", "no status"])
def test_compare_diff_rerun_and_show_exit_with_2_and_name_a_damaged_run_json(name, refused):
    record = {**started(resolve(["--recipe", "baseline"])), "status": "finished"}
    content = {
        "cut off": b'{"status": "finished", "settings": {',
        "another encoding": b"\xff\xfe",
        "no settings": json.dumps({**record, "settings": None}, default=str).encode(),
        "no status": json.dumps({**record, "status": None}, default=str).encode(),
    }
    for folder, written in (("run", json.dumps(record, default=str).encode()), ("other", content[name])):
        Path(folder).mkdir()
        Path(folder, "run.json").write_bytes(written)
    for command in ("compare run other", "show ./other", "diff run other", "rerun other"):
        assert "other/run.json" in refused(*command.split())
    assert main(["status", "other"]) == 0


@pytest.mark.parametrize("text", ["{", '{"target": "local"}', '{"target": "mars", "title": "a", "log": "x"}'])
def test_a_damaged_submission_json_is_ignored(text, tmp_path):
    (tmp_path / submission.NAME).write_text(text)
    assert submitted(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"micro_batch": 1}', '{"micro_batch": "1", "holds_for": 3}'])
def test_a_damaged_fit_json_is_ignored(text, tmp_path):
    (tmp_path / "fit.json").write_text(text)
    run = with_fit(resolve(["--output_dir", str(tmp_path)], here()))
    assert run.setting("per_device_train_batch_size").source == "batch arithmetic"
