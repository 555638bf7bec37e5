"""The live page: what it shows while a search runs, what it serves, and to whom."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import optuna
import pytest

from optuna_dsat.report.dashboard.live import LiveStudy
from optuna_dsat.report.dashboard.live_app import guarded, live_app
from optuna_dsat.study import progress
from optuna_dsat.study.live_state import LiveNotes
from optuna_dsat.trials import attributes
from optuna_dsat.words import metric_in_words
from tests.harness.landscapes import Hill
from tests.harness.pages import Page
from tests.harness.reports import ReportedStudyBench, serving


@pytest.fixture
def live(finished: ReportedStudyBench) -> LiveStudy:
    return LiveStudy(finished.store, "s")


def get(live: LiveStudy, path: str, *, method: str = "GET", host: str = "127.0.0.1:8080") -> tuple[int, str, bytes]:
    """Return status, content security policy and content of an answer."""
    words: list[tuple[str, dict[str, str]]] = []
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "HTTP_HOST": host}

    def start(status: str, headers: list[tuple[str, str]], _error: object = None) -> None:
        words.append((status, dict(headers)))

    content = b"".join(guarded(live_app(live), host="127.0.0.1")(environ, start))  # type: ignore[arg-type]
    ((status, headers),) = words
    assert headers["X-Content-Type-Options"] == "nosniff"
    return int(status.split()[0]), headers["Content-Security-Policy"], content


def begin_trial(bench: ReportedStudyBench, *, steps: int = 0) -> optuna.Trial:
    """Begin a trial as a tuner does, with some steps of its launch."""
    study = bench.study()
    trial = study.ask()
    config = study.trials[0].user_attrs[attributes.CONFIG]
    trial.set_user_attr(attributes.CONFIG, {**config, "train_micro_batch_size_per_gpu": 17})
    trial.set_user_attr(attributes.LAUNCH_ID, f"trial-{trial.number:04d}")
    for step in range(1, steps + 1):
        trial.report(120.0 + step, step)
    return trial


def test_the_page_holds_the_report_and_loads_from_itself_alone(live: LiveStudy) -> None:
    status, policy, content = get(live, "/")
    page = Page(content.decode())
    assert status == 200
    assert "script-src 'self';" in policy
    assert b"http-equiv" not in content, "a second policy would forbid the page's own scripts"
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    assert sorted(page.loads) == ["/assets/live.js", "/assets/plotly.js", "/assets/report.js"]
    assert {"now", "result", "why", "micro-batch", "launches"} <= page.ids
    assert "The search has ended." in page.text
    for name in page.loads:
        assert get(live, name)[0] == 200


def test_what_runs_is_shown_with_its_steps(live: LiveStudy, finished: ReportedStudyBench) -> None:
    _, html = live.now()
    assert "<table" not in html
    trial = begin_trial(finished, steps=2)
    later, html = live.now()
    text = Page(html).text
    assert f"{trial.number} ZeRO 2, micro-batch 17" in text
    assert "step 3 of " in text
    assert "122 samples/s" in text
    assert "16 of 16 trials done, 1 running" in text, "a trial that is asked for does not count"
    assert "The search has ended." not in text
    trial.report(125.0, 3)
    again, html = live.now()
    assert "125 samples/s" in html
    assert again == later, "a step changes no figure"


def test_the_profile_and_the_finalists_are_shown_while_they_run(finished: ReportedStudyBench) -> None:
    finished.store.create_study("new", finished.spec(name="new").model_dump(mode="json"))
    notes = LiveNotes(lambda _: None, study="new")
    with notes.kept_in(finished.store):
        notes(progress.Phase(words="building cpu_adam (first use only)"))
        notes(progress.ProfileStarted(words="ZeRO 2, no offload"))
        notes(progress.TrialPhase(number=None, words="importing"))
        text = Page(LiveStudy(finished.store, "new").now()[1]).text
    assert "the profile launch comes first" in text
    assert "Building cpu_adam (first use only), " in text
    assert "profile ZeRO 2, no offload, micro-batch 1 importing" in text
    clock = [time.time()]
    live, notes = LiveStudy(finished.store, "s"), LiveNotes(lambda _: None, study="s", clock=lambda: clock[0])
    best = live.view.best
    assert best is not None
    rate = best.samples_per_s
    assert rate is not None
    number = best.trial.number
    with notes.kept_in(finished.store):
        notes(progress.FinalistStarted(number=number, words="ZeRO 1, micro-batch 9", end_profile_step=12))
        version, html = live.now()
        text = Page(html).text
        assert "The search has ended." not in text
        assert "finalists are measured again" in text
        assert f"{number} ZeRO 1, micro-batch 9 starting" in text
        clock[0] += 2
        notes(progress.TrialStepped(number=number, step=4, samples_per_s=rate / 2, peak_bytes=3 * 2**30))
        text = Page(live.now()[1]).text
        assert f"{number} ZeRO 1, micro-batch 9 step 5 of 12 {metric_in_words('throughput', rate / 2)} -50%" in text
        assert "3.00 GiB of 60.00 GiB" in text
        assert live.now()[0] == version, "no note changes a figure"
    assert "The search has ended." in live.now()[1]


def test_the_studys_part_follows_the_store_but_not_at_every_look(
    finished: ReportedStudyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("optuna_dsat.report.dashboard.live.time.monotonic", lambda: clock[0])
    live = LiveStudy(finished.store, "s")
    before = live.study()
    trial = begin_trial(finished)
    trial.set_user_attr(attributes.OUTCOME, "out_of_memory")
    finished.study().tell(trial.number, state=optuna.trial.TrialState.PRUNED)
    assert live.now()[0] == before[0], "rendered a moment ago"
    clock[0] += 3600
    version, _ = live.now()
    assert version != before[0]
    assert live.study()[0] == version
    assert live.study()[1] != before[1]
    assert "17 of 16" in Page(live.study()[1]).cards["Trials"][0]


def test_configs_and_logs_are_served_and_nothing_else(live: LiveStudy, finished: ReportedStudyBench) -> None:
    folder = finished.folder / "out" / "s" / "trial-0000"
    (folder / "ds_config.json").write_text(json.dumps({"wandb": {"api_key": "s3cret"}, "fp16": {"enabled": True}}))
    (finished.folder / "out" / "s" / "trial-0001" / "logs" / "rank0.stderr.log").unlink()
    (finished.folder / "out" / "s" / "trial-0001" / "logs" / "rank0.stderr.log").symlink_to("/etc/passwd")
    status, _, log = get(live, "/files/trial-0000/rank0.stderr.log")
    assert (status, log) == (200, b"trial-0000 rank 0\n")
    finished.log("trial-0000").write_bytes(b"\xff --hf-token s3cret99 step 1\n")
    assert get(live, "/files/trial-0000/rank0.stderr.log")[2] == b"\xff --hf-token *** step 1\n"
    status, _, config = get(live, "/files/trial-0000/ds_config.json")
    assert status == 200
    assert json.loads(config)["fp16"] == {"enabled": True}
    assert b"s3cret" not in config
    for path in (
        "/files/trial-0001/rank0.stderr.log", "/files/../study.db", "/files/trial-0000/../../../study.db",
        "/files/trial-0000/..", "/files/trial-0000/env.json", "/files/./rank0.stderr.log", "/files//etc/passwd",
        "/files/trial-0000/logs/rank0.stderr.log", "/files/trial-0000/rank0.stderr.log/", "/assets/../page.py",
        "/assets/report.html", "/elsewhere", "/files",
    ):  # fmt: skip
        assert get(live, path)[0] == 404, path


def test_only_this_machines_names_are_answered_and_nothing_is_changed(live: LiveStudy) -> None:
    for host in ("127.0.0.1:8080", "localhost", "[::1]:80", "10.0.0.7:8080"):
        assert get(live, "/now", host=host)[0] == 200, host
    for host in ("evil.invalid", "evil.invalid:8080", "", "127.0.0.1.evil.invalid", "localhost.evil.invalid", "[x"):
        assert get(live, "/now", host=host)[0] == 403, host
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert get(live, "/now", method=method)[0] == 405
    assert get(live, "/", method="HEAD")[2] == b""


def test_pages_of_elsewhere_change_nothing_in_optuna_dashboard_either() -> None:
    words: list[str] = []

    def other(_environ: object, start: Any) -> list[bytes]:
        start("200 OK", [])
        return [b"changed"]

    app = guarded(other, host="127.0.0.1")
    for site, method, expected in (
        ("cross-site", "POST", 403), ("same-site", "DELETE", 403), ("same-origin", "POST", 200), ("", "POST", 403),
        ("none", "PUT", 200), ("cross-site", "GET", 200),
    ):  # fmt: skip
        environ = {"REQUEST_METHOD": method, "HTTP_HOST": "127.0.0.1", "HTTP_SEC_FETCH_SITE": site}
        app(environ, lambda status, _headers: words.append(status))  # type: ignore[arg-type]
        assert int(words[-1].split()[0]) == expected, (site, method)


def test_a_study_that_is_deleted_meanwhile_is_one_line(live: LiveStudy, finished: ReportedStudyBench) -> None:
    finished.store.delete_study("s")
    status, _, content = get(live, "/now")
    assert status == 503
    assert b"no study 's'" in content


def test_a_study_before_its_profile_has_a_page(bench: ReportedStudyBench) -> None:
    bench.store.create_study("s", bench.spec().model_dump(mode="json"))
    live = LiveStudy(bench.store, "s")
    assert "the profile launch comes first" in Page(live.page()).text
    bench.run(bench.spec(max_trials=2, confirm=0), Hill())
    live._render_after = 0.0
    assert "The search has ended" in Page(live.page()).text


def test_the_command_serves_it_without_the_extra_and_ends_with_ctrl_c(finished: ReportedStudyBench) -> None:
    with serving("s", "--storage", finished.url, "--port", "0") as (_, address):
        parts = urlsplit(address)
        assert (parts.hostname, parts.path) == ("127.0.0.1", "/")
        with urllib.request.urlopen(address, timeout=20) as response:
            assert "Next steps" in Page(response.read().decode()).text
        for path in ("dashboard", "api/studies"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(address + path, timeout=20)
        assert parts.port is not None
        connection = HTTPConnection("127.0.0.1", parts.port, timeout=20)
        connection.request("GET", "/now", headers={"Host": "evil.invalid"})
        assert connection.getresponse().status == 403
        connection.close()
