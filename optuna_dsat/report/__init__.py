"""Presents a stored study: HTML report, Markdown notes, figures, an explanation of the winner, and optuna-dashboard.

``view`` reads a study once. Pure functions of a view are ``figures`` (plotly), ``facts``, ``cards``, ``explain.why``
and ``dashboard.notes``. ``page`` renders them; ``write`` writes the page, or that of several studies, to a file.
``dashboard.live`` renders a study again as it changes, ``dashboard.live_app`` serves it and optuna-dashboard over HTTP,
``launch_files`` links configs and logs. ``dashboard.publish`` writes notes and plots for optuna-dashboard.
``explain.explanation`` explains the winner.
"""
