"""The model card of an adapter: base, data, recipe and results, in place of peft's empty form."""

from __future__ import annotations

from pathlib import Path

from recipes.mixture import parts_of, title
from recipes.run import Json, RunSpec
from recipes.run.metrics import is_figure

_FORM = "[More Information Needed]"  # in each field of peft's own card


def write_card(run: RunSpec, results: Json) -> None:
    """Write README.md of an adapter's folder, unless somebody has written one there.

    `results` are the numbers of run.json.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    file = Path(run["output_dir"], "README.md")
    if not run["use_peft"] or (file.exists() and _FORM not in file.read_text(encoding="utf-8")):
        return
    name, base, data = Path(run["output_dir"]).resolve().name, run["model_name_or_path"], title(run["dataset_name"])
    task = "text-generation" if run["task"] == "causal_lm" else "text-classification"
    metrics = {metric: value for metric, value in results.items() if metric.startswith("eval_") and is_figure(metric)}
    described = ModelCardData(
        base_model=base,
        datasets=[part.name for part in parts_of(run["dataset_name"]) if not Path(part.name).exists()] or None,
        library_name="peft",
        pipeline_tag=task,
        tags=["lora", "accelerate-recipes"],
        model_name=name if metrics else None,
        eval_results=[EvalResult(task, data, data, metric, value) for metric, value in metrics.items()] or None,
    )
    figures = {"steps": results["global_step"], "training loss": results.get("final_loss"), **metrics}
    texts = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in figures.items()}
    rows = "\n".join(f"| {name} | {text} |" for name, text in texts.items() if text is not None)
    text = f"""---
{described.to_yaml()}
---

# {name}

A LoRA adapter for {base}, trained on {data} with the recipe `{run.recipe.name}` of accelerate-recipes.
run.json beside this file holds every setting, versions and hardware.

| result | value |
|---|---|
{rows}
"""
    ModelCard(text).save(file)
