"""Models of torchvision, of every task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from trueup.graph import Inputs
from zoo_models.case import BATCH, ZooCase, images, noise, pictures


def torchvision_cases() -> Iterator[ZooCase]:
    """One model of each of torchvision's classification families, and its models of other tasks."""
    from torchvision import models

    def case(family: str, name: str, inputs: Callable[[], Inputs], what: str, **options: Any) -> ZooCase:
        def build() -> tuple[nn.Module, Inputs, str]:
            backbone = {"weights_backbone": None} if family in ("detection", "segmentation") else {}
            return models.get_model(name, weights=None, **backbone, **options), inputs(), what

        return ZooCase("torchvision", family, name, build)

    for name in (
        *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet"),
        *("inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet18"),
        *("resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "swin_t", "swin_v2_t", "vgg11_bn", "vit_b_16"),
        "wide_resnet50_2",
    ):
        size = 299 if name == "inception_v3" else 256 if name == "swin_v2_t" else 224
        extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        yield case("classification", name, lambda size=size: images(3, size, size), f"{size} x {size}", **extra)
    for name in ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        yield case("segmentation", name, lambda: images(3, 128, 160), "128 x 160")
    for name in (
        *("fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2", "fasterrcnn_mobilenet_v3_large_320_fpn"),
        *("maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn", "retinanet_resnet50_fpn", "fcos_resnet50_fpn"),
    ):
        threshold = "box_score_thresh" if "rcnn" in name else "score_thresh"
        small = {"min_size": 128, "max_size": 160, threshold: 0.0}  # random weights are sure of nothing
        if "rcnn" in name:
            small |= {"rpn_score_thresh": 0.0, "rpn_pre_nms_top_n_test": 100, "rpn_post_nms_top_n_test": 20}
        yield case("detection", name, pictures, "list of 128 x 160", **small)
    for name in ("ssd300_vgg16", "ssdlite320_mobilenet_v3_large"):
        yield case("detection", name, pictures, "list of 128 x 160", score_thresh=0.0)
    for name in ("r3d_18", "mc3_18", "r2plus1d_18", "s3d"):
        frames = 16 if name == "s3d" else 8
        side = 224 if name == "s3d" else 112
        yield case("video", name, lambda f=frames, s=side: Inputs((noise(BATCH, 3, f, s, s),)), f"{frames} frames")
    yield case("video", "mvit_v1_b", lambda: Inputs((noise(BATCH, 3, 16, 224, 224),)), "16 frames")
    yield case("video", "swin3d_t", lambda: Inputs((noise(BATCH, 3, 8, 112, 112),)), "8 frames")
    yield case("flow", "raft_small", lambda: Inputs((noise(BATCH, 3, 128, 160), noise(BATCH, 3, 128, 160))), "pairs")
