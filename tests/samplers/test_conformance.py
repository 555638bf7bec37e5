"""Optuna's own contract for samplers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import BasicSamplerTestCase, SingleOnlySamplerTestCase

from optuna_dsat.samplers import BinarySearchSampler, GuidedSampler, LineageRandomSampler
from optuna_dsat.samplers._base import LineageSampler
from tests.harness.small_model import small_planner


class Lenient(LineageSampler):
    """Draws also where there is no micro-batch: Optuna's cases have none, or a float."""

    def _refuse(self, why: str) -> None:
        del why


class Binary(Lenient, BinarySearchSampler):
    """Bisects."""


class Guided(Lenient, GuidedSampler):
    """Plans."""


class Random(Lenient, LineageRandomSampler):
    """Draws at random."""


class TestSamplers(BasicSamplerTestCase, SingleOnlySamplerTestCase):
    @pytest.fixture(
        params=[
            Binary,
            partial(Binary, seed=3),
            partial(Binary, micro_batch="x"),
            Guided,
            partial(Guided, planner=small_planner(), seed=3),
            Random,
            partial(Random, seed=3),
            partial(Random, micro_batch="x"),
        ]
    )
    def sampler(self, request: pytest.FixtureRequest) -> Callable[[], BaseSampler]:
        factory: Callable[[], BaseSampler] = request.param
        return factory
