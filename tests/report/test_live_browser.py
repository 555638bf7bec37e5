"""The live page in a real browser: it follows the store, and keeps what its reader did."""

from __future__ import annotations

import optuna
import pytest

from optuna_dsat.trials import attributes
from tests.harness.browser import needs_chromium, open_browser, open_page, until
from tests.harness.reports import ReportedStudyBench, serving

pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed")
pytestmark = needs_chromium

DRAWN = "[...document.querySelectorAll('.plot')].every(e => e.querySelector('.plot-container'))"
SUMMARY = "document.querySelector('#launches summary').textContent"
ZOOM = "document.querySelector('#micro-batch .plot').layout.xaxis.range"


def test_it_follows_a_search_and_keeps_zoom_and_what_was_opened(finished: ReportedStudyBench) -> None:
    study, launched = finished.study(), len(finished.view().launched)
    config = study.trials[0].user_attrs[attributes.CONFIG]
    flying = study.ask()
    flying.set_user_attr(attributes.CONFIG, config)
    flying.set_user_attr(attributes.LAUNCH_ID, f"trial-{launched:04d}")
    flying.report(123.0, 2)
    with (
        serving("s", "--storage", finished.url, "--port", "0") as (_, address),
        open_browser() as browser,
        open_page(browser, width=1280, height=900, scheme="dark") as (page, seen),
    ):
        page.goto(address)
        until(page, DRAWN)
        page.locator("#now").get_by_text("123 samples/s").wait_for()
        page.evaluate("Plotly.relayout(document.querySelector('#micro-batch .plot'), {'xaxis.range': [1, 1.5]}); null")
        page.locator("#memory-table summary").click()
        page.get_by_role("button", name="GiB", exact=True).click()
        page.get_by_role("searchbox").fill("memory")
        assert page.evaluate(SUMMARY).startswith(f"{launched} ")
        flying.set_user_attr(attributes.OUTCOME, "out_of_memory")
        study.tell(flying.number, state=optuna.trial.TrialState.PRUNED)
        page.locator("#now").get_by_text("The search has ended.").wait_for(state="attached")
        for _ in range(240):  # drawn anew with a small share of the processor
            page.wait_for_timeout(500)
            if page.evaluate(SUMMARY).startswith(f"{launched + 1} "):
                break
        assert page.evaluate(SUMMARY).startswith(f"{launched + 1} ")
        assert page.evaluate(ZOOM) == [1, 1.5]
        assert page.evaluate("document.querySelector('#memory-table').open")
        assert page.locator("#launch-rows th[aria-sort=descending]").inner_text().startswith("GiB")
        assert page.get_by_role("searchbox").input_value() == "memory"
        assert page.evaluate(DRAWN)
        assert seen.console == []
        assert {request.split("?")[0].rpartition("/")[0] for request in seen.requests} <= {
            address.rstrip("/"), f"{address}assets",
        }  # fmt: skip
