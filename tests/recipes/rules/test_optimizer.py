"""Rules about optimizer and schedule, and what happens without them."""

from __future__ import annotations

import shutil
import sys
import types

import pytest

from recipes import legal
from recipes.rules.check import check
from tests.support.real_failures import arguments, assert_fires, train
from tests.support.runs import DS, EVAL, SGD, Run, deepspeed, ds_json, resolved

pytestmark = pytest.mark.usefixtures("fresh_state")

MIN_LR = "--lr_scheduler_type cosine_with_min_lr"
POLYNOMIAL = "--lr_scheduler_type polynomial --lr_scheduler_kwargs"
PLATEAU = f"--lr_scheduler_type reduce_lr_on_plateau {EVAL} --lr_scheduler_kwargs"
GREEDY = f"--lr_scheduler_type greedy {EVAL} --lr_scheduler_kwargs"
WSD = "--lr_scheduler_type warmup_stable_decay"

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "offload_needs_adamw": (
        Run(f"--recipe memory {SGD}", yaml="memory.yaml"),
        Run("--recipe memory --optim adamw_torch_fused", yaml="memory.yaml"),
    ),
    "deepspeed_json_chooses_the_optimizer": (
        Run(f"{DS} {SGD}", files=ds_json(optimizer={"type": "AdamW"})),
        Run(f"{DS} {SGD}", files=ds_json()),
    ),
    "optimizer_arguments_are_read": (
        Run("--optim adamw_torch --optim_args beta1=0.8"),
        Run("--optim sgd --optim_args momentum=0.9"),
    ),
    "layerwise_optimizers_work_alone": (
        Run("--optim galore_adamw_layerwise --optim_target_modules all-linear", world=2),
        Run("--optim galore_adamw --optim_target_modules all-linear", world=2),
    ),
    "target_modules_are_named": (
        Run("--optim galore_adamw"),
        Run("--optim galore_adamw --optim_target_modules all-linear"),
    ),
    "schedule_needs_evaluation": (
        Run("--lr_scheduler_type reduce_lr_on_plateau"),
        Run(f"--lr_scheduler_type reduce_lr_on_plateau {EVAL}"),
    ),
    "least_rate_is_named_once": (
        Run("--lr_scheduler_type cosine_with_min_lr"),
        Run('--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr_rate":0.1}'),
    ),
    "schedule_settings_are_its_own": (
        Run('--lr_scheduler_type cosine --lr_scheduler_kwargs {"num_cicles":2}'),
        Run('--lr_scheduler_type cosine --lr_scheduler_kwargs {"num_cycles":2}'),
    ),
    "schedule_values_have_their_type": (
        Run('--lr_scheduler_type cosine --lr_scheduler_kwargs {"num_cycles":"a"}'),
        Run('--lr_scheduler_type cosine --lr_scheduler_kwargs {"num_cycles":"2"}'),
    ),
    "schedule_values_are_legal": (
        Run('--lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs {"num_decay_steps":9,"decay_type":"x"}'),
        Run(
            '--lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs {"num_decay_steps":9,"decay_type":"1-sqrt"}'
        ),
    ),
    "lowest_rate_is_below_the_rate": (
        Run(f'{MIN_LR} --lr_scheduler_kwargs {{"min_lr":0.1}}'),
        Run(f'{MIN_LR} --lr_scheduler_kwargs {{"min_lr":1e-6}}'),
    ),
    "deepspeed_takes_no_absolute_rates": (
        Run(f"{DS} --lr_scheduler_type polynomial", files=ds_json()),
        Run("--lr_scheduler_type polynomial"),
    ),
    "warmup_is_used": (
        Run("--lr_scheduler_type constant --warmup_steps 10"),
        Run("--lr_scheduler_type constant_with_warmup --warmup_steps 10"),
    ),
    "warmup_ends_before_the_run": (
        Run("--warmup_steps 10 --max_steps 10"),
        Run("--warmup_steps 9 --max_steps 10"),
    ),
    "one_warmup_step_is_one_step": (Run("--warmup_steps 1.0"), Run("--warmup_steps 0.1")),
    "max_steps_wins_over_epochs": (Run("--max_steps 5 --num_train_epochs 2"), Run("--max_steps 5")),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("offload_needs_adamw", Run("--recipe memory --optim adamw_bnb_8bit", yaml="memory.yaml"), "optim"),
    ("offload_needs_adamw", Run("--recipe memory_zero3 --optim adafactor", yaml="memory_zero3.yaml"), "optim"),
    ("layerwise_optimizers_work_alone", Run("--optim apollo_adamw_layerwise --gradient_accumulation_steps 2"), "optim"),
    ("schedule_values_are_legal", Run("--lr_scheduler_type polynomial --learning_rate 1e-8"), "lr_scheduler_type"),
    (
        "schedule_values_are_legal",
        Run('--lr_scheduler_type inverse_sqrt --lr_scheduler_kwargs {"timescale":0}'),
        "lr_scheduler_kwargs",
    ),
    (
        "schedule_values_are_legal",
        Run(f'--lr_scheduler_type reduce_lr_on_plateau {EVAL} --lr_scheduler_kwargs {{"factor":2}}'),
        "lr_scheduler_kwargs",
    ),
    ("optimizer_arguments_are_read", Run("--optim sgd --optim_args momentum=x"), "optim_args"),
    ("optimizer_arguments_are_read", Run("--optim ademamix --optim_args t_alpha=1.5"), "optim_args"),
    ("schedule_values_have_their_type", Run(f'{POLYNOMIAL} {{"power":"x"}}'), "lr_scheduler_kwargs"),
    ("schedule_values_have_their_type", Run(f'{PLATEAU} {{"patience":null}}'), "lr_scheduler_kwargs"),
    ("schedule_values_have_their_type", Run(f'{PLATEAU} {{"min_lr":[0.1,"a"]}}'), "lr_scheduler_kwargs"),
    ("schedule_values_are_legal", Run(f'{POLYNOMIAL} {{"power":-1}}'), "lr_scheduler_kwargs"),
    ("schedule_values_are_legal", Run(f'{GREEDY} {{"factor":0}}'), "lr_scheduler_kwargs"),
    (
        "schedule_settings_are_its_own",
        Run(f'--lr_scheduler_type greedy {EVAL} --lr_scheduler_kwargs {{"factr":0.5}}'),
        "lr_scheduler_kwargs",
    ),
    (
        "lowest_rate_is_below_the_rate",
        Run(f"--lr_scheduler_type greedy --learning_rate 1e-4 {EVAL}"),
        "lr_scheduler_type",
    ),
    (
        "lowest_rate_is_below_the_rate",
        Run(f'{MIN_LR} --lr_scheduler_kwargs {{"min_lr_rate":2}}'),
        "lr_scheduler_kwargs",
    ),
    (
        "deepspeed_takes_no_absolute_rates",
        Run(f'{MIN_LR} --lr_scheduler_kwargs {{"min_lr":1e-6}}', yaml="memory.yaml"),
        "lr_scheduler_kwargs",
    ),
    (
        "warmup_ends_before_the_run",
        Run(f'{WSD} --max_steps 10 --warmup_steps 2 --lr_scheduler_kwargs {{"num_decay_steps":9}}'),
        "lr_scheduler_kwargs",
    ),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("schedule_settings_are_its_own", Run("--lr_scheduler_kwargs num_cycles=2")),  # nested_settings_can_be_read
    ("offload_needs_adamw", Run(f"{DS} {SGD}", files=ds_json(zero_force_ds_cpu_optimizer=False))),
    ("offload_needs_adamw", Run(f"--recipe memory {SGD}", yaml=deepspeed("zero_stage: 2"))),
    (
        "deepspeed_takes_no_absolute_rates",
        Run(f"{DS} --lr_scheduler_type polynomial", files=ds_json(optimizer={"type": "Adam"})),
    ),
    (
        "deepspeed_takes_no_absolute_rates",
        Run(f'{MIN_LR} --lr_scheduler_kwargs {{"min_lr_rate":0.1}}', yaml="memory.yaml"),
    ),
    ("schedule_values_have_their_type", Run(f'{PLATEAU} {{"min_lr":[0,1e-6]}}')),
    (
        "schedule_values_have_their_type",
        Run('--lr_scheduler_type inverse_sqrt --lr_scheduler_kwargs {"timescale":null}'),
    ),
    ("schedule_values_have_their_type", Run(f'{GREEDY} {{"verbose":"yes"}}')),
    ("optimizer_arguments_are_read", Run("--optim ademamix --optim_args t_alpha=1,alpha=2.5")),
    ("warmup_ends_before_the_run", Run("--max_steps 2")),  # the demonstration's own warm-up
    ("warmup_ends_before_the_run", Run("--warmup_steps 0.5 --max_steps 10")),
]


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its CPU Adam: needs g++")


@pytest.fixture
def galore(monkeypatch):
    """Stand-ins for the optimizers of galore_torch. What they require is Trainer's own decision."""
    import torch
    import transformers.trainer_optimizer

    module = types.ModuleType("galore_torch")
    for name in ("GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit"):
        setattr(module, name, torch.optim.AdamW)
    monkeypatch.setitem(sys.modules, "galore_torch", module)
    monkeypatch.setattr(transformers.trainer_optimizer, "is_galore_torch_available", lambda: True)


LAYERWISE = {"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"}


def test_galore_wants_to_know_its_modules(galore, tmp_path):
    with pytest.raises(ValueError, match="You need to define `optim_target_modules`"):
        train(tmp_path, optim="galore_adamw")
    assert_fires("target_modules_are_named", {"optim": "galore_adamw"})


def test_a_layerwise_optimizer_does_not_accumulate(galore, tmp_path):
    settings = {**LAYERWISE, "gradient_accumulation_steps": 2}
    with pytest.raises(ValueError, match="does not support gradient accumulation"):
        train(tmp_path, **settings)
    assert_fires("layerwise_optimizers_work_alone", settings)


def test_a_layerwise_optimizer_does_not_work_with_ddp(galore, one_rank, tmp_path):
    with pytest.raises(NotImplementedError, match="does not support DDP"):
        train(tmp_path, **LAYERWISE)
    assert_fires("layerwise_optimizers_work_alone", LAYERWISE, world=2)


def test_a_warmup_of_one_point_zero_is_one_step(tmp_path):
    assert arguments(tmp_path, warmup_steps=1.0).get_warmup_steps(100) == 1
    assert arguments(tmp_path, warmup_steps=0.5).get_warmup_steps(100) == 50
    assert_fires("one_warmup_step_is_one_step", {"warmup_steps": 1.0})


def test_max_steps_train_a_part_of_the_epochs(tmp_path):
    settings = dict(max_steps=2, num_train_epochs=5.0)
    assert train(tmp_path, **settings).state.epoch == 1
    assert_fires("max_steps_wins_over_epochs", settings)


@pytest.mark.parametrize(
    ("optimizer", "adamw_mode"), [("SGD", False), ("Adam", False), ("AdamW", True), ("bnb8bit", False)]
)
def test_offload_replaces_the_optimizer_silently(optimizer, adamw_mode, monkeypatch):
    """Accelerate's own decision; only the class that would be compiled from C++ is a stand-in."""
    adam = pytest.importorskip("deepspeed.ops.adam")
    import torch
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    monkeypatch.setattr(adam, "DeepSpeedCPUAdam", lambda groups, **options: ("DeepSpeedCPUAdam", options["adamw_mode"]))
    weight = [torch.nn.Parameter(torch.ones(1))]
    if optimizer == "bnb8bit":
        chosen = pytest.importorskip("bitsandbytes").optim.AdamW(weight, lr=0.1, optim_bits=8)
    else:
        chosen = getattr(torch.optim, optimizer)(weight, lr=0.1)
    assert map_pytorch_optim_to_deepspeed(chosen) == ("DeepSpeedCPUAdam", adamw_mode)
    if optimizer in ("SGD", "bnb8bit"):
        named = {"SGD": "sgd", "bnb8bit": "adamw_bnb_8bit"}[optimizer]
        assert_fires("offload_needs_adamw", {"recipe": "memory", "optim": named})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("adagrad", "unexpected keyword argument 'adamw_mode'"),
        ("lion_32bit", "unexpected keyword argument 'adamw_mode'"),
        pytest.param("adafactor", "incompatible function arguments", marks=needs_compiler),
    ],
)
def test_offload_fails_with_other_optimizers(optimizer, message, tmp_path):
    pytest.importorskip("deepspeed")
    import torch
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed
    from transformers import Trainer

    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    chosen, options = Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim=optimizer))
    with pytest.raises(TypeError, match=message):
        map_pytorch_optim_to_deepspeed(chosen([weight], **options)).step()
    assert_fires("offload_needs_adamw", {"recipe": "memory", "optim": optimizer})


def test_a_beta_of_zero_is_a_float(tmp_path):
    with pytest.raises(ValueError, match="betas must be either both floats"):
        train(tmp_path, adam_beta1=0)
    train(tmp_path, adam_beta1=resolved("--adam_beta1 0")["adam_beta1"])


@pytest.mark.parametrize("schedule", sorted(legal.schedules_without_warmup()))
def test_a_warmup_is_dropped(schedule, tmp_path):
    settings = dict(lr_scheduler_type=schedule, warmup_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=1)
    assert rates(train(tmp_path, evaluates=True, **settings)) == [5e-5, 5e-5]
    assert_fires("warmup_is_used", settings)


def test_a_warmup_longer_than_the_run_never_ends(tmp_path):
    settings = dict(max_steps=2, warmup_steps=10, logging_steps=1)
    assert rates(train(tmp_path, **settings)) == [0, 5e-6]
    assert_fires("warmup_ends_before_the_run", settings)


def test_a_lowest_rate_above_the_rate_raises_it(tmp_path):
    settings = dict(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1.0}, logging_steps=1)
    assert rates(train(tmp_path, **settings)) == [5e-5, pytest.approx(0.5, rel=1e-3)]
    assert_fires("lowest_rate_is_below_the_rate", settings)


def rates(trainer) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


@pytest.mark.parametrize(
    ("schedule", "key"),
    [(schedule, key) for schedule, types in sorted(legal.schedule_types().items()) for key in types],
)
def test_a_schedule_that_fails_on_text_is_found(schedule, key):
    """Every key of every schedule that transformers has, through the real schedule."""
    if schedule in ("constant", "constant_with_warmup"):
        pytest.skip("takes no settings")
    needed = {"warmup_stable_decay": {"num_decay_steps": 2}, "greedy": {"smooth": key == "window_size"}}
    least = {"min_lr_rate": 0.1} if schedule.endswith("with_min_lr") and key != "min_lr" else {}
    given = {**needed.get(schedule, {}), **least, key: "a"}
    if _schedule_fails(schedule, given):
        kwargs = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": given, "eval_strategy": "epoch"}
        errors = [problem for problem in check(resolved(settings=kwargs)) if problem.severity == "error"]
        assert any(key in problem.what for problem in errors)


def _schedule_fails(schedule: str, given: dict) -> bool:
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    try:
        scheduler = get_scheduler(schedule, optimizer, 1, 4, given)
        for step in range(20):
            optimizer.step()
            scheduler.step(*([step * (-1.0) ** step] if schedule in ("reduce_lr_on_plateau", "greedy") else []))
    except (TypeError, ValueError):
        return True
    return False
