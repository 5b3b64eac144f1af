"""TRL's SFTTrainer with the arguments of a recipe.

Start it with `accelerate launch --config_file accelerate_configs/fast.yaml`. Its arguments are a
recipe, a model, a file of rows and an output folder.
"""

import sys

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

import recipes


def main(recipe: str, model: str, chats: str, output: str) -> None:
    args = getattr(recipes, recipe)(output_dir=output, args_class=SFTConfig, max_length=64, max_steps=3)
    data = load_dataset("json", data_files=chats, split="train")
    trainer = SFTTrainer(model=model, args=args, train_dataset=data)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
