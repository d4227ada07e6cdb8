"""CIFAR-10's pickles, and pickles that only look like them."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from trueup_lab.data import cifar10
from trueup_lab.data.images import NORMALISATION
from trueup_lab.data.root import MissingDataError


def write(root: Path, batch: object, protocol: int = 2) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "test_batch").write_bytes(pickle.dumps(batch, protocol=protocol))


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_batch_reads_as_planes_of_red_green_blue(tmp_path, pixels, protocol, order):
    batch = {b"data": np.array(pixels, order=order), b"labels": [3, 1, 4, 1], b"batch_label": b"testing"}
    write(tmp_path, batch, protocol)
    data = cifar10.load("test", tmp_path)
    assert data.images.shape == (4, 3, 32, 32)
    assert data.images[2, 1, 5, 7] == pixels[2, 1024 + 5 * 32 + 7]
    assert data.labels.tolist() == [3, 1, 4, 1]
    assert data.labels.dtype == torch.int64


class Attack:
    """Pickles into a call of any function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(lambda mark: Attack(Path.touch, mark), id="a method"),
        pytest.param(lambda mark: Attack(eval, f"open({str(mark)!r}, 'w')"), id="a builtin"),
        pytest.param(lambda mark: Attack(np.save, str(mark), 0), id="one of NumPy's own functions"),
        pytest.param(lambda _: Attack(getattr, np.ndarray, "tofile"), id="a way to reach attributes"),
    ],
)
def test_a_malicious_pickle_is_refused_before_it_runs(tmp_path, attack):
    mark = tmp_path / "was here"
    write(tmp_path, {b"data": attack(mark), b"labels": [0]})
    with pytest.raises(pickle.UnpicklingError, match="refused to build"):
        cifar10.load("test", tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("dtype", [object, np.float32])
def test_arrays_of_anything_but_bytes_are_refused(tmp_path, dtype):
    write(tmp_path, {b"data": np.zeros((1, 3072), dtype=dtype), b"labels": [0]})
    with pytest.raises(pickle.UnpicklingError, match="refused an array of type"):
        cifar10.load("test", tmp_path)


@pytest.mark.parametrize("batch", [[1, 2], {b"labels": [0]}, {b"data": [0], b"labels": [0]}])
def test_a_pickle_of_something_else_is_refused(tmp_path, batch):
    write(tmp_path, batch)
    with pytest.raises(ValueError, match="not a CIFAR-10 batch"):
        cifar10.load("test", tmp_path)


def test_the_wrong_number_of_pixels_is_refused(tmp_path, pixels):
    write(tmp_path, {b"data": pixels[:, :100], b"labels": [0] * 4})
    with pytest.raises(ValueError, match=r"must be uint8 \(4, 3072\)"):
        cifar10.load("test", tmp_path)


def test_a_missing_set_names_the_path_and_the_command(tmp_path):
    with pytest.raises(MissingDataError, match=r"data_batch_1; get it with `trueup data get cifar10`"):
        cifar10.load("train", tmp_path)


@pytest.mark.data
def test_the_real_set_is_whole_and_its_mean_and_deviation_are_the_ones_stated(data_path):
    data_path("cifar-10-batches-py", "data_batch_1")
    train = cifar10.load("train")
    assert train.images.shape == (50_000, 3, 32, 32)
    assert torch.bincount(train.labels).tolist() == [5000] * 10
    for channel in range(3):
        values = train.images[:, channel].flatten()
        counts = torch.bincount(values, minlength=256).double() / values.numel()
        levels = torch.arange(256, dtype=torch.float64) / 255
        mean = (counts * levels).sum()
        std = (counts * (levels - mean) ** 2).sum().sqrt()
        stated = NORMALISATION["cifar10"]
        assert mean == pytest.approx(stated.mean[channel], abs=1e-4)
        assert std == pytest.approx(stated.std[channel], abs=1e-4)
