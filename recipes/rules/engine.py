"""Rules about the engine, its Accelerate YAML, DeepSpeed JSON or `fsdp_config`, and DDP's settings.

These rules find settings with which a run silently trains something else, settings that depend on
the GPU, and runs that hang or fail after minutes. `probe.py` compares arguments and DeepSpeed JSON.
"""

from collections.abc import Iterable, Iterator, Mapping

from recipes import legal
from recipes.errors import Problem, plural
from recipes.rules.facts import (
    accelerator_config,
    advice,
    deepspeed_section,
    fsdp_version,
    in_json,
    in_yaml,
    is_true,
    known_config,
    mapping,
    mixed_precision,
    rule,
    syncs_each_micro_batch,
    uses_deepspeed,
    uses_fsdp,
)
from recipes.rules.table import advice_row, error_row
from recipes.run import RunSpec, nearest
from recipes.run.command_line import belongs
from recipes.run.engine import from_environment, from_yaml
from recipes.run.files import Json, launch_with, shipped

_ON_GPUS = 'If the run will train on GPUs, check it with `recipes check --gpu "H100 80GB"`'

# --- The processes --------------------------------------------------------------------------------


@rule
def single_engine_starts_one_process(run):
    """`distributed_type: NO` ignores --num_processes. So does MULTI_CPU without mpirun."""
    if run.world_size > 1 and run.engine.raw and run.engine.kind in ("single", "multi_cpu"):
        what = f"type {run.engine.raw.get('distributed_type') or 'NO'} starts one process, not {run.world_size}"
        is_chosen = run.engine.source != str(shipped(run.recipe.engine))  # if not, a launch can name another YAML
        fix = "distributed_type: MULTI_GPU, also for several CPU processes"
        yield in_yaml(run, "distributed_type", what, fix, "error" if is_chosen else "advice")


@rule
def each_process_has_a_gpu(run):
    """More processes than GPUs end in `CUDA error: invalid device ordinal`, or in NCCL's
    `Duplicate GPU detected`; with gloo, processes may share a GPU. A single process leaves other
    GPUs idle: DataParallel is switched off, because it would multiply the global batch.
    """
    here, gpus = min(run.local_world_size, -(-run.world_size // _machines(run))), len(run.hardware.gpus)
    if run.hardware.cuda and run["ddp_backend"] != "gloo" and here > gpus:
        what = f"{here} processes would run on this machine, which has only {plural(gpus, 'GPU')}"
        yield Problem("num_processes", what, f"--num_processes {gpus * _machines(run)}", "the launch")
    if run.engine.kind == "single" and run.world_size == 1 < gpus and not run["use_cpu"]:
        fix = f"{launch_with('standard.yaml')} --num_processes {gpus}"
        yield Problem("num_processes", f"is 1, so {gpus - 1} of {gpus} GPUs stay idle", fix, "the launch", "advice")


@rule
def machines_share_the_processes(run):
    """The launcher rounds down: for 3 processes on 2 machines it starts 1 on each, and both hang.
    Without an address, every machine looks for a host named None until a timeout.
    """
    machines = _machines(run)
    if run.world_size % machines:
        what = f"{run.world_size} cannot be divided evenly over {machines} machines"
        fix = f"num_processes: {-(-run.world_size // machines) * machines}, counted over all machines"
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
    """--deepspeed, or a launch with FSDP or DeepSpeed, replaces the recipe's engine. For example, a
    memory recipe then does not offload. In a plain DDP launch, train.py starts the recipe's own
    engine. On a CPU, `sharded` does not shard.
    """
    own = from_yaml(shipped(run.recipe.engine))
    if own.kind == "fsdp" and not run.hardware.can_shard and run.engine.kind not in ("fsdp", "deepspeed"):
        yield advice("recipe", "shards nothing on a CPU: the run is plain DDP", _ON_GPUS)
        return
    wanted = {"deepspeed": uses_deepspeed(run), "fsdp": run.engine.kind == "fsdp"}
    if not wanted.get(own.kind, True):
        what, fix = f"but the launch uses {run.engine.title}", launch_with(run.recipe.engine)
        if run["deepspeed"]:
            what, fix = f"but --deepspeed selects {run.engine.title}", "leave --deepspeed out"
        yield advice("recipe", f"is made for {own.title}, {what}", fix)


@rule
def one_engine_is_asked_for(run):
    """With `--fsdp` and DeepSpeed, a run ends after loading the model: `Using --fsdp xxx together
    with --deepspeed is not possible`. `--deepspeed` silently replaces the launch's FSDP or JSON.
    """
    if run["fsdp"] and uses_deepspeed(run):
        yield Problem("fsdp", "cannot be combined with DeepSpeed", "leave one of the two out")
    launch = run.outer_engine or from_environment(run.place.environment)
    if not run["deepspeed"] or launch is None:
        return
    asked = mapping(launch.raw.get("deepspeed_config")).get("deepspeed_config_file")
    asked = launch.title if launch.kind == "fsdp" else asked
    if asked and asked != run["deepspeed"]:
        fix = f"leave --deepspeed out, or start the run with {launch_with('standard.yaml')}"
        yield Problem("deepspeed", f"silently replaces {asked}, which the launch asks for", fix)


@rule
def fsdp_needs_ranks_with_gpus(run):
    """On a CPU, an FSDP YAML or `--fsdp` is silently ignored: plain DDP shards nothing. One process
    with `--fsdp` ends in `Using fsdp only works in distributed training` once the model is loaded.
    """
    shards_nothing = "shards nothing on a CPU: the run is plain DDP"
    if run["fsdp"] and run.engine.kind == "single" and run.world_size == 1:
        fix = launch_with("sharded.yaml") if run.hardware.can_shard else "leave it out: it shards nothing on a CPU"
        yield Problem("fsdp", "needs a distributed launch", fix)
    elif run.hardware.can_shard or uses_deepspeed(run):
        return
    elif run.engine.kind == "fsdp":
        fix = f"distributed_type: MULTI_GPU. {_ON_GPUS}"
        yield in_yaml(run, "distributed_type", f"FSDP {shards_nothing}", fix, "advice")
    elif run["fsdp"]:
        yield advice("fsdp", shards_nothing, f"leave it out. {_ON_GPUS}")


# --- DDP ------------------------------------------------------------------------------------------


def _uses_ddp(run: RunSpec) -> bool:
    """True if DDP wraps the model. Several processes use DDP even with `distributed_type: 'NO'`."""
    if uses_deepspeed(run) or uses_fsdp(run):
        return False
    return run.engine.kind == "ddp" or run.engine.kind.startswith("multi_") or run.world_size > 1


_OF_DDP = "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph gradient_as_bucket_view"


@rule
def ddp_settings_need_ddp(run):
    """Under DeepSpeed, FSDP and a single process the run ignores DDP's settings silently."""
    ignored = [name for name in _OF_DDP.split() if run.explicit(name) and run[name] is not None]
    ignored += ["ddp_comm_hook"] if run["ddp_comm_hook"] != "no" else []
    for name in ignored if not _uses_ddp(run) else ():
        yield advice(name, f"is ignored: the engine is {run.engine.title}, not DDP", "leave it out")


# --- The Accelerate YAML --------------------------------------------------------------------------

# Section -> the distributed type that reads it; None: the rules allow the section with every type.
_SECTIONS = {
    "deepspeed_config": "deepspeed",
    "fsdp_config": "fsdp",
    "dynamo_config": None,
    "parallelism_config": None,
    "mpirun_config": None,
    "fp8_config": None,
    "megatron_lm_config": "megatron_lm",
}
# Unknown keys here get only advice: `accelerate config` writes keys that the launcher ignores.
_LOOSE_SECTIONS = ("fp8_config", "megatron_lm_config")


def _sections(run: RunSpec) -> Iterator[tuple[str, Json]]:
    """Yield the name and content of each section that this distributed type reads."""
    for name, type_ in _SECTIONS.items():
        if type_ in (None, run.engine.kind) and isinstance(run.engine.raw.get(name), Mapping):
            yield name, run.engine.raw[name]


@rule
def yaml_keys_are_known(run):
    """An unknown key at the top ends the launcher: `The config file at ... had unknown keys`.

    In a section, accelerate drops the key: `zero_stge: 3` is stage 2, `fsdp_verion: 2` is FSDP1.
    """
    for name, section in (("", run.engine.raw), *_sections(run)):
        known = legal.names(f"{name} of accelerate_yaml" if name else "accelerate_yaml")
        what = "is not a key of the Accelerate YAML" + (f"; accelerate drops it silently from {name}" if name else "")
        for key in (key for key in map(str, section) if key not in known):
            yield in_yaml(run, key, what, _instead(key, known), "advice" if name in _LOOSE_SECTIONS else "error")


def _instead(key: str, known: Iterable[str]) -> str:
    """Return the fix for an unknown key: the argument, section or name to write instead."""
    argument = key if key in legal.settings() else belongs(key)
    if argument in legal.settings():
        return f"set the flag --{argument} instead"
    near = nearest(key, known) or next((name for name in known if name.endswith(f"_{key}")), "")
    if near and near != key:
        return near
    if key in legal.names("accelerate_yaml"):
        return f"write {key} at the top level, not indented"
    sections = {name: section for section in _SECTIONS for name in legal.names(f"{section} of accelerate_yaml")}
    if key in sections:
        return f"write {key} below {sections[key]}, indented"
    return nearest(key, sections) or nearest(key, legal.settings()) or "use one of " + ", ".join(sorted(known))


@rule
def sections_are_read(run):
    """accelerate ignores a section of another distributed type and prints no warning."""
    for name, type_ in _SECTIONS.items():
        if run.engine.raw.get(name) and type_ not in (None, run.engine.kind):
            what = f"is not read with distributed_type {run.engine.raw.get('distributed_type')}"
            yield in_yaml(run, name, what, f"distributed_type: {type_.upper()}", "advice")


@rule
def no_is_quoted(run):
    """YAML reads NO without quotes as false. With `distributed_type: NO`, accelerate then requires
    num_processes. `mixed_precision: no` ends in `'bool' object has no attribute 'lower'`.
    """
    for name, is_fatal in (("mixed_precision", True), ("distributed_type", not run.engine.num_processes)):
        if run.engine.raw.get(name) is False:
            what, severity = "`no` without quotes is false in YAML", "error" if is_fatal else "advice"
            yield in_yaml(run, name, what, f"{name}: '{'no' if name == 'mixed_precision' else 'NO'}'", severity)


@rule
def offload_happens(run):
    """The launcher does not forward an NVMe path, so DeepSpeed swaps to ./none/zero_stage_3. Below
    stage 3, DeepSpeed accepts offload_param_device and does not offload.
    """
    section, fix = deepspeed_section(run), "use a deepspeed_config_file with nvme_path, or device cpu"
    for name in ("offload_optimizer_device", "offload_param_device"):
        device = str(section.get(name, "none")).lower()
        if device == "nvme":
            yield in_yaml(run, name, "the launcher does not forward the NVMe path to the processes", fix)
        if device != "none" and name == "offload_param_device" and str(section.get("zero_stage", 2)) != "3":
            yield in_yaml(run, name, "needs ZeRO stage 3", f"zero_stage: 3, or {name}: none", "advice")


# --- The DeepSpeed JSON ---------------------------------------------------------------------------


@rule
def deepspeed_json_keys_are_known(run):
    """DeepSpeed refuses a misspelt key in a section, but ignores `gradient_cliping` at the top."""
    known = legal.names("deepspeed_json")
    for key in (run.engine.json or {}) if known else ():
        if key not in known:
            fix = nearest(str(key), known) or "use a key that DeepSpeed's documentation lists"
            yield in_json(run, str(key), "is not a key that DeepSpeed reads", fix)


@rule
def sixteen_bits_are_trained_by_a_stage(run):
    """Stage 0 (FP16_UnfusedOptimizer) creates the optimizer's state in a step without gradients.
    Adam then counts one step too many: on two CPU ranks losses differ from those of DDP and ZeRO-1.
    """
    precision = mixed_precision(run)
    if run.engine.kind == "deepspeed" and run.engine.zero_stage == 0 and precision in ("bf16", "fp16"):
        subject, report = ("zero_optimization.stage", in_json) if run.engine.json else ("zero_stage", in_yaml)
        what = f"stage 0 gives different losses than DDP in {precision}: the optimizer starts one step ahead"
        yield report(run, subject, what, "use stage 1, or an engine without DeepSpeed")


# --- DeepSpeed's tensor parallelism: on two and four CPU ranks its losses equal those of DDP ------


# Source: `AutoTP.supported` of deepspeed/module_inject/auto_tp.py, asserted once a model is loaded.
_NOT_DIVIDED = ("deberta", "flaubert", "fsmt", "gpt2", "led", "longformer", "xlm", "xlnet")


@rule
def tensor_parallelism_fits_the_run(run):
    """Tensor parallelism with ZeRO-3 ends in `Check batch related parameters`. Adapters are
    divided too, which ends in `KeyError: Parameter containing` or `loss must be a scalar tensor`.

    Seen on two CPU ranks: `dispatch_batches` multiplies the global batch by the group's size.
    Without `average_tokens_across_devices`, Trainer divides by a token count not summed over ranks.
    accelerate gathers a group's equal predictions from each of its processes, and drops the last:
    eval_loss is right, but eval_accuracy counts some examples twice and others never.
    """
    written = mapping((run.engine.json or {}).get("tensor_parallel")).get("autotp_size", 1)
    if type(written) is not int or written < 1:  # Trainer divides by this value (`get_tp_size`)
        what = f"needs a whole number above 0, got {written!r}"
        yield in_json(run, "tensor_parallel.autotp_size", what, '"autotp_size": 1, or leave tensor_parallel out')
    if not uses_deepspeed(run) or run.engine.parallelism.autotp == 1:
        return
    size, where = run.engine.parallelism.sharing, "under DeepSpeed's tensor parallelism"
    if run.engine.zero_stage == 3:
        what = "cannot be combined with ZeRO stage 3"
        yield in_json(run, "tensor_parallel.autotp_size", what, '"stage": 2, or leave tensor_parallel out')
    if (kind := known_config(run).get("model_type")) in _NOT_DIVIDED:
        yield in_json(run, "tensor_parallel.autotp_size", f"cannot divide a {kind} model", "leave tensor_parallel out")
    evaluates = run["task"] == "sequence_classification" and run["eval_strategy"] != "no"
    dispatches = is_true(accelerator_config(run).get("dispatch_batches"))
    for name, is_wrong, what, fix in (
        ("use_peft", run["use_peft"], "adapters cannot be trained", "leave tensor_parallel out for LoRA"),
        ("eval_strategy", evaluates, "metrics would count some examples twice and others never",
         "leave tensor_parallel out, or --eval_strategy no"),
        ("accelerator_config", dispatches, f"dispatch_batches makes the global batch {size} times as large",
         "leave dispatch_batches out"),
        ("average_tokens_across_devices", not run["average_tokens_across_devices"],
         f"false makes losses and gradients {size} times as large", "leave it out"),
    ):  # fmt: skip
        if is_wrong:
            yield Problem(name, f"{what} {where}", fix)


# --- accelerate's ParallelismConfig: the probe lets accelerate check the sizes -----------------

_INSTEAD = 'leave it out; to divide the model, use "tensor_parallel": {"autotp_size": 2} in a DeepSpeed JSON'


@rule
def sequences_and_models_are_not_divided(run):
    """Sequence parallelism (DeepSpeed's ALST) trains differently from plain DDP. On two CPU ranks,
    gradients were twice as large, so clipping starts earlier; micro-batches weigh the same
    whatever their number of tokens; and attention masks are dropped.

    Context parallelism needs torch's flash or efficient attention, which only GPUs have. No test on
    several GPUs has shown that context parallelism trains the same as DDP.

    tp_size does not shard a model: accelerate raises `Model should undergo tensor parallel`. A
    user's script may load a sharded model. Under DeepSpeed, tp_size processes get the same batch,
    but Trainer counts the batch once per process.
    """
    sizes = run.engine.parallelism
    by_json = f'use a DeepSpeed JSON with "tensor_parallel": {{"autotp_size": {sizes.tp_size}}}'
    refused = {
        "sp_size": ("sequence parallelism multiplies gradients by this size, and clips them afterwards", _INSTEAD),
        "cp_size": ("no test has shown that context parallelism trains the same as DDP on several GPUs", _INSTEAD),
        "tp_size": ("tp_size needs a model loaded with a tp_plan, and this run loads the whole model", by_json),
    }
    if run.place.own_script and not uses_deepspeed(run):
        del refused["tp_size"]
    for name, (why, fix) in refused.items():
        if (size := getattr(sizes, name)) > 1:
            subject = name if sizes.source == "argument" else f"parallelism_config_{name}"
            yield Problem(subject, f"{size} is refused: {why}", fix, sizes.source)


# --- FSDP: the recipe `sharded` uses version 2, which is also Trainer's default -------------------


def _of_key(run: RunSpec, key: str, what: str, fix: str, severity: str = "error") -> Problem:
    """Return a problem about a key, found in --fsdp_config or, if not there, in the YAML."""
    if run["fsdp"] and {key, f"fsdp_{key}"} & set(mapping(run["fsdp_config"])):
        return Problem("fsdp_config", f"{key} {what}", fix, severity=severity)
    return in_yaml(run, f"fsdp_{key}", what, fix, severity)


@rule
def fsdp2_is_chosen(run):
    """The launcher defaults to FSDP1, which Trainer deprecates. An unknown version is read as 1."""
    if uses_fsdp(run) and run.engine.kind == "fsdp" and run.engine.fsdp_version not in (1, 2):
        yield _of_key(run, "version", f"{run.engine.fsdp_version} trains as FSDP1", "use version 2")
    written = dict(_sections(run)).get("fsdp_config")
    if written is not None and str(written.get("fsdp_version", written.get("version", 1))) == "1":
        what = "1, the default if the key is missing, is deprecated"
        yield in_yaml(run, "fsdp_version", what, "fsdp_version: 2", "advice")


@rule
def fsdp2_shards_layer_by_layer(run):
    """If auto_wrap_policy wraps nothing, FSDP2 gathers the whole model at once, and accelerate's
    checkpointing raises a TypeError. SIZE_BASED_WRAP wraps the list of layers (not in the small
    demonstration), which FSDP2 refuses: `fully_shard does not support containers that do not ...`.
    """
    section, fix = run.engine.fsdp, "TRANSFORMER_BASED_WRAP"
    policy = str(section.get("auto_wrap_policy", "NO_WRAP")).upper()
    if fsdp_version(run) != 2 or policy not in ("NO_WRAP", "SIZE_BASED_WRAP"):
        return
    wraps_nothing = policy == "NO_WRAP" or str(section.get("min_num_params")) == "0"
    if wraps_nothing and is_true(section.get("activation_checkpointing")):
        yield _of_key(run, "auto_wrap_policy", f"{policy} leaves no layers for activation_checkpointing", fix)
    elif wraps_nothing:
        yield _of_key(run, "auto_wrap_policy", f"{policy} gathers the whole model at once", fix, "advice")
    elif not run.demonstration:
        yield _of_key(run, "auto_wrap_policy", f"{policy} wraps lists of layers, which fails in FSDP2", fix)


@rule
def fsdp_recomputes_once_and_the_same(run):
    """If FSDP and Trainer both checkpoint activations, the run ends once the model is loaded:
    `activation_checkpointing in FSDP config and ... argument can't both be set to True`.

    accelerate's checkpointing loses the random state: on two CPU ranks it changes the losses of a
    GPT-2 with dropout. Trainer's checkpointing keeps the losses, and adds no collectives.
    """
    if not uses_fsdp(run) or not is_true(run.engine.fsdp.get("activation_checkpointing")):
        return
    if run["gradient_checkpointing"]:
        what = "repeats FSDP's activation_checkpointing"
        yield Problem("gradient_checkpointing", what, "set activation_checkpointing: false in fsdp_config")
    what, fix = "recomputes with other dropout masks than the forward", "set it to false, add --gradient_checkpointing"
    if run["use_peft"] and run["lora_dropout"]:
        what, fix = f"{what}, and adapters have dropout", f"{fix}; or use --lora_dropout 0"
        yield _of_key(run, "activation_checkpointing", what, fix)
    else:
        yield _of_key(run, "activation_checkpointing", f"{what}, if the model has dropout", fix, "advice")


# --- Rules of one expression ----------------------------------------------------------------------


def _scatters(run: RunSpec) -> bool:
    """True if every micro-batch reduces or scatters its gradients."""
    return run["gradient_accumulation_steps"] == 1 or syncs_each_micro_batch(run)


def _finds_unused(run: RunSpec) -> bool:
    """True if DDP searches for unused parameters, as by default with LoRA and checkpointing."""
    asked = run["ddp_find_unused_parameters"]
    return (asked or (asked is None and run["use_peft"])) and not run["ddp_static_graph"]


def _offloads_gradients(run: RunSpec) -> bool:
    """True if `--fsdp` offloads under FSDP2. `--fsdp` adds no gloo; a YAML's offload adds gloo."""
    offloads = is_true(mapping(run["fsdp_config"]).get("cpu_offload")) or "offload" in str(run["fsdp"]).split()
    return bool(run["fsdp"]) and offloads and fsdp_version(run) == 2


ROWS = (
    error_row("a_launch_starts_processes", "num_processes",
              lambda run: run.engine.kind != "single" and run.engine.raw.get("num_processes") == 0
              and not run.engine.num_processes,  # a flag wins over the file
              "is 0: the launcher would start nothing", "write the number of GPUs, counted over all machines",
              "torch's launcher starts nothing and ends in a bare `AssertionError`."),
    error_row("several_processes_on_a_cpu_need_use_cpu", "use_cpu",
              lambda run: run.world_size > 1 and not run.hardware.cuda and not run["use_cpu"],
              lambda run: f"is off without a GPU: {run.world_size} processes would train separate models", "--use_cpu",
              "Without a GPU and without use_cpu, two ranks train two separate models into one folder."),
    error_row("static_graph_needs_accumulation_one", "ddp_static_graph",
              lambda run: run["ddp_static_graph"] and not _scatters(run) and run.world_size > 1 and _uses_ddp(run),
              "cannot be combined with gradient_accumulation_steps {gradient_accumulation_steps}",
              "leave ddp_static_graph out, or raise per_device_train_batch_size until accumulation is 1",
              "DDP's static graph expects a gradient reduction in the first backward: with accumulation it aborts."),
    error_row("reentrant_checkpointing_needs_find_unused_off", "gradient_checkpointing_kwargs",
              lambda run: mapping(run["gradient_checkpointing_kwargs"]).get("use_reentrant")
              and run["gradient_checkpointing"] and _finds_unused(run) and _uses_ddp(run),
              "use_reentrant fails with ddp_find_unused_parameters",
              "--gradient_checkpointing_kwargs '{{\"use_reentrant\": false}}', or --ddp_find_unused_parameters false",
              "The first backward fails, even in one process: `Expected to mark a variable ready only once`."),
    error_row("bf16_compression_needs_nccl", "ddp_comm_hook",
              lambda run: run["ddp_comm_hook"] == "bf16" and _uses_ddp(run) and not run.hardware.cuda,
              "bf16 needs NCCL, and NCCL needs GPUs", "--ddp_comm_hook fp16, or leave it out",
              "On a CPU: `TypeError: BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+`"),
    error_row("backends_have_their_processes", "ddp_backend",
              lambda run: run.explicit("ddp_backend") and run["ddp_backend"]
              and run.engine.kind == "single" and run.world_size == 1,
              "is for several processes, and this run has one", "leave it out",
              "A single process fails: `Default process group has not been initialized`."),
    error_row("backends_have_their_hardware", "ddp_backend",
              lambda run: run["ddp_backend"] not in (None, "gloo", "mpi") and not run.hardware.cuda,
              "{ddp_backend} needs GPUs", "leave it out: gloo is used on a CPU",
              "On a CPU: `Your assigned backend nccl is not available, please use gloo`"),
    advice_row("nccl_timeout_is_an_argument", "NCCL_TIMEOUT", lambda run: "NCCL_TIMEOUT" in run.place.environment,
           "sets no timeout", "--ddp_timeout SECONDS",
           "Nothing reads NCCL_TIMEOUT: the process group's timeout is ddp_timeout."),
    error_row("wandb_uploads_whole_models", "WANDB_LOG_MODEL",
              lambda run: run.place.environment.get("WANDB_LOG_MODEL", "false").lower() not in ("", "false")
              and run.engine.kind in ("deepspeed", "fsdp") and "wandb" in str(run["report_to"]),
              "wandb cannot upload the model of DeepSpeed or FSDP", "unset WANDB_LOG_MODEL",
              "After the last step, rank 0 alone gathers the model: `has no attribute 'save_checkpoint'`, or a hang."),
    advice_row("fsdp2_scatters_every_micro_batch", "accelerator_config",
           lambda run: fsdp_version(run) == 2 and run.world_size > 1 and not _scatters(run),
           "lets FSDP2 keep unsharded gradients on each GPU until the last micro-batch",
           '{{"gradient_accumulation_kwargs": {{"sync_each_batch": true}}}}',
           "Trainer defers FSDP2's reduce-scatter to the last micro-batch: each GPU holds all 16-bit gradients."),
    error_row("fsdp2_shards_are_known_to_the_optimizer", "optim",
              lambda run: fsdp_version(run) == 2
              and run["optim"] in ("adafactor", "adagrad", *legal.names("bitsandbytes_optimizers")),
              "{optim} does not work on FSDP2's shards", "--optim adamw_torch_fused",
              "Shards are DTensors: `bitsandbytes.optimizer_update_32bit.default does not have a sharding strategy`. "
              "Adafactor mixes in plain tensors: `aten.add_.Tensor got mixed torch.Tensor and DTensor`. Adagrad makes "
              "its state before accelerate replaces the parameters: `KeyError` in the first step."),
    error_row("offloaded_gradients_are_clipped_over_gloo", "fsdp_config",
              lambda run: _offloads_gradients(run) and (run["max_grad_norm"] or 0) > 0
              and run.hardware.cuda and "gloo" not in str(run["ddp_backend"]),
              "offloads gradients to host RAM, where NCCL cannot sum their norm for clipping",
              "set --max_grad_norm 0, or replace --fsdp by an Accelerate YAML with fsdp_offload_params: true, "
              "which adds the backend gloo",
              "The first step fails, since NCCL is only for GPUs: `No backend type associated with device type cpu`."),
)  # fmt: skip
