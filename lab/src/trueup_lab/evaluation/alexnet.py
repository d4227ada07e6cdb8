"""AlexNet's errors on ImageNet-C, by which corruption errors are divided.

Mean over the five severities, as published by Hendrycks and Dietterich (2019) in the README of their repository,
github.com/hendrycks/robustness, under "AlexNet ImageNet-C Error".
"""

from __future__ import annotations

ERRORS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
"""Errors on the 15 corruptions of the mCE."""

EXTRA_ERRORS = {
    "speckle_noise": 0.845388,
    "gaussian_blur": 0.787108,
    "spatter": 0.717512,
    "saturate": 0.658248,
}
"""Errors on the four extra corruptions, meant for validation."""
