"""A push is checked against the Hub before the run starts: a Hub over HTTP, on this machine."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from launch.training.hub import require_hub
from recipes.errors import UserError
from tests.support.models import run_with
from tests.support.running import SCRIPT, model_flags, run, train_here


class Hub(BaseHTTPRequestHandler):
    """Knows one person by one token, and one repository of theirs and one of others."""

    def do_GET(self):
        role = {"Bearer hf_write": "write", "Bearer hf_read": "read", "Bearer hf_fine": "fineGrained"}.get(
            self.headers.get("Authorization", "")
        )
        self.server.asked.append(self.path)
        if self.server.broken:
            self.answer(503, {})
        elif role is None:
            self.answer(401, {"error": "Invalid credentials"})
        elif self.path == "/api/whoami-v2":
            orgs = [{"name": "team", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}]
            self.answer(200, {"name": "ann", "orgs": orgs, "auth": {"accessToken": {"role": role}}})
        elif self.path == "/api/models/ann/there/auth-check/write":
            self.answer(200, {})
        elif self.path == "/api/models/bob/his/auth-check/write":
            self.answer(403, {"error": "Forbidden"})
        else:
            self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def answer(self, status, content, headers=()):
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.broken = [], False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


def asked(name=None, token="hf_write", **chosen):
    return require_hub(run_with(push_to_hub=True, hub_token=token, hub_model_id=name, **chosen))


def refused(name=None, token="hf_write"):
    with pytest.raises(UserError) as caught:
        asked(name, token)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("name", ["ann/there", "there", "ann/new", "team/new", "new", None])
def test_a_repository_of_ones_own_or_of_ones_organisation(name, hub):
    assert asked(name) == []


def test_without_a_name_it_is_the_folders(hub, tmp_path):
    asked(output_dir=str(tmp_path / "my-run"))
    assert "/api/models/ann/my-run/auth-check/write" in hub.asked


def test_a_token_that_nobody_has(hub):
    problem = refused(token="hf_nobody")
    assert problem.subject == "push_to_hub" and "refuses the token" in problem.what and "hf auth login" in problem.fix


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("bob/new", "bob is no organisation of theirs"),
        ("readers/new", "may only read in readers"),
        ("bob/his", "does not let ann write to bob/his"),
    ],
)
def test_a_repository_of_others(name, what, hub):
    problem = refused(name)
    assert problem.subject == "hub_model_id" and what in problem.what


def test_the_name_in_the_fix_is_taken(hub):
    assert asked(refused("bob/new").fix.removeprefix("--hub_model_id ")) == []


def test_a_token_that_may_only_read(hub):
    assert "may only read" in refused("ann/new", "hf_read").what


def test_what_the_hub_does_not_tell_is_said(hub):
    (note,) = asked("ann/new", "hf_fine")
    assert "does not tell whether this token may create ann/new" in note
    hub.broken = True
    (note,) = asked()
    assert "does not tell whether this run may push" in note


def test_a_hub_that_nobody_reaches(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    problem = refused()
    assert problem.subject == "push_to_hub" and "cannot be reached" in problem.what and "hf upload" in problem.fix


def test_a_run_that_does_not_push_asks_nothing(hub, tiny_model, texts, tmp_path):
    assert require_hub(run_with()) == []
    assert train_here(tiny_model, texts, tmp_path, "--max_steps", "1").code == 0
    assert hub.asked == []


def test_a_run_ends_before_it_reads_its_data(hub, tiny_model, texts, tmp_path):
    environment = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_write"}
    flags = [*model_flags(tiny_model, texts), "--push_to_hub", "--hub_model_id", "bob/new"]
    command = [sys.executable, str(SCRIPT), *flags, "--output_dir", str(tmp_path)]
    outcome = run(command, tmp_path, environment)
    assert outcome.code == 2 and "bob is no organisation of theirs" in outcome.output
    assert "Traceback" not in outcome.output and "Tokenizing" not in outcome.output
