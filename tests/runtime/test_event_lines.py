"""Lines that cannot be decoded are skipped, without other effects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.launch.event_log import EventLog
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import (
    BatchSourcesFound,
    EngineReady,
    RankFailed,
    RankFinished,
    RankStarted,
    StepMeasured,
    decode_event,
    encode_event,
)
from optuna_dsat.runtime.failure import diagnose, message_of
from optuna_dsat.runtime.files import TEXT_CHARS, shortened, storable

STEP = StepMeasured(
    rank=0,
    time=2.0,
    step=1,
    latency_s=0.5,
    forward_s=0.1,
    backward_s=0.1,
    step_s=0.1,
    samples=4,
    observed_micro_batch=None,
    loss=float("nan"),
    peak_allocated_bytes=1,
    peak_reserved_bytes=1,
    rss_bytes=1,
)
ENGINE = EngineReady(
    rank=0,
    time=1.0,
    zero_stage=1,
    train_batch_size=4,
    train_micro_batch_size_per_gpu=4,
    gradient_accumulation_steps=1,
    data_parallel_size=1,
    pipeline=False,
    device="cpu",
    config_differences={"a": [1, None]},
    spans={"imports": [1.0, 0.5]},
)
SOURCES = BatchSourcesFound(
    rank=0,
    time=1.0,
    options={"--seed": -1},
    settings=[{"file": "a.yaml", "key": "b", "value": 4}],
    loaders=[{"batch_size": None, "file": "a.py", "line": 3, "samples": None, "trains": True}],
    fed_at=[{"file": "a.py", "line": 3}],
)


def changed(event: Any, **values: Any) -> str:
    return json.dumps({**json.loads(encode_event(event)), **values})


@pytest.mark.parametrize("event", [STEP, ENGINE, SOURCES])
def test_what_a_rank_writes_is_read(event: Any) -> None:
    read = decode_event(encode_event(event))
    assert encode_event(read) == encode_event(event)  # type: ignore[arg-type]


def test_text_is_fit_to_be_stored() -> None:
    failed = RankFailed(
        rank=0,
        time=1.0,
        outcome=Outcome.SCRIPT_ERROR,
        phase="script",
        error_type="E",
        message="a\udcff\x00",
        traceback="x" * 20_000_000,
        missing_bytes=None,
        steps=0,
    )
    read = decode_event(encode_event(failed))
    assert isinstance(read, RankFailed)
    assert read.message == "a\ufffd\u2400"
    assert len(read.traceback) < TEXT_CHARS + 100
    assert "19992000 characters left out" in read.traceback
    read.message.encode()


def test_of_a_long_text_beginning_and_end_are_kept() -> None:
    cut = shortened("a" * 5000 + "b" * 5000, 300)
    assert cut.startswith("a" * 100)
    assert cut.endswith("b" * 200)
    assert "9700 characters" in cut
    assert shortened("short", 5) == "short"
    assert storable("plain \U0001f600") == "plain \U0001f600"


def test_an_error_that_cannot_say_itself_is_an_error_of_the_script() -> None:
    class MuteError(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no words")

    assert "MuteError" in message_of(MuteError())
    assert diagnose(MuteError(), phase="forward", device="cpu", limited=False).outcome is Outcome.SCRIPT_ERROR


def test_lines_without_an_event_are_skipped(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "trial-0000")
    started = RankStarted(rank=0, time=1.0, local_rank=0, world_size=1, pid=1)
    end = RankFinished(rank=0, time=3.0, reason="profile_done", steps=1)
    foreign = changed(STEP, rank=7)
    lines = [
        encode_event(started),
        encode_event(STEP)[:40],
        foreign,
        "",
        "no json",
        encode_event(STEP),
        encode_event(end),
    ]
    directory.events(0).write_text("\n".join(lines) + "\n")
    log = EventLog(directory, slots=1, started=0.0)
    assert [event.kind for event in log.read(1.0)] == ["rank_started", "step_measured", "rank_finished"]


def test_a_poll_does_not_look_at_all_earlier_events(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "one")
    log = EventLog(directory, slots=2, started=0.0)
    directory.events(0).write_text(f"{encode_event(STEP)}\n")
    log.read(1.0)
    log.events = {}
    assert (log.read(2.0), log.ends, log.longest_step_s) == ([], {}, 0.5)
