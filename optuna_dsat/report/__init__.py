"""Shows a stored study: HTML report, Markdown notes, figures, an explanation of the winner, and optuna-dashboard.

``view`` reads a study once. Pure functions of a view are ``figures`` (plotly), ``winner`` (the best config and what is
said about it), ``slot_time`` (how the slots' time was spent), ``memory_belief`` (what the search believed of memory),
``memory_table`` and ``notes``. ``page`` renders one HTML file from them, ``write`` writes it; ``publish`` and
``artifacts`` write notes, plots and logs to where optuna-dashboard reads them, ``serve`` starts optuna-dashboard.
``explanation`` says why the winner wins, ``proposals`` what to change or buy next.

Imports: runtime, config, trials, cost, pruners, guided, launch, store, study. Called by: tuning, cli.
"""
