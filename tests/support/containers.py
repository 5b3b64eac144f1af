"""Stand-ins for apptainer and for pyxis, which check what they are given and run the command.

Each takes its options as the real one does, refuses what that one refuses, and notes what it saw.
Inside, `python3` and `accelerate` are those of a folder that stands for the image: who finds them
has used the image's PATH. What only a site can show: the image, its drivers, its disks.
"""

from __future__ import annotations

import sys
from pathlib import Path

_APPTAINER = """\
#!{python}
import argparse, json, os, signal, subprocess, sys
parser = argparse.ArgumentParser(allow_abbrev=False)  # the options of the real one; others are refused
commands = parser.add_subparsers(required=True)
run = commands.add_parser("exec", allow_abbrev=False)
run.add_argument("--nv", action="store_true")
run.add_argument("--pwd", required=True)
run.add_argument("--bind", action="append", default=[])
run.add_argument("image")
run.add_argument("command", nargs=argparse.REMAINDER)
given = parser.parse_args()
for mount in ",".join(given.bind).split(","):
    source, target, *options = mount.split(":")
    if not os.path.exists(source):
        sys.exit(f"FATAL: container creation failed: mount source {{source}} doesn't exist")
with open({note!r}, "a") as note:
    note.write(json.dumps(vars(given)) + "\\n")
inside = {{**os.environ, "PATH": {path!r}, "IN_CONTAINER": given.image}}
process = subprocess.Popen(given.command, env=inside, cwd=given.pwd)  # in the same process group, as the real one
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda received, frame: process.send_signal(received))
code = process.wait()
sys.exit(128 - code if code < 0 else code)
"""

_SRUN = """\
#!{python}
import json, os, sys
words, options = sys.argv[1:], []
while words and words[0].startswith("--"):  # getopt stops at the first other word
    options.append(words.pop(0))
own = dict(word.split("=", 1) for word in options if word.startswith("--container-"))
if set(own) - {{"--container-image", "--container-mounts", "--container-workdir"}}:
    sys.exit(f"srun: unrecognized option in {{own}}")
for mount in own["--container-mounts"].split(","):
    source, target, *flags = mount.split(":")
    if not (source.startswith(("/", ".")) and target.startswith(("/", ".")) and os.path.exists(source)):
        sys.exit(f"pyxis: --container-mounts: invalid format: {{mount}}")
with open({note!r}, "a") as note:
    note.write(json.dumps(own) + "\\n")
rest = [word for word in options if not word.startswith("--container-")]
path = "export IN_CONTAINER=" + own["--container-image"] + " HOME=/root PATH=" + {path!r} + "; "
assert words[:2] == ["bash", "-c"], words
os.execv({srun!r}, ["srun", *rest, "bash", "-c", path + words[2], *words[3:]])
"""


def image(folder: Path) -> str:
    """A PATH on which `accelerate` and `python3` are those that run the tests, as in an image."""
    inside = folder / "image"
    inside.mkdir(parents=True)
    for name, words in {"python3": "", "accelerate": "-m accelerate.commands.accelerate_cli"}.items():
        (inside / name).write_text(f'#!/bin/bash\nexec {sys.executable} {words} "$@"\n')
        (inside / name).chmod(0o755)
    return f"{inside}:/usr/bin:/bin"


def stand_in(name: str, folder: Path, srun: str = "") -> Path:
    """An executable `apptainer` or `srun` in a folder for the PATH; what it saw is in `note`."""
    text = {"apptainer": _APPTAINER, "srun": _SRUN}[name]
    file = folder / "bin" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    note = str(folder / "note")
    file.write_text(text.format(python=sys.executable, note=note, path=image(folder), srun=srun))
    file.chmod(0o755)
    return file.parent
