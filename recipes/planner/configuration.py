"""The configuration of the model to plan, from the Hub, a folder, a file or a size."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from recipes.errors import mistake, one_line
from recipes.planner import sizes
from recipes.quiet import silence
from recipes.run import Json, RunSpec
from recipes.run.files import existing_path, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PATIENCE = 2  # seconds until the Hub counts as unreachable; huggingface_hub tries for 26
_WANTED = "a Hub id, a folder, a config.json or 7B"


def read_plain(model: str, run: RunSpec) -> Json | None:
    """The config.json of a Hub id, read without transformers, which takes seconds to import. None
    for a local model, whose configuration the rules have read already, and for a size.

    Raises `UserError` for what is no configuration, here or on the Hub.
    """
    if sizes.is_size(model):
        return None
    local = existing_path(model)
    if local is None:
        return _from_hub(model, run["model_revision"])
    file = local / "config.json" if local.is_dir() else local
    content, what = read_json(file)
    if content is None:
        raise mistake("model", what if file.is_file() else f"there is no {file}", _WANTED)
    return None


def _from_hub(model: str, revision: str) -> Json | None:
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    silent = f"{model} is neither a file here nor in the cache, and the Hub does not answer"
    private = f"{_WANTED}; `hf auth login` for a private one"
    wrong: dict[type[Exception], tuple[str, str]] = {  # the first that the error is one of
        hub.HFValidationError: (f"there is no file or folder {model}, and no Hub id looks so", _WANTED),
        hub.GatedRepoError: (f"{model} has terms to agree to on the Hub", "agree there, then `hf auth login`"),
        hub.RepositoryNotFoundError: (f"{model} is neither a file here nor a model on the Hub", private),
        hub.RevisionNotFoundError: (f"{model} has no revision {revision} on the Hub", "--model_revision main"),
        hub.LocalEntryNotFoundError: (silent, f"check the network, or the spelling: {_WANTED}"),
        hub.EntryNotFoundError: (f"{model} has no config.json on the Hub", _WANTED),
    }
    try:
        file = try_to_load_from_cache(model, "config.json", revision=revision)
        if not isinstance(file, str):
            if not _hub_answers():
                raise hub.LocalEntryNotFoundError(silent)
            file = hf_hub_download(model, "config.json", revision=revision)
        return read_json(file)[0]
    except tuple(wrong) as error:
        what, fix = next(words for kind, words in wrong.items() if isinstance(error, kind))
        raise mistake("model", what, fix) from None
    except Exception:  # the network: transformers may know more, or says what is wrong
        return None


def read_config(model: str, run: RunSpec | None = None) -> PreTrainedConfig:
    """The configuration of a Hub id, a folder, a config.json, or a size. Raises `UserError`.

    `run` says which revision, and whether the model's own code is trusted.
    """
    if sizes.is_size(model):
        return sizes.config_of(model)
    revision, trusted = (run["model_revision"], run["trust_remote_code"]) if run else ("main", False)
    local = existing_path(model)
    from transformers import AutoConfig

    origin = {"revision": revision, "trust_remote_code": trusted}
    try:
        with silence():
            # Without this huggingface_hub tries for 26 seconds to ask whether there is a newer one.
            offline = local is None and not _hub_answers()
            config = AutoConfig.from_pretrained(local or model, **origin, local_files_only=offline)
            if trusted:
                _register_code(config, str(local or model), revision)
    except Exception as error:  # each library involved has exceptions of its own
        if "trust_remote_code" in str(error):
            what = f"{model} comes with Python code"
            raise mistake("trust_remote_code", what, "read it, then --trust_remote_code") from None
        raise mistake("model", f"{model} cannot be read: {one_line(error)}", _WANTED) from None
    return config


def _hub_answers() -> bool:
    """Whether a connection to the Hub opens in time. With a proxy, only a request can tell."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    opened = threading.Event()

    def connect() -> None:  # in a thread, since no timeout holds for the search for the name
        try:
            with socket.create_connection((address.hostname or "", port), timeout=_PATIENCE):
                opened.set()
        except OSError:
            pass

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return opened.is_set()


def _register_code(config: PreTrainedConfig, model: str, revision: str) -> None:
    """Register the classes that come with a model, so that the auto classes build them unasked."""
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    folder = str(Path(model).parent) if model.endswith(".json") else model
    for name, place in (getattr(config, "auto_map", None) or {}).items():
        if name in ("AutoModelForCausalLM", "AutoModelForSequenceClassification"):
            own = get_class_from_dynamic_module(place, folder, revision=revision)
            getattr(transformers, name).register(type(config), own, exist_ok=True)
