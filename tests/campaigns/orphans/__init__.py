"""Launchers and ranks that a signal strikes at drawn moments (draw): nothing of the run may be left
behind, what it saved is whole, and the same command finishes it (trial).
"""
