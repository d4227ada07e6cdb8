"""Models that are named on the command line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from trueup.report.images import Preprocess


class NamedModel(NamedTuple):
    """A model, and how it takes images; None if that is not known."""

    model: nn.Module
    preprocess: Preprocess | None


Loader = Callable[[str], NamedModel | None]
LOADERS: list[Loader] = []
"""Entry points of installed packages: functions that return a model for the names that they know."""


def load_model(name: str) -> NamedModel:
    """Load the model that `package.module:function` returns, or one that an installed package knows by name.

    The function is called without arguments. It returns the model, or (model, preprocess).
    """
    from torch import nn

    module, colon, function = name.partition(":")
    if not colon:
        for loader in LOADERS:
            if (found := loader(name)) is not None:
                return found
        known = "" if LOADERS else "; model names need the laboratory: pip install trueup-lab"
        raise ValueError(f"{name}: expected package.module:function, a function that returns the model{known}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        root = module.partition(".")[0]
        absent = isinstance(error, ModuleNotFoundError) and error.name == root
        way = f"; run the command in the folder of {root}.py, or install {root}" if absent else ""
        raise ValueError(f"{name}: {error}{way}") from error
    try:
        made = make()
    except OSError:  # says which file
        raise
    except Exception as error:
        raise ValueError(f"{name} failed with {type(error).__name__}: {error}; --debug shows where") from error
    model, preprocess = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} returned a {type(model).__name__}, not a model or (model, preprocess)")
    return NamedModel(model.eval(), preprocess)
