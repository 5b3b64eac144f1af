"""LoRA adapters and weights in 4 bits."""

from __future__ import annotations

from recipes.rules.facts import advice, mixed_precision, of_train_py, problem, rule, zero_stage


@rule
@of_train_py
def four_bits_need_adapters(run):
    """`You cannot perform fine-tuning on purely quantized models`, when the Trainer is built."""
    if run["load_in_4bit"] and not run["use_peft"]:
        yield problem(run, "load_in_4bit", "weights in 4 bits cannot be trained", "--use_peft")


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


def what_peft_accepts(message: str) -> str:
    """What to write after peft has refused a model with this message."""
    fix = "--lora_target_modules with other modules of the model"
    return f"--lora_dropout 0, or {fix}" if "dropout" in message else fix


_ONLY_WITH = {
    "use_peft": ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
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
