"""Running `recipes doctor` in a test, on a machine as the test describes it."""

import sys

from launch.doctor import command
from launch.doctor.machine import Request
from launch.flags import Parser
from recipes.run.hardware import Gpu, Hardware

DOCTOR = [sys.executable, "-m", "launch", "doctor"]
# An nvidia-smi that shows two H100s.
SMI = """\
#!/bin/sh
case "$1" in
    --query-gpu=uuid) printf 'GPU-a\\nGPU-b\\n' ;;
    --query-gpu=driver_version) printf '580.1\\n580.1\\n' ;;
    --query-gpu=index,memory.free,memory.total) printf '0, 80000, 81559\\n1, 1000, 81559\\n' ;;
    --query-compute-apps=*) printf '4242, python\\n' ;;
esac
"""


def requested(*words: str, gpus: int = 0, environment: dict[str, str] | None = None) -> Request:
    """What the doctor makes of these flags, on a machine with 8 cores and so many H100s."""
    parser = Parser("recipes")
    command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["doctor", *words])
    hardware = Hardware((Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30),) * gpus, cores=8)
    return command.request_for(hardware, environment or {}, options)
