"""Training with a recipe: train.py, the `recipes` command, jobs, measuring, reports."""
