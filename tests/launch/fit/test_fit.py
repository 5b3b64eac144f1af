"""`--fit` finds the largest micro-batch that runs, in real processes under a real memory limit."""

import json
import os
import sys

import datasets
import pytest

from launch.cli import main
from launch.fit import search as fit
from launch.host.world import World
from recipes.errors import Failure, UserError
from recipes.rules.check import check
from recipes.run import here, resolve, with_fit
from tests.support.running import ROOT, SCRIPT, launch_quickly, losses, run, run_ranks
from tests.support.wide import LENGTH, imported_gb, texts_of, wide_model

ROOM = 1.08  # GB beside what a process has imported: it runs a micro-batch of 2, and of 1 beside `BALLAST`
BALLAST = 0.36


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("wide")
    model, data = wide_model(folder / "model"), texts_of(folder / "texts.jsonl", [LENGTH, 40] * 16)
    flags = f"--recipe standard --model_name_or_path {model} --dataset_name {data} --max_length {LENGTH}"
    return [*flags.split(), *"--global_batch_size 4 --max_steps 3 --save_steps 2 --logging_steps 1".split()]


def micro_batch(argv, *more, processes=2):
    setting = with_fit(resolve([*argv, *more], here(processes))).setting("per_device_train_batch_size")
    return setting.value, setting.source


@pytest.mark.slow
def test_fit_rejects_a_batch_that_one_of_two_ranks_cannot_hold_and_fit_json_is_reused(training, tmp_path, capsys):
    """The second rank has less memory left than the first."""
    ballast = f"import os\nballast = bytearray(b'x') * int({BALLAST}e9 * (os.environ.get('RANK') == '1'))\n"
    (tmp_path / "sitecustomize.py").write_text(ballast)  # for the probes, each of which is a new Python
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(f"{ballast}import runpy\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n")
    search = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    limit = round(imported_gb() + ROOM, 2)
    limited = ["--memory_limit", str(limit)]
    first = launch_quickly(*training, "--fit", *limited, output=out, env={"PYTHONPATH": search}, script=script)
    assert (first.code, first.record["status"]) == (0, "finished"), first.output
    found = json.loads((out / "fit.json").read_text())
    larger, largest = found["probes"]
    assert (larger["micro_batch"], larger["fits"], larger["ranks"][1]) == (2, False, "out_of_memory")
    assert larger["ranks"][0] != "out_of_memory"
    assert (largest["micro_batch"], largest["fits"], largest["ranks"]) == (1, True, ["fits", "fits"])
    assert 0 < found["peak_bytes"] <= found["limit_bytes"] == round(limit * 1e9)
    settings = first.record["settings"]
    assert (settings["per_device_train_batch_size"]["value"], settings["global_batch_size"]["value"]) == (1, 4)
    assert settings["per_device_train_batch_size"]["source"] == "fit.json"

    longer = ["4" if word == "3" else word for word in training]
    again = launch_quickly(*longer, "--fit", *limited, output=out)
    assert (again.code, again.record["global_step"]) == (0, 4), again.output
    assert "the largest that ran here" in again.output and "micro 2" not in again.output
    assert losses(again)[:2] == losses(first)[:2]  # it went on from step 2

    argv = [*training, *limited, "--output_dir", str(out)]
    assert micro_batch(argv) == micro_batch(argv, "--learning_rate", "1e-3") == (1, "fit.json")
    assert micro_batch(argv, processes=1) == (4, "batch arithmetic")
    for other in ("--gradient_checkpointing true", "--optim sgd", "--max_length 64", "--memory_limit 2"):
        assert micro_batch(argv, *other.split())[1] == "batch arithmetic", other
    assert micro_batch(argv, "--per_device_train_batch_size", "2") == (2, "command line")
    assert main(["check", "--num_processes", "2", *argv]) == 0
    assert "batch 1 x 2 x 2 = 4: the largest that ran here: peak" in capsys.readouterr().out


@pytest.mark.slow
def test_the_fit_command_finds_the_micro_batch_and_does_not_train(training, tmp_path):
    one = ["1" if word == "4" else word for word in training[2:]]
    words = ["-m", "launch", "fit", "--num_processes", "1", *one, "--output_dir", str(tmp_path), "--lora_r", "4"]
    done = run([sys.executable, *words, "--memory_limit", "2"], tmp_path, cwd=ROOT)
    assert done.code == 0 and not done.record, done.output
    assert "micro 1 x accumulation 1: runs, peak" in done.output
    assert done.output.count("is ignored without use_peft") == 1
    assert json.loads((tmp_path / "fit.json").read_text())["micro_batch"] == 1


def test_fit_checks_output_dir_then_tokenizes_then_probes(training, real_checkpoint, tmp_path, own_cache, monkeypatch):
    with pytest.raises(UserError, match="holds a run with model_name_or_path"):
        fit.fit(resolve([*training, "--fit", "--output_dir", str(real_checkpoint.parent)]), training, World())
    assert not list(datasets.config.HF_DATASETS_CACHE.rglob("*.arrow"))

    def probe(*_):
        assert list(datasets.config.HF_DATASETS_CACHE.rglob("*.arrow"))
        raise Failure("no more is asked of it")

    monkeypatch.setattr(fit, "_probe", probe)
    with pytest.raises(Failure):
        fit.fit(resolve([*training, "--fit", "--output_dir", str(tmp_path / "new" / "out")]), training, World())


# --- What a probe's end means ---------------------------------------------------------------------

_PROBE = """
import os, signal, sys, time
from launch.host import processes

def main(request, folder):
    rank = int(os.environ.get("RANK", 0))

    def leave(kind, words=""):
        processes.answer(folder, {"kind": kind, "peak_bytes": 100 + rank, "words": words})

    exec(request["argv"][0])
"""
# Ranks that agree on how each of these probes has ended.
_AGREE = """
import json, sys
from launch.fit import search as fit
from launch.host.processes import free_port
from launch.host.world import launched
from recipes.errors import Failure

fit.PROBE, world = "stand_in_probe", launched()
for number, source in enumerate(json.loads(sys.argv[1])):
    try:
        found = fit._probe({"argv": [source], "micro_batch": number}, world, free_port())
    except Failure as error:
        found = str(error)
    sys.stdout.write(json.dumps([number, found]) + "\\n")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Replaces what every probe does by the source that it is asked."""
    (tmp_path / "stand_in_probe.py").write_text(_PROBE)
    monkeypatch.setattr(fit, "PROBE", "stand_in_probe")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.parametrize(("most", "tried"), [(8, [4, 8, 16]), (3, [16, 8, 4, 2]), (0, [2, 1])])
def test_fit_doubles_a_micro_batch_that_runs_or_halves_one_that_does_not(most, tried, stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "_guess", lambda *_: tried[0])
    argv = [f"leave('fits' if request['micro_batch'] <= {most} else 'out_of_memory', 'asked for 2 GiB')"]
    run = resolve(["--recipe", "standard", "--output_dir", str(tmp_path / "out"), "--memory_limit", "1"])
    if not most:
        said = r"a micro-batch of 1 fits in 953.7 MiB: asked for 2 GiB\. Fix: raise --memory_limit; or"
        with pytest.raises(UserError, match=said):
            fit.fit(run, argv, World())
        assert not (tmp_path / "out" / "fit.json").exists()
        return
    assert fit.fit(run, argv, World()).batch.micro == max(size for size in tried if size <= most)
    probes = json.loads((tmp_path / "out" / "fit.json").read_text())["probes"]
    assert [done["micro_batch"] for done in probes] == tried


@pytest.mark.slow
def test_a_micro_batch_fits_only_if_it_runs_on_every_rank(stand_in, tmp_path):
    ends = {
        "leave('fits')": ("", ["fits", "fits"]),
        "if rank: leave('out_of_memory', 'asked')\nelse: time.sleep(600)": ("asked", ["stopped", "out_of_memory"]),
        "if rank: sys.exit('std::bad_alloc')\ntime.sleep(600)": ("std::bad_alloc", ["stopped", "out_of_memory"]),
        "if rank: os.kill(os.getpid(), signal.SIGKILL)\nsys.exit('Connection closed by peer')": (
            "killed by the kernel's OOM killer",
            ["failed", "out_of_memory"],
        ),
        "print('loading')\nif rank: sys.exit('no kernel image')\ntime.sleep(600)": None,
    }
    (tmp_path / "agree.py").write_text(_AGREE)
    codes, output = run_ranks(2, dict(os.environ), [str(tmp_path / "agree.py"), json.dumps([*ends])])
    assert codes == [0, 0], output
    told = [json.loads(line) for line in output.splitlines()]
    for number, expected in enumerate(ends.values()):
        one, other = (found for at, found in told if at == number)
        assert one == other
        if expected is None:
            assert "failed on rank 1, with an error other than out of memory:\nloading\nno kernel image" in one
        else:
            assert (one["fits"], one["words"], one["ranks"]) == (not expected[0], *expected)


def test_the_settings_of_a_fit_probe_are_legal_after_fit_drops_evaluation_and_scheduler_flags(tmp_path):
    schedules = ["reduce_lr_on_plateau", 'cosine_with_min_lr --lr_scheduler_kwargs {"min_lr_rate":0.1}']
    for flags in ("--eval_on_start", "--load_best_model_at_end", *(f"--lr_scheduler_type {one}" for one in schedules)):
        request = {"argv": f"--eval_strategy epoch {flags}".split(), "micro_batch": 1, "accumulation": 16}
        probed = fit._requested(request, World(), str(tmp_path))
        assert not [problem for problem in check(probed) if problem.severity == "error"]
