"""Traces against published readings, whole steps, real micro-batches and each other."""

import contextlib
import copy

import peft
import pytest
import torch
import transformers
from accelerate.utils import compile_regions
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, TrainingArguments

from launch.training.trainer import RecipeTrainer
from recipes.planner.fits import Estimator
from recipes.planner.memory import FREED, SIZE, Adapters, Case
from recipes.planner.trace import at_batch, short_lengths, trace, trace_any, trace_shallow, weigh
from recipes.quiet import silence
from recipes.rules.probe import arguments_for
from tests.benchmarks.published import MIB, OF_TRAINER, planned
from tests.recipes.planner.small import CPU, SHAPE, SMALL, alone, peak, real_peak, run_of

slow = pytest.mark.slow
BERT_LARGE = [one for one in OF_TRAINER if one.of_process and "adamw_torch_fused" in one.flags]


@pytest.mark.parametrize("reading", BERT_LARGE, ids=lambda reading: reading.name)
def test_planned_memory_of_bert_large_is_within_two_percent_of_published_measurements(reading):
    assert planned(reading).total / MIB == pytest.approx(reading.mib, rel=0.02)


@slow
@pytest.mark.parametrize("adapters", [None, Adapters(8)], ids=["whole", "adapters"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_planned_activations_of_compiled_layers_are_those_that_torch_compile_saves(name, adapters):
    config = copy.deepcopy(SMALL[name])
    config.use_cache = False
    traced = trace(config, Case(2, 64, on_cuda=False, mask=False, compiled=True, adapters=adapters))
    forward = traced.allocations[: traced.made_forward]
    planned = forward[forward[:, FREED] > traced.made_forward, SIZE].sum()
    model = AutoModelForCausalLM.from_config(config)
    if adapters:  # a plan counts the first layer as one of the others, whose inputs need gradients
        model.enable_input_require_grads()
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    compiled = compile_regions(model, backend="aot_eager_decomp_partition")
    own = {one.untyped_storage().data_ptr() for one in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.zeros(2, 64, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(input_ids=ids, labels=ids.clone())
    assert planned == pytest.approx(sum(kept.values()), rel=0.02)


# --- Small traces for large ones ------------------------------------------------------------------


def deeper(config, layers: int, **more):
    own = {name: value for name, value in config.to_dict().items() if name not in ("layer_types", "n_layer")}
    return type(config)(**{**own, "num_hidden_layers": layers, **more})


_HEADS = {"num_key_value_heads": 2, "head_dim": 32}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
_LATENT |= {"moe_intermediate_size": 32, "topk_group": 1, "num_key_value_heads": 4}
DEEP = {
    **{name: deeper(config, 7) for name, config in SMALL.items()},
    "two kinds in turn": transformers.Gemma2Config(**{**SHAPE, **_HEADS, "num_hidden_layers": 9}),
    "six kinds in turn": transformers.Gemma3TextConfig(**{**SHAPE, **_HEADS, "num_hidden_layers": 27}),
    "three other layers first": transformers.DeepseekV3Config(**{**SHAPE, **_LATENT, "num_hidden_layers": 9}),
}
CASES = {
    "fp32": {},
    "autocast": {"autocast": "bfloat16"},
    "checkpointing": {"checkpointing": True},
    "16 bits": {"dtype": "bfloat16"},
    "16 bits, checkpointing": {"dtype": "bfloat16", "checkpointing": True},
    "evaluation": {"evaluation": True, "autocast": "bfloat16"},
    "liger": {"liger": True},
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "checkpointing" else slow) for c in CASES])
@pytest.mark.parametrize("name", DEEP)
def test_a_trace_of_few_layers_and_examples_extrapolates_to_more_layers_and_examples(name, case):
    shallow = trace_shallow(DEEP[name], weigh(DEEP[name], "causal_lm"), Case(1, 64, copies=11, **CASES[case]))
    whole = trace(DEEP[name], Case(8, 64, **CASES[case]))
    found = at_batch(shallow, 11, 8)
    assert found.made_forward == whole.made_forward
    later = 3 * (name == "six kinds in turn")  # tables of the rarer attention are freed some layers later
    assert (found.allocations != whole.allocations).any(1).sum() <= later
    assert (found.moments >= whole.moments).all()


# --- Many families, beside a real micro-batch on this CPU -----------------------------------------

_SHAPE = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_SHAPE |= {"num_attention_heads": 4, "pad_token_id": 0}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
SIZED = {**_GROUPED, "head_dim": 16}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_VALUES = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LINEAR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR |= {"shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}

FAMILIES = {
    "bert": transformers.BertConfig(**_SHAPE, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
    "llama": LlamaConfig(**_GROUPED),
    "deepseek_v3": transformers.DeepseekV3Config(
        **{**_SHAPE, **_LATENT, **_VALUES},
        v_head_dim=24,  # as large as the queries' heads: for others a CPU has no fused kernel
    ),
    "gemma3": transformers.Gemma3Config(
        text_config=SIZED, vision_config={**_VISION, "image_size": 28, "patch_size": 14}
    ),
    "qwen3_next": transformers.Qwen3NextConfig(**SIZED, **_LINEAR),
    "mamba": transformers.MambaConfig(vocab_size=500, hidden_size=64, num_hidden_layers=2),
    "jamba": transformers.JambaConfig(**_GROUPED, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
}


def of_real_model(config, case: Case) -> int:
    """Peak bytes of a real forward and backward, of which nothing is replaced."""
    classifies = case.task == "sequence_classification"
    auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    asked = {"attn_implementation": case.attention} if case.attention else {}
    model = auto.from_config(copy.deepcopy(config), dtype=getattr(torch, case.dtype), **asked).train()
    model.config.use_cache = model.config.get_text_config().use_cache = False
    ids = torch.ones(case.batch, case.length, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": torch.zeros(case.batch, dtype=torch.long) if classifies else ids.clone()}
    inputs["attention_mask"] = torch.ones_like(ids)
    inputs["attention_mask"][:, -8:] = 0

    def micro_batch():
        with torch.autocast("cpu", torch.bfloat16) if case.autocast else contextlib.nullcontext():
            loss = model(**inputs).loss
        loss.backward()

    return real_peak(model, micro_batch)


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_traced_peak_memory_is_close_to_that_of_a_real_micro_batch(name, autocast):
    task = "sequence_classification" if name == "bert" else "causal_lm"
    case = Case(2, 64, task, autocast=autocast)
    planned, real = peak(trace(FAMILIES[name], case)), of_real_model(FAMILIES[name], case)
    assert 0.98 * real < planned < 1.2 * real  # autocast on a GPU keeps more in fp32 than on a CPU


def test_a_vision_tower_is_not_counted_as_trained():
    weights = weigh(FAMILIES["gemma3"], "causal_lm")
    text = AutoModelForCausalLM.from_config(FAMILIES["gemma3"]).get_decoder()
    assert weights.trained == sum(parameter.numel() for parameter in text.parameters()) < weights.total


LOOPS = {"mamba": 60, "jamba": 60, "qwen3_next": 384}


@pytest.mark.parametrize("name", FAMILIES)
def test_only_models_that_loop_over_a_sequence_are_traced_with_shorter_sequences(name):
    assert bool(short_lengths(FAMILIES[name], Case(2, 1024))) == (name in LOOPS)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(
    "case", [{"evaluation": True}, *(pytest.param({"checkpointing": on}, marks=slow) for on in (False, True))], ids=str
)
def test_traces_of_short_sequences_give_the_peak_of_a_long_one_in_models_that_loop_over_it(name, case):
    wide = deeper(FAMILIES[name], 2, hidden_size=512, intermediate_size=1024)
    found = trace_any(wide, weigh(wide, "causal_lm"), Case(1, LOOPS[name], copies=11, **case), 2, {})
    assert peak(found) == pytest.approx(peak(trace(wide, Case(2, LOOPS[name], **case))), rel=0.005)


def test_a_plan_for_mamba_notes_that_a_package_of_kernels_lowers_the_peak_memory():
    entry = alone("--max_length", "4096", config=FAMILIES["mamba"], gpu_memory=80)
    assert "the model's optional kernels would lower the peak" in " ".join(entry.notes)


# --- Beside Trainer's own steps and evaluations ---------------------------------------------------

KINDS = {"fp32": (), "autocast": ("--bf16", "true"), "bf16": ("--dtype", "bfloat16")}
WORDY = LlamaConfig(**{**_GROUPED, "vocab_size": 16_000})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5])
def test_planned_peak_memory_of_training_and_evaluation_is_that_of_trainer(rows, kind, tmp_path):
    flags = ("--max_length", "64", "--use_cpu", "true", "--fp16", "false", "--eval_strategy", "steps")
    flags += ("--per_device_eval_batch_size", str(rows))
    run = run_of("standard", *flags, *KINDS[kind], hardware=CPU)
    memory = Estimator(WORDY).memory(run, rows)
    model = AutoModelForCausalLM.from_config(WORDY, dtype=getattr(torch, run["dtype"]))
    row = torch.randint(0, WORDY.vocab_size, (64,))
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}] * rows
    own = {"output_dir": str(tmp_path), "max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
    args = arguments_for(run, TrainingArguments, {**own, "disable_tqdm": True, "report_to": "none"})
    trainer = RecipeTrainer(model=model, args=args, train_dataset=data, eval_dataset=data, run=run)
    with silence():
        trainer.train()  # the optimizer has its state
    batch = {name: torch.stack([one[name] for one in data]) for name in data[0]}
    assert all(parameter.grad is None for parameter in model.parameters())
    step = real_peak(model, lambda: trainer.training_step(trainer.model_wrapped, batch), *batch.values())
    assert peak(memory.micro_batch) == pytest.approx(step, rel=0.02)
    model.zero_grad(set_to_none=True)
    assert peak(memory.evaluation) == pytest.approx(real_peak(model, trainer.evaluate), rel=0.02)
