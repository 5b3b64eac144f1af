"""What accelerate-recipes does with a recipe: training, the command, jobs, measuring, reports."""
