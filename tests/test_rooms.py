"""The plan of the house: which room may import which, and how large files and rooms may grow.

A room is a folder of recipes/ or launch/, or a file directly in them. A file may import from its
own room and from rooms in layers above its own in LAYERS, also inside functions and under
TYPE_CHECKING.
"""

import ast
import graphlib
from collections import Counter
from functools import cache
from pathlib import Path

import recipes
from recipes.catalog import RECIPES
from tests.support.running import ROOT, python

LAYERS = (
    "recipes.errors recipes.quiet recipes.flags recipes.catalog recipes.mixture",
    "recipes.legal",
    "recipes.run",
    "recipes.scaling",
    "recipes.rules",
    "recipes.planner",
    "recipes.factories",
    "recipes",  # its __init__, which hands names on to users
    "launch.host launch.terminal launch.flags",
    "launch.output launch.doctor launch.data",
    "launch.training launch.explain",
    "launch.fit launch.jobs",
    "launch.commands launch.scaling launch.train",
    "launch.cli",
    "launch launch.__main__",
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms.split()}
MOST_LINES = 800  # of a file, which is one concept
# The most lines of each room; of `recipes` and `launch`, of the files directly in them. Only new
# behaviour raises a number, and its commit gives the reason.
BUDGETS = {
    "recipes": 758,
    "recipes/legal": 482,
    "recipes/run": 1828,
    "recipes/rules": 2473,
    "recipes/planner": 2968,
    "recipes/scaling": 1119,
    "launch": 547,
    "launch/commands": 1260,
    "launch/data": 2090,
    "launch/doctor": 1269,
    "launch/explain": 399,
    "launch/fit": 254,
    "launch/host": 1146,
    "launch/jobs": 1333,
    "launch/output": 1423,
    "launch/scaling": 882,
    "launch/training": 2247,
}


# --- What is there --------------------------------------------------------------------------------


@cache
def files() -> dict[str, Path]:
    """Every file of the two packages by its module's name; a folder's name is its __init__."""
    found = {}
    for path in sorted([*ROOT.glob("recipes/**/*.py"), *ROOT.glob("launch/**/*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


@cache
def imports() -> dict[str, set[str]]:
    """For each module of the two packages, those of their modules that it imports."""
    return {module: imports_of(module, ast.parse(path.read_text())) for module, path in files().items()}


def imports_of(module: str, tree: ast.Module) -> set[str]:
    """The modules that the code names; of `from recipes.run import spec`, recipes.run.spec.

    A file that calls import_module imports every module that one of its strings names.
    """
    named: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}, line {node.lineno}: an import with dots; write the whole name"
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    if "importlib.import_module" in named:
        strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        named |= {module for module in files() if "." in module and module in strings}
    return {file for file in map(_file_of, named) if file and file != module}


def _file_of(name: str) -> str | None:
    """The module that holds a dotted name, None if it is not in the two packages."""
    while name not in files():
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


# --- The rules ------------------------------------------------------------------------------------


def test_a_file_imports_only_from_its_own_folder_and_from_earlier_layers():
    wrong = [
        f"{module} -> {imported}"
        for module, found in imports().items()
        for imported in sorted(found)
        if room_of(module) != room_of(imported) and LEVEL[room_of(imported)] >= LEVEL[room_of(module)]
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_modules_have_no_circular_imports():
    """Raises CycleError, which names the files of the circle."""
    graphlib.TopologicalSorter(imports()).prepare()


def test_no_source_file_exceeds_the_line_limit():
    assert not [str(path) for path in files().values() if lines_of(path) > MOST_LINES]


def test_no_folder_has_more_lines_than_its_budget():
    sizes: Counter[str] = Counter()
    for path in files().values():
        sizes["/".join(path.relative_to(ROOT).parent.parts[:2])] += lines_of(path)
    over = {room: (lines, BUDGETS.get(room, 0)) for room, lines in sizes.items() if lines > BUDGETS.get(room, 0)}
    assert not over, f"take lines away, or raise the number in BUDGETS: {over}"


def test_no_module_in_launch_has_the_name_of_an_installed_library():
    """With train.py as a script, launch/ is first on sys.path: a launch/datasets.py would win."""
    names = {path.stem for path in (ROOT / "launch").iterdir() if not path.stem.startswith("__")}
    look = "import importlib.util as i, sys; print(*(name for name in sys.argv[1:] if i.find_spec(name)))"
    done = python("-I", "-c", look, *sorted(names))  # -I: this checkout is not on sys.path
    assert (done.returncode, done.stdout) == (0, "\n")


def test_no_module_in_recipes_has_the_name_of_an_exported_function_or_recipe():
    """Importing a module named recipes.memory would replace the recipe of that name."""
    names = {path.stem for path in (ROOT / "recipes").iterdir()}
    assert not names & {*recipes.__all__, *RECIPES}
