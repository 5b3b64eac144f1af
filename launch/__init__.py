"""What is done with a recipe: training, the `recipes` command, jobs, measuring, reports."""
