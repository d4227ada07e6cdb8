"""The models that `zoo.py` tries: one file per source."""

from zoo_models.case import ZooCase
from zoo_models.of_timm import timm_cases
from zoo_models.of_torchvision import torchvision_cases
from zoo_models.of_transformers import transformers_cases

SOURCES = {"timm": timm_cases, "torchvision": torchvision_cases, "transformers": transformers_cases}

__all__ = ["SOURCES", "ZooCase"]
