"""Predict with a corrected model under Lightning: put it where the model was.

python examples/lightning_predict.py
"""

from __future__ import annotations

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trueup


class Classifier(lightning.LightningModule):
    """Your LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
        )

    def predict_step(self, batch: list[Tensor], _number: int) -> Tensor:
        """Most likely classes."""
        classes: Tensor = self.network(batch[0]).argmax(dim=1)
        return classes


def main() -> None:
    """Calibrate the network inside the module, and replace it by its corrected form."""
    module = Classifier()  # Classifier.load_from_checkpoint("model.ckpt")
    images = torch.randn(64, 3, 32, 32)  # your clean images
    loader = DataLoader(TensorDataset(images, torch.zeros(64)), batch_size=16)

    targets = trueup.calibrate(module.network, loader)
    print(targets)
    module.network = trueup.correct(module.network, targets)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="auto", devices=1, **quiet)
    predictions = trainer.predict(module, loader)
    print(torch.cat(predictions).shape)


if __name__ == "__main__":
    main()
