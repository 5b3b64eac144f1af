"""The programs of accelerate-recipes: the `recipes` command, training, jobs, timings, reports."""
