"""What runs inside the user's training processes: hook, timers, event writer.

    __main__        started by torchrun on each rank, in front of the user's script
    session         the life of a rank: redirect, run the script, leave a record
    plan, rank      what the launcher and torchrun say
    hook            waits for ``import deepspeed`` and wraps ``deepspeed.initialize``
    hugging_face    transformers and accelerate, which read the config earlier
    lightning       Lightning, likewise
    overlay         the trial's config, laid over the script's
    meter, profiler what is measured of a step, what the profile launch learns
    memory          peaks and limits
    failure         exception -> outcome
    events, writer  the record of a rank

Imports nothing of the rest of optuna-dsat but the vocabulary of outcomes, and never Optuna; torch and
deepspeed only once the script has imported them.
"""
