"""The parts of accelerate-recipes that act: training, the command, jobs, measuring, reports."""
