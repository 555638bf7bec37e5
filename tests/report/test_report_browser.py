"""The report and the live page as people see them: a real browser, as wide as a desk and a phone, light and dark."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import pytest

from optuna_dsat.outcome import Outcome
from optuna_dsat.report.page import sections_of
from optuna_dsat.report.view import StudyView
from optuna_dsat.report.write import render_comparison
from optuna_dsat.trials import attributes
from tests.harness.browser import needs_chromium, open_browser, open_page, until
from tests.harness.reports import ReportedStudyBench, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed")
pytestmark = needs_chromium

DESK: dict[str, Any] = {"width": 1280, "height": 900}
TABLET: dict[str, Any] = {"width": 1024, "height": 768}
PHONE: dict[str, Any] = {"width": 390, "height": 844, "phone": True}

DRAWN = "[...document.querySelectorAll('.plot')].every(e => e.querySelector('.plot-container'))"
SUMMARY = "document.querySelector('#launches summary').textContent"
ZOOM = "document.querySelector('#micro-batch .plot').layout.xaxis.range"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as result:
        yield result


@pytest.fixture(scope="module")
def file(rendered: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(rendered, encoding="utf-8")
    return path


def pixels(picture: Any, box: Any) -> tuple[tuple[int, int, int], int]:
    """Return the most frequent colour of a part of a picture, and how many colours it has."""
    part = picture.crop((box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]))
    colours = part.getcolors(maxcolors=part.width * part.height)
    return max(colours)[1], len(colours)


def show(page: Page, file: Path, figures: int) -> None:
    page.goto(file.as_uri())
    until(page, f"document.querySelectorAll('.js-plotly-plot .plot-container').length === {figures}")


@pytest.mark.parametrize(("size", "scheme"), [(TABLET, "light"), (PHONE, "dark")], ids=["tablet-light", "phone-dark"])
def test_all_figures_are_drawn_and_nothing_overflows_is_covered_or_fetched(
    browser: Any, view: StudyView, file: Path, size: dict[str, Any], scheme: str
) -> None:
    images = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    drawn = [section.id for section in sections_of(view) if section.figure is not None]
    assert drawn == [section.id for section in sections_of(view)]
    with open_page(browser, scheme=scheme, **size) as (page, seen):
        show(page, file, len(drawn))
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        outside = page.evaluate(
            "[...document.querySelectorAll('main section, .plot .main-svg, pre, .scroll')]"
            ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
        )
        assert outside == []
        cut = page.evaluate(
            "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)"
            ".map(e => e.ariaLabel)"
        )
        assert size is PHONE or cut == []
        buttons = page.evaluate("[...document.querySelectorAll('.modebar-btn')].map(e => e.dataset.title)")
        assert not [title for title in buttons if "share" in title.lower() or "cloud" in title.lower()]
        picture = images.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
        for name in drawn:
            background, colours = pixels(picture, page.locator(f"#{name} .plot").bounding_box())
            assert (sum(background) < 200) == (scheme == "dark"), name
            assert colours > 20, f"{name} shows {colours} colours"
        assert page.evaluate("document.querySelectorAll('.plot .legend').length") == 0, "none within a figure"
        overlaps = page.evaluate(
            "[...document.querySelectorAll('ul.legend')].filter(e => e.getBoundingClientRect().bottom > "
            "e.nextElementSibling.getBoundingClientRect().top + 1).length"
        )
        assert overlaps == 0
        shown = "document.querySelector('#micro-batch .plot').data.filter(t => t.name === 'out of memory')[0].visible"
        assert page.evaluate(shown) is True
        key = page.locator("#micro-batch").get_by_role("button", name="out of memory")
        assert key.get_attribute("aria-pressed") == "true"
        key.click()
        assert key.get_attribute("aria-pressed") == "false"
        until(page, f"{shown} === false")
        assert seen.console == []
        assert seen.requests == [file.as_uri()]


def test_figures_follow_zoom_colour_scheme_and_width_and_print_in_black_on_white(
    browser: Any, view: StudyView, file: Path
) -> None:
    drawn = sum(section.figure is not None for section in sections_of(view))
    ticks = "[...document.querySelectorAll('#micro-batch .xtick text')].map(e => Number(e.textContent))"
    with open_page(browser, scheme="light", **DESK) as (page, seen):
        show(page, file, drawn)
        before = page.evaluate(ticks)
        for low, high in ((1.5, 1.56), (0.1, 0.4), (-0.2, 2.2)):
            zoom = f"{{'xaxis.range': [{low}, {high}]}}"
            page.evaluate(f"Plotly.relayout(document.querySelector('#micro-batch .plot'), {zoom}); null")
            until(page, f"{ticks}.length >= 3 && {ticks}.every(n => n >= {10**low} && n <= {10**high})")
        page.evaluate("Plotly.relayout(document.querySelector('#micro-batch .plot'), {'xaxis.autorange': true}); null")
        until(page, f"{ticks}.length >= 3 && {ticks}.every(n => Number.isInteger(n))")
        assert len(before) >= 3
        text = "document.querySelector('#micro-batch .plot').layout.font.color"
        light = page.evaluate(text)
        page.emulate_media(color_scheme="dark")
        until(page, f"{text} !== {json.dumps(light)}")
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        widths = page.evaluate("[...document.querySelectorAll('.plot .main-svg')].map(e => e.clientWidth)")
        assert max(widths) <= 660
        assert page.evaluate(text) == "#000"
        assert not page.locator("nav").is_visible()
        inside = "[...document.querySelectorAll('.lead, .diff')].map(e => getComputedStyle(e).breakInside)"
        assert page.get_by_text("Train with it:").first.is_visible()
        assert set(page.evaluate(inside)) == {"avoid"}, "a sentence above a figure goes to the next page with it"
        page.emulate_media(media="screen")
        page.evaluate("window.dispatchEvent(new Event('afterprint'))")
        assert page.pdf(format="A4").startswith(b"%PDF")
        page.set_viewport_size({"width": 500, "height": 800})
        until(page, "document.querySelector('#micro-batch .main-svg').clientWidth < 500")
        assert page.evaluate("document.documentElement.scrollWidth") <= 500
        assert seen.console == []


def test_the_config_is_copied_with_the_keyboard_alone_and_launches_are_filtered(
    browser: Any, view: StudyView, file: Path
) -> None:
    assert view.best is not None
    with open_page(browser, scheme="light", **DESK) as (page, _):
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.goto(file.as_uri())
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "To the result"
        page.keyboard.press("Enter")
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.dataset.copy") == "best-config":
                break
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none"
        page.keyboard.press("Enter")
        page.get_by_text("The config is copied.").wait_for()
        copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
        rows = page.locator("#launch-rows tbody tr:visible")
        assert rows.count() == len(view.launched)
        page.get_by_role("searchbox").fill("out of memory")
        short = sum(t.user_attrs[attributes.OUTCOME] == Outcome.OUT_OF_MEMORY for t in view.launched)
        assert 0 < short < len(view.launched)
        assert rows.count() == short
        page.get_by_role("searchbox").fill("")
        speed = page.locator("#launch-rows thead").get_by_role("button", name="samples/s", exact=True)
        column = speed.evaluate("button => button.parentElement.cellIndex")
        for order in ("descending", "ascending"):
            speed.click()
            assert page.locator(f"#launch-rows th[aria-sort={order}]").count() == 1
            cells = page.locator(f"#launch-rows tbody tr > :nth-child({column + 1})").all_inner_texts()
            values = [float(cell) for cell in cells if cell]
            assert values == sorted(values, reverse=order == "descending")
            assert cells[: len(values)] == [cell for cell in cells if cell], "rows without a speed come last"
    size = "train_micro_batch_size_per_gpu"
    assert copied[size] == view.best.trial.params[size]


def test_a_comparison_of_long_names_fits_and_leaves_its_bars_room(
    browser: Any, view: StudyView, tmp_path: Path
) -> None:
    name = "llama-3.1-8b_after-the-upgrade-of-everything" * 3
    other = replace(view, spec=view.spec.model_copy(update={"name": name, "slots_per_trial": 4}))
    file = tmp_path / "comparison.html"
    file.write_text(render_comparison((view, other)), encoding="utf-8")
    with open_page(browser, scheme="dark", **PHONE) as (page, seen):
        show(page, file, 2)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        share = "(e => e._fullLayout._size.w / e.clientWidth)(document.querySelector('#results .plot'))"
        until(page, f"{share} > 0.4")
        assert seen.console == []
        assert seen.requests == [file.as_uri()]


def test_it_follows_a_search_and_keeps_zoom_and_what_was_opened(browser: Any, finished: ReportedStudyBench) -> None:
    study, launched = finished.study(), len(finished.view().launched)
    config = study.trials[0].user_attrs[attributes.CONFIG]
    flying = study.ask()
    flying.set_user_attr(attributes.CONFIG, config)
    flying.set_user_attr(attributes.LAUNCH_ID, f"trial-{launched:04d}")
    flying.report(123.0, 2)
    with (
        serving("s", "--storage", finished.url, "--port", "0") as (_, address),
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
        until(page, f"{SUMMARY}.startsWith('{launched + 1} ')")
        assert page.evaluate(ZOOM) == [1, 1.5]
        assert page.evaluate("document.querySelector('#memory-table').open")
        assert page.locator("#launch-rows th[aria-sort=descending]").inner_text().startswith("GiB")
        assert page.get_by_role("searchbox").input_value() == "memory"
        assert page.evaluate(DRAWN)
        assert seen.console == []
        assert {request.split("?")[0].rpartition("/")[0] for request in seen.requests} <= {
            address.rstrip("/"), f"{address}assets",
        }  # fmt: skip
