from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest

from optuna_dsat.display import lines
from optuna_dsat.display.lines import LineView, lines_of
from optuna_dsat.outcome import Outcome
from optuna_dsat.study import progress
from optuna_dsat.study.confirm.speeds import Speed
from tests.harness.small_model import PROFILE

SPEED = Speed(metric="FLOPS_per_gpu", value=28.78e9, samples_per_s=51.25, device="cpu")
MEASURED = progress.TrialFinished(
    number=4, words="ZeRO 2, micro-batch 8; overlap_comm=true", outcome=Outcome.MEASURED, value=28.78e9,
    speed_up=1.34, best=True, message="measured to step 5", launched=5, speed=SPEED,
)  # fmt: skip


def test_a_measured_trial_says_what_differs_and_samples_first() -> None:
    [line] = lines_of(MEASURED)
    assert line == (
        "Trial 4: ZeRO 2, micro-batch 8; overlap_comm=true: 51.25 samples/s, 1.34x your config, best so far"
    )
    late = replace(MEASURED, outcome=Outcome.PRUNED)
    assert ": pruned, 51.25 samples/s, 1.34x" in lines_of(late)[0]


@pytest.mark.parametrize("outcome", [Outcome.PRUNED, Outcome.OUT_OF_MEMORY, Outcome.SCRIPT_ERROR])
def test_what_was_not_measured_says_why(outcome: Outcome) -> None:
    ended = replace(
        MEASURED, outcome=outcome, value=None, speed_up=None, best=False, message="at 3 it cannot win", speed=None
    )
    [line] = lines_of(ended)
    assert line.endswith(f": {outcome.replace('_', ' ')} (at 3 it cannot win)")


def test_a_finalist_has_its_interval_as_a_share() -> None:
    event = progress.FinalistMeasured(
        number=4, words="ZeRO 2, micro-batch 8", value=100.0, low=97.0, high=102.0, message="", round=2,
        speed=Speed(metric="throughput", value=100.0, samples_per_s=51.25),
    )  # fmt: skip
    [line] = lines_of(event)
    assert line == "Round 2, trial 4: ZeRO 2, micro-batch 8: 51.25 samples/s (95% within \u00b13.0%)"


def test_an_interval_wider_than_its_value_has_ends_instead_of_a_share() -> None:
    """Steps of microseconds were "95% within ±159.3%": between less than nothing and more than twice as much."""
    event = progress.FinalistMeasured(
        number=4, words="ZeRO 1", value=100.0, low=-20.0, high=260.0, message="",
        speed=Speed(metric="FLOPS_per_gpu", value=100.0, samples_per_s=50.0),
    )  # fmt: skip
    [line] = lines_of(event)
    assert line.endswith("(95% CI 0 to 130 samples/s)")
    step = Speed(metric="latency", value=0.1, samples_per_s=50.0)
    [line] = lines_of(replace(event, value=0.1, low=0.05, high=0.3, speed=step))
    assert line.endswith("(95% CI 50 to 300 ms)")


def test_a_profile_is_told_in_numbers_that_a_person_writes() -> None:
    profile = replace(
        PROFILE, params=1633, trainable_params=1633, activation_bytes_per_sample=2**20, flops_per_sample=12_345 * 10**9
    )
    event = progress.ProfileFinished(
        profile=profile, measured_with="ZeRO 1", reused=False, largest_micro_batches={1: 8}
    )
    text = lines_of(event)[0]
    assert "1,633 parameters, 1 MiB of activations and 12.35 TFLOP per sample" in text
    text = lines_of(replace(event, profile=replace(profile, params=2 * 10**9, trainable_params=10**6)))[0]
    assert "2 B parameters (1 M trainable)" in text
    assert "1,633 parameters in one pipeline stage, 1 MiB" in lines_of(replace(event, pipeline=True))[0]
    for sizes, words in (
        ({1: 8, 2: 65536}, "ZeRO 1: 8, ZeRO 2: 65,536 or more."),
        ({1: 65536, 2: 65536}, "65,536 or more at any ZeRO stage."),
    ):
        assert lines_of(replace(event, largest_micro_batches=sizes))[1].endswith(words)


def test_a_long_phase_is_told_with_its_duration_and_a_short_one_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    view, now = LineView(), [100.0]
    monkeypatch.setattr(lines, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(lines, "_QUIET_S", 600.0)
    for words in ("importing", "building", ""):
        view(progress.Phase(words=words))
    monkeypatch.setattr(lines, "_QUIET_S", 0.0)
    view(progress.Phase(words="building cpu_adam (first use only, may take minutes)"))
    told = ""
    while not told:
        told = capsys.readouterr().err
    now[0] += 75.0
    view(progress.Phase(words=""))
    view(progress.Phase(words="waiting for GPU 1", said=True))
    view.close()
    assert told == "Building cpu_adam (first use only, may take minutes) ...\n"
    assert capsys.readouterr().err == "Building cpu_adam took 1 min 15 s.\n"


def test_lines_on_a_terminal_without_a_cursor_are_folded_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dumb(io.StringIO):
        def isatty(self) -> bool:
            return True

    text = "Trial 3: ZeRO 1, micro-batch 35; contiguous_gradients=false, overlap_comm=true: script error (no token)"
    for stream, most in ((Dumb(), 60), (io.StringIO(), len(text))):
        monkeypatch.setenv("COLUMNS", "60")
        monkeypatch.setattr("sys.stderr", stream)
        LineView()(progress.Message(text=f"{text}\nand a second line"))
        shown = stream.getvalue().splitlines()
        assert shown[-1] == "and a second line"
        assert " ".join(shown[:-1]) == text
        assert max(map(len, shown)) <= most
        assert len(shown) == (2 if most > 60 else 4)
