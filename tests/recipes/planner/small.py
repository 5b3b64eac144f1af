"""Small models, and short ways to ask the planner about them."""

from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

from recipes import plan_memory
from recipes.planner.trace import LiveBytes
from recipes.run import here, resolve
from recipes.run.hardware import Gpu, Hardware

V100 = Hardware((Gpu("V100", (7, 0), 16 << 30),), cores=8)
CPU = Hardware(cores=2)
_WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
SHAPE = {**_WIDTHS, "num_hidden_layers": 4, "vocab_size": 1000}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 2}
SMALL = {
    "gpt2": GPT2Config(n_embd=128, n_layer=4, n_head=4, vocab_size=1000),
    "llama": LlamaConfig(**SHAPE),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS),
}

# 107M parameters.
LARGE = LlamaConfig(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8)


def peak(traced) -> int:
    """The most bytes alive at once, of a trace or of real tensors."""
    return int(traced.moments.sum(axis=1).max())


def run_of(recipe="standard", *argv, world=1, hardware=V100, engine=None, local=None):
    place = here(world, engine, local, hardware=hardware, environment={}, trained_by="nobody")
    return resolve(["--recipe", recipe, *argv], place)


def planned(*argv, config=SMALL["llama"], gpu_memory=8, gpu=None, **named):
    return plan_memory(config, argv=argv, gpu=gpu, gpu_memory=None if gpu else gpu_memory, **named)


def alone(*argv, **named):
    """The plan of `standard` alone."""
    return planned(*argv, recipe="standard", **named).recipes[0]


def real_peak(model, work, *known) -> int:
    """Peak bytes of what `work` allocates beside this model and these tensors."""
    live = LiveBytes()
    live.ignore([*model.parameters(), *model.buffers(), *known])
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.register_post_accumulate_grad_hook(live.gradient)
    with live:
        work()
    return peak(live)
