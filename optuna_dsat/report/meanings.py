"""Plain explanations of the outcomes."""

from __future__ import annotations

from collections.abc import Mapping

from optuna_dsat.outcome import Outcome

__all__ = ["MEANING"]

MEANING: Mapping[Outcome, tuple[str, str]] = {
    Outcome.MEASURED: ("All profile steps ran; the metric is the trial's value.", ""),
    Outcome.OUT_OF_MEMORY: (
        "The device had too little memory.",
        "Nothing: the search now knows that this micro-batch is too large for these settings.",
    ),
    Outcome.HOST_OUT_OF_MEMORY: (
        "The host had too little memory.",
        "Nothing, if offload is not wanted. Else free host memory, or run fewer launches at once with --max-slots.",
    ),
    Outcome.OUT_OF_DATA: (
        "The script ended by itself before the last profile step: its data is too small for steps of this batch.",
        "Nothing, if such batches are not wanted: smaller ones are tried. Else give the script more data.",
    ),
    Outcome.INVALID_CONFIG: (
        "DeepSpeed refused the configuration, or the script did not follow it.",
        "Read the message below. If the script sets a value itself, hold that knob with --no-tune.",
    ),
    Outcome.SCRIPT_ERROR: (
        "The script raised an error of its own, or left without training.",
        "Read the error below and the log of the rank that it names; run the script alone with this config.",
    ),
    Outcome.COMMUNICATION_ERROR: (
        "The ranks lost each other, and no rank had a cause of its own.",
        "Look at the network and the driver if it comes back; NCCL_DEBUG=INFO makes the logs say more.",
    ),
    Outcome.STALLED: (
        "No rank was heard from for longer than --stall-timeout allows, or all stood still for many steps.",
        "Look at logs/rank*.stacks.log for what every rank waits for; a rank that waits alone points to a deadlock.",
    ),
    Outcome.TIMEOUT: (
        "The launch took longer than --trial-timeout allows.",
        "Allow more time if slow configurations are of interest; else nothing.",
    ),
    Outcome.KILLED: (
        "A process of the launch was ended by a signal that neither the search nor the kernel's OOM killer had sent.",
        "Nothing: it was launched again. If it comes back, look for what ends processes here, such as a batch system.",
    ),
    Outcome.PRUNED: ("The launch was stopped: it could not be among the best.", ""),
    Outcome.LOST: ("Its worker died, or the search was stopped.", "Nothing: a copy is run by whoever continues."),
}
"""Outcome -> explanation, and advice if available."""
