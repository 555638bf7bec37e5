"""ZeRO stage and offloads: words, config and order."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_dsat.config.structures import GUIDE_ORDER, STRUCTURES, Structure

WORDS = {
    "ZeRO 0": {},
    "ZeRO 2": {"stage": 2.0, "offload_optimizer": {"device": "none"}, "offload_param": None},
    "ZeRO 2 + optimizer offload": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "ZeRO 3": {"stage": 3, "offload_optimizer": {"device": "auto"}, "offload_param": {"device": "auto"}},
    "ZeRO 3 + parameter offload to NVMe and optimizer offload": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
    },
}


@pytest.mark.parametrize("words", WORDS)
def test_a_config_in_words(words: str) -> None:
    assert Structure.of({"zero_optimization": WORDS[words]}).words == words


def test_a_structure_is_read_back_from_its_section() -> None:
    everything = [*STRUCTURES, *(structure.on_nvme() for structure in STRUCTURES if structure.offloads)]
    assert len(set(everything)) == len(everything)
    for item in everything:
        section: dict[str, Any] = item.zero_section(nvme_path="/nvme")
        assert Structure.of({"zero_optimization": section}) == item
        assert ("/nvme" in str(section)) == ("NVMe" in item.words)


def test_the_guides_order_is_a_part_of_the_order_by_memory() -> None:
    assert [structure for structure in STRUCTURES if structure in GUIDE_ORDER] == list(GUIDE_ORDER)
