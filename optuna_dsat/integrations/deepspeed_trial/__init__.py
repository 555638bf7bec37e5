"""Runs model definitions written for Determined's ``DeepSpeedTrial`` API, without a cluster.

A model definition is a class that derives from ``DeepSpeedTrial``; one written for Determined only needs its imports
changed. Tune it with ``optuna-dsat asha NAME:CLASS ds_config.json`` and train it with ``optuna-dsat train NAME:CLASS
ds_config.json``; torchrun runs the class on each rank. ``docs/migrate-from-determined.md`` compares the two APIs.

    trial            base class of model definitions
    context          ``DeepSpeedTrialContext``, which a definition receives
    model_parallel   which ranks share data, build data loaders and report metrics
    engines          validation of engines; default data of pipeline engines
    loaders, streams data sharded by rank, and resumable iteration over it
    reducers         custom metrics over ranks
    period_metrics   metrics averaged over a period and over ranks
    training         the training loop
    checkpoints      atomic checkpoints
    state            seeding, and states of random number generators
    __main__         entry point that torchrun starts on each rank
"""

from optuna_dsat.integrations.deepspeed_trial.context import (
    AttrDict,
    DeepSpeedTrialContext,
    DistributedContext,
    overwrite_deepspeed_config,
)
from optuna_dsat.integrations.deepspeed_trial.loaders import DataLoader
from optuna_dsat.integrations.deepspeed_trial.model_parallel import ModelParallelUnit
from optuna_dsat.integrations.deepspeed_trial.reducers import MetricReducer
from optuna_dsat.integrations.deepspeed_trial.trial import DeepSpeedTrial, TorchData
from optuna_dsat.runtime.reporting import get_ds_config_from_hparams

__all__ = [
    "AttrDict",
    "DataLoader",
    "DeepSpeedTrial",
    "DeepSpeedTrialContext",
    "DistributedContext",
    "MetricReducer",
    "ModelParallelUnit",
    "TorchData",
    "get_ds_config_from_hparams",
    "overwrite_deepspeed_config",
]
