"""The results of a run and, with `--measure`, the timings of its steps.

After the training, one of its steps is repeated in pairs, without changing the weights: once with
the collectives of gradients, once on the bare model without collectives. The difference is the
exposed communication time. A step without collectives takes as long as with a perfect network. If
this step takes longer while other processes run than alone, the difference is contention.
"""

import platform
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean, median, median_low

import torch
import torch.distributed as dist
from accelerate.utils import gather_object, is_compiled_module

from launch.host import memory
from launch.host.world import World
from launch.output import record
from launch.training.model import parameter_count
from launch.training.trainer import RecipeTrainer
from recipes.planner.speed import exchanges, flops_are_known, model_flops
from recipes.run import Json, RunSpec, with_flags
from recipes.run.spec import BATCH_FIELDS
from recipes.scaling.causes import bus_bytes
from recipes.scaling.timings import PARTS, WARM_UP_STEPS, Timing, append, name_of

# Disturbances change a short step most, so a short step is repeated more often, for one second.
_TRIES, _MOST_PAIRS, _SECONDS_OF_PAIRS = 5, 40, 1.0
# Jobs that measure the same training may differ in output, length, batch and recipe.
_OF_ONE_JOB = {*record.NO_DIFFERENCE, *BATCH_FIELDS, "measure", "recipe", "max_steps", "num_train_epochs"}


def add_timings_row(run: RunSpec, world: World, trainer: RecipeTrainer, results: Json) -> bool:
    """Add a row to the file of `--measure`. Return False if no step was timed. All ranks call this.
    Raises `UserError` if the file cannot be written.
    """
    if trainer.timing.steps_trained <= WARM_UP_STEPS:
        return False
    row = _row(run, trainer, results)
    world.decide(lambda: append(run["measure"], [row]))
    return True


def _row(run: RunSpec, trainer: RecipeTrainer, results: Json) -> Timing:
    timing, device, world = trainer.timing, trainer.args.device, run.world_size
    steps = timing.steps_trained - WARM_UP_STEPS
    name = f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
    own = {"host": platform.node(), "device": name, "peak": results["peak_memory_bytes"]}
    ranks = gather_object([{**own, **{part: timing.seconds[part] / steps for part in PARTS}}])
    parts: Json = {part: fmean(rank[part] for rank in ranks) for part in PARTS if part != "communication"}
    step_time = sum(parts.values())
    for part in ("logging", "saving"):  # one process writes; count the wait of the others as writing too
        longest = max(rank[part] for rank in ranks)
        parts["other"] -= min(parts["other"], longest - parts[part])
        parts[part] = longest

    waits, known = [rank["data_wait"] for rank in ranks], Json()
    if world > 1 and max(waits):
        known["data_wait_rank"] = waits.index(max(waits))
    # ZeRO and FSDP are left out, because their models cannot run without collectives.
    if run.engine.kind in ("single", "ddp") and timing.first_batches[0]:
        exchanging, bare = _repeated(trainer, step_time)
        pairs = zip(_slowest(exchanging), _slowest(bare), strict=True)
        exposed = max(0.0, median(longer - shorter for longer, shorter in pairs)) if world > 1 else 0.0
        parts["communication"] = min(exposed, parts["backward"])
        parts["backward"] -= parts["communication"]
        alone = [median(tries) for tries in bare]
        known["no_sync_step"] = median_low(alone) + parts["optimizer"]
        known["no_sync_step_max"] = max(alone) + parts["optimizer"]
        known["pass_overhead"] = _pass_overhead(trainer, run.batch.micro)
        if world > 1:
            slowest = ranks[rank := alone.index(max(alone))]
            known |= {"slowest_rank": rank, "slowest_host": slowest["host"], "slowest_device": slowest["device"]}

    if timing.sent and world > 1:  # a single process calls collectives too, but sends nothing
        known["syncs"], known["collectives"], size = timing.sent
        known["sync_bytes"] = size
        if known["syncs"]:
            bandwidth, known["link_latency"] = _link(size // known["collectives"], world, device)
            known["link_bandwidth"] = bandwidth
            if "communication" in parts:
                known["overlap"] = max(0.0, 1 - parts["communication"] * bandwidth / bus_bytes(size, world))

    tokens = results.get("tokens_per_second")
    return Timing(
        num_processes=world,
        epoch_time=step_time * steps,
        name=name_of(run),
        epoch=results.get("epoch"),
        samples=steps * run.batch.total,
        accuracy=results.get("eval_accuracy"),
        recipe=run["recipe"],
        global_batch=run.batch.total,
        micro_batch=run.batch.micro,
        accumulation=run.batch.accumulation,
        tokens=round(tokens * results["step_time"] * steps) if tokens else None,
        loss=results.get("eval_loss"),
        step_time=step_time,
        **parts,
        data_wait_max=max(waits),
        **known,
        peak_memory=max(rank["peak"] for rank in ranks),
        timed=f"{steps} steps",
        hardware=str(run.hardware),
        engine=run.engine.kind,
        workers=run["dataloader_num_workers"],
        cores=max(1, run.hardware.cores // run.local_world_size),
        logging_steps=trainer.state.logging_steps,
        save_steps=trainer.state.save_steps if run["save_strategy"] == "steps" else None,
        eval_steps=trainer.state.eval_steps if run["eval_strategy"] == "steps" else None,
        command=_command(run),
    )


def _command(run: RunSpec) -> str:
    """Return the user's flags except output, length, batch and recipe, which may vary by job."""
    given = {name: setting.value for name, setting in sorted(run.given.items()) if name not in _OF_ONE_JOB}
    return shlex.join(with_flags([], given))


def _repeated(trainer: RecipeTrainer, step_time: float) -> list[list[list[float]]]:
    """Repeat the first timed step with and without gradient collectives, timed by `_compared`."""
    timing, wrapped = trainer.timing, trainer.model_wrapped
    bare, state = getattr(wrapped, "module", wrapped), trainer.accelerator.gradient_state
    if is_compiled_module(wrapped):  # as a whole, around DDP, which the attribute `module` leaves out too
        bare = torch.compile(bare, **trainer.accelerator.state.dynamo_plugin.to_kwargs())
    batches, items = timing.first_batches

    def step(model: torch.nn.Module) -> None:
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            state._set_sync_gradients(last)
            syncs = last or state.plugin_kwargs.get("sync_each_batch", False)
            trainer.training_step(model if syncs else bare, dict(batch), items)
        wrapped.zero_grad()

    pairs = max(_TRIES, min(_MOST_PAIRS, round(_SECONDS_OF_PAIRS / (2 * step_time))))
    return _compared([partial(step, wrapped), partial(step, bare)], pairs, trainer.args.device)


def _pass_overhead(trainer: RecipeTrainer, size: int) -> float | None:
    """Estimate the seconds of a micro-batch that do not depend on its size, by timing half of it.
    None for a micro-batch of one row, and for packed rows under FlashAttention (`cu_seq_lens_q`).
    """
    (batch, *_), items = trainer.timing.first_batches
    if size < 2 or any(len(tensor) != size for tensor in batch.values()):
        return None
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=True)
    model = getattr(model, "module", model)  # accelerate leaves DDP around compiled layers

    def once(examples: int) -> None:
        trainer.training_step(model, {name: tensor[:examples] for name, tensor in batch.items()}, items)
        model.zero_grad()

    tries = _compared([partial(once, size), partial(once, size // 2)], _TRIES, trainer.args.device)
    long, short = (median(map(median, ranks)) for ranks in tries)
    return max(0.0, long - size * (long - short) / (size - size // 2))


def _link(size: int, world: int, device: torch.device) -> tuple[float, float]:
    """Return the bus bandwidth (bytes/s) and the latency (s) of the link, from all-reduces of
    `size` bytes and of a few bytes, while nothing else runs.
    """
    tensors = (torch.zeros(max(1, size // 4), device=device), torch.zeros(2, device=device))
    for tensor in tensors:
        dist.all_reduce(tensor)  # the first one sets up connections
    large, small = _compared([partial(dist.all_reduce, tensor) for tensor in tensors], _TRIES, device)
    return bus_bytes(size, world) / median(_slowest(large)), median(_slowest(small))


def _slowest(ranks: list[list[float]]) -> list[float]:
    """Return the seconds of the slowest process in each try."""
    return [max(took) for took in zip(*ranks, strict=True)]


def _compared(works: Sequence[Callable[[], object]], tries: int, device: torch.device) -> list[list[list[float]]]:
    """Return seconds as `[function][process][try]`, with functions in the order of `works`. The
    functions take turns, and all processes begin a function together.
    """
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    own: list[list[float]] = [[] for _ in works]
    for number in range(tries):
        for place in sorted(range(len(works)), reverse=number % 2 == 0):
            if dist.is_initialized():
                dist.barrier()
            finish()
            started = time.perf_counter()
            works[place]()
            finish()
            own[place].append(time.perf_counter() - started)
    return [list(ranks) for ranks in zip(*gather_object([own]), strict=True)]


# --- The results of a run -------------------------------------------------------------------------


def results(run: RunSpec, trainer: RecipeTrainer, metrics: dict[str, float]) -> Json:
    """Return Trainer's metrics, with speed in tokens, steady step time, peak memory and MFU. Times
    are in seconds, memory in bytes. All ranks call this, because their tokens are added up.
    """
    state, timing = trainer.state, trainer.timing
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    steps, cuda = timing.steps_trained, torch.cuda.is_available()
    # The count leaves the device only here. Processes that share examples count the same tokens.
    tokens = torch.as_tensor(trainer.tokens_seen, device=trainer.args.device).reshape(1)
    tokens_per_step = int(trainer.accelerator.gather(tokens).sum()) / run.engine.parallelism.sharing / max(1, steps)
    entries: Json = {
        **metrics,
        "global_step": state.global_step,
        "model_step": trainer.model_step,
        "best_step": state.best_global_step,
        "epoch": state.epoch,
        "world_size": trainer.accelerator.num_processes,
        "num_parameters": trainer.num_parameters,
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "step_time": timing.step_time,
        "step_time_off": timing.step_time_off,
        "exchanges_per_step": exchanges(run, run.batch.accumulation),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else memory.peak(cuda=False),
        "peak_memory_of": "allocated on the first GPU" if cuda else "of RAM in the first process",
        "log_history": state.log_history,
    }
    if steps < state.global_step:  # Trainer adds only losses since the resume; transformers 5.17 divides by all steps
        entries["train_loss"] = _mean_loss(state.log_history)
    if timing.step_time:
        entries["samples_per_second"] = run.batch.total / timing.step_time
        entries["tokens_per_second"] = tokens_per_step / timing.step_time
        entries["mfu"] = utilisation(run, trainer, entries["tokens_per_second"])
    return entries


def _mean_loss(history: list[dict[str, float]]) -> float | None:
    """Return the mean of the logged losses, each weighted by its steps; None if none was logged."""
    logged = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    total = sum((step - before) * loss for (before, _), (step, loss) in pairwise([(0, 0.0), *logged]))
    return total / logged[-1][0] if logged else None


def utilisation(run: RunSpec, trainer: RecipeTrainer, tokens_per_second: float) -> float | None:
    """Return the model FLOPs utilisation: the share of the GPUs' bf16 peak. None if the peak is
    unknown, and for classifiers, unpacked rows, adapters, and models of unknown FLOPs.
    """
    peak, model = run.hardware.peak_flops, trainer.model
    is_whole = run["packing"] and run["task"] == "causal_lm" and not run["use_peft"]
    if peak is None or not is_whole or not flops_are_known(model.config):
        return None
    parameters = trainer.num_parameters
    if not getattr(model.config, "tie_word_embeddings", False):
        parameters -= parameter_count(model.get_input_embeddings())  # a lookup costs no FLOPs
    length = getattr(trainer.train_dataset, "attended", run["max_length"])
    return tokens_per_second * model_flops(parameters, model.config, length) / (peak * run.world_size)
