"""`recipes list`, `show`, `where`, `diff` and `compare`: recipes, and real records."""

import json
import re

import pytest

from launch.cli import main
from launch.commands.compare import _less_is_better, differences, noise_can_make, other_training, results
from launch.output.record import FIELDS
from recipes.catalog import RECIPES
from tests.support.running import ROOT, SCRIPT, read_record, train_here

EVALUATED = ["--dataset_train_split", "train[:90%]", "--dataset_test_split", "train[90%:]", "--eval_strategy", "epoch"]


@pytest.fixture(scope="module")
def runs(tiny_model, texts, tmp_path_factory):
    """A folder with three runs; `changed` has another recipe, and another rate from a file."""
    folder = tmp_path_factory.mktemp("runs")
    config = folder / "mine.yaml"
    config.write_text("learning_rate: 0.01\n")
    flags = {
        "plain": [*EVALUATED, "--max_steps", "5"],
        "changed": [*EVALUATED, "--max_steps", "5", "--recipe", "fast", "--config", str(config)],
        "diverged": ["--max_steps", "5", "--learning_rate", "1e30", "--max_grad_norm", "0"],
    }
    for name, words in flags.items():
        done = train_here(tiny_model, texts, folder / name, *words)
    assert "Start again with --fresh" in done.output  # a resume would keep the rate that diverged
    return folder


@pytest.fixture
def answer(capsys):
    """The exit code of a command, and what it prints, with single spaces."""

    def answered(*words):
        code = main([*map(str, words)])
        return code, re.sub(" +", " ", capsys.readouterr().out)

    return answered


# --- The catalogue --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_show_prints_every_setting_of_a_recipe(name, capsys):
    main(["show", name])
    printed = capsys.readouterr().out
    assert all(setting in printed for setting in RECIPES[name]().settings)
    assert ("no GPU: fp32" in printed) == (name in ("standard", "fast", "sharded"))
    value, reason = RECIPES[name]().settings["engine"]
    assert f"engine {value} recipe {name} {reason}" in re.sub(" +", " ", printed)
    assert "schedule: learning_rate 5e-05, linear, no warm-up, num_train_epochs 3, max_length 1024\n" in printed


def test_show_help_lists_every_field_of_run_json(capsys):
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in FIELDS)


def test_recipes_where_prints_the_paths_of_train_py_accelerate_yamls_and_azureml_yamls(answer):
    printed = answer("where")[1]
    for name, path in {"train.py": SCRIPT, "fast.yaml": ROOT / "accelerate_configs" / "fast.yaml"}.items():
        assert f"\n{name} {path}" in printed
    assert f"\nazureml/fast.yaml {ROOT / 'azureml' / 'fast.yaml'}" in printed


# --- One run, or two ------------------------------------------------------------------------------


def test_show_prints_status_results_and_settings_of_a_run(runs, capsys):
    for name in ("changed", "changed/run.json"):
        assert main(["show", str(runs / name)]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("fast, finished\n") and "final_loss" in printed
        assert "command line" in next(line for line in printed.splitlines() if line.startswith("max_steps"))
    main(["show", str(runs / "diverged")])
    assert capsys.readouterr().out.startswith("standard, failed: NotANumber")


def test_show_omits_the_schedule_of_an_older_record_that_lacks_a_part_of_it(runs, tmp_path, answer):
    content = read_record(runs / "plain")
    assert "schedule: learning_rate 5e-05, linear," in answer("show", runs / "plain")[1]
    del content["settings"]["lr_scheduler_type"]
    (tmp_path / "run.json").write_text(json.dumps(content))
    code, printed = answer("show", tmp_path)
    assert code == 0 and "schedule: " not in printed and "final_loss" in printed


def test_diff_of_two_runs_lists_settings_versions_and_world_size(runs, tmp_path, answer):
    content = read_record(runs / "changed")
    versions = {**content["versions"], "torch": "1.0"}
    (tmp_path / "run.json").write_text(json.dumps({**content, "versions": versions, "world_size": 2}))
    _, printed = answer("diff", runs / "plain", tmp_path)
    assert "learning_rate 5e-05 0.01" in printed and "world_size 1 2" in printed
    assert f"torch {read_record(runs / 'plain')['versions']['torch']} 1.0" in printed
    assert not {"max_steps", "output_dir", "config"} & names_in(printed)
    assert answer("diff", runs / "plain", runs / "plain")[1] == "nothing differs\n"


def names_in(printed) -> set[str]:
    """The settings of a printed table."""
    return {line.split()[0] for line in printed.partition("\nsetting ")[2].splitlines()[1:] if line.strip()}


def test_diff_of_a_run_and_its_recipe_lists_the_engine_and_the_flags_of_the_run(runs, answer):
    assert names_in(answer("diff", runs / "diverged", "standard")[1]) == {
        *("max_steps", "learning_rate", "max_grad_norm", "max_length", "model_name_or_path", "dataset_name", "engine")
    }


def test_diff_of_two_recipes_prints_the_same_as_show_diff(answer):
    assert answer("diff", "fast", "standard") == answer("show", "fast", "--diff", "standard")
    assert "fast: half as many host syncs as standard" in answer("diff", "fast", "standard")[1]


# --- Several --------------------------------------------------------------------------------------


def test_compare_prints_differing_settings_results_and_failed_runs(runs, answer):
    names = ("plain", "changed", "diverged")
    code, printed = answer("compare", *(runs / name for name in names), "--target", "eval_loss", "0")
    assert code == 1 and "learning_rate 5e-05 0.01 1e+30" in printed
    assert "status finished finished failed: NotANumber" in printed and "no run meets all targets" in printed
    records = [read_record(runs / name) for name in names]
    found = results(records)
    for name in ("final_loss", "eval_loss", "step_time", "exchanges_per_step", "peak_memory_bytes", "train_runtime"):
        assert found[name][:2] == [record[name] for record in records[:2]]
        assert name in printed
    _, printed = answer("compare", runs / "plain", runs / "diverged")
    assert re.match("these runs train differently \\(.*, learning_rate\\), which also changes their results\n", printed)


def test_runs_are_compared_by_the_contents_of_their_data_and_not_by_its_path(runs):
    plain = read_record(runs / "plain")
    assert other_training(differences([plain, {**plain, "data": "other"}])) == ["the contents of the data"]
    moved = {"dataset_name": {"value": "/elsewhere/texts.jsonl", "source": "command line"}}
    assert differences([plain, {**plain, "settings": plain["settings"] | moved}]) == []
    seed = {"seed": {"value": 7, "source": "command line", "reason": ""}}
    assert other_training(differences([plain, {**plain, "settings": plain["settings"] | seed}])) == ["seed"]


@pytest.mark.parametrize(("times", "marked"), [(1.05, True), (1.12, True), (1.3, False), (0.8, False), (1.0, False)])
def test_compare_marks_a_change_of_step_time_that_noise_alone_can_make(times, marked):
    one, other = ({"step_time": seconds, "step_time_off": 0.1} for seconds in (1.0, times))
    assert noise_can_make("step_time", one, other) is marked


# --- Against a target -----------------------------------------------------------------------------


def test_compare_exits_with_0_only_if_one_and_the_same_run_meets_every_metric_target(runs, answer):
    losses = {name: read_record(runs / name)["eval_loss"] for name in ("plain", "changed")}
    better, worse = sorted(losses, key=losses.__getitem__)
    assert _less_is_better("eval_mse") and not _less_is_better("eval_accuracy")
    targets = ["--target", "eval_loss", losses[better], "--target", "global_step", "5"]
    code, printed = answer("compare", runs / better, runs / worse, runs / "diverged", *targets)
    assert code == 0 and f"all targets are met by {better}\n" in printed
    missed = f"missed by {losses[worse] - losses[better]:.4g} missed"
    assert f"eval_loss at most {losses[better]} met by 0 {missed}" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--target eval_los 1", "Fix: eval_loss."),
        ("--target eval_loss low", "not a number"),
        ("--target zzz 1", "one of "),
        ("{runs}", "{runs}/changed"),  # a folder of runs names them
    ],
)
def test_compare_refuses_an_invalid_metric_target_or_a_folder_that_holds_several_runs(words, message, runs, capsys):
    assert main(["compare", str(runs / "plain"), str(runs / "changed"), *words.format(runs=runs).split()]) == 2
    assert "".join(message.format(runs=runs).split()) in "".join(capsys.readouterr().err.split())
