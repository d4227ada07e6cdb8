"""CIFAR-10, read from the published pickles in `cifar-10-batches-py`.

A pickle can call any function by name. The unpickler here knows only the few names that arrays are built from, and
refuses all others.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trueup_lab.data.images import Images, Split
from trueup_lab.data.root import DataRoot, MissingDataError, data_root

FOLDER = Path("cifar-10-batches-py")
_AGAIN = "delete it and run `trueup data get cifar10`"
_FILES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}


def load(split: Split, root: DataRoot = None) -> Images:
    """Load the 50,000 training or 10,000 test images, (N, 3, 32, 32), from the data root."""
    if split not in _FILES:
        raise ValueError(f"unknown split {split!r} of CIFAR-10; known: train, test")
    folder = data_root(root) / FOLDER
    batches = [_read_batch(folder / name) for name in _FILES[split]]
    return Images(torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches]))


def _read_batch(path: Path) -> Images:
    if not path.exists():
        raise MissingDataError(f"CIFAR-10 is not at {path}; get it with `trueup data get cifar10`")
    try:
        with path.open("rb") as file:
            batch = _Unpickler(file, encoding="bytes").load()
    except _RefusedError:
        raise
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise almost anything
        raise ValueError(
            f"{path} is damaged, or not a CIFAR-10 batch ({type(error).__name__}: {error}); {_AGAIN}"
        ) from error
    try:
        data, labels = batch[b"data"], batch[b"labels"]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a CIFAR-10 batch: it lacks b'data' or b'labels'; {_AGAIN}") from error
    if not isinstance(data, _PickledArray) or data.values.shape != (len(labels), 3072):
        raise ValueError(f"{path} is not a CIFAR-10 batch: b'data' must be uint8 ({len(labels)}, 3072); {_AGAIN}")
    images = torch.from_numpy(data.values.reshape(-1, 3, 32, 32))
    numbers = torch.tensor(labels, dtype=torch.int64)
    if not ((numbers >= 0) & (numbers < 10)).all():
        raise ValueError(f"{path} is damaged: labels must be 0 to 9; {_AGAIN}")
    return Images(images, numbers)


class _RefusedError(pickle.UnpicklingError, ValueError):
    """A pickled object that CIFAR-10's files do not contain."""


class _Unpickler(pickle.Unpickler):
    """Unpickler of dictionaries, lists, text, numbers and byte arrays only."""

    def find_class(self, module: str, name: str) -> Any:
        stand_in = _STAND_INS.get((module, name))
        if stand_in is None:
            raise _RefusedError(
                f"refused to build {module}.{name}: CIFAR-10's files hold arrays, lists and text only; {_AGAIN}"
            )
        return stand_in


class _PickledArray:
    """Array of bytes, built from NumPy's pickled state without calling NumPy's own reconstruction."""

    def __init__(self, *_: object) -> None:
        self.values: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros(0, dtype=np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], object, bool, bytes]) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _PickledType) or not isinstance(raw, bytes):
            raise _RefusedError("refused an array that does not hold bytes")
        self.values = np.frombuffer(bytearray(raw), dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


class _PickledType:
    """Type of such an array; its state (byte order and the like) does not matter for bytes."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise _RefusedError(f"refused an array of type {code!r}: CIFAR-10's arrays hold bytes, 'u1'")

    def __setstate__(self, state: object) -> None:
        pass


def _latin1_bytes(text: str, encoding: str) -> bytes:
    """Decode bytes as Python 3 writes them in protocol 2."""
    if encoding not in ("latin1", b"latin1"):
        raise _RefusedError(f"refused text in encoding {encoding!r}: expected 'latin1'")
    return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], object] = {
    ("numpy.core.multiarray", "_reconstruct"): _PickledArray,  # NumPy 1
    ("numpy._core.multiarray", "_reconstruct"): _PickledArray,  # NumPy 2
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledType,
    ("_codecs", "encode"): _latin1_bytes,
}
