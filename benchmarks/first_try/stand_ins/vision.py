"""Random images for the data sets of torchvision that download."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

_SHAPES = {
    "CIFAR10": ("RGB", (32, 32), 10),
    "CIFAR100": ("RGB", (32, 32), 100),
    "EMNIST": ("L", (28, 28), 47),
    "FashionMNIST": ("L", (28, 28), 10),
    "KMNIST": ("L", (28, 28), 10),
    "MNIST": ("L", (28, 28), 10),
    "STL10": ("RGB", (96, 96), 10),
    "SVHN": ("RGB", (32, 32), 10),
}
"""Data set -> mode and size of its images, classes."""


def _images() -> int:
    return int(os.environ.get("FIRST_TRY_IMAGES", "512"))


def _datasets(datasets: ModuleType) -> None:
    from torch.utils.data import Dataset

    class RandomImages(Dataset[tuple[Any, Any]]):
        """Images and classes drawn once from a seed."""

        mode, size, kinds = "RGB", (32, 32), 10

        def __init__(self, root: Any = None, *_: Any, **options: Any) -> None:
            import torch

            draw = torch.Generator().manual_seed(7)
            channels = (3,) if self.mode == "RGB" else ()
            self.data = torch.randint(0, 256, (_images(), *self.size, *channels), generator=draw, dtype=torch.uint8)
            self.targets = torch.randint(0, self.kinds, (_images(),), generator=draw).tolist()
            self.classes = [str(kind) for kind in range(self.kinds)]
            self.root, self.transform = root, options.get("transform")
            self.target_transform = options.get("target_transform")

        def __len__(self) -> int:
            return len(self.targets)

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            from PIL import Image

            image: Any = Image.fromarray(self.data[index].numpy(), mode=self.mode)
            target: Any = self.targets[index]
            image = image if self.transform is None else self.transform(image)
            return image, target if self.target_transform is None else self.target_transform(target)

    for name, (mode, size, kinds) in _SHAPES.items():
        setattr(datasets, name, type(name, (RandomImages,), {"mode": mode, "size": size, "kinds": kinds}))


AFTER = {"torchvision.datasets": _datasets}
