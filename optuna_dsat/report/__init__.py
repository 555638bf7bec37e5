"""Shows a stored study: HTML report, Markdown notes, figures, an explanation of the winner, and optuna-dashboard.

``view`` reads a study once. Pure functions of a view are ``figures`` (plotly), ``winner`` (the best config and what is
said about it), ``slot_time`` (how the slots' time was spent), ``memory_table``, ``performance`` (what a configuration
reaches), ``cards``, ``why`` and ``notes``. ``page`` renders one HTML file from them, ``compare`` one of several
studies, ``write`` writes it. ``live`` renders a study again as it changes, ``live_app`` serves that over HTTP,
``launch_files`` links configs and logs. ``publish`` and ``artifacts`` write notes, plots and logs to where optuna-
dashboard reads them, ``serve`` listens for both. ``explanation`` says why the winner wins, ``proposals`` what to change
or buy next.

Imports: runtime, config, trials, cost, pruners, guided, launch, store, study. Called by: tuning, cli.
"""
