"""A run that lost or won processes goes on with those it has, as if nothing had happened.

Each is stopped in the middle of an epoch whose last batch is not full, and resumed by another
number of processes at the same global batch. Without dropout the losses are those of an
uninterrupted run, up to the order in which floats are summed; dropout would draw other masks.
"""

import collections
import json

import pytest
from safetensors.torch import load_file

from launch.output.checkpoints import numbered
from tests.support.running import ROOT, launch_quickly, losses, model_flags

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "tests" / "support" / "witness.py"
UNEVEN = "--global_batch_size 12 --num_train_epochs 3 --dataset_train_split train[:54]".split()  # 15 steps
STEADY = "--learning_rate 5e-3 --lr_scheduler_type linear --weight_decay 0.1 --logging_steps 1".split()
ADAPTERS = "--use_peft --lora_dropout 0".split()
FP32 = "--bf16 false".split()  # 16 bits round by the number of processes, resumed or not
BOUND = 5e-6  # of losses that start at 5.5 and end at 3.6
ZERO = {
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto"),
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}

# A classifier whose code comes with it.
CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class Config(PreTrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=260, hidden_size=8, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**kwargs)


class Classifier(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = torch.nn.BatchNorm1d(config.hidden_size)
        self.classifier = torch.nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        logits = self.classifier(self.norm(self.embedding(input_ids).mean(1)))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
"""
AUTO_MAP = {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.Classifier"}


@pytest.fixture(scope="module")
def flags(tiny_model, texts):
    return model_flags(tiny_model, texts)


@pytest.fixture(scope="module")
def train(flags, tmp_path_factory):
    """Trains with a recipe in one world after the other; all but the last are stopped at a step."""

    def start(recipe: str, *more: str, worlds=(4,), stops=(), output=None, env=None, config=None, ends="finished"):
        folder = output or tmp_path_factory.mktemp(recipe)
        words = ["--recipe", recipe, *flags, *UNEVEN, *STEADY, *more]
        for processes, stop in zip(worlds, [*stops, None], strict=True):
            told = {"STOP_AT_STEP": str(stop)} if stop else {}
            how = dict(processes=processes, script=SCRIPT, env={**told, **(env or {})})
            outcome = launch_quickly(*words, output=folder, config=config or f"{recipe}.yaml", **how)
            assert outcome.record["status"] == ("preempted" if stop else ends), outcome.output
        return outcome, folder

    return start


def examples(folder) -> dict[int, list[str]]:
    """For each step the examples that it trained on, on whatever rank."""
    seen = collections.defaultdict(list)
    for file in folder.glob("examples-*.jsonl"):
        for step, names in map(json.loads, file.read_text().splitlines()):
            seen[step] += names
    return {step: sorted(names) for step, names in sorted(seen.items())}


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("standard", []),
        ("standard", ADAPTERS),
        ("memory", FP32),
        ("memory_zero3", FP32),
        ("memory", [*FP32, *ADAPTERS]),
        ("sharded", []),
    ],
    ids=["ddp", "lora", "zero2", "zero3", "zero2-lora", "fsdp2"],
)
def test_four_processes_then_two_then_one_then_three(recipe, more, train):
    whole, there = train(recipe, *more)
    outcome, here = train(recipe, *more, worlds=(4, 2, 1, 3), stops=(3, 7, 11))
    assert losses(outcome) == pytest.approx(losses(whole), abs=BOUND)
    assert examples(here) == examples(there)
    assert not list(here.glob("converted-*"))
    said = "checkpoint-11 was written by 1 process, 3 go on: same data in the same order; random numbers (dropout)"
    assert said in " ".join(outcome.output.split())


@pytest.mark.parametrize("worlds", [(2, 2), (2, 4)])
def test_stopped_before_the_last_batch_of_an_epoch(worlds, train):
    """It is not full, and accelerate fills it with examples that count no second time."""
    whole, there = train("standard", worlds=(2,))
    outcome, here = train("standard", worlds=worlds, stops=(4,))
    assert examples(here) == examples(there)
    assert losses(outcome) == pytest.approx(losses(whole), abs=BOUND)


def test_an_evaluation_before_the_last_batch_of_an_epoch_changes_nothing(train):
    whole, there = train("standard", worlds=(4,))
    evaluated = "--eval_strategy steps --eval_steps 4 --dataset_test_split train[54:60] --per_device_eval_batch_size 1"
    outcome, here = train("standard", *evaluated.split(), worlds=(4,))
    assert examples(here) == examples(there)
    assert losses(outcome) == pytest.approx(losses(whole), abs=BOUND)


def test_more_groups_that_divide_the_model_among_them(train, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**ZERO, "zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}))
    whole, _ = train("standard", "--deepspeed", str(file), worlds=(2,))
    outcome, _ = train("standard", "--deepspeed", str(file), worlds=(2, 4), stops=(7,))
    assert losses(outcome) == pytest.approx(losses(whole), abs=BOUND)


@pytest.mark.parametrize("order", ["group_by_length", "batch_rebalance"])
@pytest.mark.parametrize("worlds", [(2, 2), (2, 3)])
def test_the_order_of_the_data_goes_on_in_the_second_epoch(order, worlds, train):
    whole, there = train("standard", "--train_sampling_strategy", order, worlds=(2,))
    outcome, here = train("standard", "--train_sampling_strategy", order, worlds=worlds, stops=(7,))
    assert losses(outcome) == pytest.approx(losses(whole), abs=BOUND)
    assert examples(here) == examples(there)


def test_a_sampler_without_a_seed_loses_the_order_and_is_advised_against(train):
    unseeded = ["--accelerator_config", '{"use_seedable_sampler": false}']
    _, there = train("standard", *unseeded, worlds=(1,))
    outcome, here = train("standard", *unseeded, worlds=(1, 1), stops=(7,))
    assert examples(here)[6] == examples(there)[6] and examples(here)[7] != examples(there)[7]
    assert "a resume after the first epoch trains other examples" in " ".join(outcome.output.split())


def test_packed_rows_go_on_in_the_second_epoch(train):
    whole, there = train("fast", "--packing", worlds=(2,))
    outcome, here = train("fast", "--packing", worlds=(2, 1), stops=(3,))
    assert losses(outcome) == pytest.approx(losses(whole), abs=BOUND)
    assert examples(here) == examples(there)


def test_a_kill_while_a_checkpoint_is_converted_loses_nothing(train):
    whole, _ = train("memory", *FP32, worlds=(2,))
    killed = dict(env={"KILL_WHILE_CONVERTING": "1"}, ends="preempted")  # run.json is that of the first
    _, folder = train("memory", *FP32, worlds=(2, 1), stops=(7,), **killed)
    assert list(folder.glob("converted-checkpoint-7"))
    outcome, _ = train("memory", *FP32, worlds=(1,), output=folder)
    assert losses(outcome) == pytest.approx(losses(whole), abs=BOUND)
    assert not list(folder.glob("converted-*"))


def test_the_best_model_may_be_of_another_world(train):
    """The highest loss counts as the best here: that of the first checkpoint."""
    best = "--load_best_model_at_end --metric_for_best_model eval_loss --greater_is_better true --eval_strategy steps"
    every = "--eval_steps 3 --save_strategy steps --save_steps 3 --dataset_test_split train[54:64]"
    outcome, folder = train("memory", *FP32, *best.split(), *every.split(), worlds=(2, 1), stops=(7,))
    evaluated = [entry["eval_loss"] for entry in outcome.record["log_history"] if "eval_loss" in entry]
    assert outcome.record["eval_loss"] == pytest.approx(max(evaluated), rel=1e-6) == pytest.approx(evaluated[0])
    assert not list(folder.glob("converted-*"))


def test_what_batch_norm_has_seen_is_carried_over(tmp_path):
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    _save_classifier(model)
    data.write_text("".join(json.dumps({"text": f"row {n} of all", "label": n % 2}) + "\n" for n in range(48)))
    flags = "--recipe memory --task sequence_classification --trust_remote_code --global_batch_size 12".split()
    flags += [*model_flags(model, data), "--num_train_epochs", "2", *FP32, *STEADY]
    flags += "--per_device_train_batch_size 2 --gradient_checkpointing false".split()  # BatchNorm needs two
    seen = []
    for processes, stop in ((2, {"STOP_AT_STEP": "4"}), (1, {})):
        how = dict(processes=processes, config="memory.yaml", script=SCRIPT, env=stop)
        outcome = launch_quickly(*flags, output=tmp_path / "out", **how)
        assert outcome.record["status"] == ("preempted" if stop else "finished"), outcome.output
        newest = numbered(tmp_path / "out")[0]
        seen.append(load_file(newest / "model.safetensors")["norm.num_batches_tracked"].item())
    accumulation = outcome.record["settings"]["gradient_accumulation_steps"]["value"]
    assert seen[1] == seen[0] + 4 * accumulation, outcome.output


def test_an_optimizer_that_deepspeed_cannot_convert_is_refused_with_what_works(train, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**ZERO, "zero_optimization": {"stage": 2}}))
    sgd = ["--deepspeed", str(file), "--optim", "sgd"]
    outcome, folder = train("standard", *sgd, worlds=(2, 1), stops=(3,), ends="preempted")
    assert outcome.code and "Traceback" not in outcome.output
    assert "--num_processes 2" in outcome.output and "Adam only" in outcome.output
    outcome, _ = train("standard", *sgd, worlds=(2,), output=folder)
    assert outcome.record["global_step"] == 15


def _save_classifier(folder) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from launch.data.demo import demo_tokenizer

    folder.mkdir()
    (folder / "own.py").write_text(CODE)
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": AUTO_MAP}))
    demo_tokenizer().save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    AutoModelForSequenceClassification.from_config(config, trust_remote_code=True).save_pretrained(folder)
