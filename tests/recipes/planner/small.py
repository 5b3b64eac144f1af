"""Small models, and short ways to ask the planner about them."""

import shlex

from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

from recipes import plan_memory
from recipes.catalog import RECIPES
from recipes.planner.fits import Estimator
from recipes.planner.plan import plan_run
from recipes.planner.shapes import CLOSED_FORM
from recipes.rules.check import check
from recipes.run import here, resolve
from recipes.run.files import shipped
from recipes.run.hardware import Gpu, Hardware


def peak(traced) -> int:
    """The most bytes alive at once, of a trace or of real tensors."""
    return max(map(sum, traced.moments))


V100 = Hardware((Gpu("V100", (7, 0), 16 << 30),), cores=8)
_WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
SHAPE = {**_WIDTHS, "num_hidden_layers": 4, "vocab_size": 1000}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 2}
SMALL = {
    "gpt2": GPT2Config(n_embd=128, n_layer=4, n_head=4, vocab_size=1000),
    "llama": LlamaConfig(**SHAPE),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS),
}
TINY = Estimator(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=500))

# 107M parameters on a card of 1.55 GB, of which CUDA itself takes 0.45: no recipe fits.
LARGE = LlamaConfig(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8)
SMALL_CARD = 1.55


def run_of(recipe="standard", *argv, world=1, hardware=V100):
    return resolve(["--recipe", recipe, *argv], here(world, hardware=hardware, environment={}, trained_by="nobody"))


def planned(*argv, config=SMALL["llama"], gpu_memory=8, **named):
    return plan_memory(config, argv=argv, gpu_memory=gpu_memory, **named)


def need_of(config, flags: str, engine: str | None = None, world: int = 1):
    """What `standard` with these flags needs at micro-batch 4, from a trace."""
    run = resolve(
        ["--recipe", "standard", "--max_length", "64", *flags.split()],
        here(world, hardware=V100, accelerate_config=engine, environment={}, trained_by="nobody", packages=frozenset()),
    )
    memory = Estimator(config).memory(run, 4)
    assert CLOSED_FORM not in memory.micro_batch.kernels
    return memory


def as_printed(command, card=SMALL_CARD, config=LARGE, world=1):
    """The run of a printed command, which is legal, and its plan at its own micro-batch."""
    words = shlex.split(command)
    engine = str(shipped(RECIPES[words[words.index("--recipe") + 1]]().engine))
    assert words[:2] == ["recipes", "train"] and words[words.index("--num_processes") + 1] == str(world)
    engine = words[3] if words[2] == "--accelerate_config" else engine
    liger = "--use_liger_kernel true" in command  # which a step may ask to install
    words = words[words.index("--recipe") :]
    run = resolve(
        words,
        here(
            world,
            hardware=Hardware((Gpu("a GPU", (8, 0), round(card * 1e9)),) * world, cores=8 * world, liger=liger),
            accelerate_config=engine,
            environment={},
            trained_by="nobody",
            packages=frozenset(),
        ),
    )
    assert not [problem for problem in check(run) if problem.severity == "error"], command
    return run, plan_run(run, config, round(card * 1e9), as_it_is=True)
