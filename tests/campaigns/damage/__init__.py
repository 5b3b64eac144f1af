"""Damaged checkpoints: every file of the newest one, damaged in every way, in every engine.

Faults are drawn (faults), each is done to a copy of a preempted run, and the same command is
started again (campaign). What becomes of it is judged against undamaged copies (judge).
"""
