"""Runs model definitions written for Determined's ``DeepSpeedTrial`` API, without a cluster.

A model definition is a class that derives from ``DeepSpeedTrial``. Definitions written for Determined only need their
imports changed. Tune a definition with ``optuna-dsat asha NAME:CLASS ds_config.json`` and train it with ``optuna-dsat
train NAME:CLASS ds_config.json``; torchrun runs the class on each rank. ``docs/how-to/migrate-from-determined.md``
compares this package with Determined.

    trial        base classes of model definitions and callbacks
    context      ``DeepSpeedTrialContext``, which a definition receives, and the validation of engines
    ranks        exchange of objects between ranks; which ranks share data, build data loaders and report metrics
    loaders      data sharded by rank, and resumable iteration over it
    metrics      metrics averaged over a period and over ranks, and custom metrics
    training     the training loop
    checkpoints  atomic checkpoints, and states of random number generators
    __main__     entry point that torchrun starts on each rank
"""

from optuna_dsat.integrations.deepspeed_trial.context import AttrDict, DeepSpeedTrialContext, overwrite_deepspeed_config
from optuna_dsat.integrations.deepspeed_trial.loaders import DataLoader
from optuna_dsat.integrations.deepspeed_trial.metrics import MetricReducer
from optuna_dsat.integrations.deepspeed_trial.ranks import (
    DistributedContext,
    ModelParallelUnit,
    make_data_parallel_mpu,
    make_deepspeed_mpu,
)
from optuna_dsat.integrations.deepspeed_trial.trial import DeepSpeedTrial, PyTorchCallback, TorchData
from optuna_dsat.runtime.reporting import dsat_reporting_context, get_ds_config_from_hparams

__all__ = [
    "AttrDict",
    "DataLoader",
    "DeepSpeedTrial",
    "DeepSpeedTrialContext",
    "DistributedContext",
    "MetricReducer",
    "ModelParallelUnit",
    "PyTorchCallback",
    "TorchData",
    "dsat_reporting_context",
    "get_ds_config_from_hparams",
    "make_data_parallel_mpu",
    "make_deepspeed_mpu",
    "overwrite_deepspeed_config",
]
