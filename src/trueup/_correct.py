"""`correct`: a module like the model, whose activations are moved back towards clean ones.

`build` decides at which sites a rule acts, and which norms it leaves alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trueup import kernels
from trueup._checks import check_model, check_sites, check_targets
from trueup._placed import AtSite, GateReader, GateValue, PlacedCorrection, PlacedEvidence
from trueup._reported import Reported, reading_of
from trueup.graph import Instrumented, Kind, Reading, Select, Site, Sites, Trace, check_select, trace
from trueup.plurals import counted
from trueup.rules import Correction, Evidence, Rule
from trueup.rules.evidence import CAREFUL
from trueup.targets import Targets

_PLACED: dict[Kind, Callable[[Site, Any, Any], AtSite]] = {"norm": PlacedEvidence, "activation": PlacedCorrection}


class Corrected(Instrumented):
    """The corrected model that `correct` returns, with the model's inputs and outputs.

        robust = trueup.correct(model, targets)
        robust.rule, robust.sites   # what is done, and where
        logits = robust(images)

    `rule` is the rule that is applied, `sites` are the sites that it corrects. It shares the model's weights, has the
    model's `state_dict`, and in training mode does what the model does, uncorrected. `report` is None, or the module
    that computes the second of the two values that it returns. An attribute of the model with one of these
    names takes precedence.
    """

    rule: Rule
    sites: Sites

    def __init__(
        self, traced: Trace, targets: Targets, rule: Rule, names: Collection[str], report: Reported = False
    ) -> None:
        """Called by `trueup.correct`; do not call it yourself."""
        reading = _gate_reading(targets, rule, names) if isinstance(rule, Evidence) and rule.gated else None
        place, known = _PLACED[rule.site_kind], targets.of_kind(rule.site_kind)
        super().__init__(
            traced,
            lambda site: place(site, known[site.name], rule) if site.name in names else None,
            reading=reading,
            report=reading_of(targets, rule, report, traced.sites, names),
        )
        self._rule = rule
        self._sites = traced.sites.of(site for site in traced.sites if site.name in self._placed_at)
        for part in (self._placed, self._readers, self._combine, self._report):
            if part is not None:
                part.to(self.device)
        kernels.load_backend(self.device)
        if self.device is not None and self.device.type == "cpu":
            for part in (*self._placed[:1], self._combine):
                if isinstance(part, AtSite):
                    part.warm_up()

    def __repr__(self) -> str:
        kinds = [site.kind for site in self._sites]
        counts = [counted(n, kind) for kind in _PLACED if (n := kinds.count(kind))]
        what = ", ".join(counts) or "no sites: it does what the model does"
        how = "" if self._sites.traced else ", untraced"
        return f"Corrected({type(self._inner).__name__}, {self._rule}, {what}{how})"


def correct(
    model: nn.Module,
    targets: Targets,
    rule: Evidence | Correction | None = None,
    *,
    select: Callable[[Site], bool] | None = None,
    activations: tuple[type[nn.Module] | Callable[..., Tensor], ...] = (),
    leaves: tuple[type[nn.Module], ...] = (),
    report: bool | Literal["all"] = False,
) -> Corrected:
    """Return a module that works like `model`, with its activations moved back towards clean ones.

        robust = trueup.correct(model, targets)
        logits = robust(images)
        paper = trueup.correct(model, targets, trueup.Correction(lambda1=0.5, lambda2=0.5))

    The module shares the model's weights, adds no parameters, and is in evaluation mode; the model is not touched. Each
    image is corrected on its own.

    rule: `Evidence` moves each channel after a norm in proportion to the evidence that it has shifted; `Correction`,
        the paper's, moves the activations after every activation function towards their clean distribution. The
        default is `targets.rule`, which calibration chose for this model; it may leave the model as it is. If
        calibration chose no rule, a careful one is used, with a warning.
    select: correct only the sites for which this predicate is true.
    activations, leaves: as they were given to `calibrate`.
    report: True makes the module return `(output, report)`, whatever the rule is: a dictionary of tensors with one row
        per image, which `trueup.Monitor` takes. "p" says how unusual the image is at the first norm (the share of clean
        images that are at least as unusual), "gate" how much of the correction it got, "evidence" how far it is from
        clean at that norm or, with "all", which costs more, at every norm. The report is part of the graph and exported
        with it.
    """
    check_targets("correct", targets)
    check_select(select)
    if rule is not None and not isinstance(rule, Rule):
        raise TypeError(
            f"correct(rule={rule!r}): expected a rule, such as trueup.Evidence() or trueup.Correction(lambda1=0.5)"
        )
    with torch.inference_mode(False):  # tensors made in inference mode could not be used in training later
        traced = trace(model, activations=activations, leaves=leaves, known=targets.sites)
        check_model(targets, traced.model)
        return build(traced, targets, default_rule(traced, targets, select) if rule is None else rule, select, report)


def build(
    traced: Trace, targets: Targets, rule: Rule, select: Select | None = None, report: Reported = False
) -> Corrected:
    """Correct a traced model whose targets were checked. The result shares the trace's module objects."""
    # A rule of no strength places nothing: a hook keeps torch's transformer layers off their faster path, which rounds
    # differently. A traced model has no hooks.
    if not rule.changes and (isinstance(rule, Evidence) or traced.graph is None):
        return Corrected(traced, targets, rule, [], report)
    if not (wanted := targets.of_kind(rule.site_kind)):
        raise ValueError(_no_targets_message(traced.model, rule))
    found = [site.name for site in traced.sites if site.kind == rule.site_kind and (select is None or select(site))]
    check_sites(traced.model, wanted, found, selected=select is not None)
    names = [site.name for site in corrected_by(rule, traced.sites, targets, select)]
    robust = Corrected(traced, targets, rule, names, report)
    if isinstance(rule, Evidence) and not robust._sites:
        before = " and, with least=0, all norms before the gate" if rule.least == 0 else ""
        raise ValueError(
            f"nothing to correct: {rule} skips the last {1 - rule.depth:.0%} of the norms{before}. "
            f"Select other norms with select={', or set least=0.05' if before else ''}"
        )
    return robust


def corrected_by(rule: Rule, sites: Sites, targets: Targets, select: Select | None) -> list[Site]:
    """Sites that a rule corrects: selected ones with targets, for `Evidence` among the first share of all norms."""
    mine = [site for site in sites if site.kind == rule.site_kind]
    if isinstance(rule, Evidence):
        mine = mine[: rule._count_corrected(len(mine))]
    known = targets.of_kind(rule.site_kind)
    return [site for site in mine if site.name in known and (select is None or select(site))]


def default_rule(traced: Trace, targets: Targets, select: Select | None) -> Rule:
    """Return the rule that calibration chose; if there is none, warn and return a careful one."""
    if targets.rule is not None:
        return targets.rule
    norms = any(site.name in targets.norms and (select is None or select(site)) for site in traced.sites)
    rule: Rule = CAREFUL if norms else Correction()
    warnings.warn(
        f"correct: these targets carry no decision, so {rule} is used; calibrate again with decide=True, or pass rule=",
        stacklevel=3,
    )
    return rule


def _gate_reading(targets: Targets, rule: Evidence, names: Collection[str]) -> Reading:
    if not targets.gate:
        raise ValueError(
            f"{rule} has a gate, which measures how unusual an image is, but these targets have no statistics for it: "
            "they come from an earlier version, or from images of very different sizes; calibrate again with "
            "trueup.calibrate(model, loader), or correct every image alike with trueup.Evidence(budget=1)"
        )
    share = rule._gate_before_known

    def place_before(site: Site) -> nn.Module | None:
        return PlacedEvidence(site, targets.norms[site.name], rule, share) if share and site.name in names else None

    return Reading(
        list(targets.gate),
        lambda site: GateReader(site, bands=targets.gate[site.name].bands),
        GateValue(targets.fitted_gate, [target.floor for target in targets.gate.values()], rule),
        place_before,
    )


def _no_targets_message(model: nn.Module, rule: Rule) -> str:
    return (
        f"{type(rule).__name__} needs targets of {rule.site_kind} sites, and these targets hold none: "
        f"{type(model).__name__} has no such site, select= left it out, or the targets come from an earlier version; "
        "see trueup.sites(model), and calibrate again with trueup.calibrate(model, loader)"
    )
