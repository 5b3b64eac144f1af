"""A campaign as its command runs it."""

from __future__ import annotations

import subprocess
import sys

from tests.support.running import ROOT


def campaign(name: str, *words: str) -> str:
    """What `python -m tests.campaigns.NAME` prints. Asserts that it found nothing."""
    command = [sys.executable, "-m", f"tests.campaigns.{name}", "--workers", "1", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
