"""Rules about FSDP, and what accelerate's own plugin and `fully_shard` do without them."""

from __future__ import annotations

import pytest

from recipes.rules.check import problems_by_rule
from recipes.run import resolve
from tests.support.real_failures import assert_fires, launched, losses, tiny_llama, train
from tests.support.runs import TWO_GPUS, Run, fsdp

pytestmark = pytest.mark.usefixtures("fresh_state")

VERSION_2 = "fsdp_version: 2"
SCATTERS = '--accelerator_config {"gradient_accumulation_kwargs":{"sync_each_batch":true}}'
BY_LAYER = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
SHARDED = "fsdp_state_dict_type: SHARDED_STATE_DICT"
CHECKPOINTED = "fsdp_activation_checkpointing: true"


def version_2(*lines: str) -> str:
    return fsdp(VERSION_2, *lines)


def on_gpus(argv: str = "", **run) -> Run:
    """On a CPU the same run is plain DDP, and no rule about FSDP fires."""
    return Run(argv, **{"hardware": TWO_GPUS, **run})


# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "fsdp_checkpoints_activations_once": (
        on_gpus("--gradient_checkpointing", yaml=fsdp("fsdp_activation_checkpointing: true")),
        on_gpus("--gradient_checkpointing", yaml=fsdp("fsdp_activation_checkpointing: false")),
    ),
    "fsdp_version_two_is_chosen": (on_gpus(yaml=fsdp("fsdp_offload_params: true")), on_gpus(yaml=fsdp("version: 2"))),
    "efficient_loading_needs_synchronisation": (
        on_gpus(yaml=fsdp("version: 2", "sync_module_states: false")),
        on_gpus(yaml=fsdp("version: 2", "sync_module_states: false", "cpu_ram_efficient_loading: false")),
    ),
    "fsdp2_reshards_or_not": (
        on_gpus(yaml=version_2("fsdp_reshard_after_forward: FULL_SHARD")),
        on_gpus(yaml=version_2("fsdp_reshard_after_forward: false")),
    ),
    "fsdp_switches_are_truth_values": (
        on_gpus(yaml=version_2("fsdp_cpu_ram_efficient_loading: yes please")),
        on_gpus(yaml=version_2("fsdp_cpu_ram_efficient_loading: 'yes'")),
    ),
    "fsdp_words_are_known": (
        on_gpus("--fsdp hybrid_shard", yaml="standard.yaml"),
        on_gpus("--fsdp", yaml="standard.yaml"),
    ),
    "fsdp2_reads_its_own_keys": (
        on_gpus(yaml=version_2("fsdp_sharding_strategy: NO_SHARD")),
        on_gpus(yaml=fsdp("fsdp_version: 1", "fsdp_sharding_strategy: NO_SHARD")),
    ),
    "fsdp_state_is_of_a_known_kind": (
        on_gpus('--fsdp full_shard --fsdp_config {"state_dict_type":"FULL"}', yaml="standard.yaml"),
        on_gpus('--fsdp full_shard --fsdp_config {"state_dict_type":"full_state_dict"}', yaml="standard.yaml"),
    ),
    "fsdp2_has_no_local_state": (
        on_gpus(yaml=version_2("fsdp_state_dict_type: LOCAL_STATE_DICT")),
        on_gpus(yaml=version_2("fsdp_state_dict_type: FULL_STATE_DICT")),
    ),
    "fsdp2_shards_layer_by_layer": (
        on_gpus(yaml=version_2("fsdp_auto_wrap_policy: NO_WRAP")),
        on_gpus(yaml="sharded.yaml"),
    ),
    "the_model_has_the_layers_to_wrap": (
        on_gpus(yaml=version_2("fsdp_transformer_layer_cls_to_wrap: GPT2Block")),
        on_gpus(yaml=version_2("fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer")),
    ),
    "fsdp2_scatters_every_micro_batch": (
        on_gpus("--gradient_accumulation_steps 2", world=2, yaml="sharded.yaml"),
        on_gpus(f"--gradient_accumulation_steps 2 {SCATTERS}", world=2, yaml="sharded.yaml"),
    ),
    "fsdp2_shards_are_known_to_the_optimizer": (
        on_gpus("--recipe sharded --optim adamw_bnb_8bit", yaml="sharded.yaml"),
        on_gpus("--recipe sharded --optim adamw_torch_fused", yaml="sharded.yaml"),
    ),
    "offloaded_gradients_are_clipped_over_gloo": (
        on_gpus('--fsdp true --fsdp_config {"cpu_offload":true}', world=2),
        on_gpus('--fsdp true --fsdp_config {"cpu_offload":true} --max_grad_norm 0', world=2),
    ),
    "fsdp_recomputes_with_the_same_dropout": (
        on_gpus("--use_peft --model_name_or_path m", yaml=version_2(CHECKPOINTED)),
        on_gpus("--use_peft --model_name_or_path m --gradient_checkpointing", yaml="sharded.yaml"),
    ),
    "offloaded_activations_are_checkpointed": (
        on_gpus(yaml=version_2("fsdp_activation_checkpointing_offload: true")),
        on_gpus(yaml=version_2("fsdp_activation_checkpointing_offload: true", CHECKPOINTED)),
    ),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("fsdp2_reads_its_own_keys", on_gpus(yaml=version_2("fsdp_forward_prefetch: true")), "fsdp_forward_prefetch"),
    (
        "fsdp2_reads_its_own_keys",
        on_gpus(yaml=version_2("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "fsdp_min_num_params: 100")),
        "fsdp_min_num_params",
    ),
    ("fsdp2_shards_are_known_to_the_optimizer", on_gpus("--optim adafactor", yaml="sharded.yaml"), "optim"),
    ("fsdp2_shards_are_known_to_the_optimizer", on_gpus("--fsdp true --optim lion_8bit", world=2), "optim"),
    (
        "fsdp2_shards_layer_by_layer",
        on_gpus("--model_name_or_path m", yaml=version_2("fsdp_auto_wrap_policy: SIZE_BASED_WRAP")),
        "fsdp_auto_wrap_policy",
    ),
    (  # what the launcher made of a YAML
        "fsdp2_reshards_or_not",
        on_gpus('--fsdp true --fsdp_config {"reshard_after_forward":"FULL_SHARD"}', world=2),
        "fsdp_config",
    ),
    (
        "offloaded_activations_are_checkpointed",
        on_gpus(yaml=fsdp("fsdp_version: 1", "fsdp_activation_checkpointing_offload: true", CHECKPOINTED)),
        "offload",
    ),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("fsdp2_shards_are_known_to_the_optimizer", Run("--recipe sharded --optim adafactor", yaml="sharded.yaml")),
    ("fsdp2_shards_are_known_to_the_optimizer", on_gpus("--optim adafactor", yaml=fsdp("fsdp_version: 1"))),
    (
        "offloaded_gradients_are_clipped_over_gloo",
        on_gpus(world=2, yaml=version_2("fsdp_offload_params: true")),
    ),
]


FAILS_WITH_SHARDS = [
    (
        "fsdp_checkpoints_activations_once",
        dict(gradient_checkpointing=True, fsdp_config={"activation_checkpointing": True}),
        "can't both be set to True",
    ),
    (
        "weights_alone_cannot_find_the_best",
        dict(save_only_model=True, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch"),
        "FSDP can't be used with `save_only_model`",
    ),
    (
        "sharded_checkpoints_hold_the_optimizer",
        dict(save_only_model=True, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"}),
        "not compatible with FSDP state dict type",
    ),
]


@pytest.mark.parametrize(("rule", "settings", "message"), FAILS_WITH_SHARDS)
def test_trainer_refuses(rule, settings, message, gpu_rank, tmp_path):
    settings = {"fsdp": "full_shard", **settings}
    with pytest.raises(ValueError, match=message):
        train(tmp_path, evaluates=True, use_cpu=False, **settings)
    assert_fires(rule, settings, world=2, gpu=(8, 0))


NEEDS_WHOLE = "not compatible with FSDP state dict type"
LAUNCHES = [
    ("fsdp_switches_are_truth_values", ("fsdp_cpu_ram_efficient_loading: yes please",), {}, "invalid truth value yes"),
    ("fsdp2_reshards_or_not", ("fsdp_reshard_after_forward: FULL_SHARD",), {}, "invalid truth value full_shard"),
    ("fsdp2_has_no_local_state", ("fsdp_state_dict_type: LOCAL_STATE_DICT",), {}, "does not support LOCAL_STATE_DICT"),
    (
        "fsdp2_shards_layer_by_layer",
        ("fsdp_auto_wrap_policy: SIZE_BASED_WRAP", "fsdp_min_num_params: 100"),
        {},
        "does not support containers that do not implement forward",
    ),
    (
        "the_model_has_the_layers_to_wrap",
        (BY_LAYER, "fsdp_transformer_layer_cls_to_wrap: GPT2Block"),
        {},
        "Could not find the transformer layer class GPT2Block",
    ),
    (
        "fsdp2_shards_are_known_to_the_optimizer",
        (BY_LAYER,),
        {"optim": "adafactor"},
        "got mixed torch.Tensor and DTensor",
    ),
    (
        "fsdp2_shards_are_known_to_the_optimizer",
        (BY_LAYER,),
        {"optim": "adamw_bnb_8bit"},
        "does not have a sharding strategy",
    ),
    ("sharded_checkpoints_hold_the_optimizer", (BY_LAYER,), {"save_only_model": True}, NEEDS_WHOLE),
    (
        "sharded_checkpoints_hold_the_optimizer",
        (BY_LAYER, "fsdp_state_dict_type: sharded_state_dict"),
        {"save_only_model": True},
        NEEDS_WHOLE,
    ),
    (  # the arguments' section counts with --fsdp only
        "sharded_checkpoints_hold_the_optimizer",
        (BY_LAYER, SHARDED),
        {"save_only_model": True, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}},
        NEEDS_WHOLE,
    ),
    (
        "offloaded_activations_are_checkpointed",
        (BY_LAYER, "fsdp_activation_checkpointing_offload: true"),
        {},
        "requires `activation_checkpointing=True`",
    ),
]


@pytest.fixture
def train_launched(gpu_rank, write_yaml, monkeypatch, tmp_path):
    """Trains in the environment that `accelerate launch` makes of an FSDP2 YAML."""

    def start(*lines: str, **settings):
        file = write_yaml("FSDP", "fsdp_config:", *(f"  {line}" for line in (VERSION_2, *lines)), processes=1)
        for name, value in launched(file).items():
            if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP":
                monkeypatch.setenv(name, value)
        return file, lambda **more: train(tmp_path, use_cpu=False, **settings, **more)

    return start


@pytest.mark.parametrize(("rule", "lines", "settings", "message"), LAUNCHES)
def test_a_launch_fails(rule, lines, settings, message, train_launched):
    file, start = train_launched(*lines, **settings)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=message):
        start()
    named = {"model_name_or_path": "m"} if "SIZE_BASED" in str(lines) else {}
    assert_fires(rule, {**settings, **named}, config=file, gpu=(8, 0))


def test_trainers_fsdp_is_version_2_and_saves_whole_weights_whatever_the_launch_says(train_launched, monkeypatch):
    settings = {"save_only_model": True, "fsdp": True}
    file, start = train_launched(BY_LAYER, SHARDED, **settings)
    monkeypatch.setenv("FSDP_VERSION", "1")
    plugin = start().accelerator.state.fsdp_plugin
    assert (plugin.fsdp_version, plugin.state_dict_type.name) == (2, "FULL_STATE_DICT")
    run = resolve(settings=settings, accelerate_config=str(file), hardware=TWO_GPUS, environment={})
    assert "sharded_checkpoints_hold_the_optimizer" not in dict(problems_by_rule(run))


def test_words_of_version_1_change_nothing(train_launched):
    _, plain = train_launched(BY_LAYER)
    expected = losses(plain(logging_steps=1))
    file, start = train_launched(BY_LAYER, "fsdp_sharding_strategy: NO_SHARD", "fsdp_forward_prefetch: true")
    assert losses(start(logging_steps=1)) == expected
    assert_fires("fsdp2_reads_its_own_keys", {}, config=file, gpu=(8, 0))


def recomputed(train_launched, *lines, **settings):
    _, start = train_launched(BY_LAYER, *lines, **settings)
    model = tiny_llama(attention_dropout=0.5, attn_implementation="eager")
    return losses(start(model=model, logging_steps=1, max_steps=4, learning_rate=1e-2))


def test_only_trainers_checkpointing_recomputes_the_same_dropout(train_launched):
    plain = recomputed(train_launched)
    assert recomputed(train_launched, gradient_checkpointing=True) == plain
    assert recomputed(train_launched, CHECKPOINTED) != plain
