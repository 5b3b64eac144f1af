"""Settings, records, notes and tables that a person has damaged: one answer with a fix, exit 2."""

import json
from functools import cache

import pytest

from launch.cli import main
from launch.output.record import started
from recipes.run import resolve

DEEP = b"[" * 100_000


@pytest.fixture
def answer(tmp_path, monkeypatch, capsys):
    """The exit code of a command in a folder of its own, and what it prints to stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def answered(*argv):
        try:
            code = main(list(argv))
        except SystemExit as error:  # of argparse
            code = error.code
        return code, capsys.readouterr().err

    return answered


def refused(answered) -> str:
    code, printed = answered
    assert code == 2 and ("Fix: " in printed or "usage: " in printed), printed
    assert "Traceback" not in printed
    return printed


YAMLS = {
    "a date that does not exist": b"learning_rate: 2026-13-45\n",
    "a key that is a list": b"? [a, b]\n: 3\n",
    "another encoding": "run_name: café\n".encode("latin-1"),
}


@pytest.mark.parametrize("name", YAMLS)
@pytest.mark.parametrize(
    ("top", "command"),
    [
        ("", ["check", "--config"]),
        ("base: fast\npurpose: ours\nchanges:\n", ["check", "--recipe"]),
        ("distributed_type: MULTI_GPU\n", ["check", "--accelerate_config"]),
        ("", ["check", "--azureml"]),
    ],
    ids=["config", "recipe", "accelerate", "azure"],
)
def test_a_yaml_that_cannot_be_meant(name, top, command, answer, tmp_path):
    indent = b"  " if top.startswith("base") else b""
    lines = [indent + line for line in YAMLS[name].split(b"\n")]
    (tmp_path / "mine.yaml").write_bytes(top.encode() + b"\n".join(lines))
    refused(answer(*command, "mine.yaml"))


def test_a_site_file_that_cannot_be_meant(answer, tmp_path):
    (tmp_path / "accelerate-recipes").mkdir()
    for content in YAMLS.values():
        (tmp_path / "accelerate-recipes" / "site.yaml").write_bytes(content)
        assert "site.yaml" in refused(answer("submit", "slurm", "--gpus_per_node", "2", "--dry_run"))


@pytest.mark.parametrize("content", [b'{"a": ' + DEEP, b"null", b"\xe9"])
def test_a_deepspeed_json_that_cannot_be_meant(content, answer, tmp_path):
    (tmp_path / "mine.json").write_bytes(content)
    refused(answer("check", "--deepspeed", "mine.json"))


FLAGS = {
    "no value": ["check", "--config"],
    "an unknown user": ["check", "--accelerate_config", "~nobody_here/x.yaml"],
    "two billion processes": ["check", "--num_processes", "2147483648", "--gpu", "L4"],
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_cannot_be_meant(name, answer):
    refused(answer(*FLAGS[name]))


# --- Records and notes ---------------------------------------------------------------------------


@cache
def record() -> str:
    return json.dumps({**started(resolve(["--recipe", "baseline"]), 1), "status": "finished"}, default=str)


def changed(**fields) -> bytes:
    return json.dumps({**json.loads(record()), **fields}).encode()


RECORDS = {
    "cut off": b'{"status": "finished", "settings": {',
    "another encoding": b"\xff\xfe",
    "endless nesting": b'{"status": "finished", "settings": ' + DEEP,
    "no settings": changed(settings=None),
    "no status": changed(status=None),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_damaged_record_is_named(name, answer, tmp_path):
    for folder, content in (("run", record().encode()), ("other", RECORDS[name])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run.json").write_bytes(content)
    for command in (["compare", "run", "other"], ["show", "./other"], ["diff", "run", "other"], ["rerun", "other"]):
        assert "other/run.json" in refused(answer(*command))
    assert answer("status", "other")[0] == 0


# --- Timings -------------------------------------------------------------------------------------

TIMINGS = {
    "timings.csv": {
        "an open quotation": b'num_processes,epoch_time,name\n1,2,"' + b"a\n" * 100_000,
        "another encoding": b"num_processes,epoch_time,name\n1,2,\xe9\n",
    },
    "timings.jsonl": {
        "endless nesting": b'{"num_processes": ' + DEEP,
    },
}


@pytest.mark.parametrize(("file", "name"), [(file, name) for file in TIMINGS for name in TIMINGS[file]])
def test_timings_that_cannot_be_read(file, name, answer, tmp_path):
    (tmp_path / file).write_bytes(TIMINGS[file][name])
    refused(answer("scale", "report", file))
