"""The limit on a launch's silence reaches every launch of a study."""

from __future__ import annotations

from contextlib import nullcontext

from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.plan.from_script import plan_script
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher
from tests.harness.studies import StudyBench


class Noting(SimulatedLauncher):
    """Notes what it is asked to launch."""

    def __init__(self) -> None:
        super().__init__(Hill(), total_slots=2)
        self.asked: list[LaunchRequest] = []

    def start(self, request: LaunchRequest) -> None:
        self.asked.append(request)
        super().start(request)


def test_profile_trials_finalists_and_loss_check_have_the_limit_that_was_asked_for(bench: StudyBench) -> None:
    launcher = Noting()
    spec = bench.spec(max_trials=3, confirm=1, stall_timeout_s=77.0)
    bench.session(spec, launcher, check_loss=True).run()
    kinds = {request.launch_id.split("-")[0] for request in launcher.asked}
    assert kinds == {"profile", "trial", "confirm", "loss"}
    assert {request.stall_s for request in launcher.asked} == {77.0}


def test_the_launch_of_a_plan_has_the_limit_that_was_asked_for(bench: StudyBench) -> None:
    launcher = Noting()
    plan_script(
        bench.spec(stall_timeout_s=77.0),
        store=bench.store,
        device_names=("simulated",),
        launcher=lambda: nullcontext(launcher),
        on_attempt=lambda _: None,
        memory_margin=0.05,
    )
    assert [request.stall_s for request in launcher.asked] == [77.0]
