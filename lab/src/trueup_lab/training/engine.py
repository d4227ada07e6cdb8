"""The engine of training steps: choices that change the speed but not the mathematics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from trueup_lab.devices import find_device

Precision = Literal["bfloat16", "float32"]
Compile = Literal["none", "default", "max-autotune-no-cudagraphs"]
COMPILES: tuple[Compile, ...] = ("none", "default", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Engine:
    """The device of the training steps and how they run on it.

    precision      "bfloat16" (autocast; weights, momentum and norms stay in float32) or "float32"
    compile        mode of `torch.compile` for the forward and backward pass, or "none"
    graphs         replay each model's whole step as one CUDA graph
    streams        number of CUDA streams for the models; 0 is one per model
    channels_last  memory layout of images, activations and weights
    combo          let the compiler merge small independent kernels (casts of weights, sums of gradients)
    autotune       let cuDNN time its algorithms and take the fastest; another process may choose differently, so a
                   resumed run may differ from an uninterrupted one in the last bits
    """

    device: str = "cpu"
    precision: Precision = "float32"
    compile: Compile = "none"
    graphs: bool = False
    streams: int = 0
    channels_last: bool = False
    combo: bool = False
    autotune: bool = False

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision={self.precision!r}: expected one of {', '.join(get_args(Precision))}")
        if self.streams < 0:
            raise ValueError(f"streams={self.streams}: expected 0 (one per model) or more")
        if (self.streams or self.autotune) and not self.device.startswith("cuda"):
            raise ValueError(f"streams and autotune need a CUDA device, not {self.device!r}; leave them out")
        if self.combo and self.compile == "none":
            raise ValueError("combo needs a compiler: choose a compile mode, or leave it out")
        if self.compile not in COMPILES:
            raise ValueError(f"unknown compile mode {self.compile!r}; known: {', '.join(COMPILES)}")
        if self.graphs and not self.device.startswith("cuda"):
            raise ValueError(f"CUDA graphs need a CUDA device, not {self.device!r}; set graphs to False")


def default_engine(device: str | None = None) -> Engine:
    """Return the fastest known engine: eager float32 on a CPU, one CUDA graph per model on a GPU.

    `device` None is the GPU if there is one.
    """
    device = find_device(device)
    if not device.startswith("cuda"):
        return Engine(device)
    return Engine(device, precision="bfloat16", compile="default", graphs=True, channels_last=True)
