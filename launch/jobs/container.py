"""A Slurm job's container: what it sees of the cluster's disks, and who runs it.

FILE.sif is run by apptainer (or singularity, with the same options), any other image by pyxis, a
plugin of srun. Both take folders as SRC:DST,SRC:DST, and every folder has the same path inside as
outside, so that no argument of the run has to change. Read in their documentation and source; only
a site can show that its image and its settings (a cleared environment, folders that must not be
mounted) go along with it:
- Inside are the image's own python and accelerate: apptainer takes the PATH of the image, and
  pyxis lets the image's variables win. This package is mounted as it is here.
- Signals: pyxis replaces the task by the command in the container; apptainer passes on every signal
  that it gets where the job has no terminal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.jobs.job import SCRIPT, Job, quoted
from launch.jobs.slurm_flags import Slurm
from recipes.errors import mistake
from recipes.run.files import expanded

_FOLDERS = """\
export HF_HOME=${HF_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/huggingface}
for folder in "$PWD" "$HOME" "$HF_HOME" "${HF_HUB_CACHE-}" "${HF_DATASETS_CACHE-}"; do
    [ -z "$folder" ] || folders+=("$folder")
done
mkdir -p "${folders[@]}" || exit 1
binds=$(printf '%s\\n' "${folders[@]}" | sort -u | sed 's/.*/&:&/' | paste -sd ,)"""

_HOME = """\
# Said again inside, where the image may say otherwise. Packages in the home folder are not the image's.
printf -v home 'export HOME=%q HF_HOME=%q PYTHONNOUSERSITE=1' "$HOME" "$HF_HOME\""""

_APPTAINER = """\
runner=$(command -v apptainer || command -v singularity) || {
    echo "neither apptainer nor singularity is on this node: load a module with it (--module)" >&2
    exit 1
}
container=("$runner" exec --nv --pwd "$PWD" --bind "$binds" """


def lines(job: Job, slurm: Slurm) -> list[str]:
    """Bash that sets `container`, the words before an srun's command, and `home` for inside it."""
    image = slurm.container_image or ""
    script = [f"folders=({' '.join(quoted(folders(job)))})", _FOLDERS]
    more = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in slurm.container_mounts)
    script += [f"binds+={quoted([',' + more])[0]}"] if more else []
    script.append(_HOME)
    if image.endswith(".sif"):
        return [*script, f"{_APPTAINER}{quoted([image])[0]})"]
    words = f'--container-image={quoted([image])[0]} "--container-mounts=$binds" "--container-workdir=$PWD"'
    return [*script, f"container=({words})"]


def folders(job: Job) -> list[str]:
    """What the container must see besides the folders that the job finds out on its node.

    This package, and every folder that a setting of the run names by an absolute path or by one
    that leaves the current folder. The output folder is made if it is not there.
    Raises `UserError` for a path that cannot be mounted.
    """
    package = SCRIPT.parents[1]
    found = [SCRIPT.parent, package / "recipes", Path(job.config).parent]
    if _is_outside(str(job.folder)):
        found.append(_absolute(str(job.folder)))
    named = [job.run[name] for name in job.run.given if name != "output_dir"]  # which need not exist yet
    for value in (*named, [str(file) for file in job.run.recipe.files]):
        found += filter(None, map(_folder, _texts(value)))
    wrong = [str(folder) for folder in [*found, Path.cwd()] if set(",:\n") & set(str(folder))]
    if wrong:
        what = f"{wrong[0]!r} cannot be mounted: it holds , or : or a new line"
        raise mistake("container_image", what, "a path without")
    outermost = (folder for folder in found if not any(other in folder.parents for other in found))
    return list(dict.fromkeys(map(str, outermost)))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        yield from (text for text in value if isinstance(text, str))


def _is_outside(text: str) -> bool:
    """Whether a path leads out of the current folder, wherever that is."""
    return text.startswith(("/", "~/", ".."))


def _folder(text: str) -> Path | None:
    """The folder to mount for a path that a setting names; None if there is no such folder here."""
    if not _is_outside(text):
        return None
    path = _absolute(text)
    try:
        folder = path if path.is_dir() else path.parent
        return folder if folder.is_dir() and folder != Path("/") else None
    except OSError:  # too long for a path: it is something else
        return None


def _absolute(text: str) -> Path:
    """The path without `..`. Links in it stay: inside the container it must be the same text."""
    return Path(os.path.normpath(Path.cwd() / expanded(text)))
