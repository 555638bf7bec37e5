"""What the commands on stored studies say of them."""

from __future__ import annotations

from optuna_dsat.cli.studies import launch_lines


def test_launches_that_a_stop_took_are_told_apart_from_those_that_count() -> None:
    assert [*launch_lines({"measured": 2, "lost": 1}, used=2, most=2)] == [
        "Launches: 2 of at most 2 (2 measured).",
        "Not counted: 1 launch that a stop or a crash took; each is repeated as another trial.",
    ]
    assert [*launch_lines({"measured": 3, "out_of_memory": 1}, used=4, most=9)] == [
        "Launches: 4 of at most 9 (3 measured, 1 out of memory)."
    ]
    assert next(launch_lines({"lost": 2}, used=0, most=9)) == "Launches: 0 of at most 9."
