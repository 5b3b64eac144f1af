"""Tensor parallelism and replicas of shards through train.py: the training that DDP would do."""

import json

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.support.models import SMALL, save
from tests.support.running import ROOT, launch_quickly, losses, model_flags

pytestmark = pytest.mark.slow

AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto")
ZERO_2 = {"stage": 2}  # train.py saves a whole model all the same
CONFIG = {**AUTO, "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, "zero_optimization": ZERO_2}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Two epochs whose last global batch is not full, with evaluations."""
    folder = tmp_path_factory.mktemp("training")
    words = "def class import return yield the of a model trains on data".split()
    rows = [{"prompt": " ".join(words[: row % 5 + 1]), "completion": " ".join(words[row % 9 :])} for row in range(53)]
    data = folder / "texts.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    config = LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=256)
    model = save(LlamaForCausalLM(config), folder / "model")
    more = "--num_train_epochs 2 --learning_rate 1e-2 --eval_strategy epoch --logging_steps 1 --global_batch_size 8"
    more += " --per_device_train_batch_size 2 --dataset_train_split train[:43] --dataset_test_split train[43:]"
    return [*model_flags(model, data), *more.split()]


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    file = tmp_path_factory.mktemp("deepspeed") / "ds.json"
    file.write_text(json.dumps({**CONFIG, "tensor_parallel": {"autotp_size": 2}}), encoding="utf-8")
    return ["--deepspeed", str(file)]


@pytest.fixture(scope="module")
def ddp(flags, tmp_path_factory):
    return launch_quickly(*flags, output=tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("processes", [2, 4])
def test_the_training_and_the_model_are_those_of_ddp(processes, flags, divided, ddp, tmp_path):
    outcome = launch_quickly(*flags, *divided, output=tmp_path, processes=processes)
    assert outcome.code == 0, outcome.output
    assert losses(outcome) == pytest.approx(losses(ddp), abs=1e-5)
    assert outcome.record["eval_loss"] == pytest.approx(ddp.record["eval_loss"], abs=1e-5)
    assert outcome.record["num_parameters"] == ddp.record["num_parameters"]
    of_a_step = [one.record["tokens_per_second"] * one.record["step_time"] for one in (outcome, ddp)]
    assert of_a_step[0] == pytest.approx(of_a_step[1], rel=0.05)  # DDP also counts what fills up an epoch's last batch
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(parameter.numel() for parameter in model.parameters()) == ddp.record["num_parameters"]


def test_a_model_that_deepspeed_cannot_divide_is_one_line(gpt2, texts, divided, tmp_path):
    outcome = launch_quickly(*model_flags(gpt2, texts), *divided, "--max_steps", "1", output=tmp_path)
    assert outcome.code == 1 and "Traceback" not in outcome.output
    assert "tensor_parallel: " in outcome.output


def test_replicas_of_shards_train_what_ddp_trains(flags, ddp, tmp_path):
    """HSDP through train.py, with accelerate's refusal of a CPU lifted."""
    config = (ROOT / "accelerate_configs" / "sharded.yaml").read_text(encoding="utf-8")
    config += "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n"
    (tmp_path / "hsdp.yaml").write_text(config, encoding="utf-8")
    where = dict(config=str(tmp_path / "hsdp.yaml"), script=ROOT / "tests" / "support" / "fsdp_on_cpu.py")
    outcome = launch_quickly(*flags, "--save_strategy", "no", output=tmp_path / "out", processes=4, **where)
    assert outcome.code == 0, outcome.output
    assert "2 replicas of 2 shards" in outcome.record["engine"] and outcome.record["data_parallel_size"] == 4
    assert losses(outcome) == pytest.approx(losses(ddp), abs=1e-5)


def test_a_group_shares_the_examples_of_a_stream(flags, divided, tmp_path):
    stream = "--dataset_streaming --max_steps 5 --learning_rate 1e-2 --logging_steps 1 --global_batch_size 8"
    of_group = [*flags[:6], *stream.split()]
    one = launch_quickly(*of_group, output=tmp_path / "one", processes=1, config="single.yaml")
    two = launch_quickly(*of_group, *divided, output=tmp_path / "two")
    assert two.code == 0, two.output
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
