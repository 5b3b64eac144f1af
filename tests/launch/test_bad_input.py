"""A user's mistake is one clear line, exit 2, once for all ranks; others are in test_last_words."""

import json
import subprocess
import sys

from tests.support.running import ROOT, SCRIPT, launch, launch_quickly, run, train_here


def written(folder, name, rows):
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def assert_one_clear_line(outcome, expected):
    assert outcome.code == 2, outcome.output
    assert expected in outcome.output
    lines = outcome.output.strip().splitlines()
    others = [line for line in lines if not line.startswith("advice") and not line.endswith(" ...")]
    assert len(others) == 1, outcome.output


def test_the_message_names_the_source_of_a_wrong_value(tiny_model, texts, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("dataset_text_field: body\n")
    assert_one_clear_line(train_here(tiny_model, texts, tmp_path / "out", "--config", str(config)), "mine.yaml")


def test_a_mistake_is_found_before_torch_is_imported(tmp_path):
    code = (
        "import sys; from launch.train import main; code = main(['--recipe', 'fats']); "
        "print(code, [name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "2 []"


def test_two_ranks_report_a_mistake_once(tiny_model, tmp_path):
    outcome = launch("--recipe", "fats", output=tmp_path, processes=2, config="standard.yaml")
    assert outcome.output.count("there is no recipe") == 1, outcome.output


def test_two_ranks_report_a_mistake_in_the_data_once(tiny_model, tmp_path):
    data = written(tmp_path, "data.jsonl", [{"words": "x"}])
    flags = ["--model_name_or_path", str(tiny_model), "--dataset_name", str(data)]
    outcome = launch_quickly(*flags, output=tmp_path / "out")
    assert outcome.output.count("data.jsonl has words") == 1


def test_two_processes_that_would_train_two_models_are_refused(tiny_model, texts, tmp_path):
    flags = ["--model_name_or_path", str(tiny_model), "--dataset_name", str(texts), "--use_cpu", "false"]
    outcome = launch(*flags, output=tmp_path, processes=2, config="standard.yaml")
    assert outcome.code != 0 and not outcome.record


def test_processes_started_by_srun_alone_are_refused(tmp_path):
    environment = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    outcome = run([sys.executable, str(SCRIPT), "--output_dir", str(tmp_path)], tmp_path, environment)
    assert_one_clear_line(outcome, "accelerate launch")
