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
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
