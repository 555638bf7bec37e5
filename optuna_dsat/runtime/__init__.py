"""What runs inside the user's training processes: hook, timers, event writer.

    __main__            entry point that torchrun starts on each rank; it runs the user's script
    rank_process        redirects output, runs the script, records how the rank ended
    launch_plan, rank   input from the launcher (``launch.json``) and from torchrun (environment)
    arguments           the script's command line
    hook                waits for ``import deepspeed`` and wraps ``deepspeed.initialize``
    hugging_face_hook   applies the launch's config to transformers and accelerate, which read it earlier
    lightning_hook      the same for Lightning
    overlay             merges the trial's settings into the script's DeepSpeed config
    trial_config        applies the overlay and rejects invalid combinations
    accelerate_config   gives accelerate the config where the script names none
    config_redirect     redirects reads of the user's config file to the launch's
    config_differences  differences between the script's config and the user's file
    local_rank          default of the script's ``--local_rank`` option
    leavings            notes what a rank may leave behind, for whoever removes it
    build_locks         locks of torch's builds that nobody holds, used by launch
    process_identity    what tells a process from all others, used by launch and store
    side_effects        disables checkpoints and monitors during a trial
    reporting           public functions for training loops that the hook cannot observe
    meter, clock        measure each optimizer step
    batch_sources       what may set the batch size: batch_parsers, batch_loaders, settings files
    inputs              samples and elements of what the engine is fed
    loss_scaling        steps that the loss scaler skipped
    stacks              stacks of a rank on request, while it is silent
    profiler            parameters, activations and FLOPs, measured in the profile launch
    device_memory       memory peaks and limits
    failure             exception -> outcome
    imports             modules that the script imported
    replacing           a library's function, replaced wherever the library copied it
    environment_watch   environment variables that the script changed
    events, writer      the event file of a rank
    atomic_write        atomic writes, used by all folders
    flattening          nested configs as dotted keys, used by all folders

Imports only ``outcome`` from the rest of optuna-dsat, and never Optuna; torch and deepspeed only after the
script has imported them.
Started by ``launch``; other folders use its events, overlay and file helpers.
"""
