"""Small models, and short ways to ask the planner about them."""

import shlex

from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

from recipes import plan_memory
from recipes.catalog import RECIPES
from recipes.planner.fits import Planner, estimator_of
from recipes.planner.trace import LiveBytes
from recipes.rules.check import check
from recipes.run import here, resolve
from recipes.run.files import shipped
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

# 107M parameters on a card of 1.55 GB, of which CUDA itself takes 0.45: no recipe fits.
LARGE = LlamaConfig(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8)
SMALL_CARD = 1.55


def peak(traced) -> int:
    """The most bytes alive at once, of a trace or of real tensors."""
    return int(traced.moments.sum(axis=1).max())


def run_of(recipe="standard", *argv, world=1, hardware=V100, engine=None, local=None):
    """`engine`: a YAML of ours by its name, or a file."""
    yaml = str(engine if "/" in str(engine) else shipped(f"{engine}.yaml")) if engine else None
    place = here(world, yaml, local, hardware=hardware, environment={}, trained_by="nobody")
    return resolve(["--recipe", recipe, *argv], place)


def planned(*argv, config=SMALL["llama"], gpu_memory=8, gpu=None, **named):
    return plan_memory(config, argv=argv, gpu=gpu, gpu_memory=None if gpu else gpu_memory, **named)


def alone(*argv, **named):
    """The plan of `standard` alone."""
    return planned(*argv, recipe="standard", **named).recipes[0]


def as_printed(command, card=SMALL_CARD, config=LARGE, world=1):
    """The run of a printed command, which is legal, and its plan at its own micro-batch."""
    words = shlex.split(command.removeprefix("pip install liger-kernel && "))
    assert words[:2] == ["recipes", "train"] and words[words.index("--num_processes") + 1] == str(world)
    engine = str(shipped(RECIPES[words[words.index("--recipe") + 1]]().engine))
    engine = words[3] if words[2] == "--accelerate_config" else engine
    liger = "--use_liger_kernel true" in command  # which a step may ask to install
    gpus = (Gpu("a GPU", (8, 0), round(card * 1e9)),) * world
    hardware = Hardware(gpus, cores=8 * world, liger=liger)
    place = here(world, engine, hardware=hardware, environment={}, trained_by="nobody", packages=frozenset())
    run = resolve(words[words.index("--recipe") :], place)
    assert not [problem for problem in check(run) if problem.severity == "error"], command
    return run, Planner(estimator_of(config), round(card * 1e9)).at(run, run.batch.micro)


def real_peak(model, work, *known) -> int:
    """Peak bytes of what `work` allocates beside this model and these tensors."""
    live = LiveBytes()
    live.ignore([*model.parameters(), *model.buffers(), *known])
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.register_post_accumulate_grad_hook(live.gradient)
    with live:
        work()
    return peak(live)
