"""What tests train on: a tiny model with its tokenizer, texts, and a checkpoint by Trainer."""

import gc
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

# The tests describe a CPU, `pytest tests/gpu` the rest. The workers of xdist inherit the answer.
asked = "GPU" if any(word == "gpu" or "tests/gpu" in word for word in sys.argv[1:]) else "CPU"
on_gpu = os.environ.setdefault("TESTS_ON", asked) == "GPU"
if not on_gpu:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# DeepSpeed's compiled parts belong to one environment: two would overwrite each other's.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if os.environ.get("PYTEST_XDIST_WORKER") and not on_gpu:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a tiny model's threads would only wait for each other


def pytest_report_header(config):
    if config.args_source is config.ArgsSource.ARGS:
        return None  # only some tests
    return "4 minutes on two quiet cores, 8 to 10 on busy ones; 25 with -m slow -n 4; once, DeepSpeed compiles"


def pytest_collection_modifyitems(items):
    """The longest files first, so that the workers end together; DeepSpeed compiles at once."""
    order = """
        test_every_recipe test_trace test_plan test_slurm test_containers test_train_engines test_style test_rehearsal
        test_scale test_parallelism test_preemption test_submit test_same_training test_fit test_faults test_explain
        test_out_of_memory test_train_switches test_other_world test_heartbeat test_streams test_streaming
    """.split()
    items.sort(key=lambda item: order.index(item.path.stem) if item.path.stem in order else len(order))


def pytest_collection_finish():
    """What is imported by now stays, so that garbage collections need not look at it again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_site_file(tmp_path_factory) -> None:
    """A developer's own site file is not what the tests describe."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("configuration"))


@pytest.fixture(autouse=True)
def environment_as_before():
    """What Trainer and Accelerate set in the environment of a test's process ends with the test."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A folder with a Llama of some 30 thousand parameters and the byte-level tokenizer."""
    from tests.support.models import write_llama

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return write_llama(tmp_path_factory.mktemp("tiny-model"), max_position_embeddings=256, **sizes)


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """256 texts of different lengths, as .jsonl."""
    from tests.support.rows import jsonl

    rows = [{"text": f"Example {n} says " + "well " * (1 + n % 7) + "and ends."} for n in range(256)]
    return Path(jsonl(tmp_path_factory.mktemp("data"), rows, "texts.jsonl"))


@pytest.fixture(scope="session")
def real_checkpoint(tiny_model, texts, tmp_path_factory) -> Path:
    """checkpoint-4 of a run that was trained for four steps."""
    from tests.support.running import train_here

    folder = tmp_path_factory.mktemp("real-run")
    assert train_here(tiny_model, texts, folder, "--max_steps", "4").code == 0
    return folder / "checkpoint-4"
