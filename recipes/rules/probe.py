"""The probe builds the objects that a training builds, and reports the libraries' refusals.

The probe needs no GPU and no process group. Rules judge GPU-dependent settings. An object
that cannot be built becomes a problem in the library's own words, with the source of the value.
`arguments_for` builds the arguments of the training itself, and words a refusal in the same way.
"""

import contextlib
import copy
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recipes import legal
from recipes.errors import Problem, UserError, raise_errors
from recipes.legal.libraries import ABSENT
from recipes.quiet import silence
from recipes.rules.facts import (
    accelerator_config,
    deepspeed_section,
    fsdp_version,
    is_true,
    known_config,
    mapping,
    uses_deepspeed,
    uses_fsdp,
)
from recipes.rules.training import pushed_to
from recipes.run import RunSpec, Settings
from recipes.run.engine import launch_environment

_STEPS = 1000  # assumed for a training whose length depends on its data
# Variables of a distributed launch: if they are set, a constructor would wait for other processes.
_OF_RANKS = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_|PMI_|OMPI_COMM_|MV2_COMM_|MPI_LOCAL")


def probe(run: RunSpec) -> list[Problem]:
    """Return the installed libraries' objections to a run. The import takes seconds.

    In a launched process, the probe reads the launcher's variables instead of parsing the YAML as
    the launcher would. Variables and the state of accelerate and transformers are restored.
    """
    found: list[Problem] = []
    with silence(), _state_as_before():
        _construct(run, found)
    return found


def require_constructible(run: RunSpec) -> None:
    """Raise `UserError` if the libraries refuse anything, with all their refusals."""
    raise_errors(probe(run))


def arguments_for(run: RunSpec, args_class: type, own: Settings | None = None) -> Any:
    """Build TrainingArguments or a subclass from a run's values and the values in `own`, which win.

    Raises `UserError` with the message of the class if the class refuses a value.
    """
    try:
        args = args_class(**{**run.training_arguments(), **(own or {})})
    except (TypeError, ValueError) as error:
        raise UserError(refused_by_library(run, error)) from error  # keeps the subclass's traceback
    # One process drives one GPU. If a process sees several GPUs, Trainer would use DataParallel
    # and multiply the global batch by the number of GPUs.
    args._n_gpu = min(args.n_gpu, 1)
    return args


def probe_in_child(run: RunSpec) -> list[Problem]:
    """Run `probe` in a child process: imports and output stay there, a crash becomes a problem."""
    import multiprocessing  # here, so that `recipes check` without --deep does not wait for it

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryFile() as noise:
        child = context.Process(target=_answer, args=(run, sender, noise.fileno()), daemon=True)
        child.start()
        child.join()  # no deadlock: the answer is smaller than the pipe's buffer
        noise.seek(0)
        printed = noise.read().decode(errors="replace").strip()
    if child.exitcode == 0:
        return receiver.recv()
    last = printed.rpartition("\n")[2].strip()[:300] or "no output"
    what = f"a library crashed while it checked the settings (exit code {child.exitcode}): {last}"
    return [Problem("settings", what, "reinstall the library that the message names", "the installed libraries")]


def _answer(run: RunSpec, sender: Any, printed: int) -> None:
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    if str(run["optim"]) in ("adamw_torch", "adamw_torch_fused", "sgd", "adafactor"):  # others need these packages
        for name in (*ABSENT, "peft"):
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    sender.send(probe(run))


@contextlib.contextmanager
def _state_as_before() -> Iterator[None]:
    """Clear the libraries' process-wide state and variables such as RANK. Restore both on exit."""
    from unittest.mock import patch

    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations import deepspeed

    with contextlib.ExitStack() as stack:
        for state in (AcceleratorState, GradientState, PartialState):
            stack.enter_context(patch.dict(state._shared_state, clear=True))
        stack.enter_context(patch.dict(os.environ))
        for name in filter(_OF_RANKS.match, list(os.environ)):
            del os.environ[name]
        with patch.object(deepspeed, "_hf_deepspeed_config_weak_ref", deepspeed._hf_deepspeed_config_weak_ref):
            yield


def _construct(run: RunSpec, found: list[Problem]) -> None:
    """Construct the libraries' objects for the run. Add each refusal to `found`."""

    @contextlib.contextmanager
    def attempt(file: str = "", content: Mapping[str, Any] | None = None, about: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not (isinstance(error, ImportError) and run.place.is_elsewhere):  # another machine may have the package
                found.append(refused_by_library(run, error, file, content, about))

    yaml, args, optimizer, config = run.outer_engine or run.engine, None, None, {}
    of_engine = (run.engine.source, run.engine.raw) if run.engine.kind in ("deepspeed", "fsdp") else ("", {})
    if run["deepspeed"] or deepspeed_section(run).get("deepspeed_config_file"):
        of_engine = (run.engine.json_source, run.engine.json or {})
    elif run["fsdp"] and run["fsdp_config"]:
        own = run["fsdp_config"]
        of_engine = (own if isinstance(own, str) else "--fsdp_config", mapping(own))
    if yaml.raw and Path(yaml.source).is_file() and not run.place.launched and not run.place.own_script:
        with attempt(yaml.source, yaml.raw):
            os.environ.update(_launch(run))
        if found:
            return
    _enter_engine(run)
    with attempt(*of_engine):
        args = _arguments(run)
    if args is None:
        return
    with attempt(about="report_to hub_model_id output_dir"):
        _check_names(run, args)
    with attempt(*of_engine):
        _check_sizes(run, args, found)
    with attempt(*of_engine, about="torch_compile_mode"):
        _check_plugins(args)
    with attempt(*of_engine):
        config = _deepspeed_config(run, args, found) if args.deepspeed_plugin else {}
    with attempt(about="optim_args adam_beta1 adam_beta2 optim"):
        optimizer = _optimizer(args)
    with attempt(*of_engine if config else ("", {}), about="lr_scheduler_kwargs lr_scheduler_type"):
        if optimizer is not None:
            _schedule(args, optimizer, config)


# --- Constructions, in the order of a training ----------------------------------------------------


def _launch(run: RunSpec) -> Mapping[str, str]:
    """Return the variables that `accelerate launch` (`launch_command`) exports for the YAML."""
    from accelerate.commands import launch
    from accelerate.utils import launch as environments

    yaml, nodes = run.outer_engine or run.engine, run.world_size // max(1, run.local_world_size)
    words = ["--config_file", yaml.source, "--machine_rank", "1"]  # rank 0 of several would look for a free port
    if yaml.num_processes is not None and yaml.num_processes != yaml.raw.get("num_processes"):
        words += ["--num_processes", str(yaml.num_processes)]
    if nodes > 1:
        words += ["--num_machines", str(nodes), "--main_process_ip", "127.0.0.1"]
    if yaml.raw.get("main_process_port") is None:
        words += ["--main_process_port", "0"]  # 0: any free port
    parsed = launch.launch_command_parser().parse_args([*words, "train.py"])
    args, defaults, precision_of_file = launch._validate_launch_command(parsed)
    if args.use_deepspeed:
        names = [*defaults.deepspeed_config.keys(), *(["mixed_precision"] if precision_of_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(names)
        return environments.prepare_deepspeed_cmd_env(args)[1]
    if args.multi_gpu or args.use_fsdp or args.use_megatron_lm:
        return environments.prepare_multi_gpu_env(args)
    return environments.prepare_simple_launcher_cmd_env(args)[1]


def _enter_engine(run: RunSpec) -> None:
    """Set the variables of the engine that trains, even if the launch names another engine."""
    shards = {"ACCELERATE_USE_DEEPSPEED": uses_deepspeed(run), "ACCELERATE_USE_FSDP": uses_fsdp(run)}
    for name in [name for name, used in shards.items() if not used]:
        os.environ.pop(name, None)
    if any(shards.values()) and not shards.keys() & set(os.environ) and not run["deepspeed"] and not run["fsdp"]:
        os.environ.update(launch_environment(run.engine))
    for name in ("FSDP_SYNC_MODULE_STATES", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        if os.environ.get(name, "").lower() == "true":
            os.environ[name] = "false"  # if true, accelerate would ask for the current GPU


def _arguments(run: RunSpec) -> Any:
    """Build TrainingArguments for a CPU, with the run's world size but without a process group."""
    from transformers import TrainingArguments

    class Unjoined(TrainingArguments):
        world_size = property(lambda self: run.world_size)

    # Left out: tf32 needs a GPU; ddp_backend and use_configured_state need a process group.
    given = {name: value for name, value in run.training_arguments().items() if name not in ("tf32", "ddp_backend")}
    if is_true(accelerator_config(run).get("use_configured_state")):
        given["accelerator_config"] = {**accelerator_config(run), "use_configured_state": False}
    if run["deepspeed"] and (content := run.engine.json):
        given["deepspeed"] = _with_defaults(content).config
    return Unjoined(**{**copy.deepcopy(given), "use_cpu": True})


def _check_names(run: RunSpec, args: Any) -> None:
    """Check the DataLoader's settings, the trackers' names, and the Hub repository's name."""
    from huggingface_hub.utils import validate_repo_id
    from torch.utils.data import DataLoader
    from transformers.integrations import get_reporting_integration_callbacks

    names = ("num_workers", "persistent_workers", "multiprocessing_context", "prefetch_factor")
    DataLoader([0], **{name: getattr(args, f"dataloader_{name}") for name in names})  # type: ignore[arg-type]
    get_reporting_integration_callbacks(args.report_to)
    if args.push_to_hub:
        validate_repo_id(pushed_to(run))


def _check_sizes(run: RunSpec, args: Any, found: list[Problem]) -> None:
    """Check the ParallelismConfig of the arguments or the environment. If its sizes do not fit the
    processes and the engine, add a problem to `found`.
    """
    from accelerate import DistributedType, ParallelismConfig

    config = args.parallelism_config
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        config = ParallelismConfig()
    if config is None:
        return
    type_ = DistributedType.MULTI_GPU if run.hardware.cuda else DistributedType.MULTI_CPU
    type_ = DistributedType.FSDP if uses_fsdp(run) else DistributedType.DEEPSPEED if uses_deepspeed(run) else type_
    engine = {"is_fsdp2": fsdp_version(run) == 2, "multi_device": type_ == DistributedType.MULTI_GPU}
    try:
        config._validate_accelerator(
            SimpleNamespace(num_processes=run.world_size, distributed_type=type_, **engine)  # type: ignore[arg-type]
        )
    except ValueError as error:
        fix = "use FSDP2, and sizes whose product is --num_processes; or leave the setting out"
        found.append(Problem("parallelism_config", str(error), fix, run.engine.parallelism.source))


def _check_plugins(args: Any) -> None:
    """Build the Accelerator's plugins from arguments and variables. Check the compiler's mode."""
    from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin, TorchDynamoPlugin

    GradientAccumulationPlugin(**{**(args.accelerator_config.gradient_accumulation_kwargs or {}), "num_steps": 1})
    if args.torch_compile:
        TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
        if args.torch_compile_mode and args.torch_compile_backend == "inductor":
            from torch._inductor import list_mode_options

            list_mode_options(args.torch_compile_mode)
    if args.fsdp_plugin_args is not None:
        FullyShardedDataParallelPlugin(**{**args.fsdp_plugin_args, "sync_module_states": False})
    elif "ACCELERATE_USE_FSDP" in os.environ:
        FullyShardedDataParallelPlugin()


def _deepspeed_config(run: RunSpec, args: Any, found: list[Problem]) -> dict[str, Any]:
    """Return the DeepSpeed JSON with its "auto" values filled in. Add a problem to `found` for each
    value that contradicts the arguments. If no value does, DeepSpeed's own class checks the JSON.
    """
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers.integrations.deepspeed import propagate_args_to_deepspeed

    class Config(DeepSpeedConfig):
        def _configure_train_batch_size(self) -> None:
            # Every process of an autotp_size group counts, but only one per shared sequence.
            self.world_size = run.batch.data_parallel * tensor // self._param_dict.get("sequence_parallel_size", 1)
            super()._configure_train_batch_size()

    if args.fp16 and not run.hardware.cuda and not get_accelerator().is_fp16_supported():
        raise ValueError("fp16: type fp16 is not supported on your device.")  # as DeepSpeedEngine does
    plugin, written = args.deepspeed_plugin, HfDeepSpeedConfig(run.engine.json or {})
    tensor = max(1, plugin.deepspeed_config.get("tensor_parallel", {}).get("autotp_size", 0))
    plugin.set_mixed_precision(args.mixed_precision)
    if not run["deepspeed"]:
        if written.config:
            plugin.hf_ds_config = _with_defaults(plugin.deepspeed_config)
        propagate_args_to_deepspeed(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)), args)
    config, content = plugin.hf_ds_config, plugin.hf_ds_config.config
    for name in ("total_num_steps", "warmup_num_steps") if args.max_steps <= 0 else ():
        if written.get_value(f"scheduler.params.{name}") is not None:
            content["scheduler"]["params"][name] = "auto"  # the length of the data decides
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=known_config(run).get("hidden_size") or 1))
    try:
        config.trainer_config_finalize(args, model, args.max_steps if args.max_steps > 0 else _STEPS)
    except ValueError:
        if not config.mismatches:
            raise
    for line in (line.removeprefix("- ") for line in config.mismatches):
        path = line.removeprefix("ds ").partition("=")[0]
        section, _, name = path.rpartition(".")
        line = re.sub(r"warmup_steps=\d+$", f"warmup_steps={args.warmup_steps:g}", line)  # as written, such as 0.1
        left_out = written.config and written.get_value(path) is None
        what = f"{'is left out, and its default ' * bool(left_out)}contradicts the arguments: {line}"
        fix = f'"{name}": "auto"' + f" in {section}" * bool(section)
        source = run.engine.json_source if written.config else run.engine.source
        if not written.config and name == "enabled":  # for fp8, accelerate writes bf16, which Trainer compares
            path, what = "mixed_precision", f"{args.mixed_precision} is not the type that the arguments ask for: {line}"
            fix = "use bf16 or fp16, the same in the YAML and in the arguments"
        found.append(Problem(path, what, fix, source))
    if not config.mismatches:
        if not run["deepspeed"]:  # accelerate adds the batch to the JSON that a YAML names
            content.setdefault("train_micro_batch_size_per_gpu", args.per_device_train_batch_size)
        Config(copy.deepcopy(content))
    return content


def _with_defaults(content: dict[str, Any]) -> Any:
    """Return a DeepSpeed JSON with DeepSpeed's defaults for the keys of clipping, precision,
    optimizer and schedule that the JSON lacks. Trainer fills in "auto", and compares written values
    with its arguments. A missing key gets DeepSpeed's default whatever the arguments say.
    """
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    config = HfDeepSpeedConfig(content)
    defaults = {"gradient_clipping": GRADIENT_CLIPPING_DEFAULT, "bf16.enabled": False, "fp16.enabled": False}
    for section, class_of in (("optimizer", _optimizer_class), ("scheduler", _scheduler_class)):
        if section in config.config:
            parameters = inspect.signature(class_of(config.config[section])).parameters.values()
            defaults |= {f"{section}.params.{one.name}": one.default for one in parameters if one.default != one.empty}
    highest = "scheduler.params.warmup_max_lr"
    if config.get_value(highest, defaults.get(highest)) is not None:
        defaults.pop("optimizer.params.lr", None)  # the schedule sets the lr
    for path, value in defaults.items():
        section, name = config.find_config_node(path)
        if section is not None:
            section.setdefault(name, list(value) if isinstance(value, tuple) else value)
    return config


def _optimizer_class(section: dict[str, Any]) -> Any:
    """Return DeepSpeed's optimizer class for a GPU. The CPU classes have the same defaults."""
    import torch
    from deepspeed.ops import adam, lamb, lion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    name, params = section["type"], section.setdefault("params", {})
    own = {"adam": adam.FusedAdam, "adamw": adam.FusedAdam, "lamb": lamb.FusedLamb, "lion": lion.FusedLion}
    if name.lower() in own and not params.get("torch_adam"):
        return own[name.lower()]
    of_torch = {"adam": "AdamW", "adamw": "AdamW", "adagrad": "Adagrad"}.get(name.lower(), name)
    unknown = [object] if name.lower() in DEEPSPEED_OPTIMIZERS else []  # for optimizers of mup and DeepSpeed
    return getattr(torch.optim, of_torch, *unknown)


def _scheduler_class(section: dict[str, Any]) -> Any:
    import torch
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules, section["type"], None) or getattr(torch.optim.lr_scheduler, section["type"])


def _optimizer(args: Any) -> Any:
    """Build the optimizer for one small layer, as `Trainer.create_optimizer` does."""
    import torch
    from transformers import Trainer
    from transformers.trainer_optimizer import is_optimizer_factory

    if args.optim_target_modules:  # only the real model has modules with these names
        args = copy.copy(args)
        args.optim_target_modules = "all-linear"
    model = torch.nn.Linear(1, 1)
    cls, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)  # type: ignore[arg-type]
    if is_optimizer_factory(cls):
        return cls()(model, **settings)
    weights: Any = [{"params": list(model.parameters()), "weight_decay": args.weight_decay}]
    for name in ("params", "model", "optimizer_dict"):
        weights = settings.pop(name, weights)
    return cls(weights, **settings)


def _schedule(args: Any, optimizer: Any, config: Mapping[str, Any]) -> None:
    """Build Trainer's schedule, or a DeepSpeed JSON's schedule as `_scheduler_from_config` does."""
    from transformers import get_scheduler

    steps = args.max_steps if args.max_steps > 0 else _STEPS
    settings, warmup = args.lr_scheduler_kwargs, args.get_warmup_steps(steps)
    if "scheduler" not in config:
        get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps, scheduler_specific_kwargs=settings)
    else:
        _scheduler_class(config["scheduler"])(optimizer, **config["scheduler"]["params"])


# --- Refusals -------------------------------------------------------------------------------------


def refused_by_library(
    run: RunSpec, error: Exception, file: str = "", content: Mapping[str, Any] | None = None, about: str = ""
) -> Problem:
    """Turn a library's error into a problem. The subject is a setting that the user wrote and the
    message names. Otherwise, with a `file`, the subject is a key of the file's `content` whose name
    or value is in the message, else the file. Without a `file`, the subject is a setting in
    `about` ("a b c") that the user wrote, else a setting in the message, else TrainingArguments.
    """
    text = " ".join(str(error).split()).partition(" [type=")[0]  # without pydantic's details for programmers
    lists = re.search(r"(?<!most )one of|Choose between|Input should be ['\d]|are supported|Please set", text)
    choice = "use one of the values that the message names" if lists else ""
    what, words = f"{text[:400]} ({type(error).__name__})", re.findall(r"\w+", text)
    spelled = [name for word in words for name in (word, f"dataloader_{word}", f"ddp_{word}", f"{word}_strategy")]
    named = [name for name in spelled if name in legal.trainer_fields()]
    written = [*dict.fromkeys(filter(run.explicit, named))]
    named = [name for name in named if name in words or name.startswith("dataloader_")]
    if not written and file:
        items, lower = list(_items(content or {})), {word.lower() for word in words if not word.isdigit()}
        named = [key for key, _ in items if any(key == word or key.endswith(f"_{word}") for word in lower)]
        named += [key for key, value in items if str(value).lower() in lower]
        fix = f"{choice}, in {file}" if choice else f"correct {file}"
        return Problem(next(iter(named), Path(file).name), what, fix, file)
    if lacks := re.search(r"_schedule\(\) missing .*: '(\w+)'", text):
        fix = f"--lr_scheduler_kwargs '{{\"{lacks[1]}\": N}}'"
        return Problem("lr_scheduler_type", what, fix, run.setting("lr_scheduler_type").source)
    subject = next(filter(run.explicit, [*written, *about.split()]), "")
    subject = subject or next((name for name in named if "_" in name), "")
    if subject:
        fix = f"change {' or '.join(written)}" if written[1:] else f"{choice or 'use another value'}, or leave it out"
        return Problem(subject, what, fix, run.setting(subject).source)
    files = [name for name in ("deepspeed", "fsdp_config", "accelerator_config") if run.explicit(name)]
    fix = f"correct the content of --{files[0]}" if files else "leave out the flags that the message is about"
    return Problem("TrainingArguments", what, fix, "transformers")


def _items(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a file's content and of its sections."""
    for key, value in content.items():
        yield str(key), value
        yield from _items(value) if isinstance(value, Mapping) else ()
