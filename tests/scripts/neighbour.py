"""A module of the user's own, beside ``state.py``; it keeps state, which no other launch may see."""

COUNTER: list[int] = []
