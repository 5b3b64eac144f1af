"""What engines that divide a model or its sequences train wrongly, beside plain DDP at the same
batch. What they train rightly is in tests/launch/training/test_train_engines.py.
"""

import pytest
import transformers
from accelerate import ParallelismConfig
from packaging.version import parse

from tests.support.parallel import ranks, zero
from tests.support.real_failures import assert_fires

pytestmark = pytest.mark.slow

ZERO_2 = zero(2)
ADAM_IN_BF16 = {"optim": "adamw_torch", "learning_rate": 0.1, "bf16": True}
TENSOR = {**ZERO_2, "tensor_parallel": {"autotp_size": 2}}
SDPA = {"PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa"}


def of(micro, **settings):
    """Settings with a global batch of 8 in two micro-batches."""
    return {"per_device_train_batch_size": micro, "gradient_accumulation_steps": 2, **settings}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """Plain DDP on two ranks."""
    return ranks(tmp_path_factory.mktemp("ddp"), 2, settings=of(2))[0]


def test_deepspeed_sequence_parallelism_is_refused_since_it_doubles_gradients_and_changes_losses(ddp, tmp_path):
    reports = ranks(tmp_path, 2, settings=of(4, deepspeed=ZERO_2), sizes={"sp_size": 2}, variables=SDPA)
    assert reports[0]["grad_norm"][0] / ddp["grad_norm"][0] == pytest.approx(2, rel=0.05)
    assert abs(reports[0]["loss"][0] - ddp["loss"][0]) > 1e-4
    config = {"parallelism_config": ParallelismConfig(sp_size=2), "deepspeed": ZERO_2}
    assert_fires("sequences_and_models_are_not_divided", config, world=2)


@pytest.mark.skipif(parse(transformers.__version__) < parse("5.23"), reason="other versions err in other ways")
def test_tensor_parallelism_without_average_tokens_across_devices_doubles_losses(ddp, tmp_path):
    reports = ranks(tmp_path, 2, settings=of(4, deepspeed=TENSOR, average_tokens_across_devices=False))
    assert reports[0]["loss"][0] == pytest.approx(2 * ddp["loss"][0], rel=1e-5)


def test_dispatch_batches_under_tensor_parallelism_halves_the_steps_of_an_epoch(tmp_path):
    settings = {"deepspeed": TENSOR, "max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 4}
    steps = []
    for dispatch in (False, True):
        own = {**settings, "accelerator_config": {"dispatch_batches": dispatch}}
        steps.append(len(ranks(tmp_path / str(dispatch), 2, settings=own)[0]["loss"]))
    assert steps == [8, 4]  # of the same 32 examples


def test_deepspeed_stage_0_in_bf16_has_other_losses_than_ddp_and_is_refused(tmp_path):
    second = {}
    for stage in (None, 0, 1):
        config = {"deepspeed": {**zero(stage), "bf16": {"enabled": "auto"}}}
        reports = ranks(tmp_path / str(stage), 2, settings=of(2, **ADAM_IN_BF16, **({} if stage is None else config)))
        second[stage] = reports[0]["loss"][1]
    assert abs(second[0] - second[None]) > 10 * abs(second[1] - second[None])
    config = {**zero(0), "bf16": {"enabled": "auto"}}
    assert_fires("sixteen_bits_are_trained_by_a_stage", {"bf16": True, "deepspeed": config}, world=2)


def test_an_optimizer_of_the_deepspeed_json_decays_norms_too(tmp_path):
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    config = {**ZERO_2, "optimizer": {"type": "AdamW", "params": {**params, "torch_adam": True}}}

    def differs(decay: float) -> float:
        own = {"optim": "adamw_torch", "learning_rate": 0.1, "weight_decay": decay}
        plain, by_json = (
            ranks(tmp_path / str(number), 1, settings={**own, "deepspeed": one})[0]["loss"][-1]
            for number, one in enumerate((ZERO_2, config))
        )
        return abs(plain - by_json)

    assert differs(0) < 1e-5 and differs(1) > 1e-3
    assert_fires("norms_and_biases_do_not_decay", {"deepspeed": config, "weight_decay": 1.0})


def test_fsdp_variables_of_the_launcher_are_ignored_if_deepspeed_is_in_the_arguments(tmp_path):
    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    reports = ranks(tmp_path, 2, settings={"deepspeed": ZERO_2}, variables=variables)
    assert [one["trained"] for one in reports] == [[2, "DEEPSPEED", "DeepSpeedEngine"]] * 2
    assert_fires("one_engine_is_asked_for", {"deepspeed": ZERO_2}, world=2, environment=variables)
