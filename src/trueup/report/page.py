"""The report as one HTML page: no script, no network, no other file."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape

import torch
from torch import Tensor

from trueup.monitor import Snapshot
from trueup.report.findings import Findings, SetFindings, Shown, deviating_norms
from trueup.report.style import STYLE
from trueup.report.svg import Band, depth_plot, histogram
from trueup.rules import Evidence

STYLES = ("a", "b")
QUANTILES = (0.1, 0.5, 0.9)
P_BINS = [k / 10 for k in range(11)]
CHANGES_SHOWN = 12
NEARLY_ALL = 0.9  # share of images with the smallest p-value above which their preprocessing is doubted
DOUBTFUL = 0.05  # bound on the probability below which the drift test is quoted, before it raises an alarm


def page_of(found: Findings, *, title: str | None = None, classes: Sequence[str] | None = None) -> str:
    """The page. `classes` names the classes, in the order of the model's scores."""
    names = " and ".join(some.name for some in found.sets)
    heading = escape(title or f"{found.model}: {names}")
    body = [
        f"<h1>{heading}</h1>",
        _summary(found),
        "<h2>Where the images deviate</h2>",
        _plots(found),
        *(_unusual(some, classes, several=len(found.sets) > 1) for some in found.sets),
        "<h2>Answers before and after</h2>",
        *(_answers(some, classes, several=len(found.sets) > 1) for some in found.sets),
        "<h2>What calibration decided</h2>",
        _decision(found),
        "<h2>Cost on this machine</h2>",
        _cost(found),
        f"<footer>Made by trueup on {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{heading}</title><style>{STYLE}</style></head>\n<body>'
        + "\n".join(body)
        + "</body></html>\n"
    )


def _summary(found: Findings) -> str:
    parts = [_verdict(some, found.clean_evidence, several=len(found.sets) > 1) for some in found.sets]
    if len(found.sets) == 2 and all(some.snapshot is not None for some in found.sets):
        parts.append(f"<p>{_comparison(*found.sets)}</p>")
    return "".join(parts)


def _verdict(some: SetFindings, clean: Mapping[str, Tensor], *, several: bool) -> str:
    tiles = [("images", str(some.images), "")]
    sentence = "These targets cannot tell how unusual an image is: the model has no norms."
    if (seen := some.snapshot) is not None:
        share = seen.unusual
        bad, deviating = share.low > seen.unusual_at, deviating_norms(some, clean)
        calm = "" if seen.drifted or deviating else "good"  # no green figure under a red sentence
        bounds = f"95 % interval {share.low:.1%} to {share.high:.1%}; clean images: {seen.unusual_at:.1%}"
        tiles.append(
            (
                f"unusual images (p\u00a0≤\u00a0{seen.unusual_at:.2g}); {bounds}",
                f"{share.value:.1%}",
                "bad" if bad else calm,
            )
        )
        sentence = _drift_sentence(some, seen, deviating)
    if some.answers is not None:
        changed = int((some.answers[0] != some.answers[1]).sum())
        tiles.append(("answers that the correction changes", f"{changed / some.images:.1%}", ""))
    cells = "".join(
        f'<div class="tile"><b class="{style}">{value}</b>{escape(text)}</div>' for text, value, style in tiles
    )
    name = f"<h2>{escape(some.name)}</h2>" if several else ""
    return f'{name}<p>{sentence}</p><div class="tiles">{cells}</div>'


def _drift_sentence(some: SetFindings, seen: Snapshot, deviating: Mapping[str, float]) -> str:
    sure = seen.false_alarm_probability
    chance = f"{sure:.0e}" if sure > 1e-300 else "1e-300"
    if seen.drifted:
        return (
            f'<b class="bad">The images are not like those of calibration.</b> If they were, a difference this large '
            f"would have a probability of {chance} at most.{_preprocessing_advice(some)}"
        )
    if deviating:
        name, share = max(deviating.items(), key=lambda item: item[1])
        return (
            f'<b class="bad">The images deviate from those of calibration at {len(deviating)} of {len(some.norms)} '
            f"norms.</b> At {escape(name)}, {share:.0%} of them lie farther from the clean centre than half of the "
            "clean images do. The drift test, which reads the first norm only, found no difference."
        )
    if sure < DOUBTFUL:
        alarm = min(drift.false_alarm for drift in seen.streams.values())
        return (
            "<b>The images may differ from those of calibration.</b> If they did not, a difference this large "
            f"has a probability of {sure:.2g} at most; the drift test raises an alarm at {alarm:g}."
        )
    return '<b class="good">No difference from the images of calibration was found.</b>'


def _preprocessing_advice(some: SetFindings) -> str:
    """Advice to check the preprocessing, if nearly all images are as unusual as can be before any correction."""
    if some.farthest < NEARLY_ALL * some.images:
        return ""
    return (
        f" At the first norm, {some.farthest} of {some.images} are as unusual as an image can be: check that these "
        "images are preprocessed as in calibration (size, cropping, value range, normalisation, order of channels). If "
        "they are, the pictures themselves have changed."
    )


def _comparison(a: SetFindings, b: SetFindings) -> str:
    """How the shares of unusual images of both sets differ, and their mean p-values, with standard errors."""
    assert a.snapshot is not None
    assert b.snapshot is not None
    mine, theirs = a.snapshot.unusual.value, b.snapshot.unusual.value
    # With one success and one failure added to each set: a share of 0 or 1 would have no error (Agresti and Caffo 2000)
    added = [((s.snapshot.unusual_images + 1) / (s.images + 2), s.images + 2) for s in (a, b) if s.snapshot is not None]
    error = math.sqrt(sum(share * (1 - share) / count for share, count in added))
    points = 100 * (mine - theirs)
    means, errors = zip(*((float(s.p.mean()), float(s.p.var(correction=0)) / s.images) for s in (a, b)), strict=True)
    p = f" Mean p-values are {means[0]:.2f} and {means[1]:.2f} (standard error of the difference "
    p += f"{math.sqrt(sum(errors)):.2f}; clean images: 0.50)."
    if not points:
        return f"The share of unusual images is the same in “{escape(a.name)}” and “{escape(b.name)}”.{p}"
    return (
        f"The share of unusual images is {abs(points):.1f} points {'lower' if points < 0 else 'higher'} in "
        f"“{escape(a.name)}” than in “{escape(b.name)}” (standard error {100 * error:.1f}).{p}"
    )


def _plots(found: Findings) -> str:
    figures = []
    keys = _keys(found)
    if found.sets[0].norms:
        norms = found.sets[0].norms
        clean = torch.stack([_quantiles(found.clean_evidence[name][:, None])[:, 0] for name in norms], dim=1)
        bands = [_band("clean images", "clean", clean)]
        bands += [_band(s.name, style, _quantiles(s.evidence)) for s, style in zip(found.sets, STYLES, strict=False)]
        figures.append(
            depth_plot(bands, norms, caption="Evidence at each norm", x="norm, from first to last", log=True)
            + f"<figcaption>Evidence at each norm: squared distance from clean, in clean standard deviations. "
            f"Line: median; band: 80 % of the images.{keys}</figcaption>"
        )
    if found.sets[0].snapshot is not None:
        series = [(s.name, style, _shares(s.p)) for s, style in zip(found.sets, STYLES, strict=False)]
        figures.append(
            histogram(series, edges=P_BINS, expected=0.1, caption="Histogram of p-values", x="p-value of an image")
            + "<figcaption>How unusual images are: p is the share of clean images that look at least as unusual. Clean "
            f"images have p-values spread evenly (dashed).{keys}</figcaption>"
        )
    if found.sets[0].activations:
        sites = found.sets[0].activations
        flat = torch.tensor([[0.1], [0.5], [0.9]], device="cpu").expand(3, len(sites))
        bands = [_band("clean images", "clean", flat)]
        bands += [
            _band(s.name, style, _quantiles(s.activation_rank)) for s, style in zip(found.sets, STYLES, strict=False)
        ]
        figures.append(
            depth_plot(bands, sites, caption="Rank at each activation", x="activation, from first to last", top=1.0)
            + "<figcaption>Rank of the images' distance from clean at each activation: 0.5 is ordinary, close to "
            f"1 is farther than any clean image.{keys}</figcaption>"
        )
    plots = "".join(f"<figure>{figure}</figure>" for figure in figures)
    return f'<div class="plots">{plots}</div>{_site_table(found)}'


def _keys(found: Findings) -> str:
    shown = [("clean", "clean images"), *zip(STYLES, (s.name for s in found.sets), strict=False)]
    spans = "".join(f'<span><i class="key {style}"></i>{escape(name)}</span>' for style, name in shown)
    return f'<br><span class="keys">{spans}</span>'


def _site_table(found: Findings) -> str:
    head = "".join(f'<th class="n">{escape(s.name)}</th>' for s in found.sets)
    rows = [
        f"<tr><td>{escape(name)}</td><td>norm, evidence</td>"
        + "".join(f'<td class="n">{_number(s.evidence[:, k].nanmedian())}</td>' for s in found.sets)
        + "</tr>"
        for k, name in enumerate(found.sets[0].norms)
    ] + [
        f"<tr><td>{escape(name)}</td><td>activation, rank</td>"
        + "".join(f'<td class="n">{_number(s.activation_rank[:, k].nanmedian())}</td>' for s in found.sets)
        + "</tr>"
        for k, name in enumerate(found.sets[0].activations)
    ]
    table = f'<div class="scroll"><table><tr><th>site</th><th>median of</th>{head}</tr>{"".join(rows)}</table></div>'
    return f"<details><summary>All {len(rows)} sites</summary>{table}</details>"


def _unusual(some: SetFindings, classes: Sequence[str] | None, *, several: bool) -> str:
    of = f": {escape(some.name)}" if several else ""
    cards = "".join(_card(shown, classes) for shown in some.shown)
    return (
        f"<h2>Most unusual images{of}</h2>"
        '<p class="soft">With the p-value, the norms at which the image deviates most (evidence; clean: about 1), and '
        f'the answer before and after correction.</p><div class="images">{cards}</div>'
    )


def _card(shown: Shown, classes: Sequence[str] | None) -> str:
    name = escape(shown.name, quote=True)
    lines = [f"<b>{name}</b>"]
    if math.isfinite(shown.p):
        lines.append(f"p = {shown.p:.2g}" if shown.p else "p = 0 (not finite)")
    lines += [f"{escape(name)}: {_number(value)}" for name, value in shown.evidence.items()]
    if shown.before is not None and shown.after is not None:
        before, after = _class(shown.before, classes), _class(shown.after, classes)
        lines.append(f"<b>{before} → {after}</b>" if before != after else f"{before}, unchanged")
    picture = base64.b64encode(shown.png).decode()
    return f'<div class="image"><img alt="{name}" src="data:image/png;base64,{picture}">{"<br>".join(lines)}</div>'


def _answers(some: SetFindings, classes: Sequence[str] | None, *, several: bool) -> str:
    of = f"In “{escape(some.name)}”, the" if several else "The"
    if some.answers is None:
        return "<p>The model's outputs are not class scores, one row per image, so answers were not compared.</p>"
    before, after = some.answers
    changed = before != after
    count = int(changed.sum())
    if not count:
        return f"<p>{of} correction changes none of {some.images} answers.</p>"
    pairs = Counter(zip(before[changed].tolist(), after[changed].tolist(), strict=True))
    rows = "".join(
        f'<tr><td>{_class(a, classes)}</td><td>{_class(b, classes)}</td><td class="n">{n}</td></tr>'
        for (a, b), n in pairs.most_common(CHANGES_SHOWN)
    )
    more = f'<p class="soft">and {len(pairs) - CHANGES_SHOWN} other changes</p>' if len(pairs) > CHANGES_SHOWN else ""
    start = f"{of} correction changes {count} of {some.images} answers:"
    return (
        f'<p>{start}</p><div class="scroll"><table><tr><th>model</th><th>corrected</th><th class="n">images</th></tr>'
        f"{rows}</table></div>{more}"
    )


def _decision(found: Findings) -> str:
    decision, rule = found.targets.decision, found.rule
    left_alone = isinstance(rule, Evidence) and not rule.changes
    what = "The model is left as it is." if left_alone else f"{found.corrected_sites} sites are corrected."
    parts = [f"<p>{what} Rule: <code>{escape(repr(rule))}</code></p>"]
    if rule != found.targets.rule and found.targets.rule is not None:
        parts.append("<p>This is not the rule that calibration chose.</p>")
    said = "No setting was chosen." if decision is None else str(decision)
    parts.append(f"<p>Calibrated on {found.targets.images} clean images:</p><pre>{escape(said)}</pre>")
    if decision is not None and decision.trials:
        head = "".join(
            f'<th class="n">{text}</th>'
            for text in ("clean answers changed", "kept, mild", "kept, strong", "gain, points")
        )
        rows = "".join(
            f"<tr><td>{'the model as it is' if not t.rule.changes else f'<code>{escape(repr(t.rule))}</code>'}</td>"
            f'<td class="n">{t.share_changed:.1%}</td><td class="n">{t.kept[0] / t.images:.1%}</td>'
            f'<td class="n">{t.kept[-1] / t.images:.1%}</td>'
            f'<td class="n">{100 * t.mean_gain:.2f} ± {100 * t.error:.2f}</td></tr>'
            for t in decision.trials
        )
        table = f'<div class="scroll"><table><tr><th>setting</th>{head}</tr>{rows}</table></div>'
        parts.append(
            f"<details><summary>All {len(decision.trials)} settings that were tried</summary>{table}</details>"
        )
    return "".join(parts)


def _cost(found: Findings) -> str:
    cost = found.cost
    rows = [("the model", cost.model), ("corrected", cost.corrected)]
    if cost.reported is not None:
        rows.append(("corrected, with a report for the monitor", cost.reported))
    cells = "".join(
        f'<tr><td>{name}</td><td class="n">{ms:.3g}</td><td class="n">{ms / cost.model:.2f}</td></tr>'
        for name, ms in rows
    )
    return (
        f'<p class="soft">Milliseconds per image in batches of {cost.batch}, median of a few passes. '
        f"{escape(cost.machine)}.</p>"
        '<div class="scroll"><table><tr><th></th><th class="n">ms per image</th>'
        f'<th class="n">times the model</th></tr>{cells}</table></div>'
    )


def _band(name: str, style: str, quantiles: Tensor) -> Band:
    low, middle, high = quantiles.tolist()
    return Band(name, style, low, middle, high)


def _quantiles(values: Tensor) -> Tensor:
    """Three quantiles of each column `(3, columns)`; values that are not finite count as the largest."""
    finite = values.double()
    finite = finite.nan_to_num(nan=1e6, posinf=1e6).clamp(max=1e6)
    return torch.quantile(finite, finite.new_tensor(QUANTILES), dim=0)


def _shares(p: Tensor) -> list[float]:
    counts = torch.histc(p.float(), bins=len(P_BINS) - 1, min=0, max=1)
    return (counts / max(1, len(p))).tolist()


def _class(number: int, classes: Sequence[str] | None) -> str:
    return escape(classes[number]) if classes is not None and 0 <= number < len(classes) else f"class {number}"


def _number(value: Tensor | float) -> str:
    value = float(value)
    return f"{value:.3g}" if math.isfinite(value) else "not finite"
