"""`python -m launch` is the `recipes` command."""

import sys

from launch.cli import main

sys.exit(main())
