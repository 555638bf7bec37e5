"""``dashboard``: show a study in the browser."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from optuna_dsat.cli.parameters import DEFAULT_STORAGE, Name, Storage
from optuna_dsat.escape.terminal import say
from optuna_dsat.escape.urls import page_address

__all__ = ["dashboard"]

_MOST_NAMED = 5
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def dashboard(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Show a study in the browser, with notes, plots, logs and configs (needs the extra: dashboard)."""
    from optuna_dsat.report.publish import publish, require_installed
    from optuna_dsat.report.serve import ResultStorage, serve
    from optuna_dsat.store import Store

    require_installed()
    with Store.open(storage, create=False) as store:
        published = publish(store, name)
        if published.store is None:
            _say("The folder of the study's files is not on this machine: logs and configs are not offered.")
        if published.refused:
            _say(f"Left out, as they lead out of the study's folder: {', '.join(published.refused[:_MOST_NAMED])}.")
        if host not in _LOOPBACK:
            _say(f"Whoever reaches {host} can read and delete studies: optuna-dashboard asks for no password.")

        def show_address(found: int) -> None:
            say(page_address(host, found, "dashboard", "studies", published.study_id))
            _say("Press Ctrl-C to end; start again to show what the study did since.")

        try:
            serve(ResultStorage(store), host=host, port=port, artifacts=published.store, on_ready=show_address)
        except KeyboardInterrupt:
            _say("Ended.")


def _say(text: str) -> None:
    say(text, file=sys.stderr)
