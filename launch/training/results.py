"""The results of a run: speed, memory and model FLOPs utilisation, from counts taken meanwhile."""

from __future__ import annotations

import math

import torch

from launch.host import memory
from launch.training.trainer import RecipeTrainer
from recipes.planner.footprint import optimizer_bytes_per_parameter
from recipes.planner.speed import exchanges, flops_are_known, model_flops
from recipes.run import Json, RunSpec


def results(run: RunSpec, trainer: RecipeTrainer, metrics: dict[str, float]) -> Json:
    """Trainer's own metrics under its names, and with them tokens, steady step time, peak memory
    and MFU.

    Times are in seconds, memory in bytes. All ranks call it: the tokens of all are added up.
    """
    state, meter = trainer.state, trainer.meter
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    steps = meter.steps_trained
    tokens_per_step = _total_tokens(trainer) / run.engine.parallelism.sharing / steps if steps else 0
    entries: Json = {
        **metrics,
        "global_step": state.global_step,
        "model_step": trainer.model_step,
        "best_step": state.best_global_step,
        "epoch": state.epoch,
        "world_size": trainer.accelerator.num_processes,
        "num_parameters": parameter_count(trainer.accelerator.unwrap_model(trainer.model)),
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "step_time": meter.step_time,
        "step_time_off": meter.step_time_off,
        "exchanges_per_step": exchanges(run, run.batch.accumulation),
        **peak_memory(),
        "log_history": state.log_history,
    }
    evaluated = trainer.model_step if trainer.model_step in trainer.per_class else state.global_step
    if per_class := trainer.per_class.get(evaluated):
        entries["per_class"] = per_class
    if not steps:
        entries["train_loss"] = None  # Trainer says 0: an earlier start has trained all of it
    if meter.step_time:
        entries["samples_per_second"] = run.batch.total / meter.step_time
        entries["tokens_per_second"] = tokens_per_step / meter.step_time
        attended = getattr(trainer.train_dataset, "attended", run["max_length"])
        entries["mfu"] = utilisation(run, trainer.model, entries["tokens_per_second"], attended)
    return entries


def _total_tokens(trainer: RecipeTrainer) -> int:
    """Tokens of all ranks: processes that share examples count the same ones.

    Only here does the count leave the device.
    """
    mine = torch.as_tensor(trainer.tokens_seen, device=trainer.args.device).reshape(1)
    return int(trainer.accelerator.gather(mine).sum())


def peak_memory() -> Json:
    """The peak of this process in bytes: allocated on its GPU, else resident in RAM."""
    if torch.cuda.is_available():
        return {"peak_memory_bytes": torch.cuda.max_memory_allocated(), "peak_memory_of": "allocated on the first GPU"}
    return {"peak_memory_bytes": memory.peak(cuda=False), "peak_memory_of": "of RAM in the first process"}


def parameter_count(model: torch.nn.Module, trained_only: bool = False) -> int:
    """Number of parameters: tied ones once, shards whole, two per byte of 4-bit weights."""
    return sum(_size(parameter) for parameter in model.parameters() if parameter.requires_grad or not trained_only)


def _size(parameter: torch.nn.Parameter) -> int:
    if hasattr(parameter, "ds_numel"):  # a shard of ZeRO-3
        return parameter.ds_numel
    of_a_shard = getattr(parameter, "ds_autotp_universal_checkpoint_meta", {})  # a tensor-parallel layer's
    if of_a_shard.get("logical_shape"):
        return math.prod(of_a_shard["logical_shape"])
    return parameter.numel() * (2 if type(parameter).__name__ == "Params4bit" else 1)


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights that are saved: the trained ones."""
    width = max((parameter.element_size() for parameter in model.parameters() if parameter.requires_grad), default=4)
    return parameter_count(model, trained_only=True) * width


def checkpoint_bytes(model: torch.nn.Module, run: RunSpec) -> int:
    """Estimated bytes of a checkpoint: the trained weights, and what the optimizer keeps."""
    of_optimizer = 0 if run["save_only_model"] else optimizer_bytes_per_parameter(run)
    return round(model_bytes(model) + parameter_count(model, trained_only=True) * of_optimizer)


def flops_per_token(model: torch.nn.Module, length: float) -> float:
    """Training FLOPs per token, by the formula of `recipes.planner.speed.model_flops`."""
    parameters = parameter_count(model)
    if not getattr(model.config, "tie_word_embeddings", False):
        parameters -= _size(model.get_input_embeddings().weight)
    return model_flops(parameters, model.config, length)


def utilisation(run: RunSpec, model: torch.nn.Module, tokens_per_second: float, attended: float) -> float | None:
    """Model FLOPs utilisation, of the bf16 peak. None if the hardware or the formula is unknown.

    `attended` is the length of the example that a token belongs to.
    """
    peak = run.hardware.peak_flops
    if peak is None or run["use_peft"] or not run["packing"] or run["task"] != "causal_lm":
        return None
    if not flops_are_known(model.config):
        return None
    return tokens_per_second * flops_per_token(model, attended) / (peak * run.world_size)
