"""What only a GPU can show. Skipped without one.

`python -m tests.gpu` measures speed and memory, and writes the tables.
"""

import json
import re

import pytest
import torch

from launch.cli import main
from recipes.run import hardware
from tests.support.running import launch, losses, train_here
from tests.support.wide import LENGTH, texts_of, wide_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TUNED = "fast --torch_compile_mode max-autotune-no-cudagraphs"


def test_the_driver_and_torch_see_the_same_gpus():
    found = hardware.read().gpus
    assert [gpu.capability for gpu in found] == [torch.cuda.get_device_capability(i) for i in range(len(found))]
    assert len(found) == torch.cuda.device_count()


def test_the_doctor_reports_healthy_gpus_and_their_measured_flops(capsys):
    code = main(["doctor", "--num_processes", "1", "--json"])
    said = json.loads(capsys.readouterr().out)
    found = {check["title"]: check["found"] for check in said["checks"]}
    assert (code, said["healthy"]) == (0, True) and "NCCL" in found, said
    assert re.search(r"FLOP/s in b?float16", found["matrices"])


@pytest.mark.parametrize(
    "flags", ["baseline", "standard", "fast", "sharded", "standard --optim adamw_bnb_8bit", "fast --use_peft", TUNED]
)
def test_a_recipe_trains_on_the_gpu(flags, tiny_model, texts, tmp_path):
    words = ["--recipe", *flags.split(), "--max_steps", "6", "--learning_rate", "1e-3"]
    outcome = train_here(tiny_model, texts, tmp_path, *words)
    assert losses(outcome)[-1] < losses(outcome)[0]
    if "fast" in flags:
        settings = outcome.record["settings"]
        assert (settings["bf16"]["value"], settings["torch_compile"]["value"]) == (True, True)


def test_the_micro_batch_that_fit_finds_trains_within_memory_limit_and_a_larger_one_does_not(tmp_path):
    model, data = wide_model(tmp_path / "model"), texts_of(tmp_path / "texts.jsonl", [LENGTH] * 64)
    flags = f"--recipe standard --model_name_or_path {model} --dataset_name {data} --max_length {LENGTH} --max_steps 3"
    limited = [*flags.split(), "--global_batch_size", "64", "--memory_limit", "5"]
    fitted = launch(*limited, "--fit", output=tmp_path / "fitted", config="single.yaml")
    assert fitted.record["status"] == "finished", fitted.output
    found = json.loads((tmp_path / "fitted" / "fit.json").read_text())
    assert 1 <= found["micro_batch"] < 64 and found["peak_bytes"] <= 5e9
    larger = ["--per_device_train_batch_size", "64"]
    ran_out = launch(*limited, *larger, output=tmp_path / "larger", config="single.yaml")
    assert ran_out.record["status"] == "out_of_memory" and "within --memory_limit 5:" in ran_out.output, ran_out.output
