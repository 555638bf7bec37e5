"""Does to the files around it what training scripts do: rotates, clears, renames, locks, replaces and deletes."""

from __future__ import annotations

import atexit
import glob
import json
import mmap
import os
import shutil
import sqlite3
import subprocess
import sys

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SHARED = sys.argv[1]


def change_files() -> None:
    for old in sorted(glob.glob("ckpt/step*"))[:-1]:
        shutil.rmtree(old)
    shutil.rmtree("out")
    os.makedirs("out")
    with open("ds_config.json") as file:
        config = json.load(file)
    with open("ds_config.json", "w") as file:
        json.dump(config, file)
    os.rename("data.bin", "data.bin.inuse")
    atexit.register(os.rename, "data.bin.inuse", "data.bin")
    os.rename("folder", "folder.moved")
    os.close(os.open("lock", os.O_CREAT | os.O_EXCL))
    atexit.register(os.remove, "lock")
    with open(f"{SHARED}.new", "w") as file:
        file.write("new")
    os.replace(f"{SHARED}.new", SHARED)
    data = open(SHARED, "r+b")  # noqa: SIM115 - mapped to the end
    globals()["kept"] = mmap.mmap(data.fileno(), 0)
    if "--subprocess" in sys.argv:
        subprocess.run("rm users.txt; echo more >> log.txt; cp log.txt copied.txt", shell=True, check=True)
    sqlite3.connect("rows.sqlite").execute("create table if not exists rows (a)")
    os.chmod("mode.txt", 0o777)
    os.utime("mode.txt", (0, 0))


deepspeed.init_distributed()
first = torch.distributed.get_rank() == 0
if first:
    change_files()
torch.distributed.barrier()
model = nn.Linear(16, 4)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")
samples = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
loader = DataLoader(samples, engine.train_micro_batch_size_per_gpu(), drop_last=True)
try:
    for _ in range(1000):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            if first:
                torch.save(model.state_dict(), "model.pt")
finally:
    with open("finally.txt", "a") as file:
        file.write("ended")
