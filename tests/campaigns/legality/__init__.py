"""The oracle: random runs, what `recipes check` says of each, and what really becomes of it.

A run is drawn (draw), judged by the real rules (judge), really tried (tried, start, rank), and both
are compared (compare). A disagreement is made as short as it gets (shrink) and printed.
"""
