"""`python -m launch` and `python launch` are the `recipes` command: the second where this package is not installed."""

import sys
from pathlib import Path

if not __package__:  # `python launch`: import the packages beside launch/, not the files inside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch.cli import main

sys.exit(main())
