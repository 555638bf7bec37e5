"""What runs inside the user's training processes: hook, timers, event writer.

    __main__        started by torchrun on each rank, in front of the user's script
    session         the life of a rank: redirect, run the script, leave a record
    plan, rank      what the launcher and torchrun say
    hook            waits for ``import deepspeed`` and wraps ``deepspeed.initialize``
    hugging_face    transformers and accelerate, which read the config earlier
    lightning       Lightning, likewise
    overlay         the trial's config, laid over the script's
    trial_config    what a launch makes of the configs that reach DeepSpeed; differences from the user's file
    side_effects    checkpoints and monitors, which a trial goes without
    reporting       for loops that the hook does not see: what a script may call itself
    meter, profiler what is measured of a step, what the profile launch learns
    memory          peaks and limits
    failure         exception -> outcome
    events, writer  the record of a rank

Imports nothing of the rest of optuna-dsat but the vocabulary of outcomes, and never Optuna; torch and
deepspeed only once the script has imported them.
"""
