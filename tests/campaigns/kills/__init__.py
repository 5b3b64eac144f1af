"""Killed trainings: SIGKILL at drawn moments, until the same command has finished the run.

Moments are drawn (draw) and come in one start after another (campaign). The finished run must be
the one that nobody killed.
"""
