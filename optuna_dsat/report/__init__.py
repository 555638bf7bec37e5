"""What a study tells people: a report in HTML, notes in Markdown, figures, and optuna-dashboard filled with them.

``view`` reads a study once. Pure functions of that are ``figures`` (plotly, for Python too), ``winner`` (the best
config and what is said about it), ``slot_time`` (where the slots' time went), ``memory_table`` and ``notes``. ``page``
makes one HTML file of them, which ``write`` puts on the disk; ``dashboard`` and ``artifacts`` write notes and plots
where optuna-dashboard finds them, ``serve`` starts optuna-dashboard.
"""
