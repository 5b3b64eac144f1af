"""The reference: a plain PyTorch training loop, written by hand, without Trainer."""

import itertools
import time
from collections.abc import Iterator

import torch


def loop_steps(
    model, rows, *, steps: int, micro: int, accumulation: int, learning_rate: float, bf16=False, device="cpu"
) -> Iterator[tuple[float, float]]:
    """Train on token ids `rows` [examples, length] with fused AdamW, linear decay and clipping at
    1.

    Yields the loss and the seconds of each step. The clock is read after the loss has reached the
    host.
    """
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (steps - step) / steps))
    whole = len(rows) // micro * micro  # an incomplete last batch is dropped
    batches = itertools.cycle(rows[:whole].split(micro))
    for _ in range(steps):
        started = time.perf_counter()
        total = torch.zeros((), device=device)
        for _ in range(accumulation):
            ids = next(batches).to(device, non_blocking=True)
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                loss = model(input_ids=ids, labels=ids).loss / accumulation
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
        yield total.item(), time.perf_counter() - started
