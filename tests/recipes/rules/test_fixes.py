"""What a message says to write instead is legal when it is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recipes.rules.check import problems_by_rule
from tests.support.runs import TWO_GPUS, Run, fsdp

OFFLOADED = '--fsdp true --fsdp_config {"cpu_offload":true}'
WHOLE = '--fsdp_config {"state_dict_type":"FULL_STATE_DICT"}'

# rule, a run in which it fires, a part of its fix, and what follows it: flags, or another file
FIXES = [
    ("fp16_needs_a_gpu", Run("--fp16"), "--bf16 instead", {"argv": "--bf16"}),
    ("padding_free_needs_flash_attention", Run("--padding_free --packing false"), "--packing", {"argv": "--packing"}),
    (
        "offloaded_gradients_are_clipped_over_gloo",
        Run(OFFLOADED, world=2, hardware=TWO_GPUS),
        "--max_grad_norm 0",
        {"argv": f"{OFFLOADED} --max_grad_norm 0"},
    ),
    (
        "offloaded_gradients_are_clipped_over_gloo",
        Run(OFFLOADED, world=2, hardware=TWO_GPUS),
        "fsdp_offload_params: true in an Accelerate YAML, without --fsdp",
        {"argv": "", "yaml": fsdp("fsdp_version: 2", "fsdp_offload_params: true")},
    ),
    (
        "sharded_checkpoints_hold_the_optimizer",
        Run(f"--save_only_model --fsdp true {WHOLE.replace('FULL', 'SHARDED')}", world=2, hardware=TWO_GPUS),
        "state_dict_type: FULL_STATE_DICT in fsdp_config",
        {"argv": f"--save_only_model --fsdp true {WHOLE}"},
    ),
]


@pytest.mark.parametrize(("rule", "run", "fix", "followed"), FIXES)
def test_a_fix_is_legal_when_followed(rule, run, fix, followed, tmp_path, monkeypatch):
    found = dict(problems_by_rule(run.resolve(tmp_path, monkeypatch)))
    assert fix in found[rule].fix
    after = replace(run, **followed).resolve(tmp_path, monkeypatch)
    assert not after.problems
    assert rule not in dict(problems_by_rule(after))
    assert [problem for _, problem in problems_by_rule(after) if problem.severity == "error"] == []
