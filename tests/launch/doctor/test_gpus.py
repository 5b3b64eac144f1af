"""The doctor's checks of GPUs that are not here: driver, torch's build, their health."""

import pytest

from launch.doctor import gpus, smi
from launch.doctor.stages import runs_on
from tests.launch.doctor.conftest import SMI
from tests.support.doctor import requested

# --- nvidia-smi -----------------------------------------------------------------------------------


def test_an_nvidia_smi_that_hangs_is_given_up_once(nvidia_smi, tmp_path, monkeypatch):
    monkeypatch.setattr(smi, "SECONDS", 0.3)
    nvidia_smi(f"#!/bin/sh\necho asked >>{tmp_path}/asked\nsleep 1000\n")
    for query in ("--query-gpu=uuid", "--query-gpu=memory.total"):
        assert smi.smi_rows(query).rows == ()
    assert "did not return" in gpus.driver_of_gpus(requested()).found
    assert (tmp_path / "asked").read_text() == "asked\n"


@pytest.mark.parametrize(
    "script",
    [
        "#!/bin/sh\nhead -c 4000 /dev/urandom\n",
        "#!/bin/sh\necho 'Unable to determine the device handle for GPU0: Unknown Error'\n",
        "#!/bin/sh\necho '<html>'\n",
    ],
)
def test_what_nvidia_smi_prints_instead_of_an_answer_is_shown_and_not_believed(script, nvidia_smi):
    nvidia_smi(script)
    check = gpus.driver_of_gpus(requested())
    assert (check.status, check.title) == ("error", "driver") and "is not understood: " in check.found
    assert check.found.isprintable()
    assert gpus.visible_gpus(requested()).status == "ok" and gpus.pcie() is None


def test_a_warning_beside_the_answer_is_not_a_row(nvidia_smi):
    warning = "; echo 'WARNING: infoROM is corrupted at gpu 0000:3B:00.0' ;;"
    nvidia_smi(SMI.replace(" ;;", warning))
    assert gpus.driver_of_gpus(requested()).status == "ok"
    assert smi.smi_rows("--query-gpu=uuid").rows == (("GPU-a",), ("GPU-b",))


# --- torch's build --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "driver", "words", "advice"),
    [
        (("2.13.0+cpu", None), (12, 8), "built for the CPU only", "pip install --force-reinstall torch==2.13.0"),
        (("2.13.0+cu130", "13.0"), (12, 8), "CUDA 13.0, and the driver runs up to 12.8", "a newer driver"),
        (("2.13.0+cu129", "12.9"), (12, 2), None, None),  # the same major version
        (("2.13.0+cu126", "12.6"), (13, 0), None, None),
        (("2.13.0+cu126", "12.6"), None, None, None),
        (None, (12, 8), None, None),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_is_named_before_ranks_start(build, driver, words, advice, monkeypatch):
    monkeypatch.setattr(gpus, "_build", lambda: build)
    monkeypatch.setattr(gpus, "driver_cuda", lambda: driver)
    check = gpus.torch_build(requested(gpus=2))
    assert (check is None) == (words is None)
    assert check is None or (check.fatal and words in check.found and advice in check.fix)
    assert gpus.torch_build(requested()) is None


def test_the_installed_torchs_build_is_read_without_importing_it():
    import torch

    assert gpus._build() == (torch.__version__, torch.version.cuda)


@pytest.mark.parametrize(
    ("capability", "compiled", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),  # machine code of 8.0 runs on 8.9
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # compiled on the spot
        ((10, 3), ["sm_90a", "sm_100a"], False),
        ((10, 0), ["sm_100a"], True),
        ((7, 0), ["compute_80"], False),
    ],
)
def test_a_gpu_runs_what_was_compiled_for_it(capability, compiled, runs):
    assert runs_on(capability, compiled) == runs


# --- Health ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "answer", "words"),
    [
        (
            "ecc.errors.uncorrected.volatile.total",
            "0\\n3",
            "GPU 1: uncorrected memory errors since the driver was loaded: 3",
        ),
        ("remapped_rows.failure", "No\\nYes", "GPU 1: failed remapping of memory rows: Yes"),
        ("clocks_throttle_reasons.active", "0x0000000000000001\\n0x0000000000000041", "GPU 1 is slowed down by heat"),
        ("pcie.link.width.current,pcie.link.width.max", "16, 16\\n4, 16", "GPU 1 has 4 of 16 PCIe lanes"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_named(query, answer, words, nvidia_smi):
    nvidia_smi(
        SMI.replace("    --query-gpu=uuid)", f"    --query-gpu={query}) printf '{answer}\\n' ;;\n    --query-gpu=uuid)")
    )
    check = gpus.health(requested(gpus=2))
    assert check.status == "warning" and words in check.found and "GPU 0" not in check.found


@pytest.mark.parametrize("answer", ["[N/A]", "[Not Supported]", ""])
def test_a_gpu_that_does_not_say_is_healthy(answer, nvidia_smi):
    nvidia_smi(
        SMI.replace(
            "    --query-gpu=pcie.link.gen.max,pcie.link.width.max)",
            f"    --query-gpu=*) echo '{answer}' ;;\n    --pcie)",
        )
    )
    assert gpus.health(requested(gpus=2)).status == "ok"
