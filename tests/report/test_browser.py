"""The dashboard as people see it: a real server, a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from optuna_dsat.trials import attributes
from optuna_dsat.words import times_in_words
from tests.harness.browser import CHROMIUM, FLAGS, PATIENCE_MS, needs_chromium
from tests.harness.reports import ReportedStudyBench, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed")

pytestmark = needs_chromium


@pytest.fixture
def address(finished: ReportedStudyBench) -> Iterator[str]:
    with serving("s", "--storage", finished.url, "--port", "0", "--optuna-dashboard") as (_, result):
        yield result


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            str(tmp_path / "browser"), executable_path=str(CHROMIUM), headless=True, args=FLAGS
        )
        context.set_default_timeout(PATIENCE_MS)
        try:
            yield context.new_page()
        finally:
            context.close()


def test_best_trial_plots_note_and_logs_are_on_the_page(finished: ReportedStudyBench, address: str, page: Page) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/dashboard/studies/1", address)
    view = finished.view()
    assert view.best is not None
    best = view.best.trial  # the result, which rounds may have chosen

    page.goto(address)
    page.get_by_text(f"Best Trial (number={best.number})").wait_for()
    plot = page.locator(".js-plotly-plot", has_text="Throughput over micro-batch")
    plot.locator(".legend").get_by_text("out of memory").wait_for()
    assert plot.locator(".scatterlayer .trace").count() > 4
    page.locator(".js-plotly-plot", has_text="Peak memory per rank").locator(".scatterlayer .trace").first.wait_for()
    page.get_by_text("best_ds_config").first.wait_for()

    page.goto(f"{address}/note")
    page.get_by_role("heading", name="Memory").wait_for()
    page.get_by_role("cell", name="ZeRO 3 + optimizer offload").wait_for()
    assert view.best is not None
    ratio = view.best.speed_up
    assert ratio is not None
    page.get_by_role("cell", name=f"{times_in_words(ratio.value)}\u00d7").wait_for()

    page.goto(f"{address}/trials?numbers={best.number}")
    page.get_by_role("heading", name=best.user_attrs[attributes.CONFIGURATION]).wait_for()
    page.get_by_text("x as fast as your config").wait_for()
    launch = best.user_attrs[attributes.LAUNCH_ID]
    page.get_by_text(f"{launch}.rank1.stderr.log").first.wait_for()
