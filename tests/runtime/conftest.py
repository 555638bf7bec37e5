"""Fixtures of the runtime's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.ranks import Starter


@pytest.fixture
def start(tmp_path: Path) -> Starter:
    return Starter(tmp_path)


STUB = """
import json
class accelerator:
    class get_accelerator:
        def device_name(self): return "cuda"
class zero:
    class Init:
        def __init__(self, module=None, config_dict_or_path=None, config=None, enabled=True):
            print(json.dumps([config_dict_or_path, config, enabled]))
class DeepSpeedConfig:
    def __init__(self, config, mpu=None): self._param_dict = config  # as DeepSpeed 0.14 has it
class DeepSpeedEngine:
    gathers, global_steps, global_rank = True, 3, 0
    def __init__(self, args=None, model=None, mpu=None, config=None, config_class=None):
        print(json.dumps([config_class._param_dict, None, args], sort_keys=True))
    def save_checkpoint(self, save_dir, tag=None, client_state={}):
        print("saved to", save_dir)
    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin"):
        print("saved to", save_dir)
    optimizer = None
    universal = False
    def load_universal_checkpoint(self): return self.universal
    def load_checkpoint(self, load_dir, tag=None):
        if tag == "memory": raise MemoryError(tag)
        assert tag == "fits", "another stage"
        return load_dir, {}
    def zero_optimization_partition_weights(self): return True
    def zero_gather_16bit_weights_on_model_save(self): return self.gathers
def initialize(args=None, model=None, optimizer=None, config=None, config_params=None):
    print(json.dumps([config, config_params, vars(args) if args else None], sort_keys=True))
    if args is not None and args.deepspeed_config is not None and config is not None:
        raise AssertionError("given two")
    return (object(),)
"""


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    package = tmp_path / "stubs" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STUB, encoding="utf-8")
    return package.parent
