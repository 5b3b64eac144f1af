"""TRL's SFTTrainer, or its DPOTrainer for preference pairs, with the arguments of a recipe.

Start it with `accelerate launch --config_file accelerate_configs/fast.yaml`. Its arguments are sft
or dpo, a recipe, a model, a file of rows and an output folder.
"""

import sys

from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import recipes

TRAINERS = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}


def main(name: str, recipe: str, model: str, rows: str, output: str) -> None:
    trainer_class, args_class = TRAINERS[name]
    args = getattr(recipes, recipe)(output_dir=output, args_class=args_class, max_length=64, max_steps=3)
    trainer = trainer_class(model=model, args=args, train_dataset=load_dataset("json", data_files=rows, split="train"))
    trainer.train()
    trainer.save_model()
    trainer.accelerator.end_training()  # leaves the process group: otherwise gloo may abort at exit


if __name__ == "__main__":
    main(*sys.argv[1:])
