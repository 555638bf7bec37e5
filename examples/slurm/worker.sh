#!/bin/bash
#SBATCH --job-name=dsat-worker
#SBATCH --nodes=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
# sbatch --gpus-per-node=8 worker.sh STUDY STORAGE: one worker of a study, queued again when it has to make room.

optuna-dsat worker "$1" --storage "$2" "${@:3}" &
worker=$!
told=
trap 'told=1; kill -TERM "$worker"' TERM
wait "$worker"
code=$?
if [ -n "$told" ]; then
    wait "$worker"
    # A job that was cancelled is not queued again, and one that SLURM preempts by requeueing is by SLURM.
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    if [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ]; then
        scontrol requeue "$job"
    fi
    exit 0
fi
exit "$code"
