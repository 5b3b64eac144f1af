"""LoRA and DoRA adapters, and weights in 4 bits."""

from __future__ import annotations

from recipes.legal.models import refuses_dora, targets_in_experts
from recipes.rules.facts import advice, known_config, mixed_precision, of_train_py, problem, rule, zero_stage
from recipes.rules.models import stored_as


@rule
@of_train_py
def four_bits_need_adapters(run):
    """`You cannot perform fine-tuning on purely quantized models`, when the Trainer is built."""
    if run["load_in_4bit"] and not run["use_peft"]:
        yield problem(run, "load_in_4bit", "weights in 4 bits cannot be trained", "--use_peft")


@rule
@of_train_py
def adapters_need_trained_weights(run):
    """A model from scratch has nothing to quantise or to freeze."""
    named = run["model_name_or_path"] is not None
    if (named and not run["from_scratch"]) or not (named or run.demonstrate):
        return
    fix = "leave --from_scratch out" if named else "name a model_name_or_path"
    if run["load_in_4bit"]:
        yield problem(run, "load_in_4bit", "quantises trained weights, and there are none", fix)
    elif run["use_peft"]:
        yield problem(run, "use_peft", "would freeze weights that were never trained", fix)


@rule
@of_train_py
def qlora_loads_whole_weights(run):
    """ZeRO-3 shards 4-bit weights after loading: until then every process holds the whole model."""
    if run["load_in_4bit"] and zero_stage(run) == 3:
        what = "ZeRO-3 shards the weights only after every process has loaded all of them"
        yield advice(run, "load_in_4bit", what, "--recipe memory (ZeRO-2) if one process cannot hold them")


@rule
def classifier_adapters_have_one_type(run):
    """`AssertionError` in DeepSpeed's defragment: the new head is in 16 bits, LoRA in fp32.

    ZeRO-3 joins all trained weights in one buffer. In fp32, and under ZeRO-2, it trains.
    """
    classifies = run["use_peft"] and run["task"] == "sequence_classification"
    precision = mixed_precision(run)
    if classifies and zero_stage(run) == 3 and precision in ("bf16", "fp16"):
        what = f"ZeRO-3 does not train adapters and a classification head in {precision}"
        yield problem(run, "use_peft", what, f"--recipe memory (ZeRO-2), or --{precision} false")


@rule
@of_train_py
def experts_take_plain_adapters(run):
    """`lora.ParamWrapper does not work with lora_dropout != 0.`, or `with use_dora=True.`"""
    if not run["use_peft"] or not (run["lora_dropout"] or run["use_dora"]) or not _has_experts(known_config(run)):
        return
    wanted = run["lora_target_modules"]
    model_type = str(known_config(run).get("model_type"))
    in_experts = targets_in_experts(model_type)
    every = not wanted or wanted == ["all-linear"]
    chosen = in_experts if every else {name for name in wanted if name.rpartition(".")[2] in in_experts}
    if not chosen:
        return
    fix = f"or --lora_target_modules without {', '.join(sorted(chosen))}"
    fix = f"{fix}: attention alone" if every else fix
    for name, has in (("lora_dropout", "no dropout"), ("use_dora", "no DoRA")):
        if run[name]:
            value = "--lora_dropout 0" if name == "lora_dropout" else "leave it out"
            yield problem(run, name, f"peft has {has} for experts, as those of {model_type}", f"{value}, {fix}")


def _has_experts(config):
    """Whether some layer certainly has experts: only what is written counts."""
    count = next((config[name] for name in _EXPERTS if isinstance(config.get(name), int)), 0)
    dense, layers = config.get("first_k_dense_replace") or 0, config.get("num_hidden_layers")
    every = not config.get("mlp_only_layers") and config.get("decoder_sparse_step") in (None, 1)
    return count > 0 and every and (not dense or (isinstance(layers, int) and dense < layers))


_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def what_peft_accepts(message: str, dora: bool = False) -> str:
    """What to write after peft has refused a model with this message, with DoRA or without."""
    fix = "--lora_target_modules with other modules of the model"
    experts = "ParamWrapper" in message  # which have neither dropout nor DoRA
    if dora and experts:
        return f"{fix}, or --lora_dropout 0 without --use_dora"
    return f"--lora_dropout 0, or {fix}" if "dropout" in message else fix


# --- DoRA -----------------------------------------------------------------------------------------


@rule
@of_train_py
def dora_keeps_its_weights(run):
    """`'Params4bit' object has no attribute 'ds_status'`, in a forward on a CPU: there peft's
    `dequantize_module_weight` puts a copy in the weight's place, which ZeRO-3 does not know. On a
    GPU it does not (read in its source; none was tried).
    """
    in_4_bits = run["load_in_4bit"] or stored_as(run).startswith("bitsandbytes")
    if run["use_peft"] and run["use_dora"] and in_4_bits and zero_stage(run) == 3 and not run.hardware.cuda:
        what = "cannot train on weights in 4 bits under ZeRO-3 on a CPU"
        yield problem(run, "use_dora", what, "--recipe memory (ZeRO-2), or leave it out")


@rule
@of_train_py
def dora_unpacks_its_weights(run):
    """`AwqLoraLinear does not support DoRA yet, please set it to False`."""
    stored = stored_as(run) if run["use_peft"] and run["use_dora"] else ""
    if stored and refuses_dora(stored):
        what = f"peft has no DoRA for weights quantised with {stored}, as those of {run['model_name_or_path']}"
        yield problem(run, "use_dora", what, "leave it out, or the model that is not quantised")


@rule
@of_train_py
def dora_with_dropout_computes_twice(run):
    """peft's DoRA multiplies a second time by the frozen weights if dropout changed the input.

    Source: `DoraLinearVariant.forward`. Autograd then keeps weights in 4 bits unpacked. Without
    dropout it keeps their outputs in another dtype instead: with large batches the planner finds
    that to be more.
    """
    if not (run["use_peft"] and run["use_dora"] and run["lora_dropout"]):
        return
    kept, less = "", ", and takes less memory"
    if run["load_in_4bit"]:
        kept, less = ", and keeps them all unpacked", ", and takes less memory unless the micro-batch is large"
    what = f"makes DoRA multiply by the frozen weights twice{kept}"
    yield advice(run, "lora_dropout", what, f"--lora_dropout 0 is faster{less}")


# --- Settings without effect ----------------------------------------------------------------------


_ONLY_WITH = {
    "use_peft": ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora"),
    "load_in_4bit": ("bnb_4bit_quant_type", "use_bnb_nested_quant"),
}


@rule
@of_train_py
def adapter_settings_need_adapters(run):
    """Without `use_peft` the whole model trains, whatever lora_r says."""
    for switch, names in _ONLY_WITH.items():
        for name in names:
            if run.explicit(name) and not run[switch]:
                yield advice(run, name, f"is ignored without {switch}", f"--{switch}, or leave it out")
