"""What the RAM of a node holds: the model while it is loaded, what is offloaded, and saves."""

import pytest

from recipes.planner.footprint import Memory
from recipes.planner.shapes import Weights
from recipes.planner.tracing.trace import weigh
from recipes.run import here, resolve
from recipes.run.files import shipped
from tests.recipes.planner.small import SMALL, V100

BILLION = 10**9
WHOLE = Weights(BILLION, trained=BILLION, file_width=2)
ADAPTERS = Weights(BILLION, trained=BILLION // 100, file_width=2)
LORA = ("--use_peft", "true")


def host_of(recipe, *flags, weights=WHOLE, world=8, local=8, engine=None):
    run = resolve(
        ["--recipe", recipe, "--bf16", "true", *flags],
        here(
            world,
            local_world_size=local,
            hardware=V100,
            accelerate_config=engine or str(shipped(f"{recipe}.yaml")),
            environment={},
            trained_by="nobody",
        ),
    )
    return Memory(run, weights).host_bytes / BILLION


@pytest.fixture
def engine(tmp_path):
    """A file like a shipped YAML, with one thing changed."""

    def written(name, before, after):
        text = shipped(name).read_text()
        assert before in text
        file = tmp_path / name
        file.write_text(text.replace(before, after))
        return str(file)

    return written


def test_with_ddp_each_process_loads_the_whole_model():
    assert host_of("standard") == 8 * 4
    assert host_of("standard", "--dtype", "bfloat16") == 8 * 2


def test_with_zero_3_rank_0_alone_reads_the_files_in_their_own_dtype(engine):
    on_gpus = engine("memory_zero3.yaml", "_device: cpu", "_device: none")
    assert host_of("memory_zero3", engine=on_gpus, weights=WHOLE) == 2
    assert host_of("memory_zero3", engine=on_gpus, weights=Weights(BILLION, BILLION)) == 4


def test_with_zero_3_a_node_keeps_its_share_and_gathers_the_whole_model_for_a_save():
    assert host_of("memory_zero3") == 18 + 2 + 2
    assert host_of("memory_zero3", world=16) == (18 + 2) / 2 + 2
    assert host_of("memory_zero3", *LORA, weights=ADAPTERS) == 18 / 100 + 2 + 2 / 100


def test_with_zero_2_each_process_copies_the_whole_model_for_a_save(engine):
    assert host_of("memory") == max(8 * 4, 18 + 8 * 2)
    assert host_of("memory", world=16) == max(8 * 4, 18 / 2 + 8 * 2)
    assert host_of("memory", engine=engine("memory.yaml", "_device: cpu", "_device: none")) == 8 * 4


def test_with_fsdp_one_process_reads_but_each_makes_trained_weights_fp32():
    """Memory that nobody has touched takes no RAM, until `.to(torch.float32)` copies it."""
    assert host_of("sharded") == 4
    assert host_of("sharded", "--dtype", "bfloat16") == 8 * 4
    assert host_of("sharded", "--dtype", "bfloat16", *LORA, weights=ADAPTERS) == 2 * 0.99 + 8 * 4 * 0.01


def test_with_fsdps_offload_the_gathered_model_of_a_save_comes_when_gradients_are_gone(engine):
    offloaded = engine("sharded.yaml", "offload_params: false", "offload_params: true")
    assert host_of("sharded", engine=offloaded) == 4 + 8 + 4
    assert host_of("sharded", engine=offloaded, world=16) == (4 + 8) / 2 + 4


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4), (None, 4)])
def test_the_width_of_a_models_files_is_in_its_configuration(dtype, width):
    config = type(SMALL["llama"])(**{**SMALL["llama"].to_dict(), "dtype": dtype})
    assert weigh(config, "causal_lm").file_width == width
