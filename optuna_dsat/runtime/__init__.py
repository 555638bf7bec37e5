"""Code that runs inside the user's training processes: hook, measurement, event writer.

    __main__            entry point that torchrun starts on each rank
    process             redirects output, runs the script, records how the rank ended
    rank                input from the launcher (``launch.json``) and from torchrun (environment)
    hook                waits for ``import deepspeed`` and wraps ``deepspeed.initialize``
    overlay             merges the trial's settings into the script's DeepSpeed config
    trial_config        applies the overlay and rejects invalid combinations
    reporting           public functions for training loops that the hook cannot observe
    failure             exception -> outcome
    events              the event file of a rank
    imports             functions replaced and modules watched in the script's process
    user_code           frames of the user's code, and stacks of a silent rank
    files               atomic writes and bounded reads, used by all folders
    process_identity    identifies a process across restarts, used by launch and store
    measure, adapt, isolation   sub-packages; see their docstrings

Imports only ``outcome`` and ``secrecy`` from the rest of optuna-dsat, and never Optuna; torch and DeepSpeed only after
the script has imported them.
"""
