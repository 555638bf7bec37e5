"""Presents a stored study: HTML report, Markdown notes, figures, an explanation of the winner, and optuna-dashboard.

``view`` reads a study once. Pure functions of a view are ``figures`` (plotly), ``facts``, ``training`` (time of a whole
training), ``slot_time`` (use of the slots' time), ``memory_table``,
``cards``, ``explain.why`` and ``dashboard.notes``. ``page`` renders them to an HTML file, ``compare``
does the same for several studies, ``write`` writes the file. ``dashboard.live`` renders a study again as it changes,
``dashboard.live_app`` serves it over HTTP, ``launch_files`` links configs and logs. ``dashboard.publish`` and
``dashboard.artifacts`` write notes, plots and logs for optuna-dashboard, ``dashboard.serve`` runs the server for both.
``explain.explanation`` explains the winner, ``explain.proposals`` proposes changes and purchases.

Imports: runtime, config, trials, cost, pruners, guided, launch, store, study. Called by: tuning, cli.
"""
