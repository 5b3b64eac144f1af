"""A loss and a collator of your own: Trainer with the arguments of a recipe.

Start it with `accelerate launch --config_file accelerate_configs/fast.yaml`. Its arguments are a
recipe, a model, a file of rows and an output folder.
"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

import recipes


def focal_loss(outputs, labels, num_items_in_batch=None):
    """Tokens that the model finds hard count more (Lin et al. 2017, with gamma 2)."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    hard = (1 - torch.exp(-losses)) ** 2
    return (hard * losses).sum() / num_items_in_batch


def main(recipe: str, model: str, texts: str, output: str) -> None:
    args = getattr(recipes, recipe)(output_dir=output, max_steps=3)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def collate(rows):
        batch = tokenizer(
            [row["text"] for row in rows], truncation=True, max_length=64, padding=True, return_tensors="pt"
        )
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch

    args.remove_unused_columns = False  # the collator reads the texts
    data = load_dataset("json", data_files=texts, split="train")
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model), args, collate, data, compute_loss_func=focal_loss,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    trainer.accelerator.end_training()  # leaves the process group: otherwise gloo may abort at exit


if __name__ == "__main__":
    main(*sys.argv[1:])
