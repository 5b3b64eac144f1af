"""How processes share a model and its examples, and what DDP and FSDP require of other settings."""

from __future__ import annotations

import math

from recipes import legal
from recipes.errors import Problem
from recipes.legal import models
from recipes.rules.facts import (
    accelerator_config,
    advice,
    deepspeed_file,
    deepspeed_section,
    fsdp_section,
    gradient_accumulation_kwargs,
    in_yaml,
    is_true,
    known_config,
    mapping,
    on_gpu,
    problem,
    rule,
    uses_ddp,
    uses_deepspeed,
    uses_fsdp,
    zero_stage,
)
from recipes.run import RunSpec
from recipes.run.parallelism import SIZES

# --- Processes that share examples ----------------------------------------------------------------

_INSTEAD = 'leave it out; a DeepSpeed JSON with "tensor_parallel": {"autotp_size": 2} divides the model'


def _of_sizes(run: RunSpec, field: str, what: str, fix: str, severity: str = "error") -> Problem:
    """A problem with a size of the ParallelismConfig, under the name that its source has for it."""
    return Problem(_name(run, field), what, fix, run.engine.parallelism.source, severity)


def _name(run: RunSpec, field: str) -> str:
    """The name of a size where it is written: a key of an Accelerate YAML, or a keyword."""
    in_a_script = run.engine.parallelism.source == "argument"
    return SIZES[field] if in_a_script else f"parallelism_config_{SIZES[field]}"


@rule
def sizes_of_groups_are_counts(run):
    """`dp_replicate_size must be at least 1, but got 0`, or int's own ValueError for text."""
    for field in SIZES:
        size = getattr(run.engine.parallelism, field)
        if not _is_count(size):
            yield _of_sizes(run, field, f"takes a whole number of at least 1, got {size!r}", "1, or leave it out")


def _is_count(size: object) -> bool:
    return type(size) is int and size >= 1


def _are_counts(run: RunSpec) -> bool:
    return all(_is_count(getattr(run.engine.parallelism, field)) for field in SIZES)


@rule
def sequences_are_not_divided_by_deepspeed(run):
    """DeepSpeed's sequence parallelism (ALST, Ulysses) trains, but not what plain DDP would.

    Two CPU ranks with sp_size 2 and the same global batch: gradients are twice as large, because
    the loss is gathered from all ranks and ZeRO multiplies by sp_size too, so clipping cuts them
    off earlier. Micro-batches weigh the same whatever number of tokens they hold, label smoothing
    is dropped, and so is every attention mask. Without DeepSpeed: `No sequence parallel group
    found`.
    """
    size = run.engine.parallelism.sequence
    if type(size) is int and size > 1:
        what = (
            f"{size} is refused: sequence parallelism multiplies the gradients by {size}, and clips them at that size"
        )
        yield _of_sizes(run, "sequence", what, _INSTEAD)


@rule
def sequences_are_not_divided_over_a_ring(run):
    """Context parallelism needs torch's flash or efficient attention, which only a GPU has.

    On CPU ranks, with accelerate's refusal of a CPU lifted: `Operator
    aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy
    registered`. That it trains the same as DDP could be shown on several GPUs only, and was not.
    """
    size = run.engine.parallelism.context
    if type(size) is int and size > 1:
        what = f"{size} is refused: context parallelism runs on several GPUs only, where nobody has proven its losses"
        yield _of_sizes(run, "context", what, _INSTEAD)


@rule
def tensor_parallelism_is_deepspeeds(run):
    """`Model should undergo tensor parallel before passing it to accelerate`

    accelerate's tp_size divides nothing: it expects a model that was loaded in parts. A script of
    the user's own may load one, and then trains what DDP would. Under DeepSpeed tp_size divides the
    data, and Trainer counts the undivided batch.
    """
    size = run.engine.parallelism.tensor
    if type(size) is int and size > 1 and (uses_deepspeed(run) or not run.own_script):
        what = f"{size} is refused: it expects a model that was loaded in parts, and models are loaded whole here"
        fix = f'a DeepSpeed JSON with "tensor_parallel": {{"autotp_size": {size}}}'
        yield _of_sizes(run, "tensor", what, fix)


@rule
def megatron_has_its_own_trainer(run):
    """`You must specify a training or evaluation dataloader ... when using Megatron-LM`

    Trainer prepares data and model one after the other. Read in accelerate's source: Megatron-LM
    needs GPUs.
    """
    if run.engine.kind == "megatron_lm":
        what = "MEGATRON_LM does not work with Trainer, which prepares its data apart from the model"
        yield in_yaml(run, "distributed_type", what, "distributed_type: DEEPSPEED, or FSDP")


# --- DeepSpeed's tensor parallelism: losses are those of DDP on two and four CPU ranks ------------


def _divides_tensors(run: RunSpec) -> bool:
    return uses_deepspeed(run) and run.engine.parallelism.autotp not in (0, 1)


def _in_json(run: RunSpec, subject: str, what: str, fix: str, severity: str = "error") -> Problem:
    named = run["deepspeed"] or deepspeed_section(run).get("deepspeed_config_file")
    return Problem(subject, what, fix, named if isinstance(named, str) else "DeepSpeed JSON", severity)


@rule
def tensor_parallel_sizes_are_counts(run):
    """`'>' not supported between instances of 'str' and 'int'`, from every worker."""
    size = run.engine.parallelism.autotp
    if uses_deepspeed(run) and (type(size) is not int or size < 0):
        what = f"takes a whole number, got {size!r}"
        yield _in_json(run, "tensor_parallel.autotp_size", what, '"autotp_size": 2, or leave it out')


@rule
def tensor_parallelism_needs_a_lower_stage(run):
    """`Check batch related parameters. train_batch_size is not equal to ...`, under ZeRO-3."""
    if _divides_tensors(run) and zero_stage(run) == 3:
        what = "cannot be combined with ZeRO stage 3"
        yield _in_json(run, "tensor_parallel.autotp_size", what, '"stage": 2, or leave tensor_parallel out')


@rule
def tensor_parallelism_leaves_the_batch_to_trainer(run):
    """Trainer wants all processes in `train_batch_size`, DeepSpeed and the global batch do not.

    `Please correct the following DeepSpeed config values: ds train_batch_size=8 vs hf
    train_batch_size (calculated)=16`
    """
    size = (deepspeed_file(run) or {}).get("train_batch_size", "auto")
    if _divides_tensors(run) and size == run.batch.total:  # any other is reported as a contradiction
        what = f"{size} is the global batch, and Trainer wants {size * run.engine.parallelism.sharing} there"
        yield _in_json(run, "train_batch_size", what, '"train_batch_size": "auto"')


@rule
def tensor_parallelism_shares_batches_and_tokens(run):
    """Seen on two CPU ranks: `dispatch_batches` makes the global batch larger by the group's size,
    and without `average_tokens_across_devices` Trainer divides by tokens that it has not added up.
    """
    if not _divides_tensors(run):
        return
    size = run.engine.parallelism.sharing
    if is_true(accelerator_config(run).get("dispatch_batches")):
        what = f"dispatch_batches makes the global batch {size} times as large under tensor parallelism"
        yield problem(run, "accelerator_config", what, "leave dispatch_batches out")
    if not run["average_tokens_across_devices"]:
        what = f"false makes losses and gradients {size} times as large under tensor parallelism"
        yield problem(run, "average_tokens_across_devices", what, "leave it out")


@rule
def tensor_parallelism_counts_no_accuracy(run):
    """accelerate gathers the predictions of processes that share examples, and drops the last ones.

    Training and eval_loss are right, but eval_accuracy counts some examples twice, others never.
    """
    if _divides_tensors(run) and run["task"] == "sequence_classification" and run["eval_strategy"] != "no":
        what = "makes eval_accuracy count some examples twice and others never"
        yield _in_json(run, "tensor_parallel.autotp_size", what, "leave tensor_parallel out, or --eval_strategy no")


@rule
def tensor_parallelism_trains_every_weight(run):
    """`KeyError: Parameter containing`, or `loss must be a scalar tensor`: DeepSpeed divides the
    layers, adapters included, and its optimizer looks for the trained ones as they were.
    """
    if _divides_tensors(run) and run["use_peft"]:
        what = "cannot be combined with use_peft"
        yield _in_json(run, "tensor_parallel.autotp_size", what, "leave tensor_parallel out for LoRA")


@rule
def tensor_parallelism_knows_the_model(run):
    """`HuggingFace tp_plan contains unsupported partition style(s)`, or `AutoTP not supported for
    model` if there is no plan, both once the model is loaded. A partition of the user's own wins.
    """
    section, config = mapping((deepspeed_file(run) or {}).get("tensor_parallel")), known_config(run)
    if not _divides_tensors(run) or {"partition_config", "preset_model"} & set(section):
        return
    kind, known = str(config.get("model_type")), legal.deepspeed_tensor_styles()
    plan = models.tensor_plan(kind, models.model_class(kind, run["task"]) or "")
    strange = sorted({style for style in plan.values() if style.lower() not in known}) if known else []
    base = models.model_types("MODEL_MAPPING_NAMES").get(kind, "").removesuffix("Model").lower()
    fix = "leave tensor_parallel out"
    if strange:
        styles = " and ".join(strange)
        what = f"cannot divide a {kind} model: its layers are to be divided by {styles}, which DeepSpeed cannot do"
        yield _in_json(run, "tensor_parallel.autotp_size", what, fix)
    elif not plan and base in legal.deepspeed_undivided():
        yield _in_json(run, "tensor_parallel.autotp_size", f"cannot divide a {kind} model", fix)


@rule
def deepspeed_shards_no_sequences(run):
    """`Check batch related parameters. train_batch_size is not equal to ...`

    The key is for models that divide their sequences themselves. Without `train_batch_size`
    DeepSpeed reads it, and divides nothing.
    """
    content = deepspeed_file(run) or {}
    if content.get("sequence_parallel_size") in (None, 1) or not uses_deepspeed(run):
        return
    if "train_batch_size" in content:
        what = "contradicts the batch of Trainer, whose models do not divide their sequences"
        yield _in_json(run, "sequence_parallel_size", what, "leave it out")
    else:
        what = "divides nothing: models of transformers do not know it"
        yield _in_json(run, "sequence_parallel_size", what, "leave it out", "advice")


# --- Replicas and shards (HSDP): every process has examples of its own ----------------------------


@rule
def replicas_and_shards_make_the_world(run):
    """`ParallelismConfig total_size (2) does not match num_processes (4)`, from every worker.

    Sizes that are all 1 ask for nothing. DeepSpeed ignores replicas and shards, but not how many.
    """
    parallelism = run.engine.parallelism
    if not _are_counts(run) or parallelism.is_refused(run.own_script) or _refused_on_a_cpu(run):
        return  # reported already
    if uses_fsdp(run) and parallelism.shard == 1 < parallelism.replicate:
        return  # replicas_and_shards_are_of_fsdp2 names the right sizes
    total = math.prod(getattr(parallelism, field) for field in SIZES)
    if total in (1, run.world_size) or run.world_size % parallelism.sharing:
        return
    tensor = parallelism.tensor
    what = f"{parallelism.replicate} replicas x {parallelism.shard} shards"
    what += (f" x {tensor} processes each" if tensor > 1 else "") + f" are not the {run.world_size} processes"
    yield _of_sizes(run, "shard", what, _sizes_that_fit(run))


def _sizes_that_fit(run: RunSpec) -> str:
    """Replicas and shards that make the world. FSDP wants at least two shards: the user's number of
    replicas is kept only where it leaves as many.
    """
    groups = run.world_size // run.engine.parallelism.tensor
    replicate, shard, wanted = _name(run, "replicate"), _name(run, "shard"), run.engine.parallelism.replicate
    if groups == 1:
        return f"leave {replicate} and {shard} out"
    replicas = wanted if groups % wanted == 0 and groups > wanted else 1
    return f"{replicate} {replicas} and {shard} {groups // replicas}"


@rule
def replicas_and_shards_are_of_fsdp2(run):
    """`ParallelismConfig is only compatible DistributedType.FSDP (version 2) or ...`

    Under DDP on GPUs they shard nothing: accelerate wraps the model in plain DDP. DeepSpeed ignores
    them too.
    """
    parallelism = run.engine.parallelism
    if not parallelism.source or parallelism.replicate == parallelism.shard == 1:
        return
    if not _are_counts(run) or _refused_on_a_cpu(run):
        return  # reported already
    if uses_fsdp(run):
        if str(fsdp_section(run).get("version", 1)) == "1":
            yield _of_sizes(run, "shard", "needs FSDP2", "fsdp_version: 2")
        elif parallelism.shard == 1:  # `no dimension for FSDP to shard across`
            what = f"1 leaves FSDP nothing to shard across {parallelism.replicate} replicas"
            yield _of_sizes(run, "shard", what, f"{_sizes_that_fit(run)}, or distributed_type: MULTI_GPU")
        return
    what, fix = f"shards nothing: the engine is {run.engine_title.partition(',')[0]}, not FSDP", "leave it out"
    if run.hardware.cuda:
        fix = "distributed_type: FSDP with fsdp_version: 2, or leave it out"
    yield _of_sizes(run, "shard", what, fix, "advice")


@rule
def cpu_ranks_take_no_sizes(run):
    """`ParallelismConfig is only compatible ..., but got DistributedType.MULTI_CPU`

    Sizes that are all 1 ask for nothing.
    """
    if _refused_on_a_cpu(run):
        what = "is refused by accelerate on a CPU"
        yield Problem("parallelism_config", what, "leave it out", run.engine.parallelism.source)


def _refused_on_a_cpu(run: RunSpec) -> bool:
    parallelism = run.engine.parallelism
    if not _are_counts(run) or parallelism.replicate == parallelism.shard == parallelism.sharing == 1:
        return False
    if uses_deepspeed(run) or (parallelism.sharing > 1 and not run.own_script):
        return False  # no mesh, or refused on any machine
    return bool(parallelism.source) and run.world_size > 1 and not run.hardware.shards


# --- DDP ------------------------------------------------------------------------------------------


@rule
def static_graph_needs_accumulation_one(run):
    """DDP's static graph expects a reduction in the first backward: with accumulation it aborts.

    One process works, and so does accumulation that reduces every micro-batch (`sync_each_batch`).
    """
    if not run["ddp_static_graph"] or run["gradient_accumulation_steps"] == 1 or run.world_size == 1:
        return
    if uses_ddp(run) and not is_true(gradient_accumulation_kwargs(run).get("sync_each_batch")):
        yield problem(
            run,
            "ddp_static_graph",
            f"cannot be combined with gradient_accumulation_steps {run['gradient_accumulation_steps']}",
            "leave it out, or raise per_device_train_batch_size until accumulation is 1",
        )


@rule
def reentrant_checkpointing_needs_find_unused_off(run):
    """`Expected to mark a variable ready only once` in the first backward, even of one process."""
    kwargs = mapping(run["gradient_checkpointing_kwargs"])
    if (
        not run["gradient_checkpointing"]
        or not kwargs.get("use_reentrant")
        or run["ddp_static_graph"]
        or not uses_ddp(run)
    ):
        return
    if run["ddp_find_unused_parameters"] or (run["ddp_find_unused_parameters"] is None and run["use_peft"]):
        fix = "gradient_checkpointing_kwargs '{\"use_reentrant\": false}', or --ddp_find_unused_parameters false"
        yield problem(run, "gradient_checkpointing_kwargs", "use_reentrant fails with ddp_find_unused_parameters", fix)


_ONLY_DDP = (
    "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers",
    "ddp_static_graph",
    "gradient_as_bucket_view",
)


@rule
def ddp_settings_need_ddp(run):
    """DeepSpeed, FSDP and a single process do not read them."""
    if uses_ddp(run):
        return
    ignored = [name for name in _ONLY_DDP if run.explicit(name) and run[name] is not None]
    if run["ddp_comm_hook"] != "no":
        ignored.append("ddp_comm_hook")
    for name in ignored:
        yield advice(run, name, f"is ignored: the engine is {run.engine.title}, not DDP", "leave it out")


@rule
def bf16_compression_needs_nccl(run):
    """`TypeError: BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+`"""
    if run["ddp_comm_hook"] == "bf16" and uses_ddp(run) and not on_gpu(run):
        yield problem(
            run, "ddp_comm_hook", "bf16 needs NCCL, and NCCL needs GPUs", "--ddp_comm_hook fp16, or leave it out"
        )


@rule
def nccl_timeout_is_an_argument(run):
    """Nothing reads NCCL_TIMEOUT: the process group's timeout is `ddp_timeout`."""
    if "NCCL_TIMEOUT" in run.environment:
        what = "has no effect on the process group's timeout"
        yield Problem("NCCL_TIMEOUT", what, "--ddp_timeout SECONDS", "environment", "advice")
