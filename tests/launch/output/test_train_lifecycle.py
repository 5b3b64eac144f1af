"""A run from start to end and back: resumed exactly, finished once, kept, always recorded."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.running import SCRIPT, fork, losses, model_flags, read_record, train_here
from tests.support.waiting import PATIENCE, wait_for

EIGHT_STEPS = "--max_steps 8 --save_steps 4 --save_total_limit 2 --learning_rate 1e-3 --logging_steps 1".split()


@pytest.fixture(scope="module")
def whole_run(tiny_model, texts, tmp_path_factory):
    """Eight steps with checkpoints at 4 and 8."""
    output = tmp_path_factory.mktemp("whole")
    return train_here(tiny_model, texts, output, *EIGHT_STEPS), output


@pytest.fixture
def stopped_at_four(whole_run, tmp_path):
    """The folder as it was when the run had been killed after checkpoint-4."""
    folder = shutil.copytree(whole_run[1], tmp_path / "stopped")
    shutil.rmtree(folder / "checkpoint-8")
    (folder / "model.safetensors").unlink()
    record = read_record(folder)
    (folder / "run.json").write_text(json.dumps({**record, "status": "running"}))
    return folder


def test_the_record_says_how_it_ended(whole_run):
    record = whole_run[0].record
    assert (record["status"], record["world_size"], record["global_step"]) == ("finished", 1, 8)


def test_the_record_has_results_under_trainers_names(whole_run):
    names = {"train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second", "log_history"}
    assert names <= set(whole_run[0].record)


def test_the_record_holds_every_setting_also_the_librarys_defaults(whole_run):
    settings = whole_run[0].record["settings"]
    assert settings["adam_beta1"] == {"value": 0.9, "source": "library default", "reason": ""}


def test_every_recorded_setting_has_its_source(whole_run):
    settings = whole_run[0].record["settings"]
    assert settings["max_steps"] == {"value": 8, "source": "command line", "reason": ""}
    assert settings["save_total_limit"]["source"] == "command line"
    assert settings["ddp_bucket_cap_mb"]["source"] == "recipe standard"


def test_the_banner_is_what_trained(whole_run):
    assert "micro 4 x accumulation 4 x world 1 = global 16" in whole_run[0].output


def test_an_interrupted_run_resumes_with_exactly_the_same_losses(whole_run, stopped_at_four, tiny_model, texts):
    resumed = train_here(tiny_model, texts, stopped_at_four, *EIGHT_STEPS)
    assert "checkpoint-4, step 4" in resumed.output
    assert losses(resumed) == pytest.approx(losses(whole_run[0]), rel=1e-6)


def test_the_same_data_at_another_path_is_the_same_run(whole_run, stopped_at_four, tiny_model, texts, tmp_path):
    """Azure ML mounts a job's data at another path at every start."""
    elsewhere = tmp_path / "mounted" / "rows.jsonl"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(texts.read_bytes())
    resumed = train_here(tiny_model, elsewhere, stopped_at_four, *EIGHT_STEPS)
    assert "checkpoint-4, step 4" in resumed.output
    assert losses(resumed) == pytest.approx(losses(whole_run[0]), rel=1e-6)


def test_a_damaged_checkpoint_is_named_skipped_and_kept(stopped_at_four, tiny_model, texts):
    newer = shutil.copytree(stopped_at_four / "checkpoint-4", stopped_at_four / "checkpoint-6")
    state = json.loads((newer / "trainer_state.json").read_text())
    (newer / "trainer_state.json").write_text(json.dumps({**state, "global_step": 6}))
    (newer / "manifest.json").unlink()  # as an older version of this program wrote it
    (newer / "optimizer.pt").write_bytes(b"cut off")
    resumed = train_here(tiny_model, texts, stopped_at_four, *EIGHT_STEPS)
    assert "checkpoint-6 is damaged (optimizer.pt is cut off or damaged)" in resumed.output
    assert (stopped_at_four / "damaged-checkpoint-6" / "model.safetensors").exists()
    assert resumed.record["global_step"] == 8


def edit_weights(checkpoint, change):
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    (checkpoint / "manifest.json").unlink()


def test_a_checkpoint_that_lacks_weights_is_refused(stopped_at_four, tiny_model, texts):
    edit_weights(stopped_at_four / "checkpoint-4", lambda weights: weights.pop("lm_head.weight"))
    refused = train_here(tiny_model, texts, stopped_at_four, *EIGHT_STEPS)
    assert refused.code == 2 and "lacks 1 weights of the model, among them lm_head.weight" in refused.output


def test_a_checkpoint_of_another_shape_is_refused(stopped_at_four, tiny_model, texts):
    checkpoint = stopped_at_four / "checkpoint-4"
    edit_weights(checkpoint, lambda weights: weights.update({"lm_head.weight": torch.zeros(3, 32)}))
    refused = train_here(tiny_model, texts, stopped_at_four, *EIGHT_STEPS)
    assert refused.code == 2 and "size mismatch for lm_head.weight" in refused.output


def test_an_optimizer_of_another_model_is_refused(stopped_at_four, tiny_model, texts):
    file = stopped_at_four / "checkpoint-4" / "optimizer.pt"
    file.with_name("manifest.json").unlink()
    state = torch.load(file)
    torch.save({**state, "param_groups": state["param_groups"][:1]}, file)
    refused = train_here(tiny_model, texts, stopped_at_four, *EIGHT_STEPS)
    assert refused.code == 2 and "does not fit this model" in refused.output


@pytest.mark.slow
def test_without_a_valid_checkpoint_training_starts_over(stopped_at_four, tiny_model, texts):
    (stopped_at_four / "checkpoint-4" / "trainer_state.json").write_text("{")
    resumed = train_here(tiny_model, texts, stopped_at_four, *EIGHT_STEPS)
    assert "training starts over" in resumed.output
    assert len(losses(resumed)) == 8


def test_a_finished_run_trains_nothing(whole_run, tmp_path, tiny_model, texts):
    folder = shutil.copytree(whole_run[1], tmp_path / "again")
    before = (folder / "model.safetensors").read_bytes()
    again = train_here(tiny_model, texts, folder, *EIGHT_STEPS)
    assert again.code == 0 and "nothing to train" in again.output
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_run_killed_between_its_last_step_and_its_end_takes_no_step_more(whole_run, tmp_path, tiny_model, texts):
    folder = shutil.copytree(whole_run[1], tmp_path / "killed-late")
    (folder / "run.json").write_text(json.dumps({**read_record(folder), "status": "running"}))
    again = train_here(tiny_model, texts, folder, *EIGHT_STEPS)
    assert (again.code, again.record["global_step"], again.record["status"]) == (0, 8, "finished")


def test_more_steps_go_on_from_where_it_ended(whole_run, tmp_path, tiny_model, texts):
    folder = shutil.copytree(whole_run[1], tmp_path / "longer")
    longer = train_here(tiny_model, texts, folder, *["10" if word == "8" else word for word in EIGHT_STEPS])
    assert longer.record["global_step"] == 10


@pytest.mark.slow
def test_settings_that_a_resume_ignores_are_reported(stopped_at_four, tiny_model, texts):
    changed = ["2e-3" if word == "1e-3" else word for word in EIGHT_STEPS]
    assert (
        "learning_rate 0.002 is ignored by a resume" in train_here(tiny_model, texts, stopped_at_four, *changed).output
    )


def test_another_training_in_the_same_folder_is_refused(whole_run, tiny_model, texts):
    other = train_here(tiny_model, texts, whole_run[1], *EIGHT_STEPS, "--packing")
    assert other.code == 2 and "another --output_dir, or --fresh" in other.output


@pytest.mark.slow
def test_weights_alone_resume_with_a_note(tiny_model, texts, tmp_path):
    flags = "--save_only_model --save_steps 2 --save_total_limit 1 --learning_rate 1e-3".split()
    train_here(tiny_model, texts, tmp_path, *flags, "--max_steps", "2")
    longer = train_here(tiny_model, texts, tmp_path, *flags, "--max_steps", "4")
    assert "start afresh" in longer.output
    # Rotated, not damaged.
    assert (longer.record["global_step"], (tmp_path / "checkpoint-2").exists()) == (4, False)


def test_fewer_steps_than_a_checkpoint_has_trained_are_refused(stopped_at_four, tiny_model, texts):
    """Its model would be saved as that of a shorter training. The advice has it saved as it is."""
    rest = [word for word in EIGHT_STEPS if word not in ("--max_steps", "8")]
    refused = train_here(tiny_model, texts, stopped_at_four, *rest, "--max_steps", "2")
    assert refused.code == 2
    assert "checkpoint-4 has trained 4 steps already, more than 2" in " ".join(refused.output.split())
    saved = train_here(tiny_model, texts, stopped_at_four, *rest, "--max_steps", "4")
    assert (saved.code, saved.record["global_step"], saved.record["status"]) == (0, 4, "finished")


def test_fewer_epochs_than_a_checkpoint_has_trained_are_refused(tiny_model, texts, tmp_path):
    flags = "--dataset_train_split train[:32] --save_strategy epoch --learning_rate 1e-3".split()
    train_here(tiny_model, texts, tmp_path, *flags, "--num_train_epochs", "3")
    (tmp_path / "run.json").write_text(json.dumps({**read_record(tmp_path), "status": "running"}))
    refused = train_here(tiny_model, texts, tmp_path, *flags, "--num_train_epochs", "2")
    assert refused.code == 2 and "has trained 3.0 epochs already, more than 2" in " ".join(refused.output.split())
    assert train_here(tiny_model, texts, tmp_path, *flags, "--num_train_epochs", "3").code == 0


def test_another_optimizer_is_another_training(whole_run, tiny_model, texts):
    other = train_here(tiny_model, texts, whole_run[1], *EIGHT_STEPS, "--optim", "sgd")
    assert other.code == 2 and "optim" in other.output


def test_a_finished_run_that_is_asked_for_epochs_goes_on(whole_run, tmp_path, tiny_model, texts):
    folder = shutil.copytree(whole_run[1], tmp_path / "epochs")
    flags = "--num_train_epochs 1 --save_total_limit 2 --learning_rate 1e-3".split()
    assert train_here(tiny_model, texts, folder, *flags).record["global_step"] == 16


def test_fresh_moves_nothing_when_something_else_is_wrong(whole_run, tmp_path, tiny_model, texts):
    folder = shutil.copytree(whole_run[1], tmp_path / "run")
    assert train_here(tiny_model, tmp_path / "missing.jsonl", folder, *EIGHT_STEPS, "--fresh").code == 2
    assert (folder / "model.safetensors").exists()


def test_a_token_is_neither_printed_nor_recorded(tiny_model, texts, tmp_path):
    outcome = train_here(tiny_model, texts, tmp_path, "--max_steps", "1", "--hub_token", "hf_verysecret")
    assert outcome.code == 0
    assert "verysecret" not in outcome.output + (tmp_path / "run.json").read_text()


def test_fresh_starts_over_and_deletes_nothing(whole_run, tmp_path, tiny_model, texts):
    folder = shutil.copytree(whole_run[1], tmp_path / "run")
    fresh = train_here(tiny_model, texts, folder, *EIGHT_STEPS, "--fresh")
    assert fresh.record["status"] == "finished" and len(losses(fresh)) == 8
    assert (tmp_path / "run.old-1" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"settings": 3, "world_size": "two"}'])
def test_a_damaged_record_never_stops_a_run(content, stopped_at_four, tiny_model, texts):
    (stopped_at_four / "run.json").write_text(content)
    assert train_here(tiny_model, texts, stopped_at_four, *EIGHT_STEPS).record["status"] == "finished"


@pytest.mark.parametrize("recipe", ["baseline", "standard", "fast"])
@pytest.mark.parametrize("steps", ["1", "2", "20"])
def test_a_run_that_diverged_is_never_finished(recipe, steps, tiny_model, texts, tmp_path):
    flags = f"--recipe {recipe} --learning_rate 1e38 --max_grad_norm 0 --max_steps {steps} --lr_scheduler_type constant"
    outcome = train_here(tiny_model, texts, tmp_path, *flags.split())
    assert (outcome.code, outcome.record["status"]) == (1, "failed")
    assert "step" in outcome.output and "lower learning rate" in outcome.output


def test_ctrl_c_is_recorded_and_the_next_start_resumes(tiny_model, texts, tmp_path):
    flags = [*model_flags(tiny_model, texts), "--output_dir", str(tmp_path), "--save_steps", "5"]
    endless = ["--max_steps", "100000", "--num_train_epochs", "9999"]
    with tempfile.TemporaryFile("w+") as log:
        process = fork(dict(os.environ), [str(SCRIPT), *flags, *endless], log.fileno())
        wait_for("a checkpoint", lambda: list(tmp_path.glob("checkpoint-*/trainer_state.json")))
        os.kill(process.pid, signal.SIGINT)
        process.join(PATIENCE)
        process.kill()
        log.seek(0)
        output = log.read()
    assert process.exitcode == 130, output
    assert read_record(tmp_path)["status"] == "interrupted"
    assert "interrupted. Saved: " in output and "Traceback" not in output


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a small file system: needs root")
class TestFullDisk:
    @pytest.fixture
    def small_disk(self, tmp_path):
        """A real file system of 1060 KiB.

        A checkpoint of the tiny model takes about 490 KiB, of which 440 are weights and moments.
        """
        folder = tmp_path / "disk"
        folder.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1060k", "tmpfs", folder]).returncode:
            pytest.skip("mounting is not allowed here")
        yield folder
        subprocess.run(["umount", "-l", folder], check=True)

    def test_too_small_a_disk_is_refused_before_training(self, small_disk, tiny_model, texts):
        (small_disk / "filler").write_bytes(b"x" * 800_000)
        outcome = train_here(tiny_model, texts, small_disk / "run", *EIGHT_STEPS)
        assert outcome.code == 2 and "MiB free, this run saves about" in outcome.output
        assert "in 2 checkpoints at once" in " ".join(outcome.output.split())

    def test_a_smaller_limit_needs_less(self, small_disk, tiny_model, texts):
        (small_disk / "filler").write_bytes(b"x" * 300_000)
        flags = ["--save_total_limit", "1", "--max_steps", "4", "--save_steps", "4"]
        assert train_here(tiny_model, texts, small_disk / "run", *flags).code == 0

    def test_a_disk_that_fills_up_says_what_was_saved(self, small_disk, tiny_model, texts):
        outcome = train_here(tiny_model, texts, small_disk / "run", *EIGHT_STEPS)
        assert outcome.code == 1 and "No space left on device" in outcome.output


def test_a_run_killed_after_its_last_evaluation_has_that(tiny_model, texts, tmp_path):
    split = "--dataset_train_split train[:90%] --dataset_test_split train[90%:]".split()
    flags = "--max_steps 2 --save_steps 2 --eval_strategy steps --eval_steps 2".split()
    once = train_here(tiny_model, texts, tmp_path, *split, *flags)
    (tmp_path / "run.json").write_text(json.dumps({**once.record, "status": "running"}))
    again = train_here(tiny_model, texts, tmp_path, *split, *flags)
    assert {entry["step"] for entry in again.record["log_history"] if "eval_loss" in entry} == {2}
    assert again.record["eval_loss"] == pytest.approx(once.record["eval_loss"])
    assert again.record["train_loss"] is None


@pytest.mark.slow
def test_a_resume_says_nothing_of_tied_weights(tiny_model, texts, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "tied")
    words = [sys.executable, str(SCRIPT), *model_flags(tmp_path / "tied", texts), "--output_dir", str(tmp_path / "out")]
    for steps in ("1", "2"):
        flags = ["--max_steps", steps, "--save_steps", "1", "--verbose", "--use_cpu", "true"]
        done = subprocess.run([*words, *flags], capture_output=True, text=True, check=True)
    assert "resuming from" in done.stdout
    assert "missing keys" not in done.stdout + done.stderr
    assert "save_steps = 1 (command line)" in done.stdout
