"""`recipes scale run` and `--measure`, on trainings that are slow for a known reason."""

import dataclasses
import platform
import sys
from collections.abc import Callable

import pytest

from launch.cli import main
from launch.scaling.run import points
from recipes.run import with_flags
from recipes.scaling.advice import Advice, advise, applied
from recipes.scaling.analyse import Size, analyse
from recipes.scaling.timings import Timing, append, read
from tests.support import emulated
from tests.support.running import ROOT, losses, model_flags, run, train_here
from tests.support.slow_model import write_model_with

LINK = "3mbit"


@pytest.fixture(scope="module")
def measured(tiny_model, texts, tmp_path_factory) -> Callable[..., Timing]:
    model = tmp_path_factory.mktemp("paced") / "model"
    write_model_with(emulated.PAUSE, model, tiny_model)
    return lambda processes, batch, *flags, **where: emulated.timing(model, texts, processes, batch, *flags, **where)


@pytest.fixture(scope="module")
def alone(measured) -> list[Timing]:
    """One process with all the work, and with the share that two would have."""
    return [measured(1, 16), dataclasses.replace(measured(1, 8), scaling="weak")]


@pytest.fixture(scope="module")
def healthy(measured) -> Timing:
    return measured(2, 16)


def verdict(alone: list[Timing], row: Timing) -> Size:
    return analyse([*alone, row])[0].sizes[-1]


def advice(alone: list[Timing], row: Timing) -> list[Advice]:
    series = analyse([*alone, row])[0]
    return advise(series.sizes[-1], series)


# --- Why it is slow, and what is counted ----------------------------------------------------------


@pytest.mark.slow
def test_a_scaling_run_records_the_parts_of_a_step_and_the_bytes_that_it_exchanges(healthy, tiny_model):
    from safetensors import safe_open

    assert (healthy.accumulation, healthy.syncs, healthy.timed) == (2, 1, f"{emulated.STEPS} steps")
    assert sum(healthy.parts.values()) == pytest.approx(healthy.step_time)
    with safe_open(tiny_model / "model.safetensors", "pt") as weights:
        parameters = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118
    assert healthy.sync_bytes == pytest.approx(4 * parameters, rel=0.01)


@pytest.mark.slow
@pytest.mark.skipif(not emulated.can_emulate_links(), reason="emulating a link needs root, ip netns and tc with tbf")
def test_on_a_slow_link_communication_is_the_cause_and_compression_gains_as_predicted(alone, measured):
    with emulated.link(LINK) as namespace:
        slow = measured(2, 16, namespace=namespace)
        found = verdict(alone, slow)
        assert (found.band, found.cause) == ("negative scaling", "communication")
        compression = next(one for one in advice(alone, slow) if one.key == "compression")
        after = measured(2, 16, *with_flags([], compression.flags), namespace=namespace)
    assert slow.step_time / after.step_time == pytest.approx(compression.gain, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "where"),
    [("data", {"SLOW_DATA": "0.2"}), ("contention", {"ON_ONE_CORE": "yes"}), ("straggler", {"PACE_OF_RANK_1": "2.5"})],
)
def test_the_scaling_verdict_blames_lost_time_on_slow_data_cpu_contention_or_a_slow_rank(cause, where, alone, measured):
    slow = measured(2, 16, **where)
    assert verdict(alone, slow).cause == cause
    if cause == "straggler":
        assert (slow.slowest_rank, slow.slowest_host) == (1, platform.node())


@pytest.mark.slow
def test_sync_each_batch_exchanges_gradients_in_every_micro_batch(measured):
    each = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
    assert measured(2, 16, "--accelerator_config", each).syncs == 2


def test_the_flag_measure_does_not_change_the_losses_or_weights_of_a_training(tiny_model, texts, tmp_path):
    flags = ["--max_steps", "6", "--logging_steps", "1"]
    plain = train_here(tiny_model, texts, tmp_path / "plain", *flags)
    measured = train_here(tiny_model, texts, tmp_path / "measured", *flags, "--measure", str(tmp_path / "t.jsonl"))
    assert losses(measured) == losses(plain)
    assert (tmp_path / "measured/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()
    (timing,) = read([tmp_path / "t.jsonl"])
    assert (timing.samples, timing.communication) == (3 * 16, 0)


# --- The command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_scale_run_with_apply_records_the_measured_and_the_predicted_gain(alone, healthy, tiny_model, texts, tmp_path):
    slow = dataclasses.replace(healthy, communication=healthy.step_time, step_time=2 * healthy.step_time)
    command = f"--model_name_or_path {tiny_model} --dataset_name {texts} --max_length 64"
    rows = [dataclasses.replace(row, command=command, link_bandwidth=1e3) for row in [*alone, slow]]
    append(tmp_path / "timings.jsonl", rows)

    words = "launch scale run --apply compression --repeats 1 --steps 1 --output"
    done = run([sys.executable, "-m", *words.split(), str(tmp_path)], tmp_path, cwd=ROOT)

    tried = applied(read([tmp_path / "timings.jsonl"]))
    assert done.code == 0, done.output
    assert [(one.title, one.num_processes) for one in tried] == [("compress gradients to fp16 on the wire", 2)]
    assert tried[0].predicted == pytest.approx(advice(rows[:2], rows[2])[0].gain)


@pytest.mark.slow
def test_scale_run_says_that_nothing_was_measured_if_every_run_fails(tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("launch.scaling.run.installed", lambda package: package != "matplotlib")
    (tmp_path / "bad.jsonl").write_text('{"text": ""}')
    words = ["--num_processes", "1", "--repeats", "2", *model_flags(tiny_model, tmp_path / "bad.jsonl")]
    assert main(["scale", "run", *words, "--output", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert "nothing was measured: every run failed" in printed.err
    assert printed.err.index("No pictures: ") < printed.err.index("failed, exit code 2")  # before it measures
    assert printed.err.count("failed, exit code 2") == 1  # it is not measured again
    assert printed.out.count("a round took ") == 1 and " ms, so" not in printed.out  # after the first
    assert "scale report" not in printed.out


def test_scale_run_refuses_an_output_folder_with_timings_of_another_training(tmp_path, capsys):
    append(tmp_path / "timings.jsonl", [Timing(1, 10.0, name="demonstration", command="--seed 1")])
    assert main(["scale", "run", "--learning_rate", "1", "--output", str(tmp_path)]) == 2
    said = "holds timings of demonstration with --seed 1; this run has --learning_rate 1"
    assert said in " ".join(capsys.readouterr().err.split())


def test_scale_run_starts_again_after_a_run_that_was_stopped_before_its_first_row(tmp_path, capsys):
    (tmp_path / "timings.jsonl").touch()
    assert main(["scale", "run", "--name", "mine", "--dataset_name", "./none", "--output", str(tmp_path)]) == 2
    assert "there is no file or folder ./none" in " ".join(capsys.readouterr().err.split())


def test_strong_and_weak_scaling_share_the_run_with_the_most_processes():
    both = ("strong", "weak")
    found = [(point.num_processes, point.global_batch, point.series) for point in points([], both, sizes=[1, 2, 4])]
    expected = [(1, 16, both[:1]), (1, 4, both[1:]), (2, 16, both[:1]), (2, 8, both[1:]), (4, 16, both)]
    assert sorted(found) == sorted(expected)
