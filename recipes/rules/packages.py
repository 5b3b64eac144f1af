"""Optional packages that the run needs. Rules look for them without importing them."""

from __future__ import annotations

from recipes import legal
from recipes.rules.facts import available, missing, of_train_py, problem, rule, uses_deepspeed
from recipes.run import nearest


@rule
def deepspeed_is_installed(run):
    """`ImportError: DeepSpeed is not available`, after every process has started."""
    if not uses_deepspeed(run):
        return
    if run.hardware.platform != "linux":
        yield problem(
            run, "recipe", f"needs DeepSpeed, which does not run on {run.hardware.platform}", "--recipe standard"
        )
    elif not available(run, "deepspeed"):
        yield missing(run, "recipe", "deepspeed")


@rule
def liger_is_installed(run):
    """`ImportError: You have set use_liger_kernel to True but liger-kernel ... is not available`"""
    if run["use_liger_kernel"] and not run.hardware.liger:
        yield missing(run, "use_liger_kernel", "liger-kernel")


@rule
def quantised_loading_is_installed(run):
    """`Using bitsandbytes 4-bit quantization requires bitsandbytes`, or `PEFT is not installed`."""
    for name, package in (("load_in_4bit", "bitsandbytes"), ("use_peft", "peft")):
        if run[name] and not available(run, package):
            yield missing(run, name, package)


@rule
@of_train_py
def metrics_are_installed(run):
    """`ModuleNotFoundError: No module named 'sklearn'`, after the first evaluation."""
    evaluates = run["eval_strategy"] != "no" and not run["prediction_loss_only"]
    if run["task"] == "sequence_classification" and evaluates and not available(run, "sklearn"):
        yield missing(run, "eval_strategy", "scikit-learn")


# Beginnings of `optim` -> import name, distribution. The first entry that matches counts.
_OPTIMIZER_PACKAGES = (
    (("galore_",), "galore_torch", "galore-torch"),
    (("apollo_",), "apollo_torch", "apollo-torch"),
    (("lomo", "adalomo"), "lomo_optim", "lomo-optim"),
    (("grokadamw",), "grokadamw", "grokadamw"),
    (("schedule_free_",), "schedulefree", "schedulefree"),
    (("stable_adamw",), "optimi", "torch-optimi"),
    (("adamw_anyprecision",), "torchdistx", "torchdistx"),
    (("adamw_torch_4bit", "adamw_torch_8bit"), "torchao", "torchao"),
    (("adamw_torch_xla",), "torch_xla", "torch_xla"),
    (("adamw_torch_npu_fused",), "torch_npu", "torch_npu"),
    (("adamw_bnb_8bit", "adamw_8bit", "ademamix", "lion_", "paged_", "rmsprop_bnb"), "bitsandbytes", "bitsandbytes"),
)


@rule
def optimizer_is_installed(run):
    """`ImportError: You need to install ... in order to use ... optimizers`, as training begins."""
    for names, module, distribution in _OPTIMIZER_PACKAGES:
        if run["optim"].startswith(names):
            if not available(run, module):
                yield missing(run, "optim", distribution, f"{run['optim']} needs the package {distribution}")
            return


# Import names that differ from the name in `report_to`. An empty one needs no package.
_REPORT_MODULES = {"azure_ml": "azureml", "flyte": "flytekit", "kubeflow": ""}


@rule
def reports_go_somewhere(run):
    """`... is not supported, only ... are supported`, or `... requires ... to be installed`."""
    asked = run["report_to"]
    for name in [asked] if isinstance(asked, str) else asked or []:
        if name in ("all", "none"):
            continue
        if name not in legal.report_integrations():
            near = nearest(name, legal.report_integrations())
            several = " ".join(name.split(","))
            fix = (
                f"--report_to {several if ',' in name else near}"
                if near or "," in name
                else "one of none, " + ", ".join(legal.report_integrations())
            )
            yield problem(run, "report_to", f"{name!r} is not an integration that Trainer reports to", fix)
            continue
        module = _REPORT_MODULES.get(name, name)
        alternative = name == "tensorboard" and available(run, "tensorboardX")
        if module and not available(run, module) and not alternative:
            yield missing(run, "report_to", module, f"{name} needs the package {module}")
