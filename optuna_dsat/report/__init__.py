"""What a study tells people: notes in Markdown, plots, and optuna-dashboard filled with both.

``view`` reads a study once; ``memory_table``, ``notes`` and ``figures`` are pure functions of it; ``dashboard``
and ``artifacts`` write the result where optuna-dashboard finds it, ``serve`` starts optuna-dashboard.
"""
