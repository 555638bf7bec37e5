#!/bin/bash
#SBATCH --job-name=optuna-dsat
#SBATCH --nodes=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
# sbatch --gpus-per-node=8 job.sh COMMAND ...: `optuna-dsat COMMAND ...`, queued again when it has to make room.

optuna-dsat "$@" &
tuner=$!
told=
trap 'told=1; kill -TERM "$tuner"' TERM
wait "$tuner"
code=$?
if [ -n "$told" ]; then
    wait "$tuner"
    # A job that was cancelled is not queued again, and one that SLURM preempts by requeueing is by SLURM.
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    if [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ]; then
        scontrol requeue "$job"
    fi
    exit 0
fi
exit "$code"
