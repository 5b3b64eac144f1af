"""The `recipes` command: `python -m launch`, or `python launch` in a clone without an install."""

import sys
from pathlib import Path

try:
    if not __package__:  # `python launch`: import the packages beside launch/, not the files inside it
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
        from launch.host.processes import import_own_packages

        import_own_packages()

    from launch.cli import main
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)

sys.exit(main())
