"""The model files of the experiments, and how to get missing ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trueup_lab.data.root import data_root


@dataclass(frozen=True)
class Source:
    """A file of trained models: all seeds of one set and norm."""

    set: str
    norm: str
    path: str  # under the results, or under the data root
    public: bool = False

    @property
    def model(self) -> str:
        """Name of the model in rows of results."""
        return Path(self.path).stem

    def find(self, results: Path, root: Path | None = None) -> Path:
        """Return the path of the file, whether or not it exists."""
        return (data_root(root) if self.public else results) / self.path

    def missing(self, results: Path, root: Path | None = None) -> str:
        """Return how to get the file, or an empty string if it exists."""
        path = self.find(results, root)
        if path.is_file():
            return ""
        if self.public:
            network = "ResNet-50 with torchvision's names" if self.set == "imagenet" else "ResNet-20 for CIFAR-10"
            return f"{path} is missing: put a published {network} there, as safetensors"
        if self.set == "imagenet":
            return (
                f"{path} is missing: train a ResNet-50 with `trueup train --set imagenet --norm {self.norm}`, and "
                f"save its weights there, as safetensors with the metadata norm={self.norm}"
            )
        return (
            f"{path} is missing: run `trueup train --set {self.set} --norm {self.norm} --seeds 0-9 --out runs`, then "
            f"`trueup export runs/{self.set}-{self.norm} --models {results}/models`"
        )


_PUBLIC = {
    ("imagenet", "bn"): "weights/resnet50_v1_imagenet_bn.safetensors",
    ("cifar10", "public"): "weights/resnet20_cifar10_bn_public.safetensors",
}


def source(set_name: str, norm: str) -> Source:
    """Return the file of models of a set and norm. The norm "public" is a published model.

    >>> source("cifar10", "gn").model
    'resnet20-gn-cifar10'
    """
    if (set_name, norm) in _PUBLIC:
        return Source(set_name, norm, _PUBLIC[set_name, norm], public=True)
    network = "resnet50" if set_name == "imagenet" else "resnet20"
    return Source(set_name, norm, f"models/{network}-{norm}-{set_name}.safetensors")
