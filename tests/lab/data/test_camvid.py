"""CamVid's folders: pictures red first, masks by name, and missing files are named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from trueup_lab.data import camvid
from trueup_lab.data.images import ESPNET_CAMVID
from trueup_lab.data.root import MissingDataError
from trueup_lab.evaluation import Plan, SegmentationRow, Uncorrected, evaluate, read_subjects
from trueup_lab.tables import read_table


@pytest.fixture
def root(tmp_path):
    base = tmp_path / "camvid" / "CamVid"
    for folder in ("train", "test", "testannot"):
        (base / folder).mkdir(parents=True)
    for k, name in enumerate(("b", "a")):
        Image.fromarray(np.full((6, 8, 3), (10 * k, 20, 30), np.uint8)).save(base / "test" / f"{name}.png")
        Image.fromarray(np.full((6, 8), k, np.uint8)).save(base / "testannot" / f"{name}.png")
    Image.fromarray(np.zeros((6, 8, 3), np.uint8)).save(base / "train" / "c.webp", lossless=True)
    return tmp_path


def test_pictures_and_masks_belong_together_in_the_order_of_names(root):
    found = camvid.load("test", root)
    assert found.images[:, :, 0, 0].tolist() == [[10, 20, 30], [0, 20, 30]]
    assert found.labels[:, 0, 0].tolist() == [1, 0]


def test_a_split_without_masks_is_all_void(root):
    found = camvid.load("train", root)
    assert found.images.shape == (1, 3, 6, 8)
    assert found.labels.unique().tolist() == [camvid.VOID]


def test_missing_parts_are_named(root, tmp_path):
    with pytest.raises(MissingDataError, match="no images of CamVid in .*nowhere"):
        camvid.load("test", tmp_path / "nowhere")
    (root / "camvid" / "CamVid" / "testannot" / "a.png").unlink()
    with pytest.raises(MissingDataError, match="has no mask for a.png"):
        camvid.load("test", root)
    with pytest.raises(ValueError, match="unknown split 'val'"):
        camvid.load("val", root)


def test_espnet_gets_blue_first():
    red = torch.zeros(1, 3, 1, 1, dtype=torch.uint8)
    red[:, 0] = 255
    x = ESPNET_CAMVID(red)[0, :, 0, 0]
    assert x.tolist() == pytest.approx([-107.8 / 71.0 / 255, -106.2 / 71.6 / 255, (255 - 103.1) / 68.9 / 255], rel=1e-4)


@pytest.mark.data
def test_the_public_espnet_is_evaluated_by_the_runner(data_path, tmp_path):
    subjects = read_subjects(data_path("weights", "espnet_camvid_bn.safetensors"))
    root = data_path("camvid").parent
    plan = Plan((Uncorrected(),), only=("identity",), images=6)
    evaluate(subjects, plan, tmp_path / "rows.csv", root=root, targets=tmp_path)
    (row,) = read_table(tmp_path / "rows.csv", SegmentationRow)
    assert 45 < row.mean_iou < 70
    assert len(row.iou.split("/")) == len(camvid.CLASSES)
