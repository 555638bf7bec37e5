"""Measure the steps of an engine: time, inputs, memory, FLOPs."""
