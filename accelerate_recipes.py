"""The `recipes` command, in a module that no other package has, unlike `recipes` or `launch`."""

import sys
from pathlib import Path


def main() -> int:
    """Run `recipes`, and return its exit code."""
    try:
        sys.path.insert(0, str(Path(__file__).resolve().parent))  # before a `launch` on PYTHONPATH
        from launch.host.processes import import_own_packages

        import_own_packages()
        from launch.cli import main

        return main()
    except KeyboardInterrupt:  # Ctrl-C during these imports
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
