"""``DeepSpeedTrial`` without a cluster: a model definition is a class with five methods, and this package runs it.

A definition written for Determined's class of this name changes its imports alone. It is tuned with
``optuna-dsat asha NAME:CLASS ds_config.json`` and trained with ``optuna-dsat train NAME:CLASS ds_config.json``; nothing
but torchrun stands between the command and the class. ``docs/migrate-from-determined.md`` compares the two.

    trial            what a definition implements
    context          what it is given
    model_parallel   which ranks hold the same data, build loaders, report
    engines          what is checked of an engine; a pipeline's default data
    loaders, streams data, sharded by rank, and where training stands in it
    reducers         metrics over ranks
    metrics          the averages of a period
    training         the loop
    checkpoints      whole or not at all
    state            seeds and the states of random generators
    __main__         what torchrun starts on each rank
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
