"""A training without DeepSpeed, which leaves a model at its end."""

from pathlib import Path

import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(1000):
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
Path("model.pt").write_text("trained")
