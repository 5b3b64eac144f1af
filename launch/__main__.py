"""The `recipes` command: `python -m launch`, or `python launch` in a clone without an install."""

import sys
from pathlib import Path

if not __package__:  # `python launch`: import the packages beside launch/, not the files inside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from accelerate_recipes import main

sys.exit(main())
