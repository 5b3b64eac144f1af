"""Stand-ins for what this machine lacks: an NVIDIA driver, its nvidia-smi, a broken torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

# What launch/ and recipes/ ask of the driver: two H100s.
_LIBCUDA = """\
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "NVIDIA H100 80GB HBM3", size); return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = (size_t)80 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? 9 : 0; return 0; }
"""
SMI = """\
#!/bin/sh
case "$1" in
    --query-gpu=uuid) printf 'GPU-a\\nGPU-b\\n' ;;
    --query-gpu=driver_version) printf '580.1\\n580.1\\n' ;;
    --query-gpu=index,memory.free,memory.total) printf '0, 80000, 81559\\n1, 1000, 81559\\n' ;;
    --query-compute-apps=*) printf '4242, python\\n' ;;
    --query-gpu=*) printf '[N/A]\\n[N/A]\\n' ;;
esac
"""


def make(folder: Path) -> None:
    """Write the stand-ins; a fault puts those that it needs on its search paths."""
    library = folder / "cuda" / "libcuda.so.1"
    library.parent.mkdir()
    argv = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(argv, input=_LIBCUDA, text=True, check=True)
    for name, script in {
        "smi": SMI,
        "smi-hangs": "#!/bin/sh\nsleep 1000\n",
        "smi-fails": "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n",
        "smi-words": "#!/bin/sh\necho 'Unable to determine the device handle for GPU0: Unknown Error'\n",
    }.items():
        (folder / name).mkdir()
        (folder / name / "nvidia-smi").write_text(script)
        (folder / name / "nvidia-smi").chmod(0o755)
    (folder / "torch-broken" / "torch").mkdir(parents=True)
    (folder / "torch-broken" / "torch" / "__init__.py").write_text("raise ImportError('libcudart is missing')\n")
    old = folder / "old" / "transformers-4.40.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.40.0\n")
