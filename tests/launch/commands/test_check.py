"""`recipes check`: verdict and exit code. The rules have tests of their own."""

from launch.cli import main
from tests.support.running import ROOT

FSDP = (ROOT / "accelerate_configs" / "sharded.yaml").read_text()
RESHARD = "fsdp_reshard_after_forward: true"


def test_recipes_check_takes_the_name_of_a_gpu_on_a_machine_without_gpus(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("recipes.run.hardware._cuda_gpus", lambda: ())
    file = tmp_path / "mine.yaml"
    file.write_text(FSDP.replace(RESHARD, "fsdp_reshard_after_forward: maybe"))
    words = ["check", "--recipe", "sharded", "--accelerate_config", str(file), "--num_processes", "4"]
    assert main(words) == 0
    assert "shards nothing on a CPU" in (advice := capsys.readouterr().err) and 'check --gpu "H100 80GB"' in advice
    assert main([*words, "--gpu", "H100 80GB", "--deep"]) == 2
    printed = capsys.readouterr().err
    assert "fsdp_reshard_after_forward" in printed and "on a CPU" not in printed
    file.write_text(FSDP)
    assert main([*words, "--gpu", "H100 80GB", "--deep"]) == 0
    assert (out := capsys.readouterr().out).startswith("legal: sharded on FSDP2, 4 processes") and "--deep" not in out
    words = ["--model_name_or_path", "./not_here", "--dataset_name", "./nor_this"]
    assert main(["check", *words, "--gpu", "L4"]) == 0, "it may be there"
