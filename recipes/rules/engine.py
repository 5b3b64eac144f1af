"""Rules about the engine, what its YAML, JSON or `fsdp_config` asks of it, and DDP's own settings.

They find what accelerate and DeepSpeed accept in silence and then train otherwise, what hangs, what
fails after minutes, and what only a card decides. What the libraries refuse at once is left to the
probe. So is a DeepSpeed JSON beside the arguments: the probe compares the values of both, and
DeepSpeed's defaults for those that the JSON leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from recipes import legal
from recipes.errors import Problem, plural
from recipes.rules.facts import (
    accelerator_config,
    advice,
    deepspeed_file,
    deepspeed_section,
    fsdp_section,
    fsdp_version,
    gradient_accumulation_kwargs,
    in_json,
    in_yaml,
    is_true,
    mapping,
    mixed_precision,
    on_gpu,
    problem,
    rule,
    uses_deepspeed,
    uses_fsdp,
    zero_stage,
)
from recipes.rules.table import advice_row, error_row
from recipes.run import RunSpec, nearest
from recipes.run.command_line import belongs
from recipes.run.engine import SIZES, from_environment, from_yaml
from recipes.run.files import Json, launch_with, shipped

_ON_GPUS = 'To judge it for GPUs: recipes check --gpu "H100 80GB"'

# --- The processes --------------------------------------------------------------------------------


@rule
def single_engine_starts_one_process(run):
    """`distributed_type: 'NO'` and `MULTI_CPU` start one process, whatever --num_processes says."""
    if run.world_size > 1 and run.engine.raw and run.engine.kind in ("single", "multi_cpu"):
        what = f"{run.engine.raw.get('distributed_type', 'NO')} starts one process, and {run.world_size} are asked for"
        is_chosen = run.engine.source != str(shipped(run.recipe.engine))  # or the user can launch another
        fix = "distributed_type: MULTI_GPU, also for several CPU processes"
        yield in_yaml(run, "distributed_type", what, fix, "error" if is_chosen else "advice")


@rule
def each_process_has_a_gpu(run):
    """`CUDA error: invalid device ordinal`, or NCCL's `Duplicate GPU detected`; over gloo processes
    may share a GPU. One process leaves the other GPUs idle: DataParallel would multiply the global
    batch, and is switched off.
    """
    here, gpus = min(run.local_world_size, -(-run.world_size // _machines(run))), len(run.hardware.gpus)
    if on_gpu(run) and run["ddp_backend"] != "gloo" and here > gpus:
        what = f"{here} on this machine, which has {plural(gpus, 'GPU')}"
        yield Problem("num_processes", what, f"--num_processes {gpus}", "the launch")
    if run.engine.kind == "single" and run.world_size == 1 < gpus and not run["use_cpu"]:
        fix = f"{launch_with('standard.yaml')} --num_processes {gpus}"
        yield Problem("num_processes", f"1 uses one of {gpus} GPUs", fix, "the launch", "advice")


@rule
def machines_share_the_processes(run):
    """The launcher rounds down: 3 processes on 2 machines start 1 on each, which hang. Without an
    address every machine looks for a host named None, until a timeout.
    """
    machines = _machines(run)
    if run.world_size % machines:
        what = f"{run.world_size} cannot be divided over {machines} machines"
        fix = f"num_processes: {-(-run.world_size // machines) * machines}, over all machines"
        yield in_yaml(run, "num_processes", what, fix)
    for name, value in (("main_process_ip", "ADDRESS"), ("main_process_port", "29500")) if machines > 1 else ():
        if run.engine.raw.get(name) is None:
            fix = f"{name}: {value}, or --{name} {value} for accelerate launch"
            yield in_yaml(run, name, f"is not in the file, and {machines} machines need it", fix, "advice")


def _machines(run: RunSpec) -> int:
    machines = run.engine.raw.get("num_machines")
    return machines if type(machines) is int and machines > 0 else 1


@rule
def recipe_has_its_own_engine(run):
    """An engine of the launch that train.py keeps, or --deepspeed, replaces the recipe's: then
    `sharded` does not shard, and a memory recipe does not offload. Inside plain DDP train.py starts
    the recipe's own. On a CPU nothing is sharded.
    """
    own = from_yaml(shipped(run.recipe.engine))
    if own.kind == "fsdp" and not run.hardware.can_shard and run.engine.kind not in ("fsdp", "deepspeed"):
        yield advice(run, "recipe", "shards nothing on a CPU: this is plain DDP", _ON_GPUS)
        return
    wanted = {"deepspeed": uses_deepspeed(run), "fsdp": run.engine.kind == "fsdp"}
    if not wanted.get(own.kind, True):
        what, fix = f"and the launch uses {run.engine.title}", launch_with(run.recipe.engine)
        if run["deepspeed"]:
            what, fix = f"and --deepspeed trains {run.engine.title}", "leave --deepspeed out"
        yield advice(run, "recipe", f"is made for {own.title}, {what}", fix)


@rule
def one_engine_is_asked_for(run):
    """`Using --fsdp xxx together with --deepspeed is not possible`, once the model is loaded.
    Beside `--deepspeed` the launch's FSDP is dropped in silence, and so is another DeepSpeed JSON.
    """
    if run["fsdp"] and uses_deepspeed(run):
        yield problem(run, "fsdp", "and DeepSpeed exclude each other", "leave one of them out")
    launch = run.outer_engine or from_environment(run.place.environment)
    if not run["deepspeed"] or launch is None:
        return
    asked = mapping(launch.raw.get("deepspeed_config")).get("deepspeed_config_file")
    asked = launch.title if launch.kind == "fsdp" else asked
    if asked and asked != run["deepspeed"]:
        fix = f"leave one of them out; {launch_with('standard.yaml')} suits --deepspeed"
        yield problem(run, "deepspeed", f"is trained, and the launch's {asked} is dropped", fix)


@rule
def fsdp_needs_ranks_with_gpus(run):
    """On a CPU an FSDP YAML or `--fsdp` silently trains plain DDP: nothing is sharded. Alone,
    `--fsdp` is `Using fsdp only works in distributed training`, once the model is loaded.
    """
    shards_nothing = "shards nothing on a CPU: this is plain DDP"
    if run["fsdp"] and run.engine.kind == "single" and run.world_size == 1:
        fix = launch_with("sharded.yaml") if run.hardware.can_shard else "leave it out: it shards nothing on a CPU"
        yield problem(run, "fsdp", "needs a distributed launch", fix)
    elif run.hardware.can_shard or uses_deepspeed(run):
        return
    elif run.engine.kind == "fsdp":
        fix = f"distributed_type: MULTI_GPU. {_ON_GPUS}"
        yield in_yaml(run, "distributed_type", f"FSDP {shards_nothing}", fix, "advice")
    elif run["fsdp"]:
        yield advice(run, "fsdp", shards_nothing, f"leave it out. {_ON_GPUS}")


# --- DDP ------------------------------------------------------------------------------------------


def _uses_ddp(run: RunSpec) -> bool:
    """True if DDP wraps the model, as it does when a launcher starts several `single` processes."""
    if uses_deepspeed(run) or uses_fsdp(run):
        return False
    return run.engine.kind == "ddp" or run.engine.kind.startswith("multi_") or run.world_size > 1


_OF_DDP = "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph"
_OF_DDP += " gradient_as_bucket_view"


@rule
def ddp_settings_need_ddp(run):
    """DeepSpeed, FSDP and a single process do not read them."""
    ignored = [name for name in _OF_DDP.split() if run.explicit(name) and run[name] is not None]
    ignored += ["ddp_comm_hook"] if run["ddp_comm_hook"] != "no" else []
    for name in ignored if not _uses_ddp(run) else ():
        yield advice(run, name, f"is ignored: the engine is {run.engine.title}, not DDP", "leave it out")


# --- The Accelerate YAML --------------------------------------------------------------------------

# Section -> the distributed type that reads it; None: every type does.
_SECTIONS = {
    "deepspeed_config": "deepspeed",
    "fsdp_config": "fsdp",
    "dynamo_config": None,
    "parallelism_config": None,
    "mpirun_config": None,
    "fp8_config": None,
    "megatron_lm_config": "megatron_lm",
}
# `accelerate config` writes keys into these that its launcher does not read: advice, not an error.
_LOOSE_SECTIONS = ("fp8_config", "megatron_lm_config")


def _sections(run: RunSpec) -> Iterator[tuple[str, Json]]:
    """The sections of the Accelerate YAML that are read, by name."""
    for name, type_ in _SECTIONS.items():
        if type_ in (None, run.engine.kind) and isinstance(run.engine.raw.get(name), Mapping):
            yield name, run.engine.raw[name]


@rule
def yaml_keys_are_known(run):
    """An unknown key at the top ends the launcher: `The config file at ... had unknown keys`.

    In a section accelerate drops it: `zero_stge: 3` trains stage 2, `fsdp_verion: 2` FSDP1.
    """
    for name, section in (("", run.engine.raw), *_sections(run)):
        known = legal.accelerate_nested_keys(name) if name else legal.names("accelerate_yaml")
        what = "is not a key of the Accelerate YAML" + (f"; in {name} it is dropped silently" if name else "")
        for key in (key for key in map(str, section) if key not in known):
            yield in_yaml(run, key, what, _instead(key, known), "advice" if name in _LOOSE_SECTIONS else "error")


def _instead(key: str, known: Iterable[str]) -> str:
    """The argument, place or name to write instead of an unknown key."""
    argument = key if key in legal.settings() else belongs(key)
    if argument in legal.settings():
        return f"--{argument}, an argument of the run"
    near = nearest(key, known) or next((name for name in known if name.endswith(f"_{key}")), "")
    if near and near != key:
        return near
    if key in legal.names("accelerate_yaml"):
        return f"{key} at the top level, not indented"
    sections = {name: section for section in _SECTIONS for name in legal.accelerate_nested_keys(section)}
    if key in sections:
        return f"{sections[key]}: with {key} below it, indented"
    return nearest(key, sections) or nearest(key, legal.settings()) or "one of " + ", ".join(sorted(known))


@rule
def sections_are_read(run):
    """A section of another distributed type is not read."""
    for name, type_ in _SECTIONS.items():
        if run.engine.raw.get(name) and type_ not in (None, run.engine.kind):
            what = f"is not read with distributed_type {run.engine.raw.get('distributed_type')}"
            yield in_yaml(run, name, what, f"distributed_type: {type_.upper()}", "advice")


@rule
def no_is_quoted(run):
    """YAML reads NO as false: accelerate then requires num_processes, and `mixed_precision: no`
    ends in `'bool' object has no attribute 'lower'`.
    """
    for name, is_fatal in (("mixed_precision", True), ("distributed_type", not run.engine.num_processes)):
        if run.engine.raw.get(name) is False:
            what, severity = "no without quotes is false in YAML", "error" if is_fatal else "advice"
            yield in_yaml(run, name, what, f"{name}: '{'no' if name == 'mixed_precision' else 'NO'}'", severity)


@rule
def offload_happens(run):
    """The launcher does not pass an NVMe path on: DeepSpeed swaps to ./none/zero_stage_3. Below
    stage 3, offload_param_device is accepted and does nothing.
    """
    section, fix = deepspeed_section(run), "a deepspeed_config_file with nvme_path, or device cpu"
    for name in ("offload_optimizer_device", "offload_param_device"):
        device = str(section.get(name, "none")).lower()
        if device == "nvme":
            yield in_yaml(run, name, "the launcher does not pass the NVMe path on to the processes", fix)
        if device != "none" and name == "offload_param_device" and str(section.get("zero_stage", 2)) != "3":
            yield in_yaml(run, name, "needs ZeRO stage 3", f"zero_stage: 3, or {name}: none", "advice")


# --- The DeepSpeed JSON ---------------------------------------------------------------------------


@rule
def deepspeed_json_keys_are_known(run):
    """DeepSpeed silently ignores `gradient_cliping`. Inside its sections it refuses such names."""
    known = legal.names("deepspeed_json")
    for key in (deepspeed_file(run) or {}) if known else ():
        if key not in known:
            fix = nearest(str(key), known) or "a key of DeepSpeed's own reference"
            yield in_json(run, str(key), "is not a key that DeepSpeed reads", fix)


@rule
def sixteen_bits_are_trained_by_a_stage(run):
    """Stage 0 makes the optimizer's state by a step without gradients (FP16_UnfusedOptimizer): Adam
    counts one step too many, and on two CPU ranks its losses differ from those of DDP and ZeRO-1.
    """
    if uses_deepspeed(run) and zero_stage(run) == 0 and (precision := mixed_precision(run)) in ("bf16", "fp16"):
        subject, report = ("zero_optimization.stage", in_json) if deepspeed_file(run) else ("zero_stage", in_yaml)
        what = f"0 trains other losses than DDP in {precision}: its optimizer starts one step ahead"
        yield report(run, subject, what, "stage 1, or an engine without DeepSpeed")


# --- DeepSpeed's tensor parallelism: losses are those of DDP on two and four CPU ranks ------------


@rule
def tensor_parallelism_fits_the_run(run):
    """Under ZeRO-3 `Check batch related parameters`. With adapters `KeyError: Parameter
    containing`, or `loss must be a scalar tensor`: DeepSpeed divides the layers, adapters included.

    Seen on two CPU ranks: `dispatch_batches` makes the global batch larger by the group's size,
    and without `average_tokens_across_devices` Trainer divides by tokens that it has not added up.
    accelerate gathers the predictions of processes that share examples, and drops the last ones:
    eval_loss is right, eval_accuracy counts some examples twice and others never.
    """
    if not uses_deepspeed(run) or run.engine.parallelism.autotp == 1:
        return
    size, where = run.engine.parallelism.sharing, "under DeepSpeed's tensor parallelism"
    if zero_stage(run) == 3:
        what = "cannot be combined with ZeRO stage 3"
        yield in_json(run, "tensor_parallel.autotp_size", what, '"stage": 2, or leave tensor_parallel out')
    evaluates = run["task"] == "sequence_classification" and run["eval_strategy"] != "no"
    dispatches = is_true(accelerator_config(run).get("dispatch_batches"))
    for name, is_wrong, what, fix in (
        ("use_peft", run["use_peft"], "does not train", "leave tensor_parallel out for LoRA"),
        ("eval_strategy", evaluates, "counts some examples twice and others never",
         "leave tensor_parallel out, or --eval_strategy no"),
        ("accelerator_config", dispatches, f"dispatch_batches makes the global batch {size} times as large",
         "leave dispatch_batches out"),
        ("average_tokens_across_devices", not run["average_tokens_across_devices"],
         f"false makes losses and gradients {size} times as large", "leave it out"),
    ):  # fmt: skip
        if is_wrong:
            yield problem(run, name, f"{what} {where}", fix)


# --- accelerate's ParallelismConfig: accelerate judges its sizes, in the probe -----------------

_INSTEAD = 'leave it out; a DeepSpeed JSON with "tensor_parallel": {"autotp_size": 2} divides the model'


@rule
def sequences_and_models_are_not_divided(run):
    """Sequence parallelism (DeepSpeed's ALST) trains, but not what plain DDP would: on two CPU
    ranks gradients were twice as large, so that clipping cuts them off earlier, micro-batches weigh
    the same whatever number of tokens they hold, and attention masks are dropped.

    Context parallelism needs torch's flash or efficient attention, which only a GPU has: nobody has
    shown on several GPUs that it trains the same as DDP.

    tp_size divides nothing: `Model should undergo tensor parallel before passing it to accelerate`.
    A script of the user's own may load such a model. Under DeepSpeed tp_size divides the data, and
    Trainer counts the undivided batch.
    """
    sizes = run.engine.parallelism
    by_json = f'a DeepSpeed JSON with "tensor_parallel": {{"autotp_size": {sizes.tensor}}}'
    refused = {
        "sequence": ("sequence parallelism multiplies the gradients by its size, and clips them then", _INSTEAD),
        "context": ("context parallelism runs on several GPUs only, where nobody has proven its losses", _INSTEAD),
        "tensor": ("it expects a model that was loaded in parts, and models are loaded whole here", by_json),
    }
    if run.place.own_script and not uses_deepspeed(run):
        del refused["tensor"]
    for field, (why, fix) in refused.items():
        size = getattr(sizes, field)
        if size > 1:
            yield _of_size(run, field, f"{size} is refused: {why}", fix)


def _of_size(run: RunSpec, field: str, what: str, fix: str) -> Problem:
    """A problem with a size of the ParallelismConfig, by its keyword or its key in a YAML."""
    source, name = run.engine.parallelism.source, SIZES[field]
    return Problem(name if source == "argument" else f"parallelism_config_{name}", what, fix, source)


# --- FSDP: version 2 is what `sharded` uses, and what Trainer chooses itself ----------------------


def _of_key(run: RunSpec, key: str, what: str, fix: str, severity: str = "error") -> Problem:
    """A problem with a key of the section, under the name and source where it is written."""
    if run["fsdp"] and {key, f"fsdp_{key}"} & set(mapping(run["fsdp_config"])):
        return Problem("fsdp_config", f"{key} {what}", fix, run.setting("fsdp_config").source, severity)
    return in_yaml(run, f"fsdp_{key}", what, fix, severity)


@rule
def fsdp2_is_chosen(run):
    """The launcher's default is FSDP1, which Trainer deprecates. Any other version counts as 1."""
    if uses_fsdp(run) and run.engine.kind == "fsdp" and run.engine.fsdp_version not in (1, 2):
        yield _of_key(run, "version", f"{run.engine.fsdp_version} trains as FSDP1", "2")
    written = dict(_sections(run)).get("fsdp_config")
    if written is not None and str(written.get("fsdp_version", written.get("version", 1))) == "1":
        what = "1, which accelerate uses if the key is missing, is deprecated"
        yield in_yaml(run, "fsdp_version", what, "fsdp_version: 2", "advice")


@rule
def fsdp2_shards_layer_by_layer(run):
    """A policy that wraps nothing gathers the whole model for every forward and backward. By size,
    version 2 tries to wrap the list of layers too: `fully_shard does not support containers that
    do not implement forward`. The demonstration is smaller than most limits.
    """
    section, fix = fsdp_section(run), "TRANSFORMER_BASED_WRAP"
    policy = str(section.get("auto_wrap_policy", "NO_WRAP")).upper()
    if fsdp_version(run) != 2 or policy not in ("NO_WRAP", "SIZE_BASED_WRAP"):
        return
    if policy == "NO_WRAP" or str(section.get("min_num_params")) == "0":
        yield _of_key(run, "auto_wrap_policy", f"{policy} gathers the whole model at once", fix, "advice")
    elif not run.demonstration:
        yield _of_key(run, "auto_wrap_policy", f"{policy} fails in FSDP2: it wraps lists of layers", fix)


@rule
def fsdp_recomputes_once_and_the_same(run):
    """`activation_checkpointing in FSDP config and ... argument can't both be set to True`, once
    the model is loaded.

    accelerate's checkpointing does not keep the random state: on two CPU ranks a GPT-2 with dropout
    trains other losses than without. Trainer's own trains the same, with as many exchanges.
    """
    if not uses_fsdp(run) or not is_true(fsdp_section(run).get("activation_checkpointing")):
        return
    if run["gradient_checkpointing"]:
        yield problem(run, "gradient_checkpointing", "is on in fsdp_config too", "false in fsdp_config")
    what, fix = "recomputes with other dropout masks than the forward", "false, with --gradient_checkpointing"
    if run["use_peft"] and run["lora_dropout"]:
        what, fix = f"{what}, and adapters have dropout", f"{fix}, or --lora_dropout 0"
        yield _of_key(run, "activation_checkpointing", what, fix)
    else:
        yield _of_key(run, "activation_checkpointing", f"{what}, if the model has dropout", fix, "advice")


# --- Rules of one expression ----------------------------------------------------------------------


def _scatters(run: RunSpec) -> bool:
    """True if gradients are reduced, or scattered, in every micro-batch."""
    return run["gradient_accumulation_steps"] == 1 or is_true(gradient_accumulation_kwargs(run).get("sync_each_batch"))


def _finds_unused(run: RunSpec) -> bool:
    """True if DDP searches for unused parameters, by default for adapters alone."""
    asked = run["ddp_find_unused_parameters"]
    return (asked or (asked is None and run["use_peft"])) and not run["ddp_static_graph"]


def _offloads_gradients(run: RunSpec) -> bool:
    """True if `--fsdp` offloads. Only for offload in a YAML does accelerate add gloo."""
    offloads = is_true(mapping(run["fsdp_config"]).get("cpu_offload")) or "offload" in str(run["fsdp"]).split()
    return bool(run["fsdp"]) and offloads and fsdp_version(run) == 2


ROWS = (
    error_row("several_processes_on_a_cpu_need_use_cpu", "use_cpu",
              lambda run: run.world_size > 1 and not run.hardware.cuda and not run["use_cpu"],
              lambda run: f"is off without a GPU: {run.world_size} processes would train separate models", "--use_cpu",
              "Without a GPU and without use_cpu, two ranks train two separate models into one folder."),
    error_row("static_graph_needs_accumulation_one", "ddp_static_graph",
              lambda run: run["ddp_static_graph"] and not _scatters(run) and run.world_size > 1 and _uses_ddp(run),
              "cannot be combined with gradient_accumulation_steps {gradient_accumulation_steps}",
              "leave it out, or raise per_device_train_batch_size until accumulation is 1",
              "DDP's static graph expects a reduction in the first backward: with accumulation it aborts."),
    error_row("reentrant_checkpointing_needs_find_unused_off", "gradient_checkpointing_kwargs",
              lambda run: mapping(run["gradient_checkpointing_kwargs"]).get("use_reentrant")
              and run["gradient_checkpointing"] and _finds_unused(run) and _uses_ddp(run),
              "use_reentrant fails with ddp_find_unused_parameters",
              "gradient_checkpointing_kwargs '{{\"use_reentrant\": false}}', or --ddp_find_unused_parameters false",
              "`Expected to mark a variable ready only once` in the first backward, even of one process."),
    error_row("bf16_compression_needs_nccl", "ddp_comm_hook",
              lambda run: run["ddp_comm_hook"] == "bf16" and _uses_ddp(run) and not on_gpu(run),
              "bf16 needs NCCL, and NCCL needs GPUs", "--ddp_comm_hook fp16, or leave it out",
              "`TypeError: BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+`"),
    error_row("backends_have_their_processes", "ddp_backend",
              lambda run: run.explicit("ddp_backend") and run["ddp_backend"]
              and run.engine.kind == "single" and run.world_size == 1,
              "is for several processes, and this run has one", "leave it out",
              "`Default process group has not been initialized`"),
    error_row("backends_have_their_hardware", "ddp_backend",
              lambda run: run["ddp_backend"] not in (None, "gloo", "mpi") and not on_gpu(run),
              "{ddp_backend} needs GPUs", "leave it out: gloo is used on a CPU",
              "`Your assigned backend nccl is not available, please use gloo`"),
    advice_row("nccl_timeout_is_an_argument", "NCCL_TIMEOUT", lambda run: "NCCL_TIMEOUT" in run.place.environment,
           "sets no timeout", "--ddp_timeout SECONDS",
           "Nothing reads NCCL_TIMEOUT: the process group's timeout is ddp_timeout."),
    advice_row("fsdp2_scatters_every_micro_batch", "accelerator_config",
           lambda run: fsdp_version(run) == 2 and run.world_size > 1 and not _scatters(run),
           "leaves gradients whole on each GPU until the last micro-batch",
           '{{"gradient_accumulation_kwargs": {{"sync_each_batch": true}}}}',
           "Trainer defers FSDP2's reduce-scatter to the last micro-batch: each GPU holds whole 16-bit gradients."),
    error_row("fsdp2_shards_are_known_to_the_optimizer", "optim",
              lambda run: fsdp_version(run) == 2
              and run["optim"] in ("adafactor", "adagrad", *legal.names("bitsandbytes_optimizers")),
              "{optim} does not work on FSDP2's shards", "--optim adamw_torch_fused",
              "`bitsandbytes.optimizer_update_32bit.default does not have a sharding strategy`: shards are DTensors. "
              "Adafactor mixes them with its own: `aten.add_.Tensor got mixed torch.Tensor and DTensor`. Adagrad makes "
              "its state before accelerate exchanges the parameters: `KeyError` in the first step."),
    error_row("offloaded_gradients_are_clipped_over_gloo", "fsdp_config",
              lambda run: _offloads_gradients(run) and run["max_grad_norm"]
              and run.hardware.cuda and "gloo" not in str(run["ddp_backend"]),
              "cannot add up the norm of gradients in host RAM over NCCL",
              "fsdp_offload_params: true in an Accelerate YAML, without --fsdp; or --max_grad_norm 0",
              "`No backend type associated with device type cpu`, in the first step: NCCL is for GPUs."),
)  # fmt: skip
