"""The same command again: resumed exactly from the run's own checkpoints, or refused.

What is only judged is asked of `look_ahead` and `find_earlier_run`, without a training.
"""

import fcntl
import json
import os
import shutil
from types import SimpleNamespace

import datasets
import pytest
import torch

from launch.output import checkpoints, record
from launch.output.checkpoints import manifest_of, newest_complete, newest_valid, numbered
from launch.output.resume import find_earlier_run, look_ahead, make_room
from recipes.errors import UserError
from recipes.run import here, resolve
from tests.support.running import losses, model_flags, read_record, rewrite, train_here

SIX_STEPS = "--max_steps 6 --save_steps 2 --save_total_limit 9 --learning_rate 1e-3 --logging_steps 1".split()
SPLIT = "--dataset_train_split train[:90%] --dataset_test_split train[90%:]".split()


def other(flag, value):
    """The flags of the run, one of them changed."""
    flags = [*SIX_STEPS] if flag in SIX_STEPS else [*SIX_STEPS, flag, ""]
    flags[flags.index(flag) + 1] = value
    return flags


@pytest.fixture(scope="module")
def whole_run(tiny_model, texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole")
    return train_here(tiny_model, texts, output, *SIX_STEPS), output


@pytest.fixture(scope="module")
def another_run(tiny_model, texts, tmp_path_factory):
    """The same settings but the seed: nothing in its checkpoints looks wrong."""
    output = tmp_path_factory.mktemp("another")
    assert train_here(tiny_model, texts, output, *other("--seed", "7")).code == 0
    return output


def at_step(folder, step):
    """The folder as it was when the run had been killed after this step."""
    for path in numbered(folder):
        if int(path.name.partition("-")[2]) > step:
            shutil.rmtree(path)
    (folder / "model.safetensors").unlink(missing_ok=True)
    rewrite(folder, status="running")
    return folder


@pytest.fixture
def finished(whole_run, tmp_path):
    return shutil.copytree(whole_run[1], tmp_path / "run")


@pytest.fixture
def stopped(finished):
    """Killed after its last checkpoint."""
    return at_step(finished, 6)


@pytest.fixture
def asked(tiny_model, texts):
    """The run that a command line asks for."""

    def run(folder, *flags, model=tiny_model, data=texts):
        return resolve([*model_flags(model, data), "--output_dir", str(folder), *(flags or SIX_STEPS)], here())

    return run


@pytest.fixture
def found(asked):
    """What a run finds in its folder: the checkpoint's step, 0 if none, and the notes as one."""

    def find(folder, *flags, **files):
        run = asked(folder, *flags, **files)
        earlier = look_ahead(run) or find_earlier_run(run)
        return SimpleNamespace(**{**vars(earlier), "notes": " ".join(earlier.notes)})

    return find


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def replace(folder, step, other):
    shutil.rmtree(folder / f"checkpoint-{step}")
    shutil.copytree(other / f"checkpoint-{step}", folder / f"checkpoint-{step}")


# --- It goes on -----------------------------------------------------------------------------------


def test_a_resume_skips_damaged_checkpoints_and_repeats_the_losses(whole_run, another_run, stopped, tiny_model, texts):
    """From the newest checkpoint of its own that is whole."""
    replace(stopped, 6, another_run)
    flip(stopped / "checkpoint-4" / "model.safetensors")
    resumed = train_here(tiny_model, texts, stopped, *SIX_STEPS)
    said = " ".join(resumed.output.split())
    assert "checkpoint-6 cannot be used (it belongs to another run): skipped, kept as damaged-checkpoint-6" in said
    assert "checkpoint-4 cannot be used (model.safetensors has changed" in said and "checkpoint-2, step 2" in said
    assert losses(resumed) == losses(whole_run[0])
    assert resumed.record["train_loss"] == pytest.approx(whole_run[0].record["train_loss"])  # of all steps
    writers = [manifest_of(path)["run"] for path in numbered(stopped)]
    assert [*writers, resumed.record["run"]] == [whole_run[0].record["run"]] * 4
    assert (stopped / "damaged-checkpoint-4" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["galore_adamw --optim_args rank=4", "apollo_adamw --optim_args rank=4"])
def test_a_resume_with_an_optimizer_that_projects_gradients_repeats_the_losses(optim, tiny_model, texts, tmp_path):
    flags = [*SIX_STEPS, "--optim_target_modules", "all-linear", "--optim", *optim.split()]
    whole = train_here(tiny_model, texts, tmp_path, *flags)
    assert losses(train_here(tiny_model, texts, at_step(tmp_path, 4), *flags)) == losses(whole)


def test_an_incomplete_checkpoint_is_deleted_and_the_run_resumes_from_the_one_before(stopped, found):
    checkpoints.begin(stopped / "checkpoint-6", 6, "one process", 1)
    earlier = found(stopped)
    assert (earlier.step, (stopped / "checkpoint-6").exists()) == (4, False)
    assert "checkpoint-6 is incomplete (its save was not completed): skipped and deleted" in earlier.notes


@pytest.mark.parametrize("content", [None, "{", '{"settings": 3, "world_size": "two"}', "a bit"])
def test_a_damaged_run_json_does_not_prevent_a_resume(content, another_run, stopped, found):
    """Its newest checkpoint then says which run the folder belongs to."""
    replace(stopped, 2, another_run)
    file = stopped / "run.json"
    text = file.read_text().replace('"value": 0.001,', '"value": 0.003,', 1) if content == "a bit" else content
    own = read_record(stopped)["run"]
    file.unlink() if text is None else file.write_text(text)
    earlier = found(stopped)
    assert (earlier.step, earlier.identity) == (6, own) and "run.json is missing or damaged" in earlier.notes


def test_without_a_valid_checkpoint_training_starts_over(stopped, found):
    for path in numbered(stopped):
        (path / "trainer_state.json").write_text("{")
    earlier = found(stopped)
    assert (earlier.checkpoint, earlier.step) == (None, 0) and "training starts over" in earlier.notes


def test_the_search_for_the_newest_checkpoint_skips_unfinished_ones_and_other_runs(another_run, stopped):
    checkpoints.begin(stopped / "checkpoint-6", 6, "one process", 1)
    assert newest_complete(stopped).name == "checkpoint-4"
    replace(stopped, 4, another_run)
    assert newest_complete(stopped).name == "checkpoint-2"


@pytest.mark.parametrize("flags", ["--label_smoothing_factor 0.1", "--seed 7", "--train_sampling_strategy sequential"])
def test_a_resume_reports_settings_that_have_changed(flags, stopped, found):
    assert f"{flags.split()[0][2:]} was " in found(stopped, *SIX_STEPS, *flags.split()).notes


def test_a_run_resumes_if_the_same_model_and_data_are_at_another_path(stopped, found, tiny_model, texts, tmp_path):
    """Azure ML mounts data and models at another path at every start."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    data = shutil.copy(texts, tmp_path / "rows.jsonl")
    assert found(stopped, model=model, data=data).step == 6


def test_a_change_of_a_setting_that_the_run_does_not_use_does_not_prevent_a_resume(stopped, found):
    unread = "--lora_r 8 --bnb_4bit_quant_type fp4 --packing_strategy wrapped".split()
    assert found(stopped, *SIX_STEPS, *unread).step == 6


def test_a_resume_after_the_last_evaluation_reports_its_eval_loss_without_more_steps(tiny_model, texts, tmp_path):
    flags = [*SPLIT, *"--max_steps 2 --save_steps 2 --eval_strategy steps --eval_steps 2".split()]
    once = train_here(tiny_model, texts, tmp_path, *flags)
    rewrite(tmp_path, status="running")
    again = train_here(tiny_model, texts, tmp_path, *flags)
    assert again.record["eval_loss"] == pytest.approx(once.record["eval_loss"])
    assert (again.code, again.record["global_step"], again.record["status"]) == (0, 2, "finished")


def test_a_resume_uses_the_evaluation_and_early_stopping_of_the_new_flags(tiny_model, texts, tmp_path):
    """Trainer looks up the state of each callback."""
    none = "--logging_steps 1 --eval_strategy no --eval_steps 2".split()
    data = [*SPLIT, "--learning_rate", "1e-3"]
    train_here(tiny_model, texts, tmp_path, *data, *none, "--save_steps", "2", "--max_steps", "2")
    some = "--logging_steps 1 --eval_strategy steps --eval_steps 2 --save_steps 2 --early_stopping_patience 9".split()
    best = "--load_best_model_at_end --metric_for_best_model loss --max_steps 4".split()
    longer = train_here(tiny_model, texts, tmp_path, *data, *some, *best)
    assert longer.code == 0 and "checkpoint-2, step 2" in longer.output
    rates = {entry["step"]: entry["learning_rate"] for entry in longer.record["log_history"] if "loss" in entry}
    assert {3, 4} <= {*rates} and rates[3] > rates[4] > 0  # not 0, with which the shorter schedule ended
    assert longer.record["best_step"] == 4
    assert "is ignored by a resume" not in " ".join(longer.output.split())


# --- It is refused --------------------------------------------------------------------------------


def refused(run) -> str:
    """What is said of a run before any token is made, and before any file changes."""
    with pytest.raises(UserError) as caught:
        look_ahead(run)
    return str(caught.value)


def test_a_packed_run_with_another_packing_strategy_is_refused(finished, asked):
    rewrite(finished, {"packing": True})
    other = "--packing --packing_strategy wrapped".split()
    assert "with packing_strategy bfd" in refused(asked(finished, *SIX_STEPS, *other))


def test_an_output_dir_that_holds_a_run_whose_data_has_changed_is_refused(finished, asked, texts, tmp_path):
    data = tmp_path / texts.name
    data.write_text(texts.read_text().replace("Example 3 ", "Sample 3 "))
    rewrite(finished, {"dataset_name": str(data)})
    assert "not as it is now" in refused(asked(finished, data=data))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_resume_of_adapters_on_a_changed_base_model_is_refused(name, tiny_model, texts, asked, tmp_path):
    """A checkpoint of adapters holds neither the base model's weights nor its configuration."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    flags = "--use_peft --max_steps 3 --save_steps 2 --logging_steps 1".split()
    assert train_here(model, texts, tmp_path / "out", *flags).code == 0
    at_step(tmp_path / "out", 2)
    (model / name).write_bytes((model / name).read_bytes() + b"\n")
    named = ["--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-2")]
    for folder, more in (("out", []), ("begun", named)):
        run = asked(tmp_path / folder, *flags, *more, model=model)
        assert "model as it was, not as it is now" in refused(run)


@pytest.mark.parametrize("flags", ["--metric_for_best_model accuracy", "--dataset_test_split train[50%:]"])
def test_a_resume_with_another_measure_of_the_best_model_is_refused(flags, stopped, asked):
    """The kept figure of the best model is of the old metric, on the old examples."""
    best = [*SIX_STEPS, "--eval_strategy", "steps", "--load_best_model_at_end"]
    rewrite(stopped, {"load_best_model_at_end": True})
    assert f"with {flags.split()[0][2:]} None" in refused(asked(stopped, *best, *flags.split()))
    assert look_ahead(asked(stopped, *best, "--metric_for_best_model", "eval_loss")) is None


def test_a_resume_with_other_settings_of_a_schedule_that_follows_a_metric_is_refused(stopped, asked):
    follows = [*SIX_STEPS, "--lr_scheduler_type", "reduce_lr_on_plateau"]
    assert "with lr_scheduler_type " in refused(asked(stopped, *follows))
    rewrite(stopped, {"lr_scheduler_type": "reduce_lr_on_plateau"})
    assert "with lr_scheduler_kwargs None" in refused(
        asked(stopped, *follows, "--lr_scheduler_kwargs", '{"patience": 9}')
    )


def test_a_resume_after_a_new_commit_of_the_hub_model_is_refused_with_the_fix_model_revision(
    finished, asked, found, tmp_path, monkeypatch
):
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("b" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    rewrite(finished, {"model_name_or_path": "org/name"}, model="commit " + "a" * 40)
    assert f"--model_revision {'a' * 40}" in refused(asked(finished, model="org/name"))
    assert look_ahead(asked(finished, *SIX_STEPS, "--model_revision", "a" * 40, model="org/name"))
    (refs / "main").unlink()  # which commit it is now, nobody can tell
    assert found(at_step(finished, 4), model="org/name").kept["model"] == "commit " + "a" * 40


def test_a_resume_notes_that_a_hub_dataset_has_a_new_commit(stopped, asked):
    rewrite(stopped, {"dataset_name": "org/rows"}, data="commit a")
    run = asked(stopped, data="org/rows")
    assert find_earlier_run(run, "a").notes == []
    earlier = find_earlier_run(run, "b")
    assert earlier.notes == ["the data has changed since the checkpoint"] and earlier.kept["data"] == "commit a"


@pytest.mark.parametrize("engine", ["DDP", "FSDP1", "DeepSpeed ZeRO-2, optimizer offload"])
def test_checkpoints_of_another_engine_are_refused(engine, tmp_path):
    place = here(2, "sharded", environment={})
    run = resolve(["--recipe", "sharded", "--output_dir", str(tmp_path)], place)
    ended = {"status": "finished", "global_step": 1, "model_files": {}}
    record.write(tmp_path, {**record.started(run), **ended})
    assert look_ahead(run)
    rewrite(tmp_path, engine=engine)
    assert f"written with {engine}, and FSDP2" in refused(run)


def test_max_steps_or_epochs_below_those_of_the_newest_checkpoint_are_refused(stopped, found):
    """Its model would be saved as that of a shorter training. The advice has it saved as it is."""
    with pytest.raises(UserError, match="checkpoint-6 has trained 6 steps already, more than 2") as caught:
        found(stopped, *other("--max_steps", "2"))
    assert "--max_steps 6" in str(caught.value)
    state = json.loads((stopped / "checkpoint-6" / "trainer_state.json").read_text())
    (stopped / "checkpoint-6" / "trainer_state.json").write_text(json.dumps({**state, "epoch": 0.95}))
    checkpoints.commit(stopped / "checkpoint-6", checkpoints.listed(stopped / "checkpoint-6"))
    with pytest.raises(UserError, match=r"has trained 0.95 epochs already, more than 0.5"):
        found(stopped, *"--num_train_epochs 0.5 --learning_rate 1e-3".split())


def test_an_output_dir_that_holds_a_model_without_a_valid_run_json_is_refused(asked, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    assert "would overwrite the model" in refused(asked(model))
    (model / "run.json").write_text("{")  # of a finished run without checkpoints
    assert "would overwrite the model" in refused(asked(model))
    (model / "run.json").unlink()
    assert "would overwrite the model" in refused(asked(model, model=model))


def test_an_output_dir_that_holds_checkpoints_of_plain_trainer_is_refused(asked, stopped):
    (stopped / "run.json").unlink()
    for path in numbered(stopped):
        (path / "manifest.json").unlink()
    assert f"with --resume_from_checkpoint {stopped / 'checkpoint-6'}" in refused(asked(stopped))


def test_an_output_dir_that_another_run_is_writing_to_is_refused(asked, tmp_path):
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as a run holds it
    try:
        assert "another run is writing" in refused(asked(tmp_path))
    finally:
        os.close(handle)


def test_a_changed_learning_rate_is_refused_with_the_rate_that_continues_the_run(asked, stopped):
    said = refused(asked(stopped, *other("--learning_rate", "5e-3")))
    assert "holds a run with learning_rate 0.001, not 0.005" in said
    assert "use --learning_rate 0.001 to continue, another --output_dir, or --fresh" in said
    named = ["--resume_from_checkpoint", str(stopped / "checkpoint-2")]
    said = refused(asked(stopped.with_name("new"), *other("--learning_rate", "5e-3"), *named))
    assert "checkpoint-2 holds a run with learning_rate 0.001" in said and "another --resume_from_checkpoint" in said


@pytest.mark.usefixtures("own_cache")
def test_a_refused_or_finished_run_tokenizes_nothing_and_changes_no_file(finished, tiny_model, texts):
    flip(finished / "checkpoint-6" / "optimizer.pt")
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    outcome = train_here(tiny_model, texts, finished, *SIX_STEPS, "--packing")
    assert outcome.code == 2 and "with packing False, not True" in outcome.output
    outcome = train_here(tiny_model, texts, finished, *other("--seed", "7"))
    assert outcome.code == 2 and "holds a finished run with seed 42, not 7" in outcome.output
    outcome = train_here(tiny_model, texts, finished, *SIX_STEPS, "--recipe", "baseline")
    assert outcome.code == 2 and "holds a finished run with recipe standard, not baseline" in outcome.output
    outcome = train_here(tiny_model, texts, finished, *other("--logging_steps", "3"))
    assert outcome.code == 0 and "nothing to train" in outcome.output
    assert "logging_steps 3.0 (was 1.0) has no effect, because the run has finished" in outcome.output
    outcome = train_here(tiny_model, texts, finished.with_name("new"), "--dataset_text_field", "nowhere")
    assert outcome.code == 2 and not finished.with_name("new").exists()
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    assert not list(datasets.config.HF_DATASETS_CACHE.rglob("*.arrow"))


# --- It is finished -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "longer"),
    [(other("--max_steps", "8"), True), (["--num_train_epochs", "1"], True), (other("--max_steps", "5"), False)],
)
def test_a_finished_run_resumes_only_if_more_steps_or_epochs_are_given(flags, longer, finished, found):
    earlier = found(finished, *flags)
    assert (earlier.finished, earlier.step) == (not longer, 6)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_starting_a_finished_run_again_names_its_model_files_that_changed_or_are_missing(name, finished, found):
    assert found(finished).notes == ""
    (finished / name).write_bytes(bytes((finished / name).stat().st_size))
    assert found(finished).notes.startswith(f"{name} has changed since it was written: ")
    (finished / name).unlink()
    assert found(finished).notes.startswith(f"{name} is missing: ")


def test_fresh_starts_over_and_keeps_the_earlier_run_in_a_renamed_folder(whole_run, finished, tiny_model, texts):
    assert train_here(tiny_model, finished / "missing.jsonl", finished, *SIX_STEPS, "--fresh").code == 2
    assert (finished / "model.safetensors").exists()
    fresh = train_here(tiny_model, texts, finished, *SIX_STEPS, "--fresh")
    assert fresh.record["status"] == "finished" and losses(fresh) == losses(whole_run[0])
    assert fresh.record["run"]["id"] != whole_run[0].record["run"]["id"]
    assert (finished.with_name("run.old-1") / "model.safetensors").exists() and "run.old-1" in fresh.output


def test_fresh_renames_neither_a_folder_without_a_run_nor_the_current_folder(finished, asked, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    make_room(asked(tmp_path / "mine", "--fresh"))
    assert (tmp_path / "mine" / "thesis.txt").exists() and not (tmp_path / "mine.old-1").exists()
    monkeypatch.chdir(finished)
    with pytest.raises(UserError, match="is or holds the current folder"):
        make_room(asked(".", "--fresh"))


def test_a_converted_checkpoint_left_by_a_killed_run_is_removed_before_the_free_space_is_measured(finished, asked):
    (finished / "converted-checkpoint-2" / "tmp").mkdir(parents=True)
    with pytest.raises(UserError, match="but this run saves about"):
        make_room(asked(finished), 2 * shutil.disk_usage(finished).free)
    assert not list(finished.glob("converted-*"))


# --- From a checkpoint that the user has named ----------------------------------------------------


@pytest.fixture(scope="module")
def begun_run(whole_run, tiny_model, texts, tmp_path_factory):
    """A finished run that began from checkpoint-2 of another."""
    folder = tmp_path_factory.mktemp("begun")
    whole = shutil.copytree(whole_run[1], folder / "whole")
    named = ["--resume_from_checkpoint", str(whole / "checkpoint-2")]
    outcome = train_here(tiny_model, texts, folder / "begun", *SIX_STEPS, *named)
    assert losses(outcome) == losses(whole_run[0])
    return folder


@pytest.fixture
def begun(begun_run, tmp_path):
    """As it was when the run had been killed after step 4, and the flags that name its start."""
    folder = at_step(shutil.copytree(begun_run / "begun", tmp_path / "begun"), 4)
    return folder, ["--resume_from_checkpoint", str(begun_run / "whole" / "checkpoint-2")]


def test_a_requeued_run_with_resume_from_checkpoint_continues_at_its_own_newest_checkpoint(begun, found):
    """A job that is queued again would lose all steps since its first start."""
    folder, named = begun
    again = found(folder, *SIX_STEPS, *named)
    assert again.checkpoint == folder / "checkpoint-4" and "to begin at" in again.notes
    assert again.identity == read_record(folder)["run"]


def test_resume_from_checkpoint_is_used_if_the_seed_changed_or_output_dir_holds_no_checkpoint(begun, begun_run, found):
    (folder, named), start = begun, begun_run / "whole" / "checkpoint-2"
    assert found(folder, *other("--seed", "7"), *named).checkpoint == start
    assert found(at_step(folder, 2), *SIX_STEPS, *named).checkpoint == start


def test_resume_from_checkpoint_does_not_overwrite_a_finished_run(begun, asked, finished, tmp_path):
    folder, named = begun
    assert "which a resume from" in refused(asked(finished, *SIX_STEPS, *named))
    assert "with packing False, not True" in refused(asked(tmp_path / "new", *SIX_STEPS, "--packing", *named))
    rewrite(folder, status="finished", global_step=6)
    assert look_ahead(asked(folder, *SIX_STEPS, *named))


def test_a_resume_skips_checkpoints_that_an_abandoned_run_left(finished, found, tiny_model, texts, tmp_path):
    """It went back to step 2 with another seed, and was killed before its first checkpoint."""
    (finished / "checkpoint-6" / "rng_state_1.pth").touch()
    given_up = shutil.copytree(at_step(finished, 6) / "checkpoint-6", tmp_path / "given-up")
    back = [*other("--seed", "7"), "--resume_from_checkpoint", str(finished / "checkpoint-2")]
    train_here(tiny_model, texts, finished, *back)
    assert "rng_state_1.pth" not in manifest_of(finished / "checkpoint-6")["files"]
    assert newest_valid(finished)[0].step == 6
    shutil.copytree(given_up, at_step(finished, 2) / "checkpoint-6")
    again = found(finished, *other("--seed", "7"))
    assert again.checkpoint == finished / "checkpoint-2" and "it belongs to another run" in again.notes


def test_a_resume_with_an_optimizer_pt_that_does_not_fit_the_model_is_refused(stopped, tiny_model, texts):
    (at_step(stopped, 4) / "checkpoint-4" / "manifest.json").unlink()
    file = stopped / "checkpoint-4" / "optimizer.pt"
    state = torch.load(file)
    torch.save({**state, "param_groups": state["param_groups"][:1]}, file)
    outcome = train_here(tiny_model, texts, stopped, *SIX_STEPS)
    assert outcome.code == 2 and "does not fit this model" in " ".join(outcome.output.split())
