"""Optuna pruners for DeepSpeed configurations, usable in any study."""

from optuna_dsat.pruners._asha import AshaPruner
from optuna_dsat.pruners._deepspeed import DeepSpeedPruner

__all__ = ["AshaPruner", "DeepSpeedPruner"]
