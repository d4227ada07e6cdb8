"""MNIST, from the four files it is published in (with or without `.gz`), under `MNIST/raw`."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from trueup_lab.data.images import Images
from trueup_lab.data.root import MissingDataError, data_root

Split = Literal["train", "test"]
FOLDER = Path("MNIST", "raw")
_PREFIX = {"train": "train", "test": "t10k"}


def load(split: Split, root: str | os.PathLike[str] | None = None) -> Images:
    """The 60,000 training or 10,000 test images, (N, 1, 28, 28), from the data root."""
    if split not in _PREFIX:
        raise ValueError(f"unknown split {split!r} of MNIST; known: train, test")
    folder = data_root(root) / FOLDER
    images = _read_idx(folder / f"{_PREFIX[split]}-images-idx3-ubyte", dimensions=3)
    labels = _read_idx(folder / f"{_PREFIX[split]}-labels-idx1-ubyte", dimensions=1)
    if len(images) != len(labels):
        raise ValueError(f"{folder} has {len(images)} {split} images but {len(labels)} labels")
    return Images(torch.from_numpy(images)[:, None], torch.from_numpy(labels).long())


def _read_idx(path: Path, dimensions: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    packed = path.with_name(path.name + ".gz")
    if path.exists():
        content = path.read_bytes()
    elif packed.exists():
        content = gzip.decompress(packed.read_bytes())
    else:
        raise MissingDataError(f"MNIST is not at {path}; get it with `trueup data get mnist`")
    # Two zero bytes, the type (8: unsigned byte), the number of dimensions, then each as a big-endian uint32.
    header = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < header:
        raise ValueError(f"{path} is no IDX file of bytes with {dimensions} dimensions; delete it and get it again")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    values = np.frombuffer(bytearray(content), dtype=np.uint8, offset=header)
    if values.size != np.prod(shape):
        raise ValueError(
            f"{path} should hold {' x '.join(map(str, shape))} bytes after its header, not {values.size}; "
            "delete it and get it again"
        )
    return values.reshape(shape)
