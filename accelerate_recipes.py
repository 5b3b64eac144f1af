"""The `recipes` command, under a name that is ours alone: others have a `recipes` or a `launch`."""

import sys
from pathlib import Path


def main() -> int:
    """The exit code of `recipes`."""
    try:
        sys.path.insert(0, str(Path(__file__).resolve().parent))  # before a `launch` on PYTHONPATH
        from launch.host.processes import import_own_packages

        import_own_packages()
        from launch.cli import main

        return main()
    except KeyboardInterrupt:  # while this imports
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
