"""``dashboard``: show a study in the browser during the search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from optuna_dsat.cli.parsing.parameters import DEFAULT_STORAGE, LatestName, Storage
from optuna_dsat.cli.tables import notify
from optuna_dsat.escape.paths import page_address
from optuna_dsat.escape.terminal import say

if TYPE_CHECKING:
    from optuna_dsat.report.dashboard.publish import Published
    from optuna_dsat.store import Store

_MOST_NAMED = 5
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def dashboard(
    name: LatestName = None,
    storage: Storage = DEFAULT_STORAGE,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    optuna_dashboard: Annotated[
        bool, typer.Option("--optuna-dashboard", help="Serve optuna-dashboard as well (needs the extra: dashboard).")
    ] = False,
) -> None:
    """Show a study in the browser while it is searched: what runs now, and the report, kept up to date.

    Nothing can be changed there. With --optuna-dashboard that is served as well, with notes, plots, logs and configs.
    """
    from optuna_dsat.report.dashboard.live import LiveStudy
    from optuna_dsat.report.dashboard.live_app import beside, guarded, live_app
    from optuna_dsat.report.dashboard.publish import require_installed
    from optuna_dsat.report.dashboard.serve import optuna_app, serve
    from optuna_dsat.store import Store
    from optuna_dsat.study.stored import latest_study

    if optuna_dashboard:
        require_installed()
    with Store.open(storage, create=False) as store:
        name = name or latest_study(store)
        app = live_app(LiveStudy(store, name))
        published = _publish(store, name) if optuna_dashboard else None
        if published is not None:
            app = beside(app, optuna_app(store, published.store))
        if host not in _LOOPBACK:
            what = "read and delete studies: optuna-dashboard" if optuna_dashboard else "read this study: the page"
            notify(f"Whoever reaches {host} can {what} asks for no password.")

        def show_address(result: int) -> None:
            say(page_address(host, result))
            if published is not None:
                say(page_address(host, result, "dashboard", "studies", published.study_id))
                notify("The first page follows the study; start again to have its notes for optuna-dashboard anew.")
            notify("Press Ctrl-C to end.")

        try:
            serve(guarded(app, host=host), host=host, port=port, on_ready=show_address)
        except KeyboardInterrupt:
            notify("Ended.")


def _publish(store: Store, name: str) -> Published:
    """Write notes, plots and artifacts for optuna-dashboard, and report omissions."""
    from optuna_dsat.report.dashboard.publish import publish

    published = publish(store, name)
    if published.store is None:
        notify("The folder of the study's files is not on this machine: logs and configs are not offered.")
    if published.refused:
        notify(f"Left out, as they lead out of the study's folder: {', '.join(published.refused[:_MOST_NAMED])}.")
    return published
