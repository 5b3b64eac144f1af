"""The launcher of accelerate-recipes: the `recipes` command, training, jobs, timings, reports."""
