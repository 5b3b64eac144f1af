"""Rules about nested settings, and what happens without them."""

from __future__ import annotations

import pytest

from recipes.rules.check import check
from tests.support.real_failures import arguments, assert_fires, losses, train
from tests.support.runs import DS, Run, ds_json, resolved

pytestmark = pytest.mark.usefixtures("fresh_state")

MISSPELT = '--gradient_checkpointing_kwargs {"use_rentrant":false}'

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "nested_settings_are_known": (
        Run('--accelerator_config {"even_batch":true}'),
        Run('--accelerator_config {"even_batches":true}'),
    ),
    "nested_settings_are_switched_on": (Run(MISSPELT), Run(f"--gradient_checkpointing {MISSPELT}")),
    "nested_settings_can_be_read": (Run(DS), Run(DS, files=ds_json())),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("nested_settings_are_known", Run(f"--gradient_checkpointing {MISSPELT}"), "checkpointing"),
    (
        "nested_settings_are_known",
        Run('--fsdp full_shard --fsdp_config {"fsdp_verion":2}', yaml="standard.yaml"),
        "fsdp",
    ),
]


def test_what_nothing_reads_changes_nothing(tmp_path):
    ignored = dict(fsdp_config={"fsdp_verion": 2}, gradient_checkpointing_kwargs={"use_rentrant": False})
    expected = losses(train(tmp_path / "plain", logging_steps=1))
    assert losses(train(tmp_path / "ignored", logging_steps=1, **ignored)) == expected
    found = check(resolved(f'--fsdp_config {{"fsdp_verion":2}} {MISSPELT}'))
    assert [problem.severity for problem in found if "ignored" in problem.what] == ["advice", "advice"]
    assert "error" not in [problem.severity for problem in found]


def test_unknown_fsdp_keys_pass_the_constructor(tmp_path):
    settings = dict(fsdp="full_shard", fsdp_config={"fsdp_verion": 2})
    assert "verion" in arguments(tmp_path, **settings).fsdp_config
    assert_fires("nested_settings_are_known", settings)
