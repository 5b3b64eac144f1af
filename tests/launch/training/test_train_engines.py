"""DeepSpeed, tensor parallelism and replicas of shards train on CPU ranks what one process trains,
and save one whole model. DDP is in test_same_training.py, FSDP2 in test_sharded.py.
"""

import json

import pytest
from transformers import AutoModelForCausalLM

from tests.launch.training.test_every_recipe import NEEDS_COMPILER
from tests.support.parallel import zero
from tests.support.running import ROOT, launch, launch_quickly, losses, model_flags, train_here

pytestmark = pytest.mark.slow

# Two epochs whose last global batch is not full, with evaluations.
UNEVEN = (
    "--num_train_epochs 2 --learning_rate 1e-2 --eval_strategy epoch --logging_steps 1 --global_batch_size 8 "
    "--per_device_train_batch_size 2 --dataset_train_split train[:43] --dataset_test_split train[43:53] --bf16 false"
).split()
BY_JSON = {"ZeRO-2": zero(2), "ZeRO-3": zero(3), "tensor parallel": {**zero(2), "tensor_parallel": {"autotp_size": 2}}}
COUNTS = ROOT / "tests" / "support" / "fsdp_on_cpu.py"
HELD = {"sharded": 0.5, "tensor parallel": 0.8}  # the most of the weights that a rank of it may hold
REPLICAS_OF_SHARDS = """
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
"""
ENGINES = [  # its title in the record, the recipe or an engine from above, and the processes
    pytest.param("DeepSpeed ZeRO-2, optimizer offload", "memory", 2, marks=NEEDS_COMPILER),
    pytest.param("DeepSpeed ZeRO-3, optimizer and parameter offload", "memory_zero3", 2, marks=NEEDS_COMPILER),
    ("DeepSpeed ZeRO-2", "ZeRO-2", 2),
    ("DeepSpeed ZeRO-3", "ZeRO-3", 2),
    ("tensor parallel", "tensor parallel", 2),
    ("tensor parallel", "tensor parallel", 4),
    ("2 replicas of 2 shards", "sharded", 4),
]


@pytest.fixture(scope="module")
def one_process(tiny_model, texts, tmp_path_factory):
    return train_here(tiny_model, texts, tmp_path_factory.mktemp("one"), "--recipe", "standard", *UNEVEN)


@pytest.mark.parametrize(("title", "engine", "processes"), ENGINES)
def test_each_engine_has_the_losses_of_one_process(title, engine, processes, one_process, tiny_model, texts, tmp_path):
    flags, how = [*model_flags(tiny_model, texts), *UNEVEN], {"processes": processes}
    how |= {"script": COUNTS} if engine in HELD else {}
    if engine in BY_JSON:
        (tmp_path / "ds.json").write_text(json.dumps(BY_JSON[engine]))
        flags += ["--deepspeed", str(tmp_path / "ds.json")]
    elif engine == "sharded":
        yaml = (ROOT / "accelerate_configs" / "sharded.yaml").read_text()
        (tmp_path / "hsdp.yaml").write_text(yaml + REPLICAS_OF_SHARDS)
        how["config"] = str(tmp_path / "hsdp.yaml")
    else:
        flags, how["config"] = ["--recipe", engine, *flags], f"{engine}.yaml"
    outcome = launch_quickly(*flags, output=tmp_path / "out", **how)
    assert (outcome.code, outcome.record["world_size"]) == (0, processes), outcome.output
    assert title in outcome.record["engine"]
    assert losses(outcome) == pytest.approx(losses(one_process), abs=1e-4)
    for name in ("eval_loss", "num_parameters"):
        assert outcome.record[name] == pytest.approx(one_process.record[name], abs=1e-4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    parameters = one_process.record["num_parameters"]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    if engine in HELD:
        held = json.loads((tmp_path / "out" / "held-0.json").read_text())["parameters"]
        assert held <= HELD[engine] * 4 * parameters


@NEEDS_COMPILER[0]
def test_recipe_memory_launched_with_a_ddp_yaml_starts_deepspeed_itself(tiny_model, texts, tmp_path):
    flags = ["--recipe", "memory", *model_flags(tiny_model, texts), "--max_steps", "2"]
    assert launch(*flags, output=tmp_path, processes=1, config="standard.yaml").code == 0
    assert (tmp_path / "checkpoint-2" / "latest").exists()  # a file of DeepSpeed


@pytest.mark.parametrize("end", [42, 36])
def test_eval_loss_of_uneven_ranks_does_not_depend_on_average_tokens_across_devices(end, tiny_model, texts, tmp_path):
    """Of ten examples the first rank has eight, the second two; of four, the second has none."""
    split = f"--dataset_train_split train[:32] --dataset_test_split train[32:{end}] --eval_strategy epoch --max_steps 1"
    flags = [*model_flags(tiny_model, texts), *split.split(), "--learning_rate", "1e-12"]
    expected = launch_quickly(*flags, output=tmp_path / "summed").record["eval_loss"]
    own = launch_quickly(*flags, "--average_tokens_across_devices", "false", output=tmp_path / "own")
    assert own.record["eval_loss"] == pytest.approx(expected, rel=1e-6)
