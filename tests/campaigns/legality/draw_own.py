"""Draws recipes of the user's own: a base and a few changes, now and then wrong ones."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import yaml

from recipes import legal
from tests.campaigns.legality.case import OWN_RECIPE, Case, Change
from tests.campaigns.legality.draw import draw
from tests.campaigns.legality.values import NOT_DRAWN, words_for

_USUAL = (
    "learning_rate lr_scheduler_type warmup_steps optim weight_decay max_grad_norm global_batch_size "
    "per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing packing max_length use_peft "
    "lora_r lora_target_modules bf16 attn_implementation eval_strategy save_strategy save_steps"
).split()
_ODDITIES: dict[str, list[Any]] = {
    "base": ["turbo", "mine.yaml", 3],
    "purpose": ["", 5],
    "engine": ["single.yaml", "standard.yaml", "memory.yaml", "nowhere.yaml"],
    "micro_batch_cap": [1, 4, 0, "4"],
    "learning_rate": [[1e-4, "not below changes"]],
    "changes": [None, [], {"learning_rate": 1e-4}, {"lerning_rate": [1e-4, "a reason"]}],
}


def draw_own(random: Random) -> Case:
    """A plain case with a recipe of its own. The same `random` draws the same case."""
    plain = draw(random)
    kept = [change for change in plain.changes if change.name != "recipe"]
    base = random.choice(("baseline", "standard", "standard", "fast", "fast", "memory", "sharded"))
    changes = [Change("own", "base", base), Change("own", "purpose", "To try it.")]
    everything = sorted(set(legal.settings()) - set(NOT_DRAWN) - {"recipe", "task", "torch_compile"})
    for name in dict.fromkeys([*random.sample(_USUAL, random.choice((0, 1, 2, 3))), random.choice(everything)]):
        value = _typed(words_for(name, random, 0.1)[0])
        reason = "we tried it" if random.random() > 0.03 else ""
        changes.append(Change("own", f"changes.{name}", [value, reason]))
    if random.random() < 0.2:
        key = random.choice(sorted(_ODDITIES))
        changes.append(Change("own", key, random.choice(_ODDITIES[key])))
    if random.random() < 0.7:
        kept = random.sample(kept, min(2, len(kept)))
    return replace(plain, changes=(Change("flag", "recipe", [OWN_RECIPE]), *changes, *kept))


def _typed(word: str) -> Any:
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        return word
