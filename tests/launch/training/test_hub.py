"""A push is checked against the Hub before the run starts: a Hub over HTTP, on this machine."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from launch.training.trainer import require_hub
from recipes.errors import UserError
from tests.support.models import run_with
from tests.support.running import train_here


class Hub(BaseHTTPRequestHandler):
    """Knows one person by one token, who may write to their own repositories."""

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        asked = json.loads(content) if "create" in self.path else {"organization": "bob", "name": "a file"}
        owner = asked.get("organization") or "ann"
        self.server.asked.append(f"{owner}/{asked['name']}")
        self.answer(403 if owner == "bob" else 200, {"url": f"{self.server.address}/{owner}/{asked['name']}"})

    def do_GET(self):
        self.answer(404 if "bob" in self.path else 200, {})

    def answer(self, status, content):
        if self.headers.get("Authorization") != "Bearer hf_write":
            status, content = 401, {"error": "Invalid credentials"}
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.fixture
def hub(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked, server.address = [], f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # knows the endpoint of its first use
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield server
        server.shutdown()


def asked(name=None, token="hf_write", **chosen):
    require_hub(run_with(push_to_hub=True, hub_token=token, hub_model_id=name, **chosen))


def test_push_to_hub_creates_the_hub_repository_before_the_run(hub, tmp_path):
    asked("team/new")
    asked(output_dir=str(tmp_path / "my-run"))
    require_hub(run_with())  # pushes nothing
    assert hub.asked == ["team/new", "ann/my-run"]


@pytest.mark.parametrize(("name", "token", "says"), [("bob/his", "hf_write", "403"), ("new", "hf_nobody", "401")])
def test_a_push_that_the_hub_refuses_is_reported_with_the_status_code_and_a_fix(name, token, says, hub):
    with pytest.raises(UserError, match=f"push_to_hub: .*{says}.* Fix: run `hf auth login`"):
        asked(name, token)


def test_a_run_whose_push_the_hub_refuses_ends_before_it_reads_its_data(hub, tiny_model, texts, tmp_path):
    flags = "--push_to_hub --hub_model_id bob/new --hub_token hf_write".split()
    outcome = train_here(tiny_model, texts, tmp_path, *flags)
    assert outcome.code == 2 and "push_to_hub: " in outcome.output
    assert "Traceback" not in outcome.output and "Tokenizing" not in outcome.output


def test_a_push_that_the_hub_refuses_after_the_training_names_the_folder_of_the_model(hub, tiny_model, texts, tmp_path):
    flags = "--push_to_hub --hub_model_id ann/new --hub_token hf_write --max_steps 1".split()
    outcome = train_here(tiny_model, texts, tmp_path, *flags)
    said = " ".join(outcome.output.split())
    assert outcome.code == 1 and f"the model is in {tmp_path}, but not on the Hub: 403" in said and "Trace" not in said
    card = (tmp_path / "README.md").read_text()  # the card to push
    assert f"fine-tuned version of {tiny_model} on the {texts} dataset" in card and "recipe `standard`" in card
