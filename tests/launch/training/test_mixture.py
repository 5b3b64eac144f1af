"""A mixture trains on the same examples in the same order, in whatever world and however often it
was stopped.
"""

import json

import pytest
import yaml

from tests.launch.training.test_other_world import SCRIPT, examples
from tests.support.running import launch_quickly, read_record

pytestmark = pytest.mark.slow

STEADY = "--global_batch_size 12 --max_steps 20 --logging_steps 1".split()


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A file of settings with three parts, of which the two smaller are repeated."""
    folder = tmp_path_factory.mktemp("mixture")
    parts = []
    for name, (size, weight) in {"large": (60, 2), "small": (11, 2), "tiny": (3, 1)}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name} {n}"}) + "\n" for n in range(size)))
        parts.append({"name": str(folder / f"{name}.jsonl"), "weight": weight})
    file = folder / "settings.yaml"
    file.write_text(yaml.safe_dump({"dataset_name": parts}))
    return file


@pytest.mark.parametrize(
    "packing", [["--max_length", "64"], ["--packing", "--max_length", "32"]], ids=["rows", "packed"]
)
def test_a_mixture_goes_on_with_the_next_example_in_another_world(packing, settings, tiny_model, tmp_path):
    words = ["--recipe", "standard", "--model_name_or_path", str(tiny_model), "--config", str(settings), *STEADY]
    words += packing
    whole = launch_quickly(*words, output=tmp_path / "whole", processes=2, script=SCRIPT)
    assert whole.record["status"] == "finished", whole.output
    assert "large.jsonl: 60 examples, 40.0% of all" in " ".join(whole.output.split())
    for processes, stop in ((2, 3), (4, 11), (1, 16), (2, None)):
        told = {"STOP_AT_STEP": str(stop)} if stop else {}
        launch_quickly(*words, output=tmp_path / "parts", processes=processes, script=SCRIPT, env=told)
    assert read_record(tmp_path / "parts")["status"] == "finished"
    assert examples(tmp_path / "parts") == examples(tmp_path / "whole")
