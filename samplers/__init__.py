"""Optuna samplers that tune DeepSpeed configurations, usable in any study."""

from optuna_dsat.samplers._binary import BinarySearchSampler
from optuna_dsat.samplers._guided import GuidedSampler
from optuna_dsat.samplers._random import LineageRandomSampler

__all__ = ["BinarySearchSampler", "GuidedSampler", "LineageRandomSampler"]
