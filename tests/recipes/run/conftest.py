"""A --config file for the tests of a run."""

import pytest


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write
