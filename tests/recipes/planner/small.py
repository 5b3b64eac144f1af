"""Small models, and short ways to ask the planner about them."""

from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

from recipes import plan_memory
from recipes.planner.estimate import Estimator
from recipes.run import resolve
from tests.benchmarks.published import V100

_WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
SHAPE = {**_WIDTHS, "num_hidden_layers": 4, "vocab_size": 1000}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 2}
SMALL = {
    "gpt2": GPT2Config(n_embd=128, n_layer=4, n_head=4, vocab_size=1000),
    "llama": LlamaConfig(**SHAPE),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS),
}
TINY = Estimator(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=500))

# 107M parameters on a card of 2.5 GB, of which CUDA itself takes 1.4: no recipe fits.
LARGE = LlamaConfig(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8)
SMALL_CARD = 2.5


def run_of(recipe="standard", *argv, world=1, hardware=V100):
    return resolve(["--recipe", recipe, *argv], world_size=world, hardware=hardware, environment={}, demonstrate=False)


def planned(*argv, config=SMALL["llama"], gpu_memory=8, **named):
    return plan_memory(config, argv=argv, gpu_memory=gpu_memory, **named)


def need_of(config, flags: str, engine: str | None = None, world: int = 1):
    """What `standard` with these flags needs at micro-batch 4, from a trace."""
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
