"""Checks that the verbs share: targets are targets, of this model, and of sites that it has."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from trueup.targets import Fingerprint, Targets, is_quantised, listed


def check_targets(verb: str, targets: object) -> None:
    """Raise TypeError unless `targets` is a `Targets`."""
    if not isinstance(targets, Targets):
        raise TypeError(
            f"{verb}: expected Targets, got {type(targets).__name__}; read a file with trueup.Targets.load(path)"
        )


def check_model(targets: Targets, model: nn.Module) -> None:
    """Raise ValueError if the targets were calibrated on another model, and say what differs."""
    if difference := targets.fingerprint.difference(Fingerprint.of(model)):
        raise ValueError(
            f"these targets were calibrated on another model than this {type(model).__name__}: {difference}; "
            + _way_out(model, "calibrate again with trueup.calibrate(model, loader)")
        )


def check_sites(model: nn.Module, wanted: Collection[str], found: Collection[str], *, selected: bool) -> None:
    """Raise ValueError if the model lacks sites that the targets hold, unless the user selected among them."""
    missing = [name for name in wanted if name not in found]
    if selected and len(missing) == len(wanted):
        raise ValueError(
            f"select= matches none of the sites that this rule corrects and these targets hold: {listed(wanted)}; "
            f"change select=, or give another rule="
        )
    if missing and not selected:
        raise ValueError(
            f"the targets hold the site {missing[0]!r}, which was not found in this {type(model).__name__}; it has "
            f"{listed(found) or 'none of theirs'}; "
            + _way_out(model, "give the same activations= and leaves= as to calibrate")
        )


def _way_out(model: nn.Module, usual: str) -> str:
    """Advice for a model that does not fit its targets. Quantisation may have removed its norms."""
    if is_quantised(model):
        return "this model is quantised, so correct first: quantise what trueup.correct(model, targets) returns"
    return usual
