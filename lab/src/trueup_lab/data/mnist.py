"""MNIST, read from the four published files in `MNIST/raw`, compressed (`.gz`) or not."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from trueup_lab.data.images import Images, Split
from trueup_lab.data.root import DataRoot, MissingDataError, data_root

FOLDER = Path("MNIST", "raw")
_AGAIN = "delete it and run `trueup data get mnist`"
_PREFIX = {"train": "train", "test": "t10k"}


def load(split: Split, root: DataRoot = None) -> Images:
    """Load the 60,000 training or 10,000 test images, (N, 1, 28, 28), from the data root."""
    if split not in _PREFIX:
        raise ValueError(f"unknown split {split!r} of MNIST; known: train, test")
    folder = data_root(root) / FOLDER
    images = _read_idx(folder / f"{_PREFIX[split]}-images-idx3-ubyte", dimensions=3)
    labels = _read_idx(folder / f"{_PREFIX[split]}-labels-idx1-ubyte", dimensions=1)
    if len(images) != len(labels):
        raise ValueError(f"{folder} has {len(images)} {split} images but {len(labels)} labels; {_AGAIN}")
    return Images(torch.from_numpy(images)[:, None], torch.from_numpy(labels).long())


def _read_idx(path: Path, dimensions: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    packed = path.with_name(path.name + ".gz")
    if path.exists():
        content = path.read_bytes()
    elif packed.exists():
        try:
            content = gzip.decompress(packed.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{packed} is damaged ({error}); {_AGAIN}") from error
    else:
        raise MissingDataError(f"MNIST is not at {path}; get it with `trueup data get mnist`")
    # Header: two zero bytes, the type (8: unsigned byte), the number of dimensions, each size as a big-endian uint32.
    header = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < header:
        raise ValueError(f"{path} is not an IDX file of bytes with {dimensions} dimensions; {_AGAIN}")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    values = np.frombuffer(bytearray(content), dtype=np.uint8, offset=header)
    if values.size != np.prod(shape):
        raise ValueError(
            f"{path} has {values.size} bytes after its header, expected {' x '.join(map(str, shape))}; {_AGAIN}"
        )
    return values.reshape(shape)
