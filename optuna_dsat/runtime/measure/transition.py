"""Steps of a continued launch between two trials: the first may still have the earlier batch size."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from optuna_dsat.runtime.measure.live import NotLiveError

__all__ = ["Transition"]


class Transition:
    """Checks that the script follows the batch size and accumulation of each trial after the first."""

    def __init__(self) -> None:
        self._observed: int | None = None
        """Micro-batch of the last step; None if not observed."""
        self._passes = Fraction(0)
        """Forward passes of the last step."""
        self._expected_passes: Fraction | None = None
        """Forward passes of each step; None in the first trial."""
        self._awaited: int | None = None
        """Micro-batch of the next step that counts; None for any."""
        self._most_in_flight = 0
        """Steps that may still come with the earlier batch size."""

    def begin(self, *, micro_batch: int | None, accumulated: Fraction, rescale: Callable[[Fraction], int]) -> None:
        """Begin another trial.

        Args:
            micro_batch: Samples per rank and forward pass; None if they stay as they are.
            accumulated: Ratio of its gradient accumulation steps to those of the trial before.
            rescale: Multiplies the batch size of the script's data; returns the number of batches still in flight.

        Raises:
            NotLiveError: If the batch size is to change and was not observed.
        """
        self._expected_passes = self._passes * accumulated
        self._awaited = micro_batch
        if micro_batch is not None:
            if self._observed is None:
                raise NotLiveError("the engine's inputs have no tensors")
            self._most_in_flight = max(1, rescale(Fraction(micro_batch, self._observed)))

    def includes(self, micro_batch: int | None, passes: int) -> bool:
        """Return whether a step still has the batch size of the trial before.

        Args:
            micro_batch: Largest leading dimension of its inputs; None if not observed.
            passes: Its forward passes.

        Raises:
            NotLiveError: If the script does not follow the trial's batch size or accumulation.
        """
        self._observed, self._passes = micro_batch, Fraction(passes)
        if self._awaited is not None and micro_batch != self._awaited:
            self._most_in_flight -= 1
            if self._most_in_flight < 0:
                raise NotLiveError(f"the batch size is {micro_batch}, not {self._awaited}")
            return True
        self._awaited = None
        if self._expected_passes is not None and passes != self._expected_passes:
            expected = self._expected_passes
            raise NotLiveError(f"the forward passes of a step are {passes}, not {expected}")
        return False
