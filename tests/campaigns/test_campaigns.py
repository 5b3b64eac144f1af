"""Campaigns draw the same again by a seed, judge rightly, excuse nothing in silence, and catch a
broken product.
"""

import ast
import json
import os
import pickle
import re
import shutil
import signal
from pathlib import Path
from random import Random

import pytest

import launch.training.trainer  # noqa: F401 - what is forked below need not import it
from recipes.errors import Problem
from tests.campaigns import breaks, resuming
from tests.campaigns.legality import SHOWN, Judgement, compare, draw, shrink
from tests.campaigns.resuming import BACKGROUND, HIT, MAIN, Moment, watched
from tests.campaigns.runs import FILES, MOMENT, Case, Change, Outcome, forked
from tests.recipes.rules import test_table
from tests.support.running import ROOT, python


def campaign(name: str, *words: str, folder: Path = ROOT):
    return python("-m", f"tests.campaigns.{name}", "--workers", "1", *words, cwd=folder, PYTHONPATH=folder)


# --- Drawing --------------------------------------------------------------------------------------

PHASES = ["start"] * 9 + ["step 1", "save"] * 20 + ["end"] * 3
EVENTS = {"single": [{MAIN: PHASES, BACKGROUND: []}], "ddp": [{MAIN: PHASES, BACKGROUND: [BACKGROUND] * 9}] * 2}


def test_the_same_seed_draws_the_same_runs_which_vary_flags_environment_variables_and_files():
    cases = [[draw(Random(f"seed-{number}")) for number in range(300)] for _ in range(2)]
    assert cases[0] == cases[1]
    assert len({repr(case) for case in cases[0]}) > 280
    assert {change.where for case in cases[0] for change in case.changes} == {"flag", "variable", *FILES}
    assert any(case.lifted for case in cases[0])


def test_the_same_seed_gives_the_same_random_kills_of_a_training():
    chains = [[resuming.draw_kills(Random(f"seed-{number}"), EVENTS) for number in range(99)] for _ in range(2)]
    assert chains[0] == chains[1]
    moments = [moment for chain in chains[0] for moment in chain.moments]
    assert {moment.thread for moment in moments} == {MAIN, BACKGROUND} and any(moment.alone for moment in moments)


def test_the_same_seed_gives_the_same_file_damage_and_the_shortest_campaign_has_every_kind():
    faults = [resuming.draw_damage(Random("seed"), ["single", "ddp"], 1) for _ in range(2)]
    assert faults[0] == faults[1]
    assert {fault.kind for fault in faults[0] if fault.where == resuming.CHECKPOINT} == set(resuming.KINDS)
    assert {fault.where for fault in faults[0]} == {resuming.CHECKPOINT, resuming.WHOLE, resuming.TWO, *resuming.INPUTS}


def test_the_same_seed_draws_the_same_random_code_mutations_and_they_lie_in_several_folders():
    first, again = (breaks.draw(Random("seed"), ROOT, 40) for _ in range(2))
    assert first == again
    assert {Path("launch/output"), Path("recipes/rules")} <= {one.file.parent for one in first}


# --- Breaks ---------------------------------------------------------------------------------------

SOURCE = """\
def f(x):
    if x > 3:
        raise ValueError("größer")
    return x if x == 1 else True
"""


def test_each_code_mutation_gives_a_different_program(tmp_path):
    found = []
    for one in breaks.breaks_of(Path("f.py"), SOURCE):
        (tmp_path / "f.py").write_text(SOURCE, encoding="utf-8")
        one.apply(tmp_path)
        found.append(ast.unparse(ast.parse((tmp_path / "f.py").read_text(encoding="utf-8"))))
    assert len(found) == len(set(found)) == 9 and ast.unparse(ast.parse(SOURCE)) not in found


# --- What check says, and what becomes of it ------------------------------------------------------


def test_a_failing_case_shrinks_to_the_one_change_that_makes_it_fail():
    needed = Change("flag", "bf16", ["true"])
    others = [Change("flag", name, ["1"]) for name in ("seed", "lora_r", "save_steps", "eval_steps", "max_steps")]
    case = Case("accelerate", 2, "memory.yaml", "gpt2", "texts.txt", changes=(*others[:2], needed, *others[2:]))
    assert shrink(case, lambda other: needed in other.changes) == Case(changes=(needed,))


CASE = Case(changes=(Change("flag", "do_train", ["false"]),))
RULE, AT_ITS_WORD = "a_training_trains", "weight_decay_is_in_range"


def compared(rule: str, without: float, beside: str = "", what: str = "is off, and train.py always trains"):
    """A run that trains, and that `rule` refuses; without the setting, the loss is `without`."""

    def trained(loss: float) -> Outcome:
        seen = {"losses": [loss], "steps": 2}
        return Outcome(0, "", [seen], {"status": "finished"})

    refused = {name: [Problem("do_train", what, "leave it out")] for name in filter(None, (rule, beside))}
    return compare(Judgement(refused), trained(2.5), CASE, [rule], lambda case, rule: trained(without))


def test_a_refusal_of_an_ignored_setting_is_proven_if_the_loss_is_the_same_without_the_setting():
    assert compared(RULE, 2.5).proven and not compared(RULE, 2.5).disagreement
    assert compared(RULE, 2.5, what="is off").disagreement  # the rule does not say that it is ignored


def test_the_campaign_reports_a_setting_that_a_rule_calls_ignored_but_that_changes_the_loss():
    assert RULE in compared(RULE, 2.4).disagreement
    assert RULE in compared(RULE, 2.4, beside=AT_ITS_WORD).disagreement


def test_refusing_a_run_that_would_train_counts_as_unproven_if_the_rule_is_listed_so():
    assert compared(AT_ITS_WORD, 2.4, what="-0.1 is out of range").unproven
    assert compared(AT_ITS_WORD, 2.4, what="0.01 is out of range").disagreement  # no test shows that it fails


def test_each_rule_that_the_campaign_need_not_prove_has_a_test_of_its_real_failure():
    tests = "".join(file.read_text() for file in (ROOT / "tests/recipes/rules").glob("test_*.py"))
    assert {*SHOWN} <= {*re.findall(r'assert_fires\(\s*"(\w+)"', tests), *test_table.SILENT}


def test_a_run_that_check_accepts_but_that_fails_is_a_disagreement():
    failed = Outcome(1, "Traceback (most recent call last):\nValueError: no")
    assert compare(Judgement(), failed, CASE, [], lambda case, rule: None).disagreement


# --- Kills and damage -----------------------------------------------------------------------------


def written(folder: Path, moment: Moment) -> tuple[int, list[str]]:
    """How a process ends that writes the files a, b and c, and which of them are there then."""

    def write() -> None:
        os.setsid()
        os.chdir(folder)
        with watched("out"):
            for name in "abc":
                Path("out", name).write_text(name)

    (folder / "out").mkdir()
    pid = forked(write, {**os.environ, MOMENT: repr(moment)})
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), sorted(file.name for file in folder.glob("out/*"))


def test_the_kill_campaign_kills_a_process_just_before_it_opens_the_randomly_chosen_file(tmp_path):
    assert written(tmp_path, Moment(3)) == (-signal.SIGKILL, ["a"])  # the first is the start itself
    assert (tmp_path / HIT).read_text() == "start"


def test_a_kill_that_the_campaign_drew_for_rank_1_does_not_kill_rank_0(tmp_path):
    assert written(tmp_path, Moment(3, rank=1)) == (0, ["a", "b", "c"])
    assert not (tmp_path / HIT).exists()


RESUMED = "note  checkpoint-5 cannot be used (model.safetensors is cut off)\nresuming from out/checkpoint-4, step 4"
SILENT = "resuming from out/checkpoint-4, step 4\ndata       texts.jsonl, 64 examples"
ERROR = "\nerror  dataset_name: texts.jsonl is not valid. Fix: write it again"
CRASH = "Traceback (most recent call last):\nValueError: no"


@pytest.mark.parametrize(
    ("where", "code", "output", "differs", "kind"),
    [
        (resuming.CHECKPOINT, 0, RESUMED, "", resuming.MENDED),
        (resuming.CHECKPOINT, 0, RESUMED.replace("model.safe", "model.\nsafe"), "", resuming.MENDED),
        (resuming.CHECKPOINT, 0, SILENT, "", resuming.UNNAMED),
        (resuming.CHECKPOINT, 0, RESUMED, "weights", resuming.DIFFERENT),
        (resuming.CHECKPOINT, 0, "model.safetensors: training starts over", "", resuming.STARTED_OVER),
        (resuming.CHECKPOINT, 1, CRASH, "", resuming.TRACEBACK),
        (resuming.CHECKPOINT, None, "", "", resuming.HANGS),
        ("data", 2, ERROR, "", resuming.REFUSED),
        ("data", 2, "\nerror  learning_rate: -1 is out of range", "", resuming.TRACEBACK),
        ("run.json", 2, ERROR.replace("texts.jsonl", "run.json"), "", resuming.TRACEBACK),
        ("run.json", 0, "step 1/6", "", resuming.STARTED_OVER),
        ("data", 0, SILENT, "", resuming.MENDED),
        ("data", 0, SILENT, "losses", resuming.DIFFERENT),
        ("data", 0, f"note  the data has changed\n{SILENT}", "losses", resuming.TOLD),
        ("data", 0, f"note  the world has changed\n{SILENT}", "losses", resuming.DIFFERENT),
    ],
)
def test_a_damaged_run_is_judged_by_exit_code_output_and_changed_results(where, code, output, differs, kind):
    file = resuming.INPUTS.get(where, "out/checkpoint-5/model.safetensors")
    fault = resuming.Fault("single", where, "removed", 0)
    assert resuming.judge(Outcome(code, output), fault, [Path(file)], lambda: differs)[0] == kind


def test_the_damage_campaign_notices_an_optimizer_state_that_differs_from_the_undamaged_run(tmp_path, monkeypatch):
    """Beside a finished run, what it left when nobody touched it."""
    import torch
    from safetensors.torch import save_file

    last = tmp_path / resuming.OUTPUT / resuming.LAST
    last.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    save_file({"weight": torch.ones(2)}, last.parent / "model.safetensors")
    (last.parent / "run.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": 2.5, "eval_runtime": 7}]}))
    for value in (1, 1 + 1e-7):
        torch.save({"state": {0: {"exp_avg": [1, value], "step": 6}}}, last / "optimizer.pt")
        if value == 1:
            (tmp_path / "single").mkdir()
            (tmp_path / "single" / "left").write_bytes(pickle.dumps(resuming.left()))
            assert not resuming.difference(tmp_path, "single")
    assert "optimizer.pt" in resuming.difference(tmp_path, "single")


# --- The campaigns themselves ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("legality --runs 25", " 0 disagreements"),
        ("resuming kills --count 5 --engine single ddp lora-best", " 0 lost"),
        ("resuming damage --count 12 --engine single ddp", " 0 lost"),
    ],
)
def test_short_campaigns_of_random_runs_kills_and_damage_find_no_failure(words, ends):
    done = campaign(*words.split(), "--seed", "slow tier")
    assert done.returncode == 0 and ends in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_damage_campaign_fails_if_resuming_never_checks_which_run_wrote_a_checkpoint(tmp_path):
    for name in ("recipes", "launch", "tests", "accelerate_configs", "azureml"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    product = tmp_path / "launch" / "output" / "checkpoints.py"
    checked = 'return run is not None and writer is not None and writer["id"] != run["id"]'
    assert checked in product.read_text()
    product.write_text(product.read_text().replace(checked, "return False"))
    fault = repr(resuming.Fault("single", resuming.WHOLE, resuming.REPLACED, 0))
    done = campaign("resuming", "damage", "--only", fault, folder=tmp_path)
    assert done.returncode == 1 and resuming.DIFFERENT in done.stdout, done.stdout + done.stderr
