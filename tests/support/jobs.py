"""Jobs as a test makes them: of runs that are not checked, on nodes with GPUs that are assumed."""

from collections.abc import Sequence

from launch.jobs.job import Job
from recipes.run import here, resolve
from recipes.run.hardware import Gpu, Hardware
from recipes.run.place import launch_yaml


def job(recipe="standard", nodes=1, processes=1, argv: Sequence[str] = (), gpu=True, preflight=False) -> Job:
    hardware = Hardware((Gpu("GPU", (8, 0), 80 << 30),) * processes if gpu else (), cores=8)
    place = here(nodes * processes, local_world_size=processes, hardware=hardware, environment={})
    run = resolve(["--recipe", recipe, *argv], place)
    config = str(launch_yaml(run.recipe, run["deepspeed"]))
    return Job(run, nodes, ("--recipe", recipe, *argv), config, preflight=preflight)
