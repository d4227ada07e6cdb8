"""Models of Hugging Face transformers, from small configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from trueup.graph import Inputs
from zoo_models.case import BATCH, ZooCase, noise


def transformers_cases() -> Iterator[ZooCase]:
    """Hugging Face models from small configurations."""
    import transformers as hf

    width = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    plain = {**width, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
    stages = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
    swin = {"image_size": 64, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    backbone = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "out_features": ["stage2"]}
    detr = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "num_queries": 5,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
    }

    regnet = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8}
    efficientnet = {"image_size": 64, "width_coefficient": 0.25, "hidden_dim": 320, "initializer_range": 0.3}
    mobilevit = {
        "image_size": 64,
        "hidden_sizes": [16, 16, 16],
        "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
        "num_attention_heads": 2,
        "initializer_range": 0.3,
    }
    levit = {
        "image_size": 64,
        "hidden_sizes": [16, 16, 16],
        "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
    }
    focalnet = {
        "image_size": 64,
        "embed_dim": 8,
        "depths": [1, 1],
        "focal_levels": [2, 2],
        "focal_windows": [3, 3],
        "hidden_sizes": [8, 16],
    }
    hiera = {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 2]}
    bit = {"embedding_size": 32, "hidden_sizes": [128, 256], "depths": [1, 1], "num_groups": 8}
    dpt = {
        **plain,
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 16, 16],
        "fusion_hidden_size": 16,
        "is_hybrid": False,
    }
    glpn = {
        "hidden_sizes": [8, 16, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 2],
        "decoder_hidden_size": 16,
    }

    def case(name: str, task: str, size: int, config: Callable[[], Any], frames: int | None = None) -> ZooCase:
        full = f"{name}For{task}" if task else f"{name}Model"
        shape = (BATCH, 3, size, size) if frames is None else (BATCH, frames, 3, size, size)

        def build() -> tuple[nn.Module, Inputs, str]:
            words = " x ".join(map(str, (*shape[1:-3], *shape[-2:])))
            return getattr(hf, full)(config()), Inputs((), {"pixel_values": noise(*shape)}), f"pixel_values {words}"

        return ZooCase("transformers", name, full, build)

    image = "ImageClassification"
    yield case("ViT", image, 32, lambda: hf.ViTConfig(**plain))
    yield case("DeiT", image, 32, lambda: hf.DeiTConfig(**plain))
    yield case("Beit", image, 32, lambda: hf.BeitConfig(**plain))
    yield case("Dinov2", image, 32, lambda: hf.Dinov2Config(**width, image_size=32, patch_size=8))
    yield case("ResNet", image, 64, lambda: hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]))
    yield case("ConvNext", image, 64, lambda: hf.ConvNextConfig(**stages))
    yield case("ConvNextV2", image, 64, lambda: hf.ConvNextV2Config(**stages))
    yield case("Swin", image, 64, lambda: hf.SwinConfig(**swin))
    yield case("Swinv2", image, 64, lambda: hf.Swinv2Config(**swin))
    yield case("MobileNetV2", image, 64, lambda: hf.MobileNetV2Config(depth_multiplier=0.25, initializer_range=0.3))
    yield case("Segformer", "SemanticSegmentation", 64, lambda: hf.SegformerConfig(**stages, decoder_hidden_size=16))
    yield case(
        "Detr", "ObjectDetection", 64, lambda: hf.DetrConfig(**detr, backbone_config=hf.ResNetConfig(**backbone))
    )

    text = {**width, "intermediate_size": 64, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    small = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
    every = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
    yield case("CLIP", image, 32, lambda: hf.CLIPConfig(vision_config=plain, text_config=text))
    yield case("Siglip", image, 32, lambda: hf.SiglipConfig(vision_config=plain, text_config=text))
    yield case("RegNet", image, 64, lambda: hf.RegNetConfig(**regnet))
    yield case("EfficientNet", image, 64, lambda: hf.EfficientNetConfig(**efficientnet))
    yield case("MobileNetV1", image, 64, lambda: hf.MobileNetV1Config(depth_multiplier=0.25, initializer_range=0.3))
    yield case("MobileViT", image, 64, lambda: hf.MobileViTConfig(**mobilevit))
    yield case("PoolFormer", image, 64, lambda: hf.PoolFormerConfig(**small))
    yield case("Levit", image, 64, lambda: hf.LevitConfig(**levit))
    yield case("Cvt", image, 64, lambda: hf.CvtConfig(embed_dim=[8, 16, 16], num_heads=[1, 2, 2], depth=[1, 2, 10]))
    yield case("PvtV2", image, 64, lambda: hf.PvtV2Config(image_size=64, num_attention_heads=[1, 1, 2, 2], **small))
    yield case("FocalNet", image, 64, lambda: hf.FocalNetConfig(**focalnet))
    yield case("SwiftFormer", image, 64, lambda: hf.SwiftFormerConfig(depths=[1] * 4, embed_dims=[8, 16, 16, 16]))
    yield case("Hiera", image, 64, lambda: hf.HieraConfig(**hiera))
    yield case("Bit", image, 64, lambda: hf.BitConfig(**bit))
    yield case("Dinov2WithRegisters", image, 32, lambda: hf.Dinov2WithRegistersConfig(**width, patch_size=8))
    yield case("DINOv3ViT", "", 32, lambda: hf.DINOv3ViTConfig(**plain))
    yield case("DPT", "DepthEstimation", 32, lambda: hf.DPTConfig(**dpt))
    yield case("GLPN", "DepthEstimation", 64, lambda: hf.GLPNConfig(**glpn))
    yield case("Yolos", "ObjectDetection", 32, lambda: hf.YolosConfig(**{**plain, "image_size": [32, 32]}))
    yield case("RTDetr", "ObjectDetection", 64, lambda: hf.RTDetrConfig(**rt_detr(hf, small)))
    yield case(
        *("UperNet", "SemanticSegmentation", 64),
        lambda: hf.UperNetConfig(
            backbone_config=hf.ConvNextConfig(**stages, **every), hidden_size=16, use_auxiliary_head=False
        ),
    )
    yield case("Mask2Former", "UniversalSegmentation", 64, lambda: hf.Mask2FormerConfig(**mask2former(hf, every)))
    video = "VideoClassification"
    yield case("VideoMAE", video, 32, lambda: hf.VideoMAEConfig(**plain, num_frames=4), frames=4)
    yield case("Timesformer", video, 32, lambda: hf.TimesformerConfig(**plain, num_frames=4), frames=4)
    yield case(
        *("Vivit", video, 32),
        lambda: hf.VivitConfig(**width, intermediate_size=64, image_size=32, num_frames=4, tubelet_size=[2, 8, 8]),
        frames=4,
    )


def rt_detr(hf: Any, small: dict[str, Any]) -> dict[str, Any]:
    """A small configuration of RT-DETR."""
    features = ["stage2", "stage3", "stage4"]
    return {
        "backbone_config": hf.RTDetrResNetConfig(embedding_size=8, **small, layer_type="basic", out_features=features),
        "encoder_hidden_dim": 16,
        "encoder_in_channels": [8, 16, 16],
        "encoder_ffn_dim": 16,
        "encoder_attention_heads": 2,
        "decoder_in_channels": [16, 16, 16],
        "d_model": 16,
        "decoder_layers": 1,
        "decoder_ffn_dim": 16,
        "decoder_attention_heads": 2,
        "num_queries": 5,
        "num_denoising": 0,
    }


def mask2former(hf: Any, every: dict[str, Any]) -> dict[str, Any]:
    """A small configuration of Mask2Former."""
    swin = {"image_size": 64, "embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 1, 2, 2], "window_size": 4}
    return {
        "backbone_config": hf.SwinConfig(**swin, **every),
        "feature_size": 32,
        "mask_feature_size": 32,
        "hidden_dim": 32,
        "encoder_feedforward_dim": 16,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "num_attention_heads": 2,
        "dim_feedforward": 16,
        "num_queries": 5,
    }
