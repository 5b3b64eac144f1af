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
    Qwen3MoeConfig,
)

from launch.cli import main
from recipes import plan_memory
from recipes.catalog import RECIPES
from recipes.errors import UserError
from recipes.planner.estimate import Estimator, read_config
from recipes.planner.fits import Usable, largest_that_fits
from recipes.planner.footprint import Components, need
from recipes.planner.live_bytes import LiveBytes
from recipes.planner.plan import plan_run
from recipes.planner.shapes import Adapters, Case, Traced, Weights
from recipes.planner.trace import SHALLOW, at_batch, layers_are_equal, of_depth, trace, weigh, with_layers
from recipes.run import resolve
from recipes.run.engine import Engine, shipped
from tests.benchmarks.published import BERT_LARGE, MIB, V100, predicted
from tests.benchmarks.resident import CASES
from tests.support.running import ROOT

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
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS),
}


def two_whole_steps(config, case: Case, accumulation: int) -> int:
    """The most that is alive in the second of two real optimizer steps, AdamW's state and update included."""
    from recipes.planner import trace as tracing

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
@pytest.mark.parametrize(("accumulation", "checkpointing"), [(1, False), (2, False), (1, True)])
def test_the_arithmetic_is_what_two_whole_steps_keep_alive(name, accumulation, checkpointing):
    config = SMALL[name]
    case = Case(4, 64, checkpointing=checkpointing)
    run = run_of("standard", "--fp16", "false", "--optim", "adamw_torch")
    needed = need(run, weigh(config, "causal_lm"), trace(config, case), accumulation, context=0)
    assert needed.gpu.total == pytest.approx(two_whole_steps(config, case, accumulation), rel=0.02)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_two_micro_batches_tell_every_other(name, autocast):
    one, two, three, nine = (trace(SMALL[name], Case(batch, 64, autocast=autocast)) for batch in (1, 2, 3, 9))
    assert most(at_batch(two, three, 1)) == pytest.approx(most(one), rel=0.002)
    assert most(at_batch(two, three, 9)) == pytest.approx(most(nine), rel=0.01)


def most(traced):
    return max(map(sum, traced.moments))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("case", [Case(2, 64), Case(2, 64, autocast="bfloat16"), Case(2, 64, checkpointing=True)])
def test_two_shallow_models_tell_a_deep_one(name, case):
    own = {key: value for key, value in SMALL[name].to_dict().items() if key not in ("layer_types", "n_layer")}
    deep = type(SMALL[name])(**{**own, "num_hidden_layers": 7})
    assert layers_are_equal(deep, weigh(deep, "causal_lm"), "causal_lm")
    shallow, deeper = (trace(with_layers(deep, layers), case) for layers in (SHALLOW, SHALLOW + 1))
    told, real = of_depth(shallow, deeper, 7), trace(deep, case)
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


@pytest.mark.parametrize(
    ("optim", "numbers"),
    [("sgd", 0), ("adagrad", 1), ("adamw_torch", 2), ("ademamix", 3), ("lion_8bit", 0.25), ("adamw_bnb_8bit", 0.5)],
)
def test_optimizers_keep_their_moments(optim, numbers):
    weights = Weights(10**9, 10**9)
    kept = need(run_of("standard", "--optim", optim), weights, Traced([(0, 0, 1)], 1), 1).gpu
    update = 4 * 10**9 if optim == "adamw_torch" else 0
    assert kept.optimizer == pytest.approx(4 * 10**9 * numbers + update, rel=0.02)


def test_a_layer_of_experts_is_fetched_whole():
    experts = Weights(10**10, 10**10, largest_layer=3 * 10**9)
    run = resolve(["--recipe", "memory_zero3"], world_size=8, hardware=V100, environment={}, demonstrate=False)
    assert need(run, experts, Traced([(0, 0, 0)], 1), 1).gpu.parameters == 2 * 3 * 10**9


def test_a_decoder_classifies_though_it_has_no_padding_token():
    assert need_of(SMALL["llama"], "--task sequence_classification").gpu.total > 0


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
    words = [sys.executable, "-m", "tests.benchmarks.resident", "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
@pytest.mark.parametrize("case", CASES)
def test_two_real_steps_have_resident_what_was_planned(case, resident):
    row = resident[case]
    assert row["predicted_bytes"] == pytest.approx(row["resident_bytes"], rel=0.05)


# --- The plan --------------------------------------------------------------------------------------------------------


TINY = Estimator(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=500))


def planned(*argv, config=SMALL["llama"], **named):
    named = {"gpu_memory": 8, **named}
    return plan_memory(config, argv=argv, **named)


@settings(max_examples=5, deadline=None)
@given(micro=st.integers(1, 16), length=st.integers(8, 128), layers=st.integers(1, 2), more=st.integers(1, 8))
def test_memory_grows_with_the_batch_the_length_and_the_layers(micro, length, layers, more):
    run = run_of("standard")

    def total(micro, length, layers):
        config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=layers, vocab_size=500)
        return need(run, weigh(config, "causal_lm"), trace(config, Case(micro, length)), accumulation=2).gpu.total

    larger = [(micro + more, length, layers), (micro, length + more, layers), (micro, length, layers + 1)]
    assert total(micro, length, layers) <= min(total(*sizes) for sizes in larger)


@settings(max_examples=50, deadline=None)
@given(micro=st.integers(1, 64), accumulation=st.integers(1, 64), world=st.integers(1, 16), usable=st.integers(1, 40))
def test_the_global_batch_stays(micro, accumulation, world, usable):
    run = run_of(
        "standard", "--global_batch_size", str(micro * accumulation * world), "--max_length", "64", world=world
    )
    entry = largest_that_fits(run, TINY, Usable(usable << 28))
    assert entry.micro_batch * entry.accumulation * world == run.batch.total


@settings(max_examples=50, deadline=None)
@given(
    total=st.integers(10**6, 10**10),
    frozen=st.floats(0, 1),
    world=st.integers(2, 64),
    stage=st.integers(1, 3),
    optim=st.sampled_from(["adamw_torch", "adamw_bnb_8bit", "sgd"]),
)
def test_shards_never_sum_below_the_whole(total, frozen, world, stage, optim):
    weights = Weights(total, trained=max(1, round(total * (1 - frozen))))
    parts = []
    for processes in (1, world):
        engine = Engine("deepspeed", "", zero_stage=stage)
        flags = ["--optim", optim, "--global_batch_size", str(world)]
        run = resolve(flags, world_size=processes, engine=engine, hardware=V100, environment={}, demonstrate=False)
        parts.append(need(run, weights, Traced([(0, 0, 0)], 1), accumulation=1).gpu)
    for part in ("parameters", "gradients", "optimizer"):
        assert world * getattr(parts[1], part) >= getattr(parts[0], part)


@pytest.mark.parametrize("memory", [3, 80])
def test_what_is_recommended_fits_and_is_legal(memory, capsys):
    plan = planned(gpu_memory=memory, config=LlamaConfig(hidden_size=512, num_hidden_layers=2, intermediate_size=1024))
    best = next(entry for entry in plan.recipes if entry.name == plan.recommended)
    assert best.fits and best.margin_bytes > 0
    assert main(["check", "--recipe", best.name, "--per_device_train_batch_size", str(best.micro_batch)]) == 0


def test_eight_billion_in_sixteen_bits_on_48_gb_need_offload():
    """DDP with 8-bit Adam does not fit, nor safely with checkpointing; offload does."""
    config, card = read_config("8.36B"), round(47.4 * 2**30)
    adam = ("--dtype", "bfloat16", "--optim", "adamw_bnb_8bit", "--max_length", "2048")
    tries = {
        "adam": run_of("standard", *adam, world=2),
        "checkpointed": run_of("standard", *adam, "--gradient_checkpointing", "true", world=2),
        "offload": run_of("memory", "--max_length", "2048", world=2),
    }
    assert {name: plan_run(run, config, card).fits for name, run in tries.items()} == {
        "adam": False,
        "checkpointed": False,
        "offload": True,
    }


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


# --- Where nothing fits ----------------------------------------------------------------------------------------------

LARGE = LlamaConfig(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8)
SMALL_CARD = 2.5


@pytest.fixture(scope="module")
def too_large():
    """107M parameters on 2.5 GB, of which CUDA itself takes 1.4."""
    return planned("--max_length", "256", config=LARGE, gpu_memory=SMALL_CARD)


def test_where_nothing_fits_there_are_steps_in_the_order_to_try_them(too_large):
    assert too_large.recommended is None
    order = [
        "gradient_checkpointing",
        "adamw_bnb_8bit",
        "memory",
        "use_peft",
        "load_in_4bit",
        " on ",
    ]
    places = [next(i for i, step in enumerate(too_large.next_steps) if word in step.words) for word in order]
    assert places == sorted(places)


def test_each_step_says_what_it_saves_and_costs(too_large):
    before = next(entry for entry in too_large.recipes if entry.name == "standard")
    for step in too_large.next_steps:
        assert step.saves_bytes == before.total_bytes - step.total_bytes and step.slowdown


def test_a_step_that_fits_is_a_run_that_fits(too_large, capsys):
    step = next(step for step in too_large.next_steps if step.fits and "peft" in step.words)
    recipe, *flags = step.words.removeprefix("--recipe ").split()
    again = planned("--max_length", "256", *flags, config=LARGE, recipe=recipe, gpu_memory=SMALL_CARD)
    assert again.recommended == recipe
    assert main(["check", *step.words.split(), "--per_device_train_batch_size", "1", "--model_name_or_path", "m"]) == 0


def test_a_recipe_that_needs_more_ram_than_a_node_has_does_not_fit():
    run = run_of("memory", "--max_length", "64")
    enough, too_little = (largest_that_fits(run, TINY, Usable(8 << 30, host)) for host in (1 << 30, 1 << 10))
    assert enough.fits and too_little.fits_gpu and not too_little.fits


def test_a_recipe_that_is_not_legal_says_why_and_its_step_leaves_the_reason_out():
    plan = planned("--optim", "adamw_bnb_8bit", "--max_length", "256", config=LARGE, gpu_memory=SMALL_CARD)
    assert {entry.name for entry in plan.recipes} == {"fast", "standard"}
    assert "replaced by DeepSpeedCPUAdam" in plan.refused["memory"]
    assert any(step.words == "--recipe memory, without --optim" for step in plan.next_steps)


# --- Time ------------------------------------------------------------------------------------------------------------


def choices(recipe="standard", processes=2, **named):
    flags = ["--global_batch_size", "96", "--max_length", "64"]
    return planned(*flags, recipe=recipe, gpu="A100 80GB", gpu_memory=None, num_processes=processes, **named).choices


@pytest.mark.parametrize("recipe", ["standard", "memory", "memory_zero3"])
def test_every_choice_keeps_the_global_batch_and_its_compute(recipe):
    found = choices(recipe)
    assert {choice.micro_batch * choice.accumulation * 2 for choice in found} == {96}
    assert len({choice.time.compute for choice in found}) == 1


def test_accumulation_costs_ddp_nothing_and_zero_an_exchange_a_micro_batch():
    by_accumulation = {choice.accumulation: choice.time.sent_bytes for choice in choices("standard")}
    assert by_accumulation[4] == by_accumulation[12]
    sharded = {choice.accumulation: choice.time.sent_bytes for choice in choices("memory_zero3")}
    assert sharded[12] == 3 * sharded[4]


def test_an_all_reduce_sends_twice_the_share_of_the_others():
    parameters = weigh(SMALL["llama"], "causal_lm").total
    for processes in (2, 4):
        sent = choices(processes=processes)[0].time.sent_bytes
        assert sent == pytest.approx(2 * (processes - 1) / processes * 4 * parameters)


def test_a_step_takes_its_flops_at_the_stated_share_of_the_peak():
    text = SMALL["llama"]
    used = weigh(text, "causal_lm").total - 1000 * 128  # an input embedding that is not tied is a lookup
    flops = (6 * used + 6 * 4 * 128 * 64) * 48 * 64
    assert choices(mfu=0.5)[0].time.compute == pytest.approx(flops / (0.5 * 312e12))


def test_bytes_take_their_time_at_the_stated_bandwidth():
    slow, fast = (choices(bandwidth=speed)[0].time for speed in (1, 10))
    assert slow.communication == pytest.approx(slow.sent_bytes / 1e9)
    assert fast.communication == pytest.approx(slow.communication / 10)


def test_no_time_is_told_for_experts_or_an_unknown_card():
    assert planned(config=SMALL["qwen3_moe"], gpu="H100", gpu_memory=None).choices[0].time.compute is None
    assert planned().choices[0].time.compute is None


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


def test_the_plot_is_a_picture(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    one = ["--gpu", "H100", "--recipe", "standard"]
    assert main(["plan", "--model", str(folder), *one, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "--model", str(folder), *one, "--plot", str(tmp_path / "no" / "plan.png")]) == 2
    assert "choose a writable folder" in capsys.readouterr().err


def test_what_is_left_is_printed_where_nothing_fits(tmp_path, capsys):
    LARGE.save_pretrained(tmp_path)
    words = ["--model", str(tmp_path), "--gpu_memory", str(SMALL_CARD), "--recipe", "memory", "--max_length", "256"]
    assert main(["plan", *words]) == 0
    printed = capsys.readouterr().out
    assert "nothing fits" in printed and "--use_peft true --load_in_4bit true" in printed


@pytest.mark.parametrize(
    "sizes",
    [{"gpu_memory": -5}, {"gpu_memory": 8, "num_processes": 0}, {"gpu_memory": 8, "mfu": float("nan")}, {}],
    ids=str,
)
def test_sizes_that_are_none_are_refused_in_python_too(sizes):
    with pytest.raises(UserError):
        plan_memory(SMALL["llama"], **sizes)


@pytest.mark.parametrize(
    "content", ['{"model_type": "t5"}', '{"model_type": "llama", "hidden_size": "256"}', "{}", "["]
)
def test_what_is_no_model_of_the_task_is_one_line(content, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    assert main(["plan", "--model", str(tmp_path), "--gpu", "L4", "--recipe", "standard"]) == 2
    assert capsys.readouterr().err.startswith("error  model")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--model 7B", "--gpu_memory GB"),
        ("--model 7B --gpu H100 --gpu_memory 80", "--gpu_memory GB"),
        ("--model 0B --gpu H100", "such as 7B"),
        ("--model 7X --gpu H100", "such as 7B"),
        ("--model 7B --gpu H100 --plot x", ".png"),
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
