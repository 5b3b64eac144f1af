"""Plans do not depend on what was measured on the machine that tests them."""

import pytest


@pytest.fixture(autouse=True)
def nothing_was_measured_here(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
