"""The probe: what the installed libraries refuse, in their words, and nothing else."""

import inspect
import os
from dataclasses import replace

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import launch
from transformers.integrations import is_deepspeed_zero3_enabled

from recipes.catalog import RECIPES
from recipes.errors import Problem
from recipes.rules.check import check
from recipes.rules.probe import _optimizer_class, probe, probe_in_child, refused_by_library
from recipes.run.hardware import Hardware
from tests.support.running import python
from tests.support.runs import DS, TWO_GPUS, Run, deepspeed, ds_json, fsdp, groups, resolved, yaml

ZERO_2 = {"zero_optimization": {"stage": 2}}
BASELINE = "--recipe baseline"


def gpus(line: str) -> Run:
    return Run(yaml=fsdp("fsdp_version: 2", line), hardware=TWO_GPUS)


def in_groups(**sizes) -> Run:
    return Run(yaml=groups(**sizes), hardware=TWO_GPUS, world=4)


def scheduler(**section) -> Run:
    return Run(DS, files=ds_json(scheduler=section))


# a run, the subject of the problem, and the library's sentence
BY_LAUNCHER = [
    (Run(yaml=yaml("multi_gpu")), "distributed_type", "'multi_gpu' is not a valid DistributedType"),
    (Run(yaml="compute_environment: LOCAL\ndistributed_type: 'NO'\nnum_processes: 1\n"), "num_processes",
     "had unknown keys (['num_processes'])"),
    (Run(yaml=yaml("MULTI_GPU", "mixed_precision: bfloat16")), "mixed_precision", "Unknown mixed_precision mode"),
    (Run(yaml=yaml("DEEPSPEED", "deepspeed_config: ds.json")), "accelerate.yaml", "has no attribute 'keys'"),
    (gpus("fsdp_sync_module_states: false"), "fsdp_sync_module_states", "set `--fsdp_sync_module_states` to `True`"),
    (Run(yaml=yaml("MULTI_GPU", "dynamo_config:", "  dynamo_backend: inductr")), "dynamo_backend",
     "Unknown dynamo backend: INDUCTR"),
]  # fmt: skip
BY_ARGUMENTS = [
    (Run(f"{BASELINE} --report_to tensorbord"), "report_to", "tensorbord is not supported"),
    (Run(f"{BASELINE} --adam_beta1 1.0"), "adam_beta1", "Invalid beta parameter"),
    (Run(f'{BASELINE} --lr_scheduler_type linear --lr_scheduler_kwargs {{"num_cycles":2}}'), "lr_scheduler_kwargs",
     "unexpected keyword argument 'num_cycles'"),
    (Run(f"{BASELINE} --torch_compile_mode fastest"), "torch_compile_mode", "Unrecognized mode=fastest"),
    (Run(f"{BASELINE} --push_to_hub --hub_model_id my/own/model"), "hub_model_id", "Repo id must be in the form"),
]  # fmt: skip
BY_FSDP = [
    (Run("--fsdp zero3", world=2), "fsdp", "Unknown `fsdp` option: zero3"),
    (gpus("fsdp_state_dict_type: LOCAL_STATE_DICT"), "fsdp_state_dict_type", "does not support LOCAL_STATE_DICT"),
    (in_groups(dp_shard=0), "parallelism_config_dp_shard_size", "dp_shard_size must be at least 1"),
    (in_groups(dp_replicate=2, dp_shard=4), "parallelism_config", "total_size (8) does not match num_processes (4)"),
    (Run(yaml=groups("MULTI_GPU", dp_shard=2), world=2), "parallelism_config", "but got DistributedType.MULTI_CPU"),
]  # fmt: skip
BY_DEEPSPEED = [
    (Run(yaml=deepspeed("zero_stage: 5")), "zero_stage", "Input should be 0, 1, 2"),
    (Run(yaml=deepspeed("deepspeed_config_file: ds.json", "zero_stage: 2"), files=ds_json()), "ds.json",
     "the following accelerate config variables will be ignored"),
    (Run(DS, files={"ds.json": ZERO_2}), "ds.json", "Either train_batch_size or train_micro_batch_size_per_gpu"),
    (Run(DS, files=ds_json(zero_optimization={"stge": 2})), "stge", "Extra inputs are not permitted"),
    (Run(f"{DS} --bf16", files=ds_json(fp16={"enabled": True}, bf16={"enabled": True})), "bf16", "cannot be set to"),
    (scheduler(type="WarmupLr", params={}), "type", "no attribute 'WarmupLr'"),
    (scheduler(type="WarmupLR", params={"warmup_steps": 5}), "warmup_steps", "unexpected keyword argument"),
]  # fmt: skip


def adam(**section) -> dict:
    return ds_json(gradient_clipping="auto", optimizer={"type": "AdamW", **section})


def warmup(**params) -> dict:
    params = {"total_num_steps": "auto", **params}
    return ds_json(gradient_clipping="auto", scheduler={"type": "WarmupDecayLR", "params": params})


# DeepSpeed's own value of what the JSON leaves out, beside that of the arguments.
BY_DEFAULT = [
    (Run(f"{DS} --max_grad_norm 0.5", files=ds_json()), "gradient_clipping", "is left out, and its default"),
    (Run(f"{DS} --bf16", files=ds_json(bf16={})), "bf16.enabled", ": ds bf16.enabled=False vs hf bf16"),
    (Run(f"{DS} --learning_rate 3e-3", files=adam()), "optimizer.params.lr", "lr=0.001 vs hf learning_rate=0.003"),
    (Run(DS, files=adam(params={"lr": "auto", "torch_adam": True})),  # torch's own has another default
     "optimizer.params.weight_decay", "weight_decay=0.01 vs hf weight_decay=0.0"),
    (Run(f"{DS} --warmup_steps 0.1", files=warmup(warmup_max_lr="auto")), "scheduler.params.warmup_num_steps",
     "warmup_num_steps=1000 vs hf warmup_steps=0.1"),
    (Run(DS, files=warmup(warmup_num_steps="auto")), "scheduler.params.warmup_max_lr", "=0.001 vs hf learning_rate"),
]  # fmt: skip
# The value in the JSON or YAML, beside that of the arguments.
BY_COMPARISON = [
    (Run(DS, files=ds_json(optimizer={"type": "Adam", "params": {"lr": 0.3}})), "optimizer.params.lr", "lr=0.3 vs hf"),
    (Run(yaml=deepspeed("gradient_clipping: 0.5")), "gradient_clipping", "=0.5 vs hf max_grad_norm=1.0"),
    (Run("--bf16_full_eval", yaml=deepspeed()), "mixed_precision", "=False vs hf bf16|bf16_full_eval=True"),
    (Run(DS, files=ds_json(tensor_parallel={"autotp_size": 2}, train_batch_size=16), world=2), "train_batch_size",
     "=16 vs hf train_batch_size (calculated)=32"),
]  # fmt: skip
REFUSED = [*BY_LAUNCHER, *BY_ARGUMENTS, *BY_FSDP, *BY_DEEPSPEED, *BY_DEFAULT, *BY_COMPARISON]


@pytest.mark.parametrize(("run", "subject", "sentence"), REFUSED, ids=[case[2][:40] for case in REFUSED])
def test_a_library_error_is_reported_unchanged_with_setting_and_fix(run, subject, sentence, tmp_path, monkeypatch):
    found = probe(run.resolve(tmp_path, monkeypatch))
    assert any(sentence in problem.what for problem in found), found
    assert subject in [problem.subject for problem in found if sentence in problem.what]
    assert all(problem.fix and problem.source and "\n" not in problem.what for problem in found)


def test_all_contradictions_of_a_deepspeed_json_are_reported_at_once(tmp_path, monkeypatch):
    run = Run(DS, files=ds_json(gradient_accumulation_steps=3, gradient_clipping=0.5)).resolve(tmp_path, monkeypatch)
    assert [str(problem) for problem in probe(run)] == [
        "gradient_accumulation_steps: contradicts the arguments: ds gradient_accumulation_steps=3 vs hf "
        'gradient_accumulation_steps=4 (ds.json). Fix: "gradient_accumulation_steps": "auto".',
        "gradient_clipping: contradicts the arguments: ds gradient_clipping=0.5 vs hf max_grad_norm=1.0 (ds.json)."
        ' Fix: "gradient_clipping": "auto".',
    ]


def test_fp8_in_an_accelerate_yaml_with_deepspeed_is_refused_with_bf16_as_the_fix(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "is_fp8_available", lambda: True)  # it looks for packages
    text = deepspeed() + "mixed_precision: fp8\n"
    (problem,) = probe(Run("--bf16 false", yaml=text, hardware=TWO_GPUS).resolve(tmp_path, monkeypatch))
    assert problem.subject == "mixed_precision" and problem.what.startswith("fp8 is not the type")
    assert problem.source.endswith("accelerate.yaml") and "bf16" in problem.fix


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        ("--bf16 --fp16", "change fp16 or bf16"),
        ("--lr_scheduler_type warmup_stable_decay", "--lr_scheduler_kwargs '{\"num_decay_steps\": N}'"),
        ("--warmup_steps -1", "use another value, or leave it out"),
    ],
)
def test_a_fix_names_both_settings_of_a_contradiction_or_the_argument_that_a_schedule_lacks(argv, fix):
    (problem,) = probe(resolved(f"{BASELINE} {argv}"))
    assert (problem.fix, problem.source, problem.severity) == (fix, "command line", "error")


def test_a_librarys_error_that_names_no_setting_is_reported_unchanged():
    absent = ValueError("Your assigned backend mpi is not available, please use gloo")
    assert refused_by_library(resolved("--ddp_backend mpi", 2), absent).subject == "ddp_backend"
    found = refused_by_library(resolved(), ValueError("The config of your backend is not available"))
    assert (found.subject, found.source) == ("TrainingArguments", "transformers")
    assert found.what == "The config of your backend is not available (ValueError)"


# --- What is not refused --------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("hardware", [Hardware(), TWO_GPUS], ids=["CPU", "GPUs"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_library_probe_accepts_every_recipe_with_its_shipped_accelerate_yaml(recipe, hardware, world):
    argv, processes = ["--recipe", recipe], 1 if recipe == "baseline" else world
    run = resolved(argv, processes, hardware=hardware, accelerate_config=RECIPES[recipe]().engine)
    assert probe(run) == []


LEFT_OUT_RIGHTLY = [
    Run(f"{DS} --bf16", files=ds_json()),  # accelerate adds the section
    Run(f"{DS} --learning_rate 3e-3", files=adam(params={"lr": "auto"})),
    Run(DS, files=adam(type="SGD", params={"lr": "auto"})),
    Run(  # the schedule sets the rate
        f"{DS} --learning_rate 3e-3",
        files={"ds.json": {**adam()["ds.json"], **warmup(warmup_max_lr="auto", warmup_num_steps="auto")["ds.json"]}},
    ),
    in_groups(dp_replicate=2, dp_shard=2),
    # Configured by the training before its arguments.
    Run('--accelerator_config {"use_configured_state":true}'),
    # Processes that share a model count each.
    Run(DS, files=ds_json(tensor_parallel={"autotp_size": 2}), world=4),
]


@pytest.mark.parametrize("run", LEFT_OUT_RIGHTLY, ids=lambda run: run.argv)
def test_the_library_probe_accepts_a_json_or_yaml_without_keys_that_a_run_does_not_need(run, tmp_path, monkeypatch):
    assert probe(run.resolve(tmp_path, monkeypatch)) == []


@pytest.mark.parametrize("cls", ["FusedAdam", "DeepSpeedCPUAdam"])
def test_deepspeeds_fused_and_cpu_adam_have_the_defaults_that_check_deep_assumes(cls):
    real = inspect.signature(getattr(pytest.importorskip("deepspeed.ops.adam"), cls)).parameters
    known = inspect.signature(_optimizer_class({"type": "AdamW"})).parameters
    assert all(known[name].default == real[name].default for name in ("lr", "betas", "eps", "weight_decay"))


def test_the_deep_check_accepts_tf32_and_nccl_for_gpus_that_are_on_another_machine():
    run = resolved("--tf32 true --ddp_backend nccl", 2, hardware=TWO_GPUS)
    assert probe(run) == [] and not [found for found in check(run) if found.severity == "error"]


def test_the_library_probe_accepts_a_package_missing_here_if_the_run_trains_on_another_machine(tmp_path, monkeypatch):
    words = "--recipe baseline --optim stable_adamw"
    assert "optimi" in probe(Run(words).resolve(tmp_path, monkeypatch))[0].what
    assert probe(Run(words, elsewhere=frozenset()).resolve(tmp_path, monkeypatch)) == []


def test_the_library_probe_of_a_launched_process_does_not_check_the_accelerate_yaml_again(tmp_path, monkeypatch):
    run = Run(yaml=yaml("MULTI_GPU", "gpu_ids: '0'")).resolve(tmp_path, monkeypatch)
    assert probe(run) and probe(replace(run, place=replace(run.place, launched=True))) == []


# --- What stays behind ----------------------------------------------------------------------------


@pytest.mark.parametrize("yaml_file", ["standard.yaml", "memory_zero3.yaml", "sharded.yaml"])
def test_the_library_probe_leaves_environment_and_accelerates_states_unchanged(yaml_file, tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    run = Run(yaml=yaml_file, hardware=TWO_GPUS, world=2).resolve(tmp_path, monkeypatch)
    states = [state._shared_state for state in (AcceleratorState, GradientState, PartialState)]
    before = dict(os.environ), [dict(state) for state in states]
    assert probe(run) == []
    assert (dict(os.environ), [dict(state) for state in states]) == before
    assert not is_deepspeed_zero3_enabled()


def test_the_library_probe_restores_an_accelerate_state_that_existed_before():
    state = PartialState(cpu=True)
    assert probe(resolved("--recipe fast")) == []
    assert state.device.type == "cpu" and PartialState().num_processes == 1


def test_the_library_probe_in_a_child_process_leaves_torch_unimported_in_the_parent(tmp_path):
    code = (
        "import sys\n"
        "from recipes.rules.probe import probe_in_child\n"
        "from recipes.run import resolve\n"
        "found = probe_in_child(resolve(['--warmup_steps', '-1']))\n"
        "print([problem.subject for problem in found], 'torch' in sys.modules)\n"
    )
    done = python("-c", code)
    assert (done.stdout.strip(), done.stderr) == ("['warmup_steps'] False", "")


def test_a_library_probe_that_dies_is_reported_with_its_last_line_of_stderr(monkeypatch):
    def dies(run):
        os.write(2, b"libcudart.so: cannot open shared object file\n")
        os._exit(7)

    monkeypatch.setattr("recipes.rules.probe.probe", dies)
    (problem,) = probe_in_child(resolved())
    assert isinstance(problem, Problem) and "(exit code 7): libcudart.so: cannot open" in problem.what
