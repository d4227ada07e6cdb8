"""Published checkpoints load and are as accurate as they are known to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from trueup_lab.data import cifar10
from trueup_lab.data.imagenet import ImageFolder
from trueup_lab.data.images import EFFICIENTNET_LITE, ESPNET_CAMVID, IMAGENET
from trueup_lab.models import ResNet50, load_public


@pytest.mark.data
def test_the_public_cifar10_resnet20_is_right_on_915_of_the_first_1000(data_path):
    model = load_public(data_path("weights", "resnet20_cifar10_bn_public.safetensors"))
    data_path("cifar-10-batches-py", "test_batch")
    test = cifar10.load("test").first(1000)
    with torch.inference_mode():
        right = model(IMAGENET(test.images)).argmax(1) == test.labels
    assert int(right.sum()) == 915


@pytest.mark.data
@pytest.mark.slow
def test_the_public_resnet50_is_right_on_742_of_1000_validation_images(data_path):
    model = load_public(data_path("weights", "resnet50_v1_imagenet_bn.safetensors"))
    folder = ImageFolder(data_path("imagenet_val_1k", "val"))
    right = 0
    with torch.inference_mode():
        for batch in folder.batches(50):
            right += int((model(IMAGENET(batch.images)).argmax(1) == batch.labels).sum())
    assert abs(right - 742) <= 1  # decoding JPEG differs by a grey level between versions of Pillow


@pytest.mark.data
def test_the_public_resnet50_knows_most_of_the_first_twenty(data_path):
    model = load_public(data_path("weights", "resnet50_v1_imagenet_bn.safetensors"))
    batch = next(ImageFolder(data_path("imagenet_val_1k", "val")).batches(20))
    with torch.inference_mode():
        right = model(IMAGENET(batch.images)).argmax(1) == batch.labels
    assert int(right.sum()) >= 14


@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "normalisation"),
    [
        ("mobilenet_v2_imagenet_bn.safetensors", IMAGENET),
        ("efficientnet_lite0_imagenet_bn.safetensors", EFFICIENTNET_LITE),
    ],
)
def test_public_mobile_networks_know_most_of_the_first_twenty(data_path, file, normalisation):
    model = load_public(data_path("weights", file))
    batch = next(ImageFolder(data_path("imagenet_val_1k", "val")).batches(20))
    with torch.inference_mode():
        right = model(normalisation(batch.images)).argmax(1) == batch.labels
    assert int(right.sum()) >= 14


@pytest.mark.data
def test_the_public_espnet_segments_camvid(data_path):
    """Ten images take a second, and are within a few points of the published mean IoU."""
    model = load_public(data_path("weights", "espnet_camvid_bn.safetensors"))
    assert camvid_mean_iou(model, data_path("camvid", "CamVid"), every=24) > 0.54


@pytest.mark.data
@pytest.mark.slow
def test_the_public_espnet_has_its_published_mean_iou_on_every_third_test_image(data_path):
    """58.5, as the authors' own class gives with these weights and these images."""
    model = load_public(data_path("weights", "espnet_camvid_bn.safetensors"))
    assert abs(camvid_mean_iou(model, data_path("camvid", "CamVid"), every=3) - 0.585) <= 0.005


def camvid_mean_iou(model: torch.nn.Module, folder: Path, every: int) -> float:
    """Mean IoU over the pixels of one test image in `every`."""
    counts = torch.zeros(12, 12, dtype=torch.int64)  # by class and by answer
    for path in sorted((folder / "test").iterdir())[::every]:
        pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)[None]
        truth = torch.from_numpy(np.array(Image.open(folder / "testannot" / f"{path.stem}.png"))).long()
        with torch.inference_mode():
            answer = model(ESPNET_CAMVID(pixels)).argmax(1)[0]
        seen = truth < 11  # 11 is void
        counts += torch.bincount(12 * truth[seen] + answer[seen], minlength=144).view(12, 12)
    union = counts.sum(0) + counts.sum(1) - counts.diag()
    return float((counts.diag() / union)[:11].mean())


def test_a_file_of_another_network_is_refused_with_its_keys(tmp_path):
    save_file({"features.0.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"holds none of .* first keys are features.0.weight"):
        load_public(tmp_path / "other.safetensors")


def test_a_resnet50_with_another_norm_says_which_in_its_metadata(tmp_path):
    model = ResNet50("gn", classes=3)
    weights = {key: value.half() for key, value in model.state_dict().items()}
    save_file(weights, tmp_path / "gn.safetensors", metadata={"norm": "gn"})
    found = load_public(tmp_path / "gn.safetensors")
    assert isinstance(found.bn1, torch.nn.GroupNorm)
    assert found.fc.weight.equal(model.fc.weight.half().float())
