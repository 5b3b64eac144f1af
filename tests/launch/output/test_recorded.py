"""run.json and back: its settings are the run's, no secret is in it, each field is explained."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch.cli import main
from launch.commands.compare import results
from launch.host import secrets
from launch.output import record
from recipes.catalog import RECIPES
from recipes.run import HIDDEN, fingerprints, here, resolve
from recipes.run.batch import Batch
from recipes.run.hardware import Hardware
from recipes.run.spec import FIT
from tests.support.running import train_here
from tests.support.runs import A100, H100, machine, resolved

CPU = Hardware(cores=2)
WRITTEN = {
    "learning_rate": 3e-4,
    "save_steps": 0.5,
    "max_steps": 12,
    "global_batch_size": 32,
    "lora_target_modules": ["q_proj", "--flag", "a b"],
    "lr_scheduler_kwargs": {"min_lr": 1e-6, "text": "no"},
    "run_name": "1e-5",
    "dataset_name": "a path/with blanks äöü.jsonl",
    "hub_model_id": "a\nb $HOME *",
    "dataloader_drop_last": True,
}


def recorded(folder: Path, run) -> str:
    """The run.json of a run, as train.py writes it."""
    record.write(folder, record.started(run))
    return str(folder / "run.json")


# --- The same settings ----------------------------------------------------------------------------


@pytest.mark.parametrize("written", [{}, WRITTEN], ids=["recipe", "written"])
@pytest.mark.parametrize(
    "hardware", [CPU, machine(A100, 4), machine(H100, 4, liger=False)], ids=["cpu", "a100", "h100"]
)
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_run_json_given_as_config_resolves_to_the_same_settings(recipe, hardware, written, tmp_path):
    for world in (1, 2, 4):
        place = here(world, hardware=hardware, environment={})
        run = resolve(place=place, settings={"recipe": recipe, **written})
        again = resolve(["--config", recorded(tmp_path, run)], place)
        assert not run.problems and not again.problems
        assert not {name for name in run if again[name] != run[name] and name not in record.NO_DIFFERENCE}
        assert again.batch.total == run.batch.total


def test_a_run_json_given_as_config_does_not_set_output_dir(tmp_path):
    run = resolve(["--output_dir", str(tmp_path), "--run_name", "mine"], here(hardware=CPU))
    again = resolve(["--config", recorded(tmp_path, run)], here(hardware=CPU))
    assert (again["output_dir"], again["run_name"]) == ("outputs/standard", "mine")
    assert not again.explicit("output_dir")


def test_a_run_json_as_config_keeps_the_global_batch_with_another_number_of_processes(tmp_path):
    file = recorded(tmp_path, resolve(place=here(2, hardware=CPU)))
    assert resolve(["--config", file], here(4, hardware=CPU)).batch.total == 16
    (problem,) = resolve(["--config", file], here(3, hardware=CPU)).problems
    assert (problem.subject, problem.source) == ("global_batch_size", file)


def test_a_run_json_as_config_keeps_the_micro_batch_of_fit_for_the_same_process_count(tmp_path):
    run = resolve(["--fit"], here(2, hardware=CPU))
    file = recorded(tmp_path, replace(run, batch=Batch(2, 4, 2, "the largest that ran here", FIT)))
    again = resolve(["--config", file], here(2, hardware=CPU))
    assert (again.batch.micro, again["fit"]) == (2, False)
    elsewhere = resolve(["--config", file], here(1, hardware=CPU))
    assert (elsewhere.batch.micro, elsewhere["fit"]) == (4, True)


def test_a_run_json_as_config_keeps_a_max_length_lowered_to_the_models_limit(tmp_path):
    run = resolved("--model_name_or_path gpt2").limited("max_length", 512, "the longest sequence")
    assert resolve(["--config", recorded(tmp_path, run)], here(hardware=CPU))["max_length"] == 512


def test_a_run_json_of_an_older_version_given_as_config_sets_the_recorded_values_that_are_still_valid(tmp_path):
    file = Path(recorded(tmp_path, resolve(["--recipe", "fast"], here(hardware=CPU))))
    content = json.loads(file.read_text())
    content["settings"]["logging_steps"]["value"] = 77  # what an older `fast` said
    content["settings"]["adam_beta2"]["value"] = 0.95  # an older default of the library
    content["settings"]["seed"]["value"] = None
    content["settings"]["gone"] = {"value": 1, "source": "library default", "reason": ""}
    file.write_text(json.dumps(content))
    again = resolve(["--config", str(file)], here(hardware=CPU))
    assert (again["logging_steps"], again["adam_beta2"], again["seed"], again.problems) == (77, 0.95, 42, ())


def test_hardware_dependent_settings_of_a_run_json_are_decided_anew_on_another_machine(tmp_path):
    file = recorded(tmp_path, resolve(["--recipe", "fast"], here(hardware=machine(A100))))
    again = resolve(["--config", file], here(hardware=CPU))
    assert (again["bf16"], again["torch_compile"], again["use_cpu"]) == (False, False, True)
    assert not again.problems


def test_a_relative_path_in_run_json_falls_back_to_the_folder_where_the_run_started(tmp_path, monkeypatch):
    for name in ("then", "now"):
        (tmp_path / name).mkdir()
    (tmp_path / "then" / "texts.txt").write_text("a text\n")
    monkeypatch.chdir(tmp_path / "then")
    file = recorded(tmp_path, resolve(["--dataset_name", "texts.txt"], here(hardware=CPU)))
    monkeypatch.chdir(tmp_path / "now")
    assert resolve(["--config", file], here(hardware=CPU))["dataset_name"] == str(tmp_path / "then" / "texts.txt")
    (tmp_path / "now" / "texts.txt").write_text("a text\n")
    assert resolve(["--config", file], here(hardware=CPU))["dataset_name"] == "texts.txt"


# --- Fingerprints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 70_000, 299_999])
def test_a_changed_byte_anywhere_changes_the_fingerprint_of_data(place, tmp_path):
    file, content = tmp_path / "data.txt", bytearray(300_000)
    file.write_bytes(content)
    before = fingerprints.of_data(str(file))
    assert not fingerprints.differ(before, fingerprints.of_data(str(file)))
    content[place] = 1
    file.write_bytes(content)
    assert fingerprints.differ(before, fingerprints.of_data(str(file)))


def test_a_hidden_file_does_not_change_the_fingerprint_of_a_data_folder(tmp_path):
    (tmp_path / "data.txt").write_text("a text")
    before = fingerprints.of_data(str(tmp_path))
    (tmp_path / ".DS_Store").write_text("of a file manager")
    assert fingerprints.of_data(str(tmp_path)) == before


# --- Secrets --------------------------------------------------------------------------------------


def test_run_json_never_holds_a_secret_from_environment_flags_or_recipe(tmp_path, monkeypatch):
    """Neither one of the environment, nor one that was typed, nor one in a recipe of one's own."""
    token, similar, variable = "w4ndbS3cret", f"hf_{'aB3' * 10}", f"hf_{'xY7' * 10}"
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"base: fast\npurpose: Ours.\nchanges:\n  hub_token: [{similar}, ours]\n  seed: [7, {similar}]\n")
    monkeypatch.setenv("WANDB_API_KEY", token)
    monkeypatch.setattr(record, "first_environment", lambda: {"HF_TOKEN": variable, "NCCL_NET": f"//u:{variable}@h"})
    monkeypatch.setattr("sys.argv", ["train.py", "--hub_token", variable, f"--run_name={token}"])
    words = ["--recipe", str(recipe), "--hub_token", variable, "--run_name", token, "--hub_model_id", similar]
    text = Path(recorded(tmp_path, resolve(words, here(hardware=CPU)))).read_text()
    assert HIDDEN in text and not any(secret in text for secret in (token, similar, variable))


def test_a_hub_token_which_run_json_records_only_masked_must_be_given_again(tmp_path):
    file = recorded(tmp_path, resolve(["--hub_token", "mine", "--push_to_hub"], here(hardware=CPU)))
    (problem,) = resolve(["--config", file], here(hardware=CPU, environment={})).problems
    assert (problem.subject, "HF_TOKEN" in problem.fix) == ("hub_token", True)
    in_environment = resolve(["--config", file], here(hardware=CPU, environment={"HF_TOKEN": "mine"}))
    assert (in_environment.problems, in_environment["hub_token"]) == ((), None)
    typed = resolve(["--config", file, "--hub_token", "mine"], here(hardware=CPU, environment={}))
    assert (typed.problems, typed["hub_token"]) == ((), "mine")


def test_run_json_records_no_environment_variable_that_holds_a_secret_or_a_path(monkeypatch):
    left_out = ["HF_TOKEN", "NCCL_SECRET", "TORCH_API_KEY", "HF_HOME", "TORCH_EXTENSIONS_DIR", "PATH"]
    monkeypatch.setattr(record, "first_environment", lambda: {**dict.fromkeys(left_out, "x"), "NCCL_DEBUG": "INFO"})
    assert record.environment() == {"NCCL_DEBUG": "INFO"}


HOLD_A_SECRET = [
    'AWS_SECRET_ACCESS_KEY = "wJalr/XUtn"', 'os.environ["API_KEY"] = f"wJalr/XUtn"', '{"api_key": "wJalr/XUtn"}',
    'api_keys = ["wJalr/XUtn"]', '{"name": "API_KEY", "value": "wJalr/XUtn"}', 'api_key: Optional[str] = "wJalr/XUtn"',
    'token = environ.get("HF_TOKEN") or "wJalr/XUtn"', "f(eos_token=None, hub_token='wJalr/XUtn')",
    'link = "https://it:wJalr@host"', "hub_token: [wJalr/XUtn, ours]", "DB_PASSWORD=wJalr/XUtn",
    "db_password: |\n  wJalr/\n  XUtn\n", "hub_token:\n- wJalr/XUtn\n- ours", "- name: API_KEY\n  value: wJalr/XUtn",
]  # fmt: skip
HARMLESS = [
    'pad_token = "<pad>"', "num_tokens: 123456789", 'token == "wJalr/XUtn"', "hub_token: null", "import token",
    "label_key: sentiment_label", "token =" + " " * 10**6,
]  # fmt: skip


@pytest.mark.parametrize("text", [*HOLD_A_SECRET, *HARMLESS], ids=lambda text: text[:30])
def test_run_json_records_only_the_hash_of_a_file_that_seems_to_hold_a_secret(text):
    recorded = secrets.recorded_text(text)  # and does not take hours
    assert recorded.startswith(HIDDEN) if text in HOLD_A_SECRET else recorded[:100] == text[:100]
    assert text not in HOLD_A_SECRET or "Jal" not in recorded


# --- Every start ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(tiny_model, texts, tmp_path_factory):
    """A run of three steps, and then of two more."""
    output = tmp_path_factory.mktemp("resumed")
    assert train_here(tiny_model, texts, output, "--max_steps", "3").code == 0
    assert train_here(tiny_model, texts, output, "--max_steps", "5").code == 0
    return output


def test_run_json_records_the_steps_processes_and_time_of_each_start(resumed):
    first, second = record.read(resumed)["sessions"]
    assert (first["from_step"], second["from_step"]) == (0, 3)
    assert first["status"] == second["status"] == "finished" and min(first["seconds"], second["seconds"]) > 0
    assert first["world_size"] == 1 and first["versions"] == second["versions"] == record.read(resumed)["versions"]


def test_compare_sums_the_train_runtime_of_all_starts_and_omits_it_if_one_is_missing(resumed):
    whole = record.read(resumed)
    earlier = whole["sessions"][0]["seconds"]
    assert results([whole])["train_runtime"] == [whole["train_runtime"] + earlier]
    del whole["sessions"][0]["seconds"]
    assert "train_runtime" not in results([whole])


def test_rerun_exact_refuses_a_run_that_was_resumed_with_other_process_counts(resumed, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = record.read(resumed)
    whole["sessions"][0]["world_size"] = 2
    (tmp_path / "run.json").write_text(json.dumps(whole))
    assert main(["rerun", "run.json", "--dry_run"]) == 0
    resumed = "a resume changed the recorded run (processes: 2, then 1; max_steps)"
    assert resumed in " ".join(capsys.readouterr().err.split())
    assert main(["rerun", "run.json", "--dry_run", "--exact"]) == 2
    assert "leave out --exact" in capsys.readouterr().err
    assert main(["show", "run.json"]) == 0 and "processes: 2, then 1" in capsys.readouterr().out


# --- The fields -----------------------------------------------------------------------------------


def test_run_json_has_exactly_the_fields_that_are_documented(tiny_model, texts, tmp_path):
    outcome = train_here(tiny_model, texts, tmp_path / "out", "--max_steps", "12", "--packing")
    by_trainer = {name for name in outcome.record if name.startswith(("train_", "total_flos", "epoch"))}
    of_others = {"error", "classes", "changed"}  # of classifiers, and of a resume
    assert set(outcome.record) - by_trainer == set(record.FIELDS) - of_others
