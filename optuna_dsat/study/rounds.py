"""The rounds of a confirmation as they are stored with the study, and what is launched next in them.

In each round the user's config and the finalists are launched once, in an order drawn anew. All follows from what is
stored, so that whoever resumes the study goes on with the round that was begun.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from optuna_dsat.launch.conditions import Conditions
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.joint_estimate import JointEstimate
from optuna_dsat.trials import attributes

__all__ = ["MIN_ROUNDS", "RoundLaunch", "Rounds", "order_of_round"]

MIN_ROUNDS = 3
"""Rounds before anything is decided by them."""
_MOST_FAILURES = 2
"""Launches of a configuration that end with what may pass (a stall, a lost connection) before it leaves."""


@dataclass(frozen=True, kw_only=True)
class RoundLaunch:
    """One launch of a confirmation."""

    round: int
    """From 1."""
    number: int
    """Number of the trial that it measures again."""
    value: float | None
    """The metric over its counted steps; None if it was not measured."""
    low: float | None
    """Lower end of the 95% interval over its steps; None if ``value`` is."""
    high: float | None
    """Its upper end."""
    metrics: Mapping[str, float]
    """All metrics by name; empty if it was not measured."""
    steps: int
    """Counted steps."""
    outcome: str
    message: str
    held_s: float = 0.0
    """Seconds for which it held its devices."""
    conditions: Conditions = field(default_factory=Conditions)
    """What went on beside it."""

    def to_json(self) -> dict[str, Any]:
        """Return the input of ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RoundLaunch:
        """Build from the output of ``to_json``."""
        return cls(**{**record, "conditions": Conditions.from_json(record.get("conditions", {}))})


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The confirmation of one study so far."""

    chosen: tuple[int, ...] = ()
    """Numbers of the trials that are compared, the user's config among them; those that took another's place last."""
    measured: int = 0
    """Measured trials when they were chosen: they are chosen again once there are more."""
    since: int = 1
    """The first round of those that were chosen last."""
    estimate: JointEstimate | None = None
    """What the search says of those that are compared; None if its method has no posterior."""
    launches: tuple[RoundLaunch, ...] = field(default=())
    """In the order in which they ran."""

    @classmethod
    def of(cls, study_attributes: Mapping[str, Any]) -> Rounds:
        """Read the rounds from a study's user attributes; those of older versions are one round."""
        record = study_attributes.get(attributes.CONFIRMATION)
        if record is not None:
            launches = tuple(RoundLaunch.from_json(one) for one in record["launches"])
            kept = {name: record[name] for name in ("measured", "since")}
            said = record.get("estimate")
            estimate = None if said is None else JointEstimate.from_json(said)
            return cls(chosen=tuple(record["chosen"]), launches=launches, estimate=estimate, **kept)
        older = study_attributes.get(attributes.FINALISTS, [])
        return cls(launches=tuple(RoundLaunch(round=1, **one) for one in older))

    def to_json(self) -> dict[str, Any]:
        """Return the value of the study attribute ``CONFIRMATION``."""
        return {
            "chosen": list(self.chosen),
            "measured": self.measured,
            "since": self.since,
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "launches": [one.to_json() for one in self.launches],
        }

    def with_launch(self, launch: RoundLaunch) -> Rounds:
        """Return these rounds and one more launch."""
        return replace(self, launches=(*self.launches, launch))

    @property
    def last(self) -> int:
        """The latest round; 0 before the first."""
        return max((one.round for one in self.launches), default=0)

    @property
    def spent_s(self) -> float:
        """Seconds that the launches of those that were chosen last held their devices."""
        return sum(one.held_s for one in self.launches if one.round >= self.since)

    def values(self) -> dict[int, dict[int, float]]:
        """Return trial number -> round -> metric, of the launches that were measured."""
        found: dict[int, dict[int, float]] = {}
        for one in self.launches:
            if one.value is not None:
                found.setdefault(one.number, {})[one.round] = one.value
        return found

    def failure(self, number: int) -> RoundLaunch | None:
        """Return the launch for which a trial is not compared any more; None if it is still compared."""
        failed = [one for one in self.launches if one.number == number and one.value is None]
        lasting = [one for one in failed if not Outcome(one.outcome).retryable]
        if lasting:
            return lasting[0]
        return failed[-1] if len(failed) >= _MOST_FAILURES else None

    def begun(self, round_number: int) -> Sequence[int]:
        """Return the trials that a round has launched."""
        return [one.number for one in self.launches if one.round == round_number]


def order_of_round(numbers: Sequence[int], *, round_number: int, seed: int) -> list[int]:
    """Return the order of a round: drawn anew for each, the same for whoever continues it.

    Args:
        numbers: The trials that are launched in it.
        round_number: From 1.
        seed: Of the study.
    """
    order = sorted(numbers)
    random.Random(f"{seed}/round/{round_number}").shuffle(order)
    return order
