"""Bad input: what a user can write wrongly, and what comes back.

Valid commands and files (world, seeds) are made wrong at random (mutate, draw), given to the real
code in a fork (attempt), and the answer is judged (judge): no traceback, no crash, no hang, and a
refusal says what is wrong, where it stands and what to write instead.
"""
