"""The benchmark of a save, on a tiny model."""

from tests.benchmarks import saving


def test_trainers_part_of_a_save_is_measured(tmp_path, monkeypatch):
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setattr(saving, "SHAPE", tiny)
    rounds = saving.measured(2, tmp_path)
    assert len(rounds) == 2 and all(0 < each.trainers < each.waited for each in rounds)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
