"""A section for a model card: what calibration chose for the model, and on how many images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.plurals import counted

if TYPE_CHECKING:
    from trueup.targets.values import Targets

ADDRESS = "https://github.com/trueup-ml/trueup"
FILE_NAME = "model.trueup.safetensors"
"""Name of the targets file beside a model, by convention."""


def section(targets: Targets, file: str) -> str:
    """Return the section as Markdown, with a heading of the second level."""
    return "\n".join(
        [
            "## trueup",
            "",
            f"[trueup]({ADDRESS}) moves this model's activations back towards those of clean images, at test time.",
            "",
            "```python",
            "import trueup",
            "",
            f'targets = trueup.Targets.load("{file}")',
            "robust = trueup.correct(model, targets)",
            "```",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in _facts(targets, file)),
            "",
        ]
    )


def _facts(targets: Targets, file: str) -> list[tuple[str, str]]:
    facts = [
        ("targets", f"`{file}`"),
        ("calibrated on", f"{counted(targets.images, 'clean image')}, without labels"),
        ("sites", f"{counted(len(targets.norms), 'norm')}, {counted(len(targets.activations), 'activation')}"),
    ]
    decision = targets.decision
    if decision is None:
        return [*facts, ("setting", "none was chosen; pass a rule to `trueup.correct`")]
    best = decision.chosen
    if best is None:
        reason = "no setting was better and safe" if decision.trials else decision.note
        return [*facts, ("setting", f"the model is left as it is: {reason}")]
    before, images = decision.trials[0], best.images
    levels = ("mild", "strong") if len(best.kept) == 2 else tuple(f"level {n + 1}" for n in range(len(best.kept)))
    return [
        *facts,
        ("setting", f"`{best.rule}`"),
        ("tried on", f"{images} of the images and perturbed copies of them"),
        ("clean answers kept", f"at least {1 - best.share_changed:.1%}"),
        *(
            (f"answers kept under {level} perturbation", f"{a / images:.1%} without trueup, {b / images:.1%} with it")
            for level, a, b in zip(levels, before.kept, best.kept, strict=True)
        ),
    ]
