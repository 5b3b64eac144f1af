"""`--fit` finds the largest micro-batch that runs, in real processes under a real memory limit."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import datasets
import pytest

from launch.cli import main
from launch.fit import search as fit
from launch.fit.search import ProbeFailed
from launch.host.world import World
from recipes.errors import UserError
from recipes.rules.check import check
from recipes.run import here, resolve, with_fit
from tests.support.running import ROOT, SCRIPT, launch_quickly, losses, run
from tests.support.waiting import PATIENCE, wait_for
from tests.support.wide import LENGTH, texts_of, wide_model

LIMIT = 1.64  # GB: a process runs a micro-batch of 2, and one that has already taken `BALLAST` runs 1
BALLAST = 0.36


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("wide")
    model, data = wide_model(folder / "model"), texts_of(folder / "texts.jsonl", [LENGTH, 40] * 16)
    flags = f"--recipe standard --model_name_or_path {model} --dataset_name {data} --max_length {LENGTH}"
    return [*flags.split(), *"--global_batch_size 4 --max_steps 3 --save_steps 2 --logging_steps 1".split()]


@pytest.fixture(scope="module")
def second_rank_has_less(training, tmp_path_factory):
    """Fit and train in one command, where the second rank has less memory left than the first."""
    folder = tmp_path_factory.mktemp("fitted")
    ballast = f"import os\nballast = bytearray(b'x') * int({BALLAST}e9 * (os.environ.get('RANK') == '1'))\n"
    (folder / "sitecustomize.py").write_text(ballast)  # for the probes, each of which is a new Python
    (folder / "train.py").write_text(f"{ballast}import runpy\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n")
    search = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    flags = [*training, "--fit", "--memory_limit", str(LIMIT)]
    done = launch_quickly(*flags, output=folder / "out", env={"PYTHONPATH": search}, script=folder / "train.py")
    assert done.code == 0, done.output
    return folder / "out", done


@pytest.fixture
def found(second_rank_has_less):
    return json.loads((second_rank_has_less[0] / "fit.json").read_text())


# --- What is found --------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_one_rank_cannot_run_does_not_fit(found):
    larger, largest = found["probes"]
    assert (larger["micro_batch"], larger["fits"], larger["ranks"][1]) == (2, False, "out_of_memory")
    assert larger["ranks"][0] != "out_of_memory"
    assert (largest["micro_batch"], largest["fits"], largest["ranks"]) == (1, True, ["fits", "fits"])
    assert 0 < found["peak_bytes"] <= found["limit_bytes"] == LIMIT * 1e9


@pytest.mark.slow
def test_the_run_that_follows_trains_with_it_at_the_same_global_batch(second_rank_has_less, found):
    settings = second_rank_has_less[1].record["settings"]
    assert second_rank_has_less[1].record["status"] == "finished"
    assert settings["per_device_train_batch_size"]["value"] == found["micro_batch"] == 1
    assert settings["per_device_train_batch_size"]["source"] == "fit.json"
    assert "the largest that ran here: peak" in settings["per_device_train_batch_size"]["reason"]
    assert found["micro_batch"] * found["accumulation"] * found["world_size"] == 4
    assert settings["global_batch_size"]["value"] == found["global_batch_size"] == 4


@pytest.mark.slow
def test_the_next_run_takes_it_without_another_probe(second_rank_has_less, training):
    folder, first = second_rank_has_less
    longer = ["4" if word == "3" else word for word in training]
    again = launch_quickly(*longer, "--fit", "--memory_limit", str(LIMIT), output=folder)
    assert (again.code, again.record["global_step"]) == (0, 4), again.output
    assert "the largest that ran here" in again.output and "micro 2" not in again.output
    assert losses(again)[:2] == losses(first)[:2]  # it went on from step 2


def test_an_evaluation_that_does_not_fit_is_told_before_the_training(training, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for split in ("train", "test"):
        texts_of(folder / f"{split}.jsonl", [LENGTH, 40] * 16)
    words = [str(folder) if before == "--dataset_name" else word for before, word in pairwise(["", *training])]
    words += ["--eval_strategy", "steps", "--per_device_eval_batch_size", "512", "--memory_limit", str(LIMIT)]
    argv = [sys.executable, str(SCRIPT), *words, "--fit_only", "--output_dir", str(tmp_path / "out")]
    done = run(argv, tmp_path / "out", cwd=ROOT)
    assert done.code == 2, done.output
    assert "512 examples do not fit" in done.output and "--per_device_eval_batch_size 256" in done.output


def test_a_command_fits_alone_and_says_how_to_train_with_it(training, tmp_path):
    one = ["1" if word == "4" else word for word in training[2:]]
    words = ["-m", "launch", "fit", "--num_processes", "1", *one, "--output_dir", str(tmp_path), "--lora_r", "4"]
    done = run([sys.executable, *words, "--memory_limit", "2"], tmp_path, cwd=ROOT)
    assert done.code == 0 and not done.record, done.output
    assert "micro 1 x accumulation 1: runs, peak" in done.output
    assert done.output.count("is ignored without use_peft") == 1
    assert "train with it: recipes submit local --processes_per_node 1 -- --model_name_or_path" in done.output
    assert json.loads((tmp_path / "fit.json").read_text())["micro_batch"] == 1


@pytest.mark.parametrize("flag", ["--fit", "--fit_only"])
def test_the_data_is_tokenized_once_before_the_first_probe(flag, training, tmp_path, own_cache, monkeypatch):
    def probe(*_):
        assert list(datasets.config.HF_DATASETS_CACHE.rglob("*.arrow"))
        raise ProbeFailed("no more is asked of it")

    monkeypatch.setattr(fit, "_probe", probe)
    with pytest.raises(ProbeFailed):
        fit.fit(resolve([*training, flag, "--output_dir", str(tmp_path / "out")]), training, World())


def test_a_folder_of_another_training_is_told_before_the_search(training, real_checkpoint, own_cache):
    run = resolve([*training, "--fit", "--output_dir", str(real_checkpoint.parent)])
    with pytest.raises(UserError, match="holds a run with model_name_or_path"):
        fit.fit(run, training, World())
    assert not list(datasets.config.HF_DATASETS_CACHE.rglob("*.arrow"))


# --- What a fit holds for -------------------------------------------------------------------------


@pytest.fixture
def argv(second_rank_has_less, training):
    return [*training, "--memory_limit", str(LIMIT), "--output_dir", str(second_rank_has_less[0])]


def micro_batch(argv, *more, processes=2):
    setting = with_fit(resolve([*argv, *more], here(processes))).setting("per_device_train_batch_size")
    return setting.value, setting.source


@pytest.mark.slow
def test_a_fit_holds_for_its_own_training_alone(argv):
    assert micro_batch(argv) == micro_batch(argv, "--learning_rate", "1e-3") == (1, "fit.json")
    assert micro_batch(argv, processes=1) == (4, "batch arithmetic")
    for other in ("--gradient_checkpointing true", "--optim sgd", "--dtype bfloat16", "--packing"):
        assert micro_batch(argv, *other.split()) == (2, "batch arithmetic"), other
    for name, value in (("--global_batch_size", "8"), ("--max_length", "64"), ("--memory_limit", "2")):
        other = [value if before == name else word for before, word in zip(["", *argv], argv, strict=False)]
        assert micro_batch(other)[1] == "batch arithmetic", name


@pytest.mark.slow
def test_what_is_written_down_wins_over_a_fit_which_the_check_shows(argv, capsys):
    assert micro_batch(argv, "--per_device_train_batch_size", "2") == (2, "command line")
    assert main(["check", "--num_processes", "2", *argv]) == 0
    assert "batch 1 x 2 x 2 = 4: the largest that ran here: peak" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{", "[]", '{"micro_batch": 1}', '{"micro_batch": "1", "holds_for": 3}'])
def test_a_damaged_fit_is_ignored(content, training, tmp_path):
    (tmp_path / "fit.json").write_text(content)
    assert micro_batch([*training, "--output_dir", str(tmp_path)]) == (2, "batch arithmetic")


# --- What a probe's end means ---------------------------------------------------------------------

_PROBE = """
import os, signal, sys, time
from launch.host import processes

def main(folder):
    request = processes.request(folder)
    rank = int(request["argv"][0])

    def leave(kind, words=""):
        processes.answer(folder, {"kind": kind, "peak_bytes": 100 + rank, "words": words})

"""


@pytest.fixture
def probe(monkeypatch, tmp_path):
    """Replaces what every probe does by this source."""

    def replace(source: str) -> None:
        (tmp_path / "stand_in_probe.py").write_text(_PROBE + textwrap.indent(source, "    "))
        monkeypatch.setattr(fit, "PROBE", "stand_in_probe")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    return replace


@pytest.fixture
def ranks_agree(probe):
    """What two ranks (threads here) agree on when their probes have run this source."""
    from torch.distributed import TCPStore

    def agreed(source: str) -> dict | ProbeFailed:
        probe(source)
        served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        def of_rank(rank: int):
            store = TCPStore("127.0.0.1", served.port, is_master=False, wait_for_workers=False)
            try:
                return fit._probe({"argv": [str(rank)], "micro_batch": 8}, World(2, rank, 2), store, 0)
            except ProbeFailed as error:
                return error

        with ThreadPoolExecutor(2) as threads:
            one, other = threads.map(of_rank, range(2))
        assert str(one) == str(other)
        return one

    return agreed


@pytest.mark.parametrize(("most", "tried"), [(8, [4, 8, 16]), (3, [16, 8, 4, 2])])
def test_it_goes_up_from_the_guess_while_it_runs_or_down_until_it_does(most, tried, probe, tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "_guess", lambda *_: tried[0])
    probe(f"leave('fits' if request['micro_batch'] <= {most} else 'out_of_memory')")
    run = resolve(["--recipe", "standard", "--output_dir", str(tmp_path), "--memory_limit", "4"])
    assert fit.fit(run, ["0"], World()).batch.micro == max(size for size in tried if size <= most)
    assert [done["micro_batch"] for done in json.loads((tmp_path / "fit.json").read_text())["probes"]] == tried


def test_where_not_even_one_example_fits_it_says_what_takes_less(probe, tmp_path):
    probe("leave('out_of_memory', 'asked for 2 GiB')")
    run = resolve(["--global_batch_size", "1", "--output_dir", str(tmp_path), "--memory_limit", "1"])
    with pytest.raises(UserError, match="not even a micro-batch of 1 runs") as refused:
        fit.fit(run, ["0"], World())
    assert "in 953.7 MiB: asked for 2 GiB. Fix: --gradient_checkpointing true" in str(refused.value)
    assert not (tmp_path / "fit.json").exists()


@pytest.mark.parametrize(
    ("source", "words", "ranks"),
    [
        ("leave('fits')", "", ["fits", "fits"]),
        ("if rank: leave('out_of_memory', 'asked')\nelse: time.sleep(600)", "asked", ["stopped", "out_of_memory"]),
        ("if rank: sys.exit('std::bad_alloc')\ntime.sleep(600)", "std::bad_alloc", ["stopped", "out_of_memory"]),
    ],
)
def test_a_micro_batch_fits_only_if_it_runs_on_every_rank(ranks_agree, source, words, ranks):
    agreed = ranks_agree(source)
    assert (agreed["fits"], agreed["words"], agreed["ranks"]) == (not words, words, ranks)
    assert agreed["peak_bytes"] == (0 if "bad_alloc" in words else 101)


def test_a_probe_killed_by_the_kernel_ran_out_of_memory(ranks_agree):
    agreed = ranks_agree("if rank: os.kill(os.getpid(), signal.SIGKILL)\nsys.exit('Connection closed by peer')")
    assert (agreed["fits"], agreed["words"]) == (False, "killed by the kernel's OOM killer")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGSEGV)", "sys.exit('no kernel image for it')"])
def test_another_failure_says_nothing_about_memory(ranks_agree, end):
    failed = ranks_agree(f"print('loading the model', flush=True)\nif rank: {end}\ntime.sleep(1)\nleave('fits')")
    assert isinstance(failed, ProbeFailed)
    assert "failed on rank 1, which says nothing about memory" in str(failed) and "loading the model" in str(failed)


@pytest.mark.parametrize(
    "flags",
    [
        "--eval_strategy epoch --eval_on_start",
        "--eval_strategy epoch --lr_scheduler_type reduce_lr_on_plateau",
        "--eval_strategy epoch --load_best_model_at_end",
        '--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr_rate":0.1}',
    ],
)
def test_a_probe_has_no_evaluations_of_its_schedule_and_is_legal_without(flags, tmp_path):
    request = {"argv": flags.split(), "micro_batch": 1, "accumulation": 16}
    probed = fit._requested(request, World(), str(tmp_path))
    assert not [problem for problem in check(probed) if problem.severity == "error"]


@pytest.mark.slow
def test_nothing_is_left_of_a_fit_that_is_told_to_stop(training, tmp_path):
    one = ["1" if word == "4" else word for word in training]
    words = [sys.executable, str(ROOT / "launch" / "train.py"), *one, "--fit", "--output_dir", str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert any("from micro" in line for line in process.stdout)
        children = wait_for("the first probe", lambda: children_of(process.pid))
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert (process.returncode, "Traceback" in output) == (75, False), output
    wait_for("the end of the probe", lambda: not any(alive(child) for child in children))
    assert not (tmp_path / "fit.json").exists()


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def alive(pid: str) -> bool:
    return Path("/proc", pid).exists()
