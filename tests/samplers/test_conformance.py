"""Optuna's own contract for samplers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import BasicSamplerTestCase, SingleOnlySamplerTestCase

from optuna_dsat.samplers import BinarySearchSampler, GuidedSampler, LineageRandomSampler
from tests.harness.small_model import small_planner


class TestSamplers(BasicSamplerTestCase, SingleOnlySamplerTestCase):
    @pytest.fixture(
        params=[
            BinarySearchSampler,
            partial(BinarySearchSampler, seed=3),
            partial(BinarySearchSampler, micro_batch="x"),
            partial(BinarySearchSampler, max_micro_batch=lambda _params, _history: 3, usual=lambda _name, _params: 1),
            GuidedSampler,
            lambda: GuidedSampler(planner=small_planner(), seed=3),
            LineageRandomSampler,
            partial(LineageRandomSampler, max_micro_batch=lambda _params, _history: 3, usual=lambda _name, _params: 1),
            partial(LineageRandomSampler, seed=3),
            partial(LineageRandomSampler, micro_batch="x"),
        ]
    )
    def sampler(self, request: pytest.FixtureRequest) -> Callable[[], BaseSampler]:
        factory: Callable[[], BaseSampler] = request.param
        return factory
