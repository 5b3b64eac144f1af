"""A run goes on from its own checkpoints only: each says which run wrote it."""

import json
import shutil

import pytest

from launch.output import identity, manifest
from launch.output.checkpoints import newest_complete, newest_valid, numbered, rotate
from tests.support.running import losses, read_record, train_here

SIX_STEPS = "--max_steps 6 --save_steps 2 --save_total_limit 9 --learning_rate 1e-3 --logging_steps 1".split()


@pytest.fixture(scope="module")
def whole_run(tiny_model, texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole")
    return train_here(tiny_model, texts, output, *SIX_STEPS), output


@pytest.fixture(scope="module")
def another_run(tiny_model, texts, tmp_path_factory):
    """The same settings but the seed: nothing in its checkpoints looks wrong."""
    output = tmp_path_factory.mktemp("another")
    assert train_here(tiny_model, texts, output, *SIX_STEPS, "--seed", "7").code == 0
    return output


@pytest.fixture
def stopped(whole_run, tmp_path):
    """The folder as it was when the run had been killed after its last checkpoint."""
    return as_killed(shutil.copytree(whole_run[1], tmp_path / "stopped"))


def as_killed(folder):
    (folder / "model.safetensors").unlink()
    (folder / "run.json").write_text(json.dumps({**read_record(folder), "status": "running"}))
    return folder


def only(folder, *steps):
    for path in numbered(folder):
        if int(path.name.partition("-")[2]) not in steps:
            shutil.rmtree(path)
    return folder


def said(outcome):
    return " ".join(outcome.output.split())


def test_record_and_checkpoints_name_the_same_run(whole_run):
    named = {identity.of_checkpoint(path)["id"] for path in numbered(whole_run[1])}
    assert named == {identity.of_folder(whole_run[1])["id"]}


def test_a_checkpoint_of_another_run_is_set_aside(whole_run, another_run, stopped, tiny_model, texts):
    shutil.rmtree(stopped / "checkpoint-6")
    shutil.copytree(another_run / "checkpoint-6", stopped / "checkpoint-6")
    resumed = train_here(tiny_model, texts, stopped, *SIX_STEPS)
    assert "checkpoint-6 is damaged (it is another run's): skipped, kept as damaged-checkpoint-6" in said(resumed)
    assert "checkpoint-4, step 4" in resumed.output and losses(resumed) == losses(whole_run[0])


def test_a_resume_stays_the_same_run(whole_run, stopped, tiny_model, texts):
    only(stopped, 2)
    train_here(tiny_model, texts, stopped, *SIX_STEPS)
    named = [identity.of_folder(stopped), *map(identity.of_checkpoint, numbered(stopped))]
    assert named == [identity.of_folder(whole_run[1])] * 4


def test_without_a_record_the_newest_checkpoint_names_the_run(whole_run, another_run, stopped, tiny_model, texts):
    (stopped / "run.json").unlink()
    shutil.rmtree(stopped / "checkpoint-2")
    shutil.copytree(another_run / "checkpoint-2", stopped / "checkpoint-2")
    resumed = train_here(tiny_model, texts, stopped, *SIX_STEPS)
    assert "run.json is missing or damaged" in said(resumed) and "checkpoint-6, step 6" in resumed.output
    assert identity.of_folder(stopped) == identity.of_folder(whole_run[1])


def test_what_does_not_name_its_run_is_taken_as_before(whole_run, stopped, tiny_model, texts):
    """An older version of this program has written it."""
    only(stopped, 4)
    manifest.begin(stopped / "checkpoint-4", 4, "one process", 1)
    manifest.commit(stopped / "checkpoint-4", manifest.listed(stopped / "checkpoint-4"))
    assert losses(train_here(tiny_model, texts, stopped, *SIX_STEPS)) == losses(whole_run[0])


def test_what_is_told_to_be_saved_is_complete_and_the_runs_own(another_run, stopped):
    assert newest_complete(stopped).name == "checkpoint-6"
    (stopped / "checkpoint-6" / "optimizer.pt").write_bytes(b"cut off")
    assert newest_complete(stopped).name == "checkpoint-4"
    shutil.rmtree(stopped / "checkpoint-4")
    shutil.copytree(another_run / "checkpoint-4", stopped / "checkpoint-4")
    assert newest_complete(stopped).name == "checkpoint-2"


@pytest.mark.parametrize(
    "damage", [None, 3, {"id": "0123456789abcdef"}, {"began_from": "x"}, {"began_at": "x"}, {"checksum": ""}]
)
def test_a_record_that_names_its_run_wrongly_costs_no_checkpoint(damage, stopped):
    record = read_record(stopped)
    run = {**record["run"], **damage} if isinstance(damage, dict) else damage
    (stopped / "run.json").write_text(json.dumps({**record, "run": run}))
    newest, damaged = newest_valid(stopped)
    assert newest.step == 6 and not damaged


def test_fresh_begins_another_run(whole_run, stopped, tiny_model, texts):
    train_here(tiny_model, texts, stopped, *SIX_STEPS, "--fresh")
    assert identity.of_folder(stopped)["id"] != identity.of_folder(whole_run[1])["id"]


# --- A checkpoint that the user has named ---------------------------------------------------------


def at_step(folder, step):
    """The folder as it was when the run had been killed after this step."""
    for path in numbered(folder):
        if int(path.name.partition("-")[2]) > step:
            shutil.rmtree(path)
    return as_killed(folder)


@pytest.fixture
def begin(whole_run, tmp_path, tiny_model, texts):
    """Starts a run from a checkpoint in the folder `whole`, by default in another output folder."""
    whole = shutil.copytree(whole_run[1], tmp_path / "whole")

    def start(step, *flags, output=tmp_path / "begun"):
        named = ["--resume_from_checkpoint", str(whole / f"checkpoint-{step}")]
        return train_here(tiny_model, texts, output, *SIX_STEPS, *named, *flags)

    start.whole, start.output = whole, tmp_path / "begun"
    return start


def test_the_same_command_again_goes_on_from_its_newest(whole_run, begin):
    """A job that is queued again would lose all steps since its first start."""
    begin(2)
    at_step(begin.output, 4)
    again = begin(2)
    assert f"{begin.output}/checkpoint-4, step 4" in said(again) and "this run began from" in said(again)
    assert losses(again) == losses(whole_run[0])


def test_before_its_first_checkpoint_it_begins_there_again(whole_run, begin):
    begin(2)
    at_step(begin.output, 2)
    again = begin(2)
    assert f"{begin.whole}/checkpoint-2, step 2" in said(again) and losses(again) == losses(whole_run[0])


def test_once_it_is_finished_nothing_is_left(begin):
    begin(2)
    again = begin(2)
    assert again.code == 0 and "nothing to train" in again.output


def test_where_it_began_need_not_be_there_any_more(whole_run, begin):
    begin(2)
    at_step(begin.output, 4)
    shutil.rmtree(begin.whole)
    assert losses(begin(2)) == losses(whole_run[0])


def test_another_course_begins_there_again(begin):
    begin(2)
    at_step(begin.output, 4)
    again = begin(2, "--seed", "7")
    assert f"{begin.whole}/checkpoint-2, step 2" in said(again)


def test_an_earlier_checkpoint_of_the_run_begins_there_again(begin):
    at_step(begin.whole, 6)
    back = begin(4, output=begin.whole)
    assert f"{begin.whole}/checkpoint-4, step 4" in said(back)
    at_step(begin.whole, 6)
    assert f"{begin.whole}/checkpoint-2, step 2" in said(begin(2, output=begin.whole))


def test_what_was_given_up_is_never_taken_again(begin, tiny_model, texts):
    """It went back to step 2 with another seed, and was killed before its first checkpoint."""
    at_step(begin.whole, 6)
    kept = shutil.copytree(begin.whole / "checkpoint-6", begin.output)
    other = begin(2, "--seed", "7", output=begin.whole)
    shutil.rmtree(begin.whole / "checkpoint-4")
    shutil.rmtree(begin.whole / "checkpoint-6")
    shutil.copytree(kept, begin.whole / "checkpoint-6")
    as_killed(begin.whole)
    resumed = train_here(tiny_model, texts, begin.whole, *SIX_STEPS, "--seed", "7")
    assert "checkpoint-2, step 2" in resumed.output and "it is another run's" in said(resumed)
    assert losses(resumed) == losses(other)


@pytest.mark.parametrize(("is_own", "left"), [(False, [6, 5, 2]), (True, [6, 5])])
def test_what_is_another_runs_is_never_deleted(is_own, left, tmp_path):
    own, another = identity.new(), identity.new()
    for step, run in ((2, own), (5, own if is_own else another), (6, own)):
        manifest.begin(tmp_path / f"checkpoint-{step}", step, "one process", 1, run)
        manifest.commit(tmp_path / f"checkpoint-{step}", [])
    rotate(tmp_path / "checkpoint-6", 2, None)
    assert [int(path.name.partition("-")[2]) for path in numbered(tmp_path)] == left


def test_nothing_of_what_was_given_up_gets_into_a_new_checkpoint(begin):
    (begin.whole / "checkpoint-6" / "rng_state_1.pth").touch()
    at_step(begin.whole, 6)
    begin(2, "--seed", "7", output=begin.whole)
    assert "rng_state_1.pth" not in manifest.read(begin.whole / "checkpoint-6")["files"]
    assert newest_valid(begin.whole)[0].step == 6
