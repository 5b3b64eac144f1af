"""`recipes` and `launch`, though other distributions have packages of these names too.

Of two in the same folder, the one that was installed last has overwritten files of the other
(torchtune's wheel brings a `recipes`). Of two in different folders, the first on sys.path hides the
other (ROS 2 puts its `launch` on PYTHONPATH). This file imports nothing of ours.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

OURS = "accelerate-recipes"  # the __init__ of both packages says so
NAMES = ("recipes", "launch")
_ROOT = Path(__file__).resolve().parents[2]  # the folder that holds them


def import_own_packages() -> None:
    """Import ours, whatever else is on sys.path. Exit with code 2 if they are no longer whole.

    A script calls this with their folder first on the path. The order of the path is the user's: a
    library on PYTHONPATH stays before an installed one.
    """
    for name in NAMES:
        file = _ROOT / name / "__init__.py"
        if not file.is_file() or OURS not in file.read_text(encoding="utf-8"):
            whose = " or ".join(other_owners(name)) or "another distribution"
            what = f"{file} was overwritten or removed with the package of this name of {whose}"
            fix = f"pip install --force-reinstall --no-deps {OURS} (or its wheel), or an environment of its own"
            print(f"error  {name}: {what}. Fix: {fix}.", file=sys.stderr)
            sys.exit(2)
    for name in reversed(NAMES):
        import_module(name)
    del sys.path[0]
    if str(_ROOT) not in sys.path:  # a clone that is not installed
        sys.path.append(str(_ROOT))


def other_owners(name: str) -> list[str]:
    """The other distributions that have installed a package of this name. Takes 0.2 s."""
    from importlib.metadata import packages_distributions

    return sorted(set(packages_distributions().get(name, ())) - {OURS})
