"""Azure ML over the wire, to a workspace on this machine; and with one's own data."""

import contextlib
import http.server
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from transformers import BertConfig, BertForSequenceClassification

from launch.cli import main
from launch.jobs.azure import CODE
from tests.support.azure_jobs import run_on_nodes, sent
from tests.support.models import SMALL, save, write_llama
from tests.support.running import read_record

# --- A workspace of Azure ML on this machine, which answers the SDK over TLS ----------------------

NAMES = {"subscription_id": "00000000-0000-0000-0000-000000000000", "resource_group": "group", "workspace_name": "lab"}
_ARM = (
    f"/subscriptions/{NAMES['subscription_id']}/resourceGroups/group"
    "/providers/Microsoft.MachineLearningServices/workspaces/lab"
)
_BLOB_HEADERS = {"ETag": '"1"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT", "x-ms-blob-type": "BlockBlob"}


class Workspace:
    """`jobs` are the bodies that were sent, `blobs` the uploads.

    The test sets a job's `status` and `log`. With `refuse` the service answers every job with
    that error.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.blobs: dict[str, bytes] = {}
        self.status, self.log, self.refuse = "Running", b"", ""
        self.log_was_read = threading.Event()
        self.port = 0

    @property
    def address(self) -> str:
        return f"https://localhost:{self.port}"

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        if path.startswith(_ARM):
            return self._resource(method, path.removeprefix(_ARM), body)
        if path.endswith("/rundata"):
            return 200, {"runMetadata": {"runId": next(iter(self.jobs)), "outputs": {}}}
        if path.startswith("/history/"):
            logs = {"user_logs/std_log.txt": f"{self.address}/log"}
            return 200, {"runId": path.split("/")[-2], "status": self.status, "logFiles": logs}
        if path == "/log":
            self.log_was_read.set()
        fixed = {
            "/metadata": [self._cloud()],
            "/token": {"access_token": "t", "expires_on": str(int(time.time()) + 3600), "token_type": "Bearer"},
            "/discovery": {"api": self.address, "history": self.address},
            "/log": self.log,
        }
        return (200, fixed[path]) if path in fixed else self._blob(method, path, query, body)

    def _cloud(self) -> dict[str, Any]:
        names = dict.fromkeys(("portal", "resourceManager"), f"{self.address}/")
        login = {"loginEndpoint": f"{self.address}/", "audiences": [f"{self.address}/"]}
        return {"name": "Loopback", **names, "authentication": login, "suffixes": {"storage": self.address[8:]}}

    def _resource(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        kind, _, name = path.strip("/").partition("/")
        if path == "":
            return 200, {"properties": {"discoveryUrl": f"{self.address}/discovery"}, "name": "lab"}
        if kind == "jobs" and self.refuse:
            return 400, {"error": {"code": "UserError", "message": self.refuse}}
        if kind == "jobs":
            if method == "PUT":
                self.jobs[name] = json.loads(body)["properties"]
            studio = {"Studio": {"endpoint": f"https://studio/runs/{name}", "jobServiceType": "Studio"}}
            job = {"status": self.status, "services": studio, "properties": {}, "tags": {}}
            return 200, {"id": _ARM + path, "name": name, "type": "job", "properties": {**self.jobs[name], **job}}
        if path.endswith("startPendingUpload"):
            box = f"https://acct.blob.localhost:{self.port}/box"
            reference = {"blobUri": box, "credential": {"credentialType": "SAS", "sasUri": f"{box}?sig=none"}}
            kinds = {"pendingUploadId": "1", "pendingUploadType": "TemporaryBlobReference"}
            return 200, {**kinds, "blobReferenceForConsumption": reference}
        if path.endswith("listSecrets"):
            return 200, {"secretsType": "Sas", "sasToken": "sig=none"}
        if kind == "datastores":
            store = {"datastoreType": "AzureBlob", "accountName": "acct", "containerName": "box"}
            found = {"name": name or "workspaceblobstore"}
            found["properties"] = {**store, "credentials": {"credentialsType": "Sas"}}
            return 200, found if name else {"value": [found]}
        if method == "PUT":
            return 201, {"id": _ARM + path, "name": name.rpartition("/")[2], **json.loads(body)}
        return (200, {"value": []}) if "/versions" in path else (404, {"error": {"code": "NotFound", "message": path}})

    def _blob(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        if path == "/box" and "comp" in query:
            return 200, self._listed(query["prefix"][0])
        name = path.removeprefix("/box/")
        if method == "GET" and name in self.blobs:
            return 206, self.blobs[name]
        if method != "PUT":
            return 404, b""
        if "comp" in query:  # metadata
            return 200, b""
        self.blobs[name] = body
        return 201, b""

    def _listed(self, prefix: str) -> bytes:
        blobs = "".join(
            f"<Blob><Name>{name}</Name><Properties><Content-Length>{len(blob)}</Content-Length>"
            "<BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name, blob in self.blobs.items()
            if name.startswith(prefix)
        )
        head = '<?xml version="1.0" encoding="utf-8"?>'
        return f"{head}<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>".encode()


@contextlib.contextmanager
def serving(workspace: Workspace, certificate: Path, key: Path) -> Iterator[int]:
    """The port at which the workspace answers, over TLS."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, found = workspace.answer(self.command, url.path, parse_qs(url.query), body)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(code)
            headers = {**_BLOB_HEADERS, "Content-Length": str(len(data))}
            if code == 206:
                headers["Content-Range"] = f"bytes 0-{len(data) - 1}/{len(data)}"
            if data.startswith(b"<?xml"):
                headers["Content-Type"] = "application/xml"
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_HEAD = do_PATCH = handle_any

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


# --- Submissions ----------------------------------------------------------------------------------

SUBMIT = "submit azureml --compute gpus".split()
MODEL = "--model_name_or_path somebody/model".split()
STORE = "azureml://datastores/lab/paths"
TWO_NODES = [*SUBMIT, *"--recipe fast --nodes 2 --processes_per_node 8 -- --seed 1".split()]


def dry_run(*words: str, training: tuple[str, ...] | list[str] = ()) -> Path:
    """The YAML of a dry run, in the current folder, beside its code."""
    Path("mine.yaml").unlink(missing_ok=True)
    assert main([*SUBMIT, *words, "--dry_run", "--output", "mine.yaml", "--", *training]) == 0
    return Path("mine.yaml")


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def workspace(empty, monkeypatch):
    """The workspace. The environment points to it: a real client with a real login finds it."""
    Path("config.json").write_text(json.dumps(NAMES))
    workspace = Workspace()
    certificate = empty / "certificate.pem"
    openssl = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
    names = "subjectAltName=DNS:localhost,DNS:acct.blob.localhost,IP:127.0.0.1"
    words = [*openssl.split(), "-addext", names, "-keyout", empty / "key.pem", "-out", certificate]
    subprocess.run(words, check=True, capture_output=True)
    with serving(workspace, certificate, empty / "key.pem") as workspace.port:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        monkeypatch.setenv("ARM_CLOUD_METADATA_URL", f"{workspace.address}/metadata")
        monkeypatch.delenv("AZUREML_CURRENT_CLOUD", raising=False)  # the SDK sets it
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{workspace.address}/token")  # a managed identity's
        monkeypatch.setenv("IDENTITY_HEADER", "any")
        monkeypatch.setattr(socket, "getaddrinfo", _only_here)
        yield workspace


_real_getaddrinfo = socket.getaddrinfo


def _only_here(host: Any, *others: Any, **named: Any) -> Any:
    name = host.decode() if isinstance(host, bytes) else host
    if name == "127.0.0.1" or str(name).endswith("localhost"):
        return _real_getaddrinfo("127.0.0.1", *others, **named)
    raise socket.gaierror(f"{name} is not on this machine")


# --- Over the wire --------------------------------------------------------------------------------


def test_submit_azureml_sends_the_job_that_a_dry_run_shows_and_no_outputs_folder(workspace):
    Path("config.json").write_text(json.dumps({**NAMES, "workspace_name": "another"}))
    assert main([*TWO_NODES[:2], "--workspace_name", "lab", *TWO_NODES[2:]]) == 0
    (body,) = workspace.jobs.values()
    assert main([*TWO_NODES[:-3], "--dry_run", "--output", "mine.yaml", *TWO_NODES[-3:]]) == 0
    shown = sent(Path("mine.yaml"))
    for name in ("command", "distribution", "resources", "inputs", "outputs", "environmentVariables", "displayName"):
        assert body[name] == shown[name], name
    assert body["computeId"].endswith("/computes/gpus")
    assert "/environments/" in body["environmentId"] and "/codes/" in body["codeId"]
    names = [name.removeprefix(f"{CODE}/") for name in workspace.blobs]
    assert {"launch/train.py", "recipes/catalog.py", "accelerate_configs/fast.yaml"} <= set(names)
    assert any(name.endswith("environment/Dockerfile") for name in names)
    unwanted = re.compile(r"(^|/)(\.git|\.venv|tests|outputs)/|checkpoint-|safetensors|__pycache__")
    assert [name for name in names if unwanted.search(name)] == []


def test_status_and_logs_find_a_submitted_azureml_job(workspace, capsys):
    assert main(TWO_NODES) == 0
    (name,) = workspace.jobs
    folder = str(Path("outputs") / name)
    workspace.log = b"step 1/2 loss 3\n"
    assert main(["status"]) == 0 and "Running" in capsys.readouterr().out
    finish = lambda: workspace.log_was_read.wait() and setattr(workspace, "status", "Completed")  # noqa: E731
    threading.Thread(target=finish, daemon=True).start()
    assert main(["logs", "-f", folder]) == 0 and "step 1/2 loss 3" in capsys.readouterr().out
    workspace.blobs[f"ExperimentRun/dcid.{name}/user_logs/std_log.txt"] = b"step 2/2 loss 1\n"
    assert main(["logs", folder]) == 0 and "step 2/2 loss 1" in capsys.readouterr().out


def test_submit_azureml_exits_with_2_if_azure_refuses_or_login_or_workspace_is_missing(workspace, monkeypatch, capsys):
    def last_line() -> str:
        assert main(TWO_NODES) == 2
        return capsys.readouterr().err.splitlines()[-1]

    workspace.refuse = "Unknown compute target 'gpus'."
    assert "Azure reports: (UserError) Unknown compute target 'gpus'" in last_line()
    monkeypatch.delenv("IDENTITY_ENDPOINT")
    assert "az login" in last_line()
    Path("config.json").unlink()
    assert "--workspace_name" in last_line()


# --- Every form of --data -------------------------------------------------------------------------


def test_a_data_argument_becomes_a_uri_file_or_uri_folder_depending_on_its_path_or_on_data_type(workspace):
    parts = ["azureml:rows:1", f"{STORE}/a.csv", f"{STORE}/v1.2", "wasbs://box@lab.blob.core.windows.net/parts"]
    assert main([*SUBMIT, "--data", *parts, "--", *MODEL]) == 0
    (body,) = workspace.jobs.values()
    kinds = {name: entry["jobInputType"] for name, entry in body["inputs"].items() if name.startswith("data")}
    assert kinds == {"data": "uri_folder", "data_2": "uri_file", "data_3": "uri_folder", "data_4": "uri_folder"}
    assert body["inputs"]["data"]["uri"].endswith("/data/rows/versions/1")
    assert body["inputs"]["data_4"]["uri"] == parts[3]
    assert "--dataset_name ${{inputs.data}} ${{inputs.data_2}} ${{inputs.data_3}}" in body["command"]
    file = sent(dry_run("--data", "azureml:rows:1", "--data_type", "uri_file", training=MODEL))["inputs"]["data"]
    assert file["jobInputType"] == "uri_file"


def test_azureml_uploads_a_local_model_folder_and_local_data_and_output_dir_ends_the_outputs_path(workspace):
    write_llama(Path("own"), **SMALL)
    Path("rows").mkdir()
    Path("rows/a.jsonl").write_text('{"text": "Example"}\n')
    flags = "--model_name_or_path own --output_dir outputs/mine".split()
    assert main([*SUBMIT, "--data", "rows", "rows/a.jsonl", "--", *flags]) == 0
    (body,) = workspace.jobs.values()
    kinds = [body["inputs"][name]["jobInputType"] for name in ("model", "data", "data_2")]
    assert kinds == ["uri_folder", "uri_folder", "uri_file"]
    assert {"model.safetensors", "a.jsonl"} <= {name.rpartition("/")[2] for name in workspace.blobs}
    assert "--model_name_or_path ${{inputs.model}} " in body["command"] and "own" not in body["command"]
    assert body["outputs"]["run"]["uri"].endswith("/outputs/mine") and "mine" not in body["command"]


# --- The job's command, on two simulated nodes ----------------------------------------------------


@pytest.mark.slow
def test_two_nodes_train_a_classifier_on_a_mounted_model_and_data_and_resume_at_another_mount_path(empty):
    config = BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=128, num_labels=2)
    save(BertForSequenceClassification(config), empty / "bert")
    flags = "--task sequence_classification --model_name_or_path bert --max_length 64 --report_to none"
    words = "--nodes 2 --processes_per_node 2 --data azureml:rows:1 --data_type uri_file".split()
    body = sent(dry_run(*words, training=[*flags.split(), "--max_steps", "2"]))
    for start, steps in (("first", 2), ("second", 3)):
        body["command"] = body["command"].replace("--max_steps 2", f"--max_steps {steps}")
        there = empty / start / "wd" / "INPUT_data" / "rows.jsonl"  # a file keeps its name
        there.parent.mkdir(parents=True)
        rows = (f'{{"text": "Example {number} is {number % 2}.", "label": {number % 2}}}\n' for number in range(64))
        there.write_text("".join(rows))
        model = shutil.copytree("bert", there.parents[1] / "INPUT_model")
        assert run_on_nodes(body, Path(CODE), empty / "out", processes_per_node=2, data=there, model=model) == [0, 0]
        record = read_record(empty / "out")
        assert (record["world_size"], record["status"], record["global_step"]) == (4, "finished", steps)
        assert record["settings"]["dataset_name"]["value"] == str(there)
    assert [entry["step"] for entry in record["log_history"] if "loss" in entry][-1] == 3
