"""Jobs for Azure ML, through Azure's own parser to the body that would be sent. Nothing here has run on Azure."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch import azure_job
from launch.azure_job import Azure
from launch.cli import main
from launch.job import job_of
from recipes.catalog import RECIPES
from recipes.hardware import Gpu, Hardware
from recipes.run import resolve
from tests.hostile import HOSTILE
from tests.running import ROOT, model_flags, read_record

FOLDER = ROOT / "azureml"
SHIPPED = ["standard", "fast", "memory"]


def job(recipe="standard", nodes=1, processes=4, argv=()):
    hardware = Hardware((Gpu("GPU", (8, 0), 80 << 30),) * processes, cores=8)
    world = nodes * processes
    run = resolve(
        ["--recipe", recipe, *argv], world_size=world, local_world_size=processes, hardware=hardware, environment={}
    )
    return job_of(run, nodes, processes, argv)


def sent(file: Path) -> dict:
    """The body of the request that Azure's SDK would make of a YAML."""
    azure = pytest.importorskip("azure.ai.ml")
    return azure.load_job(str(file))._to_job()._to_rest_object().as_dict()["properties"]


@pytest.fixture
def rendered():
    """Writes a job beside the shipped ones, where its relative paths hold."""
    written = []

    def write(text: str) -> Path:
        file = FOLDER / f"rendered-{os.getpid()}-{len(written)}.yaml"
        written.append(file)
        file.write_text(text, encoding="utf-8")
        return file

    yield write
    for file in written:
        file.unlink()


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_shipped_job_is_what_the_renderer_writes_and_its_comments(recipe):
    shipped = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text())
    assert shipped == yaml.safe_load(azure_job.render(job(recipe), Azure(compute="gpu-cluster")))


@pytest.mark.parametrize("recipe", SHIPPED)
def test_azures_own_parser_takes_a_shipped_job(recipe):
    body = sent(FOLDER / f"{recipe}.yaml")
    assert body["distribution"] == {"distributionType": "PyTorch", "processCountPerInstance": 1}
    assert body["resources"]["shmSize"] == "16g"
    assert body["outputs"]["run"]["mode"] == "ReadWriteMount"


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - {"baseline"}))
def test_azures_own_parser_takes_a_rendered_job(recipe, rendered):
    azure = Azure(instance_type="Standard_NC24ads_A100_v4", spot=True, data="azureml:texts:1")
    body = sent(rendered(azure_job.render(job(recipe, nodes=2), azure)))
    assert body["resources"]["instanceCount"] == 2
    assert body["queueSettings"]["jobTier"] == "Spot"
    assert body["inputs"]["data"]["uri"].endswith("texts:1")


@pytest.mark.parametrize("recipe", SHIPPED)
def test_every_reference_in_a_command_is_an_input_or_an_output(recipe):
    content = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text())
    for kind, name in re.findall(r"\$\{\{(\w+)\.(\w+)\}\}", content["command"]):
        assert name in content[kind]


def as_azure_runs_it(body: dict, outputs: str, **inputs: object) -> str:
    """The command with Azure's references filled in."""
    values = {"outputs.run": outputs, **{f"inputs.{name}": str(value) for name, value in inputs.items()}}
    return re.sub(r"\$\{\{([\w.]+)\}\}", lambda found: values[found.group(1)], body["command"])


def test_arguments_arrive_as_they_were_typed(rendered, tmp_path):
    body = sent(rendered(azure_job.render(job(argv=HOSTILE), Azure(compute="c"))))
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "train.py").write_text(
        "import json, sys, pathlib; pathlib.Path('words.json').write_text(json.dumps(sys.argv[1:]))"
    )
    environment = {"WORLD_SIZE": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = as_azure_runs_it(body, "out", processes_per_node=1).replace(
        "accelerate_configs", f"{ROOT}/accelerate_configs"
    )
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path, env={**os.environ, **environment})
    words = json.loads((tmp_path / "words.json").read_text())
    assert words[2 : 2 + len(HOSTILE)] == HOSTILE


def test_a_job_of_two_nodes_with_two_processes_each_trains_as_one_world(rendered, tiny_model, texts, tmp_path):
    flags = [*model_flags(tiny_model, texts), "--max_steps", "2", "--report_to", "none"]
    body = sent(rendered(azure_job.render(job(nodes=2, processes=2, argv=flags), Azure(compute="c"))))
    command = as_azure_runs_it(body, shlex.quote(str(tmp_path / "out")), processes_per_node=2)
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}  # as Azure ML sets them
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    nodes = [
        subprocess.Popen(
            ["bash", "-c", command], cwd=ROOT, env={**os.environ, **environment, "NODE_RANK": rank, "RANK": rank}
        )
        for rank in ("0", "1")
    ]
    assert [node.wait(timeout=300) for node in nodes] == [0, 0]
    assert (read_record(tmp_path / "out")["world_size"], read_record(tmp_path / "out")["status"]) == (4, "finished")


def test_the_upload_holds_the_code_and_nothing_else(tmp_path):
    assets = pytest.importorskip("azure.ai.ml._utils._asset_utils")
    ignore = assets.get_ignore_file(str(ROOT))
    for path in (".git/HEAD", ".venv/bin/python", "outputs/fast/checkpoint-2/model.safetensors", "tests/running.py"):
        assert ignore.is_file_excluded(str(ROOT / path)), path
    for path in ("launch/train.py", "recipes/catalog.py", "accelerate_configs/fast.yaml"):
        assert not ignore.is_file_excluded(str(ROOT / path)), path


def test_the_environment_pins_what_ci_tests():
    pins = {
        line.partition("==")[0].lower(): line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    for line in (FOLDER / "environment" / "requirements.txt").read_text().splitlines():
        name = line.partition("==")[0].lower()
        assert line.startswith("#") or "mlflow" in name or line == pins[name]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("", "--compute NAME"),
        ("--compute c --shm_size 64gigs", "16g"),
        ("--compute c -- --output_dir out", "--output_uri"),
        ("--compute c", "az ml job create"),
    ],
)
def test_a_mistake_is_one_line(words, advice, capsys):
    assert main(["submit", "azureml", *words.split()]) == 2
    assert advice in capsys.readouterr().err
