"""What FSDP requires of its own section and of the other settings.

Version 2 is what `sharded` uses and what Trainer chooses itself; an Accelerate YAML without
`fsdp_version` starts version 1. A key stands in the YAML, as `fsdp_NAME`, or in Trainer's
`fsdp_config`.
"""

from __future__ import annotations

from recipes import legal
from recipes.errors import Problem
from recipes.legal import models
from recipes.rules.facts import (
    absent_classes,
    advice,
    fsdp_section,
    fsdp_version,
    gradient_accumulation_kwargs,
    in_yaml,
    is_true,
    known_config,
    mapping,
    problem,
    rule,
    sections,
    uses_deepspeed,
    uses_fsdp,
)
from recipes.run import RunSpec, nearest


def _of_key(run: RunSpec, key: str, what: str, fix: str, severity: str = "error") -> Problem:
    """A problem with a key of the section, under the name and source where it is written."""
    if run["fsdp"] and {key, f"fsdp_{key}"} & set(mapping(run["fsdp_config"])):
        return Problem("fsdp_config", f"{key} {what}", fix, run.setting("fsdp_config").source, severity)
    return in_yaml(run, f"fsdp_{key}", what, fix, severity)


def _built_version(run: RunSpec) -> int:
    """The version of accelerate's plugin. Trainer builds it for `--fsdp` on a CPU too."""
    version = str(fsdp_section(run).get("version"))
    return fsdp_version(run) or (int(version) if run["fsdp"] and version.isdigit() else 0)


# --- Words of version 1 ---------------------------------------------------------------------------

_BY_STRATEGY = {
    "FULL_SHARD": "true",
    "SHARD_GRAD_OP": "false",
    "NO_SHARD": "distributed_type: MULTI_GPU, which is DDP",
    "HYBRID_SHARD": "parallelism_config with dp_replicate_size and dp_shard_size",
    "HYBRID_SHARD_ZERO2": "parallelism_config with dp_replicate_size and dp_shard_size",
}


@rule
def fsdp2_reshards_or_not(run):
    """`ValueError: invalid truth value full_shard`: version 2 takes true or false."""
    value = fsdp_section(run).get("reshard_after_forward")
    if _built_version(run) != 2 or value is None or str(value).lower() in _TRUTH_VALUES:
        return
    fix = _BY_STRATEGY.get(str(value).upper(), "true, or false to keep what the forward gathered")
    yield _of_key(run, "reshard_after_forward", f"is true or false in FSDP2, not {value}", fix)


_WORDS_OF_2 = ("full_shard", "shard_grad_op")
_TRUTH_VALUES = ("true", "false", "1", "0", "yes", "no", "y", "n", "t", "f", "on", "off")
_SWITCHES = ("use_orig_params", "sync_module_states", "forward_prefetch")  # that version 2 does not read


@rule
def fsdp_switches_are_truth_values(run):
    """`ValueError: invalid truth value yes please`, from every worker."""
    section = fsdp_section(run)
    is_fsdp = (run.engine.kind == "fsdp" or run["fsdp"]) and not uses_deepspeed(run)
    version_one = str(section.get("version", 1)) == "1" and not run["fsdp"]
    for key in ("cpu_ram_efficient_loading", *(_SWITCHES if version_one else ())) if is_fsdp else ():
        if section.get(key) is not None and str(section[key]).lower() not in _TRUTH_VALUES:
            yield _of_key(run, key, f"is true or false, not {section[key]!r}", "true or false")


_DROPPED = ("forward_prefetch", "backward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers")


@rule
def fsdp_words_are_known(run):
    """`Unknown fsdp option: zero3`, and `fsdp=hybrid_shard is only available with FSDP1`

    `--fsdp` alone shards. Its words are an older spelling of keys in `fsdp_config`.
    """
    if not isinstance(run["fsdp"], str):
        return
    version = str(mapping(run["fsdp_config"]).get("version", 2))
    for word in run["fsdp"].split():
        if word not in legal.fsdp_words():
            fix = nearest(word, legal.fsdp_words()) or "--fsdp alone, with fsdp_config"
            yield problem(run, "fsdp", f"has no word {word!r}", fix)
        elif version == "2" and word.upper() in _BY_STRATEGY and word not in _WORDS_OF_2:
            yield problem(run, "fsdp", f"{word} is of FSDP1", f"--fsdp alone, or {_BY_STRATEGY[word.upper()]}")


@rule
def fsdp2_reads_its_own_keys(run):
    """Version 2 drops these keys of version 1 without a word, also a strategy such as NO_SHARD."""
    if fsdp_version(run) != 2:
        return
    section = fsdp_section(run, launched=False)
    for key in _DROPPED:
        if key in section:
            yield _of_key(run, key, "is ignored by FSDP2", "leave it out", "advice")
    by_layer = str(section.get("auto_wrap_policy")).upper() == "TRANSFORMER_BASED_WRAP" and not run["fsdp"]
    if by_layer and section.get("min_num_params"):
        yield _of_key(run, "min_num_params", "is only read with SIZE_BASED_WRAP", "leave it out", "advice")
    strategy = str(section.get("sharding_strategy", "FULL_SHARD")).upper()
    if strategy not in ("FULL_SHARD", "1"):
        instead = _BY_STRATEGY.get(strategy)
        fix = f"fsdp_reshard_after_forward: {instead}" if instead in ("true", "false") else instead
        yield _of_key(run, "sharding_strategy", "is ignored by FSDP2", fix or "leave it out", "advice")


@rule
def fsdp2_has_no_local_state(run):
    """`FSDP2 does not support LOCAL_STATE_DICT`, when the Trainer is built."""
    if _built_version(run) == 2 and str(fsdp_section(run).get("state_dict_type")).upper() == "LOCAL_STATE_DICT":
        yield _of_key(run, "state_dict_type", "LOCAL_STATE_DICT needs FSDP1", "SHARDED_STATE_DICT")


# --- Both versions --------------------------------------------------------------------------------


@rule
def fsdp_state_is_of_a_known_kind(run):
    """`KeyError: 'FULL'` of `--fsdp`; nested_yaml_values_are_legal tells of a YAML's."""
    value = fsdp_section(run).get("state_dict_type")
    known = legal.accelerate_choices()["FSDP_STATE_DICT_TYPE"]
    if run["fsdp"] and isinstance(value, str) and value.upper() not in known and value not in ("1", "2", "3"):
        yield _of_key(run, "state_dict_type", f"{value!r} is not one of its values", f"one of {', '.join(known)}")


@rule
def fsdp_checkpoints_activations_once(run):
    """`activation_checkpointing in FSDP config and ... argument can't both be set to True`"""
    if not uses_fsdp(run) or not run["gradient_checkpointing"]:
        return
    if is_true(fsdp_section(run).get("activation_checkpointing")):
        yield problem(run, "gradient_checkpointing", "is on in fsdp_config too", "keep the one in fsdp_config")


@rule
def fsdp_version_two_is_chosen(run):
    """The launcher's default is FSDP1, which Trainer deprecates. Trainer's own default is FSDP2."""
    section = dict(sections(run)).get("fsdp_config")
    if run.engine.kind != "fsdp" or section is None:
        return
    version = section.get("fsdp_version", section.get("version", 1))
    if str(version) == "1":
        what = "1, which accelerate uses if the key is missing, is deprecated"
        yield in_yaml(run, "fsdp_version", what, "fsdp_version: 2", "advice")


@rule
def efficient_loading_needs_synchronisation(run):
    """`When using --fsdp_cpu_ram_efficient_loading set --fsdp_sync_module_states to True`

    `fsdp_cpu_ram_efficient_loading` is true by default.
    """
    section = dict(sections(run)).get("fsdp_config", {})
    synchronises = section.get("fsdp_sync_module_states", section.get("sync_module_states", True))
    efficient = section.get("fsdp_cpu_ram_efficient_loading", section.get("cpu_ram_efficient_loading", True))
    if run.engine.kind == "fsdp" and not synchronises and efficient:
        fix = "fsdp_sync_module_states: true, or fsdp_cpu_ram_efficient_loading: false"
        yield in_yaml(
            run, "fsdp_sync_module_states", "false contradicts fsdp_cpu_ram_efficient_loading, which needs it", fix
        )


# --- What is sharded together ---------------------------------------------------------------------


@rule
def fsdp2_shards_layer_by_layer(run):
    """A policy that wraps nothing gathers the whole model for every forward and backward.

    By size, version 2 tries to wrap the list of layers too: `fully_shard does not support
    containers that do not implement forward`. The demonstration is smaller than most limits.
    """
    section = fsdp_section(run)
    policy = str(section.get("auto_wrap_policy", "NO_WRAP")).upper()
    if fsdp_version(run) != 2 or policy not in ("NO_WRAP", "SIZE_BASED_WRAP"):
        return
    least = section.get("min_num_params", 100_000_000)  # the launcher's default
    by_size = policy == "SIZE_BASED_WRAP" and str(least) != "0"
    if by_size and not run.demonstration:
        what = f"{policy} fails in FSDP2: it wraps lists of layers"
        yield _of_key(run, "auto_wrap_policy", what, "TRANSFORMER_BASED_WRAP")
    elif not by_size:
        what = f"{policy} gathers the whole model at once"
        yield _of_key(run, "auto_wrap_policy", what, "TRANSFORMER_BASED_WRAP", "advice")


@rule
def the_model_has_the_layers_to_wrap(run):
    """`Could not find the transformer layer class GPT2Block in the model.`, once it is loaded."""
    named = fsdp_section(run).get("transformer_layer_cls_to_wrap")
    if not uses_fsdp(run) or not named:
        return
    names = named if isinstance(named, list) else str(named).split(",")
    for name in absent_classes(run, names):
        kind = str(known_config(run)["model_type"])
        layers = sorted(models.layer_classes(kind))
        fix = nearest(name, layers) or (", ".join(layers) if len(names) == 1 else "leave it out")
        yield _of_key(
            run, "transformer_layer_cls_to_wrap", f"{name} is not a part of a {kind} model", fix or "leave it out"
        )


# --- Steps ----------------------------------------------------------------------------------------


@rule
def fsdp2_scatters_every_micro_batch(run):
    """Without `sync_each_batch`, accumulation keeps a whole gradient on each GPU, in 16 bits.

    Trainer then switches FSDP2's reduction off until the last micro-batch.
    """
    if fsdp_version(run) != 2 or run["gradient_accumulation_steps"] == 1 or run.world_size == 1:
        return
    if not is_true(gradient_accumulation_kwargs(run).get("sync_each_batch")):
        fix = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
        what = "leaves gradients whole on each GPU until the last micro-batch"
        yield advice(run, "accelerator_config", what, fix)


@rule
def fsdp2_shards_are_known_to_the_optimizer(run):
    """`Operator bitsandbytes.optimizer_update_32bit.default does not have a sharding strategy`.

    FSDP2's parameters are DTensors, which bitsandbytes does not know. Adafactor mixes them with
    tensors of its own: `aten.add_.Tensor got mixed torch.Tensor and DTensor`.
    """
    if fsdp_version(run) != 2:
        return
    if run["optim"] == "adafactor" or run["optim"] in legal.bitsandbytes_optimizers():
        yield problem(run, "optim", f"{run['optim']} does not work on FSDP2's shards", "--optim adamw_torch_fused")


@rule
def offloaded_gradients_are_clipped_over_gloo(run):
    """`No backend type associated with device type cpu`, in the first step: NCCL is for GPUs.

    accelerate adds gloo for offload in a YAML, not for offload in the arguments (`PartialState`
    reads FSDP_OFFLOAD_PARAMS). Read in the source: only a GPU can show it.
    """
    offloads = is_true(mapping(run["fsdp_config"]).get("cpu_offload")) or "offload" in str(run["fsdp"]).split()
    if not run["fsdp"] or not offloads or not run.hardware.cuda or not run["max_grad_norm"]:
        return
    if fsdp_version(run) == 2 and "gloo" not in str(run["ddp_backend"]):
        what = "cannot add up the norm of gradients in host RAM over NCCL"
        fix = "fsdp_offload_params: true in an Accelerate YAML, without --fsdp; or --max_grad_norm 0"
        yield problem(run, "fsdp_config", what, fix)


# --- Activation checkpointing ---------------------------------------------------------------------


@rule
def fsdp_recomputes_with_the_same_dropout(run):
    """accelerate's checkpointing does not keep the random state: it recomputes other dropout masks.

    On two CPU ranks a GPT-2 with dropout trains other losses than without checkpointing. Trainer's
    own checkpointing trains the same, with as many exchanges: FSDP2 gathers nothing again.
    """
    if not uses_fsdp(run) or not is_true(fsdp_section(run).get("activation_checkpointing")):
        return
    fix = "false, with --gradient_checkpointing"
    if run["use_peft"] and run["lora_dropout"]:
        what = "recomputes with other dropout masks than the forward, and adapters have dropout"
        yield _of_key(run, "activation_checkpointing", what, f"{fix}, or --lora_dropout 0")
    else:
        what = "recomputes with other dropout masks than the forward, if the model has dropout"
        yield _of_key(run, "activation_checkpointing", what, fix, "advice")


@rule
def offloaded_activations_are_checkpointed(run):
    """`activation_checkpointing_offload=True requires activation_checkpointing=True`, and FSDP2."""
    section = fsdp_section(run)
    if not uses_fsdp(run) or run["fsdp"] or not is_true(section.get("activation_checkpointing_offload")):
        return
    if not is_true(section.get("activation_checkpointing")):
        yield _of_key(
            run, "activation_checkpointing_offload", "needs checkpointing", "fsdp_activation_checkpointing: true"
        )
    elif fsdp_version(run) != 2:
        yield _of_key(run, "activation_checkpointing_offload", "needs FSDP2", "fsdp_version: 2")
