"""The planner against published readings, against whole steps on tensors without data, and against itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen3MoeConfig,
)

from launch.cli import main
from recipes import plan_memory
from recipes.catalog import RECIPES
from recipes.engine import shipped
from recipes.estimate import Estimator
from recipes.footprint import Components, need
from recipes.run import resolve
from recipes.trace import (
    SHALLOW,
    Adapters,
    Case,
    LiveBytes,
    at_batch,
    layers_are_equal,
    of_depth,
    trace,
    weigh,
    with_layers,
)
from tests.published import BERT_LARGE, MIB, V100, predicted
from tests.resident import CASES
from tests.running import ROOT

FSDP2 = str(shipped("fsdp2.yaml"))


def run_of(recipe="standard", *argv, world=1, hardware=V100):
    return resolve(["--recipe", recipe, *argv], world_size=world, hardware=hardware, environment={}, demonstrate=False)


@pytest.mark.parametrize("reading", BERT_LARGE, ids=str)
def test_published_readings_of_bert_large_are_met_within_six_percent(reading):
    assert predicted(reading).gpu.total / MIB == pytest.approx(reading.mib, rel=0.06)


SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
SHAPE["vocab_size"] = 1000
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 2}
SMALL = {
    "gpt2": GPT2Config(n_embd=128, n_layer=4, n_head=4, vocab_size=1000),
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS),
}


def two_whole_steps(config, case: Case, accumulation: int) -> int:
    """The most that is alive in the second of two real optimizer steps, AdamW's state and update included."""
    from recipes import trace as tracing

    with FakeTensorMode(), tracing._attention_of_a_gpu():
        model = tracing._model(config, case)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        live = LiveBytes()
        inputs = tracing._inputs(config, case)
        with tracing._Operations(), live:
            for tensor in [*model.parameters(), *model.buffers()]:
                live._count(tensor)
            for _ in range(2):
                for _ in range(accumulation):
                    model(**inputs).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return max(map(sum, live.moments))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_arithmetic_is_what_two_whole_steps_keep_alive(name, accumulation, checkpointing):
    config = SMALL[name]
    case = Case(4, 64, checkpointing=checkpointing)
    run = run_of("standard", "--fp16", "false", "--optim", "adamw_torch")
    needed = need(run, weigh(config, "causal_lm"), trace(config, case), accumulation, context=0)
    assert needed.gpu.total == pytest.approx(two_whole_steps(config, case, accumulation), rel=0.02)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_two_micro_batches_tell_every_other(name, autocast):
    two, three, nine = (trace(SMALL[name], Case(batch, 64, autocast=autocast)) for batch in (2, 3, 9))
    assert most(at_batch(two, three, 9)) == pytest.approx(most(nine), rel=0.01)


def most(traced):
    return max(map(sum, traced.moments))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("case", [Case(2, 64), Case(2, 64, autocast="bfloat16"), Case(2, 64, checkpointing=True)])
def test_two_shallow_models_tell_a_deep_one(name, case):
    own = {key: value for key, value in SMALL[name].to_dict().items() if key not in ("layer_types", "n_layer")}
    deep = type(SMALL[name])(**{**own, "num_hidden_layers": 9})
    assert layers_are_equal(deep, weigh(deep, "causal_lm"), "causal_lm")
    shallow, deeper = (trace(with_layers(deep, layers), case) for layers in (SHALLOW, SHALLOW + 1))
    told, real = of_depth(shallow, deeper, 9), trace(deep, case)
    for part in ((0, 1), (2,), (0, 1, 2)):  # without gradients, gradients alone, all
        fullest = [max(sum(moment[at] for at in part) for moment in one.moments) for one in (told, real)]
        assert fullest[0] == pytest.approx(fullest[1], rel=1e-3)


# --- Adapters and shards ---------------------------------------------------------------------------------------------


def need_of(config, flags: str, engine: str | None = None, world: int = 1):
    run = resolve(
        ["--recipe", "standard", "--max_length", "64", *flags.split()],
        world_size=world,
        hardware=V100,
        accelerate_config=engine,
        environment={},
        demonstrate=False,
        elsewhere=frozenset(),
    )
    found, traced = Estimator(config).need(run, 4)
    assert traced
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_adapters_train_what_peft_makes_trainable(name):
    import peft

    model = AutoModelForCausalLM.from_config(SMALL[name])
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    found = need_of(SMALL[name], "--use_peft true --lora_r 8 --bf16 true").gpu
    assert found.parameters == 4 * total
    assert (found.gradients, found.optimizer) == (4 * trained, 8 * trained)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_weights_in_4_bits_take_what_bitsandbytes_makes_of_them(name, tmp_path):
    from transformers import BitsAndBytesConfig

    AutoModelForCausalLM.from_config(SMALL[name]).save_pretrained(tmp_path)
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=options, dtype=torch.float32)
    real = sum(parameter.nbytes for parameter in model.parameters())
    adapters = need_of(SMALL[name], "--use_peft true --lora_r 8").gpu.optimizer / 2
    found = need_of(SMALL[name], "--use_peft true --lora_r 8 --load_in_4bit true --use_bnb_nested_quant true").gpu
    packed = weigh(SMALL[name], "causal_lm", Adapters(8, four_bits="bfloat16")).in_4_bits
    assert found.parameters - adapters == pytest.approx(real + packed * (1 / 64 + 4 / (64 * 256)), rel=1e-3)


@pytest.mark.parametrize("smaller", ["--use_peft true", "--use_peft true --load_in_4bit true"])
def test_adapters_take_less_than_training_everything(smaller):
    whole, less = (need_of(SMALL["llama"], flags).gpu for flags in ("", smaller))
    assert less.total < whole.total
    assert less.gradients + less.optimizer < 0.2 * (whole.gradients + whole.optimizer)


def test_fsdp2_spreads_every_state_and_gathers_layers(tmp_path):
    deep = LlamaConfig(**{**SHAPE, "num_hidden_layers": 12})
    alone, shared = (need_of(deep, "--bf16 true", FSDP2, world).gpu for world in (1, 8))
    weights = weigh(deep, "causal_lm")
    assert shared.optimizer == pytest.approx(alone.optimizer / 8, rel=0.01)
    gathered = 2 * (weights.outside_layers + 2 * weights.largest_layer)
    assert shared.parameters == pytest.approx(4 * weights.total / 8 + gathered, rel=0.01)


# --- Real memory -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resident():
    words = [sys.executable, "-m", "tests.resident", "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
@pytest.mark.parametrize("case", CASES)
def test_two_real_steps_have_resident_what_was_planned(case, resident):
    row = resident[case]
    assert row["predicted_bytes"] == pytest.approx(row["resident_bytes"], rel=0.05)


# --- The plan --------------------------------------------------------------------------------------------------------


def planned(*argv, config=SMALL["llama"], **named):
    named = {"gpu_memory": 8, **named}
    return plan_memory(config, argv=argv, **named)


@settings(max_examples=10, deadline=None)
@given(micro=st.integers(1, 16), length=st.integers(8, 128), more=st.integers(1, 8))
def test_memory_grows_with_the_batch_and_the_length(micro, length, more):
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=500)
    weights, run = weigh(config, "causal_lm"), run_of("standard")

    def total(micro, length):
        return need(run, weights, trace(config, Case(micro, length)), accumulation=2).gpu.total

    assert total(micro, length) <= min(total(micro + more, length), total(micro, length + more))


def test_memory_grows_with_the_layers():
    deeper = LlamaConfig(**{**SMALL["llama"].to_dict(), "num_hidden_layers": 6})
    flags = "--per_device_train_batch_size 4 --max_length 64".split()
    shallow, deep = (planned(*flags, config=config).recipes for config in (SMALL["llama"], deeper))
    assert all(one.total_bytes < two.total_bytes for one, two in zip(shallow, deep, strict=True))


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_global_batch_stays(processes):
    for entry in planned("--global_batch_size", "16", num_processes=processes).recipes:
        assert entry.micro_batch * entry.accumulation * processes == 16


@pytest.mark.parametrize("recipe", ["memory", "memory_zero3"])
@pytest.mark.parametrize("processes", [2, 4])
def test_shards_never_sum_below_the_whole(recipe, processes):
    alone, shared = (planned(recipe=recipe, num_processes=n).recipes[0] for n in (1, processes))
    assert shared.host_bytes_per_node >= alone.host_bytes_per_node
    for part in ("parameters", "gradients", "optimizer"):
        assert processes * getattr(shared.components, part) >= getattr(alone.components, part)


@pytest.mark.parametrize("memory", [0.5, 2, 80])
def test_what_is_recommended_fits_and_is_legal(memory, capsys):
    plan = planned(gpu_memory=memory, config=LlamaConfig(hidden_size=512, num_hidden_layers=4, intermediate_size=1024))
    if plan.recommended is None:
        assert not any(entry.fits for entry in plan.recipes)
        return
    best = next(entry for entry in plan.recipes if entry.name == plan.recommended)
    assert best.fits and best.margin_bytes > 0
    assert main(["check", "--recipe", best.name, "--per_device_train_batch_size", str(best.micro_batch)]) == 0


def test_eight_billion_in_sixteen_bits_on_48_gb_need_offload():
    """DDP with 8-bit Adam does not fit, nor safely with checkpointing; offload does."""
    card = {"gpu_memory": 47.4 * 2**30 / 1e9, "num_processes": 2}
    ddp = "--dtype bfloat16 --optim adamw_bnb_8bit --max_length 2048 --per_device_train_batch_size 1".split()
    checkpointed = [*ddp, "--gradient_checkpointing", "true"]
    assert not plan_memory("8.36B", argv=ddp, recipe="standard", **card).recipes[0].fits
    assert not plan_memory("8.36B", argv=checkpointed, recipe="standard", **card).recipes[0].fits
    offload = plan_memory("8.36B", argv=["--max_length", "2048"], recipe="memory", **card)
    assert offload.recommended == "memory"


class LooksAtItsDataConfig(LlamaConfig):
    model_type = "looks_at_its_data"


class LooksAtItsData(LlamaForCausalLM):
    config_class = LooksAtItsDataConfig

    def forward(self, input_ids=None, **others):
        return super().forward(input_ids[:, : input_ids.max().item() + 1], **others)


def test_a_model_that_cannot_be_traced_is_estimated_and_said_so(tmp_path, capsys):
    AutoConfig.register(LooksAtItsDataConfig.model_type, LooksAtItsDataConfig)
    AutoModelForCausalLM.register(LooksAtItsDataConfig, LooksAtItsData)
    LooksAtItsDataConfig(**SHAPE).save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--gpu", "A100 80GB", "--recipe", "standard"]) == 0
    assert "cannot be traced" in capsys.readouterr().out


def test_a_classifier_is_planned_without_data():
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
    assert planned("--task", "sequence_classification", config=config).recommended == "fast"


def test_components_sum_to_the_total():
    assert Components(1, 2, 3, 4, 5, 6, 7).total == 28


# --- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    SMALL["llama"].save_pretrained(tmp_path)
    return tmp_path


def test_it_prints_a_row_for_each_recipe_and_the_one_to_take(folder, capsys):
    assert main(["plan", "--model", str(folder), "--gpu", "H100", "--num_processes", "4"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in RECIPES if name != "baseline")
    assert "take fast" in printed


def test_json_holds_bytes_and_whole_numbers_only(folder, capsys):
    assert main(["plan", "--model", str(folder / "config.json"), "--gpu_memory", "24", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["recommended"] == "fast" and plan["gpu"]["usable_bytes"] == 24_000_000_000
    for entry in plan["recipes"]:
        assert sum(entry["components"].values()) == entry["total_bytes"]
        assert all(type(size) is int for size in entry["components"].values())


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--model 7B", "--gpu NAME, or --gpu_memory GB"),
        ("--model 7B --gpu H100 --gpu_memory 80", "--gpu NAME, or --gpu_memory GB"),
        ("--model 7B --gpu H1000", "--gpu_memory GB"),
        ("--model nowhere/at/all --gpu H100", "a Hub id, a folder, a config.json or 7B"),
        ("--model 7B --gpu H100 --recipe fats", "fast"),
        ("--model 7B --gpu H100 --lerning_rate 1", "--learning_rate"),
        ("--model 7B --gpu H100 --num_processes 3 --nodes 2", "a multiple"),
        ("--model 7B --gpu H100 --num_processes 3 --global_batch_size 16", "15 or 18"),
    ],
)
def test_a_mistake_is_one_line(words, advice, capsys):
    assert main(["plan", *words.split()]) == 2
    assert advice in capsys.readouterr().err
