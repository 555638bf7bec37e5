"""Launch the user's script for a trial, follow it, end it and report its outcome.

    protocol        requests, reports, and the launcher interface
    launcher        takes slots, starts launches and advances them
    launch          a running launch
    run_directory   files of a launch
    event_log       events and logs of the ranks
    measurement     steps of all ranks, metrics and their noise
    classify        facts of an ended launch -> outcome
    machine, warm, agent, places    sub-packages, see their docstrings

Neither Optuna nor torch is imported: the agent of a node runs without them.
"""
