"""FSDP2: what is sharded, what is gathered at which moment, and the live bytes of real ranks."""

import json
import subprocess
import sys

import numpy as np
import pytest
from transformers import LlamaConfig

from recipes.planner.fits import Estimator
from recipes.planner.footprint import Memory
from recipes.planner.shapes import Traced, Weights
from recipes.planner.tracing.trace import weigh
from recipes.run import here, resolve
from recipes.run.files import shipped
from tests.benchmarks.sharded import CASES
from tests.recipes.planner.small import SHAPE, V100
from tests.support.running import ROOT

DEEP = LlamaConfig(**{**SHAPE, "num_hidden_layers": 12})


def run_of(*flags, recipe="sharded", world=8, engine="sharded.yaml"):
    config = str(engine) if "/" in str(engine) else str(shipped(engine))
    argv = ["--recipe", recipe, "--bf16", "true", "--max_length", "64", *flags]
    return resolve(argv, here(world, hardware=V100, accelerate_config=config, environment={}, trained_by="nobody"))


def need_of(*flags, micro=2, **named):
    return Estimator(DEEP).memory(run_of(*flags, **named), micro).gpu


def test_every_state_is_shared_by_all():
    alone, shared = (need_of(world=world) for world in (1, 8))
    weights = weigh(DEEP, "causal_lm")
    assert shared.optimizer == pytest.approx(8 * weights.trained / 8, rel=0.01)
    assert shared.optimizer == pytest.approx(alone.optimizer / 8, rel=0.01)
    assert shared.parameters - 4 * weights.total / 8 <= 2 * (2 * weights.largest_layer + weights.outside_layers)


@pytest.mark.parametrize("recipe", ["fast", "sharded"])
def test_nothing_of_ddps_buckets_exists(recipe):
    flags = ("--gradient_accumulation_steps", "1", "--packing", "false")
    assert need_of(*flags, recipe=recipe) == need_of(*flags, recipe="sharded")


def test_without_sync_each_batch_a_step_of_several_micro_batches_holds_all_gradients():
    weights = Weights(10**9, 10**9, largest_layer=10**7)
    each, once = run_of(), run_of("--accelerator_config", '{"split_batches": false}')
    traced = Traced(np.array([(0, 0, 0), (1, 0, 4)]), 1)
    found = [Memory(run, weights, traced, accumulation=4).gpu for run in (each, once)]
    assert found[0].gradients == 4 * 10**9 / 8
    assert found[1].gradients == pytest.approx(2 * 10**9, rel=0.01)


def test_frozen_weights_stay_as_they_were_loaded_and_trained_ones_are_fp32():
    lora = ("--use_peft", "true", "--lora_r", "8")
    half, full = (need_of(*lora, "--dtype", dtype) for dtype in ("bfloat16", "float32"))
    frozen = weigh(DEEP, "causal_lm").total
    assert full.parameters - half.parameters == pytest.approx(2 * frozen / 8, rel=0.01)
    assert half.optimizer == full.optimizer


def test_weights_in_4_bits_are_shared_but_not_their_scales():
    lora = ("--use_peft", "true", "--lora_r", "8", "--load_in_4bit", "true")
    two, four = (need_of(*lora, world=world, micro=16).parameters for world in (2, 4))
    packed = 12 * (4 * 128 * 128 + 3 * 128 * 256)
    assert two - four > packed * 0.5 / 4
    assert four > packed / 16


def test_offload_leaves_only_what_is_gathered(tmp_path):
    file = tmp_path / "offload.yaml"
    file.write_text(shipped("sharded.yaml").read_text().replace("offload_params: false", "offload_params: true"))
    found = need_of(engine=file)
    weights = weigh(DEEP, "causal_lm")
    assert (found.optimizer, found.gradients) == (0, pytest.approx(0, abs=2 * weights.largest_layer))
    host = Estimator(DEEP).memory(run_of(engine=file), 2).host_bytes
    assert host == 16 * weights.total  # parameters, gradients and two moments of all eight GPUs


def test_fsdps_own_checkpointing_is_as_good_as_trainers(tmp_path):
    file = tmp_path / "checkpointed.yaml"
    file.write_text(
        shipped("sharded.yaml").read_text().replace("_version: 2", "_version: 2\n  fsdp_activation_checkpointing: true")
    )
    assert need_of(engine=file) == need_of("--gradient_checkpointing", "true")


@pytest.mark.slow
def test_real_ranks_hold_as_much_as_planned():
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.sharded", "--json"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(CASES)
    for case, row in found.items():
        assert row["predicted_bytes"] == pytest.approx(row["live_bytes"], rel=0.07), case
