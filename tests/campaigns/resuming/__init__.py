"""Trainings that are killed (kills) or find their files damaged (damage): the same command ends
them as if nothing had happened, or says why not.
"""
