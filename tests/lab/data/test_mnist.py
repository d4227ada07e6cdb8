"""MNIST's files, real ones and broken ones."""

from __future__ import annotations

import gzip
import struct

import pytest
import torch

from trueup_lab.data import mnist
from trueup_lab.data.root import MissingDataError


def write(folder, images=2, labels=2, pack=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "t10k-images-idx3-ubyte": struct.pack(">4I", 0x803, images, 2, 3) + bytes(range(images * 6)),
        "t10k-labels-idx1-ubyte": struct.pack(">2I", 0x801, labels) + bytes(range(labels)),
    }.items():
        if pack:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("pack", [False, True])
def test_pixels_and_labels_come_in_the_order_of_the_file(tmp_path, pack):
    write(tmp_path / "MNIST" / "raw", pack=pack)
    data = mnist.load("test", tmp_path)
    assert data.images.tolist() == [[[[0, 1, 2], [3, 4, 5]]], [[[6, 7, 8], [9, 10, 11]]]]
    assert data.labels.tolist() == [0, 1]
    assert (data.images.dtype, data.labels.dtype) == (torch.uint8, torch.int64)
    assert len(data) == 2


def test_a_missing_set_names_the_path_and_the_command(tmp_path):
    with pytest.raises(MissingDataError, match=r"MNIST/raw/train-images-idx3-ubyte; .*trueup data get mnist"):
        mnist.load("train", tmp_path)


def test_a_cut_file_is_refused(tmp_path):
    write(tmp_path / "MNIST" / "raw")
    path = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="11 bytes after its header, expected 2 x 2 x 3"):
        mnist.load("test", tmp_path)


def test_another_kind_of_file_is_refused(tmp_path):
    write(tmp_path / "MNIST" / "raw")
    (tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte").write_bytes(b"<html>")
    with pytest.raises(ValueError, match="not an IDX file"):
        mnist.load("test", tmp_path)


def test_more_images_than_labels_are_refused(tmp_path):
    write(tmp_path / "MNIST" / "raw", labels=1)
    with pytest.raises(ValueError, match="2 test images but 1 labels"):
        mnist.load("test", tmp_path)


def test_an_unknown_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'val' of MNIST; known: train, test"):
        mnist.load("val", tmp_path)


@pytest.mark.data
@pytest.mark.parametrize(("split", "count", "first"), [("train", 60_000, 5), ("test", 10_000, 7)])
def test_the_real_set_is_whole(data_path, split, count, first):
    data_path("MNIST", "raw")
    data = mnist.load(split)
    assert data.images.shape == (count, 1, 28, 28)
    assert int(data.labels[0]) == first  # the first training image is the well-known 5, the first test image a 7
    assert data.labels.unique().tolist() == list(range(10))
