"""What is done with a recipe: train.py, the `recipes` command, loading data and models, recording runs."""
