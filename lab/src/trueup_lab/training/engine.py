"""How training steps are executed: the choices that change the speed and not the mathematics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Compile = Literal["none", "default", "max-autotune-no-cudagraphs"]
COMPILES: tuple[Compile, ...] = ("none", "default", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Engine:
    """Where and how the steps run.

    precision      "bfloat16" (autocast; weights, momentum and norms stay in float32) or "float32"
    compile        mode of `torch.compile` for the forward and backward pass, or "none"
    graphs         replay each model's whole step as one CUDA graph
    streams        on how many CUDA streams the models are spread; 0 for one each
    channels_last  memory layout of images, activations and weights
    combo          let the compiler merge small independent kernels (casts of weights, sums of gradients)
    autotune       let cuDNN time its algorithms and take the fastest; another process may take others, and
                   then a resumed run is no longer bit-for-bit the uninterrupted one
    """

    device: str = "cpu"
    precision: Literal["bfloat16", "float32"] = "float32"
    compile: Compile = "none"
    graphs: bool = False
    streams: int = 0
    channels_last: bool = False
    combo: bool = False
    autotune: bool = False

    def __post_init__(self) -> None:
        if self.compile not in COMPILES:
            raise ValueError(f"unknown compile mode {self.compile!r}; known: {', '.join(COMPILES)}")
        if self.graphs and not self.device.startswith("cuda"):
            raise ValueError(f"CUDA graphs need a CUDA device, not {self.device!r}; set graphs to False")


def default_engine(device: str | None = None) -> Engine:
    """The fastest known on `device`: on a CPU plain eager float32, on a GPU everything in one graph a model.

    None takes the GPU if there is one.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not device.startswith("cuda"):
        return Engine(device)
    return Engine(device, precision="bfloat16", compile="default", graphs=True, channels_last=True)
