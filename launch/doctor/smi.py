"""What nvidia-smi prints. One that hangs, or prints what is not understood, is asked only once."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

from launch.host import processes

SECONDS = 8  # it never returns when the driver hangs; its first call may take some seconds
_VERSION = re.compile(r"\d+(\.\d+)+")
_LONGEST = 160  # characters of garbage that are shown


@dataclass(frozen=True)
class SmiOutput:
    """Rows that nvidia-smi printed, or why it failed. Both are empty if there is no nvidia-smi."""

    rows: tuple[tuple[str, ...], ...] = ()
    problem: str = ""

    def numbers(self) -> list[list[float]]:
        """The rows that hold numbers only: for a part of a GPU (MIG), the memory reads [N/A]."""
        return [[float(cell) for cell in row] for row in self.rows if all(_is_number(cell) for cell in row)]


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII) is not None


@cache
def driver() -> SmiOutput:
    """The driver's version on each GPU. Whoever asks for more asks for this first."""
    text, problem = _ask("--query-gpu=driver_version", "--format=csv,noheader,nounits")
    rows = tuple(row for row in _cells(text) if _VERSION.fullmatch(row[0]))
    if not problem and text.strip() and not rows:
        shown = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split())[:_LONGEST])
        problem = f"nvidia-smi printed what is not understood: {shown}"
    return SmiOutput(rows, problem)


@cache
def smi_rows(query: str) -> SmiOutput:
    """The rows for all GPUs, whatever CUDA_VISIBLE_DEVICES says."""
    text, problem = nvidia_smi(query, "--format=csv,noheader,nounits")
    return SmiOutput(_cells(text), problem)


def nvidia_smi(*arguments: str) -> tuple[str, str]:
    """Its output, and what is wrong if it fails. Both are empty if there is no nvidia-smi."""
    return ("", driver().problem) if driver().problem else _ask(*arguments)


def forget() -> None:
    """Ask again from now on."""
    driver.cache_clear()
    smi_rows.cache_clear()


def _cells(text: str) -> tuple[tuple[str, ...], ...]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return tuple(tuple(cell.strip() for cell in line.split(",")) for line in lines)


def _ask(*arguments: str) -> tuple[str, str]:
    if shutil.which("nvidia-smi") is None:
        return "", ""
    with processes.group() as started:  # inside a hanging driver it may survive even SIGKILL
        process = subprocess.Popen(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        try:
            output, errors = (stream.decode(errors="replace") for stream in process.communicate(timeout=SECONDS))
        except subprocess.TimeoutExpired:
            return "", f"nvidia-smi did not return within {SECONDS} s: the driver or a GPU hangs"
    if process.returncode:
        return "", f"nvidia-smi failed: {' '.join((output + errors).split())[:_LONGEST]}"
    return output, ""
