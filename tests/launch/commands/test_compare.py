"""`recipes compare`: what differs between records of real runs, and which meets a target."""

import json

import pytest

from launch.cli import main
from launch.commands.compare import differences, noise_can_make, other_training
from tests.support.running import train_here

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
        train_here(tiny_model, texts, folder / name, *words)
    return folder


@pytest.fixture
def compare(runs, capsys):
    """The exit code and the JSON of a comparison of runs, by their names."""

    def compared(*words):
        names = [str(runs / word) if (runs / word).is_dir() else word for word in words]
        code = main(["compare", *names, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return compared


def of(runs, name) -> dict:
    return json.loads((runs / name / "run.json").read_text())


def test_a_setting_stands_under_its_source_with_its_value_and_source_in_each_run(compare, runs):
    _, found = compare("plain", "changed")
    assert found["settings"]["file"]["learning_rate"] == [
        {"value": 5e-5, "source": "library default"},
        {"value": 0.01, "source": str(runs / "mine.yaml")},
    ]
    sources = [entry["source"] for entry in found["settings"]["recipe"]["logging_steps"]]
    assert sources == ["recipe standard", "recipe fast"]


def test_where_a_run_wrote_to_is_no_difference(compare):
    _, found = compare("plain", "changed")
    names = {name for settings in found["settings"].values() for name in settings}
    assert not names & {"output_dir", "config"}


def test_a_run_does_not_differ_from_itself(compare):
    _, found = compare("plain", "plain")
    assert found["settings"] == found["surroundings"] == {} and found["other_training"] == []


def test_results_are_those_of_the_records(compare, runs):
    _, found = compare("plain", "changed")
    records = [of(runs, name) for name in ("plain", "changed")]
    for name in ("final_loss", "eval_loss", "step_time", "exchanges_per_step", "peak_memory_bytes", "train_runtime"):
        assert found["results"][name] == [record[name] for record in records]


def test_a_run_that_failed_is_shown_with_its_status_and_error(compare):
    _, found = compare("plain", "diverged")
    assert found["runs"][1]["status"] == "failed" and "NotANumber" in found["runs"][1]["error"]


def test_no_name_is_cut_when_piped(runs, tmp_path, capsys):
    names = [f"{number}-{'a-name-that-says-it-all-' * 4}" for number in range(3)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text((runs / "changed" / "run.json").read_text())
    main(["compare", str(runs / "plain"), *(str(tmp_path / name) for name in names)])
    headings = capsys.readouterr().out.splitlines()[-20:]
    assert any(all(name in line for name in names) for line in headings)


def timed(record: dict, step_time: float, off: float) -> dict:
    return {**record, "step_time": step_time, "step_time_off": off}


@pytest.mark.parametrize(("times", "marked"), [(1.05, True), (1.12, True), (1.3, False), (0.8, False), (1.0, False)])
def test_a_step_time_that_noise_can_make_is_marked(runs, times, marked):
    one, other = timed(of(runs, "plain"), 1.0, 0.1), timed(of(runs, "plain"), times, 0.1)
    assert noise_can_make("step_time", one, other) is marked


def logged(record: dict, *losses: float) -> dict:
    history = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    return {**record, "final_loss": losses[-1], "log_history": history}


@pytest.mark.parametrize(
    ("losses", "marked"),
    [((3.0, 2.2, 2.1, 1.3), True), ((4.1, 3.0, 3.2, 2.1), False), ((3.1, 2.1, 2.1, 1.1), False)],
    ids=["crossing", "apart", "apart by the same in each log"],
)
def test_a_loss_that_noise_can_make_is_marked(runs, losses, marked):
    one = logged(of(runs, "plain"), 3.0, 2.0, 2.0, 1.0)
    assert noise_can_make("final_loss", one, logged(of(runs, "plain"), *losses)) is marked


def test_runs_of_one_name_are_told_apart_by_their_paths(runs, tmp_path, capsys):
    other = tmp_path / "plain"
    other.mkdir()
    (other / "run.json").write_text((runs / "plain" / "run.json").read_text())
    main(["compare", str(runs / "plain"), str(other), "--json"])
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == [str(runs / "plain"), str(other)]


@pytest.mark.parametrize(("name", "value"), [("seed", 7), ("global_batch_size", 32), ("dataset_name", "other")])
def test_another_training_is_named(runs, name, value):
    plain = of(runs, "plain")
    settings = {**plain["settings"], name: {"value": value, "source": "command line", "reason": ""}}
    other = {**plain, "settings": settings, "data": None}  # equal fingerprints would be the same data
    assert other_training(differences([plain, other])) == [name]


def test_contents_count_and_not_their_path(runs):
    plain = of(runs, "plain")
    assert other_training(differences([plain, {**plain, "data": "other"}])) == ["the contents of the data"]
    moved = {"dataset_name": {"value": "/elsewhere/texts.jsonl", "source": "command line"}}
    assert differences([plain, {**plain, "settings": plain["settings"] | moved}]) == []


def test_it_says_first_that_the_training_is_not_the_same(runs, capsys):
    main(["compare", str(runs / "plain"), str(runs / "diverged")])
    assert capsys.readouterr().out.startswith("not the same training, which changes the results too: another ")


@pytest.mark.parametrize(
    ("target", "code"),
    [(["eval_loss", "100"], 0), (["eval_loss", "0"], 1), (["samples_per_second", "0"], 0), (["train_runtime", "0"], 1)],
)
def test_the_exit_code_says_whether_a_run_meets_the_target(compare, target, code):
    assert compare("plain", "changed", "--target", *target)[0] == code


def test_every_target_is_to_be_met_by_one_run(compare, runs):
    losses = {name: of(runs, name)["eval_loss"] for name in ("plain", "changed")}
    better, worse = sorted(losses, key=losses.__getitem__)
    code, found = compare(better, worse, "--target", "eval_loss", str(losses[better]), "--target", "global_step", "5")
    assert (code, found["meets_all"]) == (0, [better])
    assert found["targets"][0]["margin"] == [0, pytest.approx(losses[better] - losses[worse])]


def test_a_run_without_the_result_does_not_meet_it(compare):
    _, found = compare("diverged", "plain", "--target", "eval_loss", "100")
    assert found["targets"][0]["met"] == [False, True]


def test_a_folder_of_runs_names_them(runs, capsys):
    assert main(["compare", str(runs / "plain"), str(runs)]) == 2
    assert str(runs / "changed") in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval_los", "1"], "Fix: eval_loss."),
        (["eval_loss", "low"], "is not a number"),
        (["zzz", "1"], "one of "),
    ],
)
def test_an_impossible_target_is_a_mistake(runs, capsys, words, message):
    assert main(["compare", str(runs / "plain"), str(runs / "changed"), "--target", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
