"""Which engine of a script is measured: the first that it makes, unless that does not train.

A script of reinforcement learning or preference optimisation may make the engine of a reference model first, which
never steps, and one that trains folds or rounds makes an engine for each. The first engine counts until another one
makes two updates while it makes none, if it has made none at all, or if the other was made after it had begun to train.
Two models that train together, as those of a GAN, are made before either trains: the first that steps stays measured.

An engine whose optimizer the script steps itself (Lightning Fabric) takes no other's place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from optuna_dsat.runtime.engine_state import is_pipeline, is_update_step

__all__ = ["UPDATES_ALONE", "OtherEngine", "replace_method"]

UPDATES_ALONE = 2
"""Updates of another engine in a row at which it is the one that trains."""


def replace_method(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace a method on an object by what ``wrap`` makes of it; return a function that puts it back."""
    own = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name)))

    def undo() -> None:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return undo


class OtherEngine:
    """Watches the updates of an engine beside the measured one.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        measured: Returns how many updates the measured engine has made.
        takes_over: Called once this engine is the one that trains; it is not watched any more then.
    """

    def __init__(self, engine: Any, *, measured: Callable[[], int], takes_over: Callable[[], None]) -> None:
        self._measured = measured
        self._takes_over = takes_over
        self._seen = measured()
        self._is_later = self._seen > 0
        self._alone = 0
        self._unwatch = replace_method(engine, "train_batch" if is_pipeline(engine) else "step", self._wrap)
        self._engine = engine

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            updates = is_pipeline(self._engine) or is_update_step(self._engine)
            result = original(*args, **kwargs)
            if updates:
                self._updated()
            return result

        return step

    def _updated(self) -> None:
        done = self._measured()
        self._alone = 1 if done != self._seen else self._alone + 1
        self._seen = done
        if self._alone >= UPDATES_ALONE and (done == 0 or self._is_later):
            self._unwatch()
            self._takes_over()
