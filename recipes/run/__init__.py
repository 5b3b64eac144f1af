"""One run, resolved from the user's settings, the recipe, the machine and the engine."""

from recipes.run.command_line import with_flags
from recipes.run.files import Json, nearest
from recipes.run.fitted import with_fit
from recipes.run.own_recipe import find_recipe
from recipes.run.place import Place, here
from recipes.run.resolve import resolve
from recipes.run.spec import BEST_MODEL, COMMAND_LINE, FIT, HIDDEN, RunSpec, Setting, Settings, shown
