"""Fixtures of the laboratory's tests: its command line, and a small data root."""

from __future__ import annotations

import pickle
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from trueup.cli import application
from trueup_lab.cli import add_commands
from trueup_lab.locks import locked


@pytest.fixture(scope="session")
def call() -> Callable[..., Any]:
    """Call a subcommand of the laboratory: `call("evaluate", "resnet20-bn-digits", "--out", path)`."""
    app = application()
    add_commands(app)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def waits() -> Callable[..., bool]:
    """Whether some work waits while another holds the lock of a path: `waits(path, work)`. It is done at the end."""

    def tried(path: Path, work: Callable[[], object]) -> bool:
        worker = threading.Thread(target=work)
        with locked(path):
            worker.start()
            worker.join(timeout=0.5)
            waited = worker.is_alive()
        worker.join()
        return waited

    return tried


@pytest.fixture
def small_root(tmp_path):
    """A data root with 12 test images of MNIST and of CIFAR-10, and 4 of ImageNet."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    digits = rng.integers(0, 256, (12, 28, 28), dtype=np.uint8)
    (raw / "t10k-images-idx3-ubyte").write_bytes(struct.pack(">BBBBIII", 0, 0, 8, 3, 12, 28, 28) + digits.tobytes())
    (raw / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, 12) + bytes(range(10)) + b"\0\1")
    cifar = tmp_path / "cifar-10-batches-py"
    cifar.mkdir()
    batch = {
        b"data": rng.integers(0, 256, (12, 3072), dtype=np.uint8),
        b"labels": [k % 10 for k in range(12)],
    }
    (cifar / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    for synset in ("n01440764", "n01443537"):
        folder = tmp_path / "imagenet" / "val" / synset
        folder.mkdir(parents=True)
        for k in range(2):
            coarse = rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)
            image.fromarray(coarse).resize((300, 260)).save(folder / f"{synset}_{k}.JPEG")
    return tmp_path
