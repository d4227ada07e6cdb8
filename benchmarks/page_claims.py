"""Sentences of pages that state results, with their numbers computed from the files that the pages name.

benchmarks/page_numbers.py compares them with the pages. Change a sentence here and on the page together.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from statistics import fmean

import trueup
from page_tables import NO_GATE, OURS, PUBLIC, RESNET50, RESULTS, read, signed
from trueup._choose import DOSES
from trueup_lab.data.corruptions import REPORTED_ON
from trueup_lab.evaluation import EvaluationRow, read_rows
from trueup_lab.experiments import differences, experiment, paper, rows_file

PAGES = (
    *("any-model", "bench", "bound", "calibration-images", "corruptions", "default", "deployment", "evaluation"),
    *(
        "evidence-results",
        "first-correction",
        "gate",
        "kernels",
        "lab-notes",
        "limits",
        "many-gpus",
        "method",
        "models",
    ),
    *("monitoring", "own-rules", "paper", "performance", "reading-the-decision", "results", "segmentation", "sharing"),
    "targets",
)
"""Pages on which every number is accounted for."""

PAPERS = "the paper's correction"
MIXING = {4: "bn-mix:prior=4", 8: "bn-mix", 16: "bn-mix:prior=16"}


def claims() -> dict[str, list[str]]:
    """Return the sentences of each page, or parts of sentences, with their numbers."""
    found = {
        "bench": [*_bench()],
        "lab-notes": [*_lab_notes()],
        "evidence-results": [*_evidence_results()],
        "gate": [*_gate()],
        "bound": [*_bound()],
        "corruptions": [*_corruptions()],
        "method": [*_method()],
        "reading-the-decision": [*_reading()],
        "models": [*_models()],
        "targets": [*_targets()],
        "performance": [*_performance()],
    }
    return {page: found.get(page, []) for page in PAGES}


def _performance() -> Iterator[str]:
    rows = {(row["case"], row["what"]): row for row in read("performance_h200")}
    kernels_of = {
        (row["architecture"], row["batch"], row["network"], row["kernel"]): row for row in read("profile_h200")
    }
    ours = kernels_of["ViT-S/16", "1", "evidence, no gate", "trueup"]
    model = float(kernels_of["ViT-S/16", "1", "uncorrected", "all"]["microseconds"])
    launches, each = float(ours["launches"]), float(ours["microseconds"]) / float(ours["launches"])
    yield (
        f"one image of ViT-S/16 takes {model:.0f} microseconds on the GPU, and the corrections add {launches:.0f} "
        f"launches of {each:.1f} microseconds each."
    )
    compiled, eager = (
        1000 * float(rows[f"ResNet-50, batch 64, bfloat16{how}", "evidence, no gate"]["cost"])
        for how in (", compiled", "")
    )
    yield f"ResNet-50 takes {compiled:.1f} ms, and {eager:.1f} ms in eager mode."
    (graph,) = (
        row
        for row in read("kernel_variants_later")
        if (row["without"], row["case"]) == ("nothing", "ResNet-50, batch 64")
    )
    corrected = float(graph["microseconds"]) / 1000
    alone = 1000 * float(rows["ResNet-50, batch 64, bfloat16, compiled", "evidence, no gate"]["of"])
    yield (
        f"in a CUDA graph, without the host, the corrected ResNet-50 takes {corrected:.1f} ms, and the compiled model "
        f"{alone:.1f} ms."
    )
    on_gpu = [
        float(kernels_of[name, "64", "evidence, no gate", "all"]["microseconds"])
        / float(kernels_of[name, "64", "uncorrected", "all"]["microseconds"])
        for name in ("RegNetY-1.6GF", "MobileNetV2")
    ]
    yield f"on the GPU itself they took {on_gpu[0]:.2f} and {on_gpu[1]:.2f} times the model in the profile"
    seconds, kernels = (
        [float(rows[f"{name}: first answer", what]["cost"]) for name in ("ResNet-50", "MobileNetV2")]
        for what in ("first answer, empty cache", "compiled kernels")
    )
    yield f"{seconds[0]:.1f} s with {kernels[0]:.0f} kernels and {seconds[1]:.1f} s with {kernels[1]:.0f}"
    slow = [rows[f"calibration, {name}", "calibration"] for name in ("ResNet-20, batch 128", "ResNet-50, batch 64")]
    small, large = (float(row["cost"]) - float(row["of"]) for row in slow)
    yield f"takes {small:.2f} s (ResNet-20) and {large:.2f} s (ResNet-50) longer than its 40 passes"


def _bench() -> Iterator[str]:
    by = {
        corruption: [row for row in read("bench") if (row["method"], row["corruption"]) == ("default", corruption)]
        for corruption in ("identity", "fifteen")
    }
    clean = [(float(row["gain"]), float(row["error"])) for row in by["identity"]]
    beyond = [(gain, error) for gain, error in clean if gain < -max(0.3, 2 * error)]
    (lost,) = beyond
    yield (
        f"| met by {len(clean) - len(beyond)} of {len(clean)} models; one with group norm changes by "
        f"{lost[0]:+.2f} ± {lost[1]:.2f} |"
    )
    assert min(float(row["gain"]) for row in by["fifteen"]) > 0
    yield "| More right answers under corruption than the model alone | met by every model |"
    late = {name: [float(row["gain"]) for row in rows if row["torch"].endswith("cpu")] for name, rows in by.items()}
    yield (
        f"{len(late['identity'])} ResNet-20s of ours (seeds 3 to 9 with batch norm, 3 and 4 with the other norms) were "
        f"measured once, after everything had been settled: {fmean(late['identity']):+.2f} points on clean images and "
        f"{fmean(late['fifteen']):+.1f} under corruption, on average."
    )
    shifts = [r for r in read("other_shifts") if r["method"] == "default" and r["corruption"] != "shifts"]
    z = [float(row["gain"]) / float(row["error"]) for row in shifts if float(row["error"]) > 0]
    yield (
        f"Of {len(shifts)} gains of a model under a shift, {sum(x > 2 for x in z)} are larger than twice their "
        f"standard error, and {sum(x < -2 for x in z)} are losses of more than that; the largest loss is "
        f"{-min(float(row['gain']) for row in shifts):.1f} points."
    )


def _lab_notes() -> Iterator[str]:
    changed = {model: _choosing(model, "evidence", "changed") for model in (PUBLIC, *OURS.values(), RESNET50)}
    resnet50 = changed.pop(RESNET50)
    few, many = min(changed.values()), max(changed.values())
    yield f"`Evidence()` changes {few:.1f} to {many:.1f} % of the predictions on clean test images"
    yield f"With a ResNet-50 and its thousand classes it is {resnet50:.1f} %"
    lost = [-_choosing(model, "evidence, all count 1", "clean") for model in OURS.values()]
    yield f"clean images lose {min(lost):.1f} to {max(lost):.1f} points with a ResNet-20 of ours"
    over = functools.partial(_over, "cifar10")
    public = [over("public", "evidence", base) for base in (PAPERS, MIXING[8], MIXING[4], "uncorrected")]
    ahead = _choosing(PUBLIC, MIXING[4], "chosen") - _choosing(PUBLIC, MIXING[8], "chosen")
    cost = -_choosing(PUBLIC, MIXING[4], "clean")
    yield (
        "| 1.5 over mixing, 3 over the paper's, clean within 0.1 "
        f"| Over the paper's {public[0]['average']:.2f}, clean {signed(public[3]['clean'])}: reached. "
        f"Over mixing {public[1]['average']:.2f} at N = 8, but {public[2]['average']:.2f} at N = 4, which is best "
        f"for this model on the four corruptions (by {ahead:.2f}, at a cost of {cost:.1f} points on clean images)"
    )
    mixing, papers, plain = (over("bn", "evidence", base) for base in (MIXING[8], PAPERS, "uncorrected"))
    yield (
        f"{mixing['average']:.2f} over mixing at N = 8, their best on the four; {papers['average']:.2f} over the "
        f"paper's; clean {signed(plain['clean'])}: reached"
    )
    aims = {"gn": "1.5 over uncorrected and over the paper's, clean within 0.1", "frn": "the same"}
    for norm, aim in aims.items():
        plain, papers = (over(norm, "evidence", base) for base in ("uncorrected", PAPERS))
        yield (f"| {aim} | {plain['average']:.2f}, {papers['average']:.2f}, clean {signed(plain['clean'])}: reached |")
    mnist = [_over("mnist", norm, "evidence", PAPERS)["average"] for norm in ("bn", "frn", "gn")]
    clean = [signed(_over("mnist", norm, "evidence", "uncorrected")["clean"]) for norm in ("bn", "frn", "gn")]
    reached = f"{', '.join(f'{gain:.2f}' for gain in mnist)}, clean {', '.join(clean)}: reached"
    yield f"| over the paper's, clean within 0.1 | {reached} |"
    gated, free = (_over("imagenet", "bn", method, MIXING[16]) for method in ("evidence", NO_GATE))
    clean = [signed(_over("imagenet", "bn", method, "uncorrected")["clean"], ".1f") for method in ("evidence", NO_GATE)]
    yield (
        "| 1.5 over mixing, clean within 0.3 "
        f"| {gated['average']:.2f}, clean {clean[0]}; without a gate {free['average']:.2f}, clean {clean[1]}"
    )
    mixed, sorted_ = (
        max(_stream(m, stream) for m in ("bn-batch", "tent", "tent:continual=True")) for stream in ("mixed", "sorted")
    )
    yield f"| {_stream('evidence', 'any'):.1f} against {mixed:.1f} at most and {sorted_:.1f}: reached |"


def _evidence_results() -> Iterator[str]:
    images = [row for row in _rows("imagenet") if row.method == "uncorrected" and row.model == RESNET50]
    clean = fmean(row.accuracy for row in images if row.corruption == "identity")
    rest = fmean(row.accuracy for row in images if row.corruption in REPORTED_ON)
    yield f"points over uncorrected ({clean:.1f} % on clean images, {rest:.1f} % on the fifteen)"
    norms = {norm: _over("cifar10", norm, "evidence", "uncorrected") for norm in ("public", "bn", "gn", "frn")}
    papers = {norm: _over("cifar10", norm, PAPERS, "uncorrected") for norm in norms}
    worst = max(-_single(norm) for norm in ("bn", "gn", "frn"))
    lost = max(-norms[norm]["clean"] for norm in ("bn", "gn", "frn"))
    yield f"{lost:.2f} points at most on the average of each norm (single models: {worst:.2f})"
    costs = [-gains["clean"] for gains in papers.values()]
    mixing = max(-_over("cifar10", norm, MIXING[8], "uncorrected")["clean"] for norm in ("public", "bn"))
    yield (f"paper's correction costs {min(costs):.1f} to {max(costs):.2f}, and mixing with N = 8 up to {mixing:.1f}")
    yield f"the published ResNet-20 gains {norms['public']['clean']:.1f}"
    eight, four, against = (
        [_over("cifar10", norm, "evidence", base)["average"] for norm in ("public", "bn")]
        for base in (MIXING[8], MIXING[4], PAPERS)
    )
    yield f"`Evidence()` gains {eight[0]:.1f} points on the published model and {eight[1]:.1f} on ours"
    ahead = _choosing(PUBLIC, MIXING[4], "chosen") - _choosing(PUBLIC, MIXING[8], "chosen")
    cost = [-_over("cifar10", norm, MIXING[4], "uncorrected")["clean"] for norm in ("public", "bn")]
    yield (
        f"N = 4 is better than N = 8 by {ahead:.1f} on the four corruptions with the published model, and costs "
        f"{cost[0]:.1f} and {cost[1]:.1f} points on clean images; over it the gain is {four[0]:.1f} and {four[1]:.1f}. "
        f"Over the paper's correction it is {against[0]:.1f} and {against[1]:.1f}"
    )
    over, plain = (
        [_over("imagenet", "bn", method, base)["average"] for method in ("evidence", NO_GATE)]
        for base in (MIXING[16], PAPERS)
    )
    yield (
        f"{over[0]:.2f} points over it, and {over[1]:.2f} without a gate. Over the paper's correction it is "
        f"{plain[0]:.1f} and {plain[1]:.1f}"
    )
    mixed, ours = (_by_corruption(PUBLIC, method) for method in (MIXING[8], "evidence"))
    pairs = ", ".join(
        f"{name.replace('_', ' ')} {mixed[name]:.1f} against {ours[name]:.1f}"
        for name in ("frost", "glass_blur", "fog", "snow", "brightness")
    )
    yield f"mixing with N = 8 is ahead on five of the fifteen: {pairs}"
    assert sum(mixed[name] > ours[name] for name in REPORTED_ON) == 5
    least = _by_corruption(PUBLIC, "evidence:least=0.0")
    yield (
        f"motion blur {least['motion_blur']:.1f} against {ours['motion_blur']:.1f} for `Evidence()` and "
        f"{mixed['motion_blur']:.1f} for mixing, zoom blur {least['zoom_blur']:.1f} against {ours['zoom_blur']:.1f} "
        f"and {mixed['zoom_blur']:.1f}, fog {least['fog']:.1f}"
    )
    yield f"the paper's correction gains nothing and `Evidence()` {norms['gn']['average']:.1f} points"
    yield f"response norm, {papers['frn']['average']:.2f} and {norms['frn']['average']:.1f}"


def _gate() -> Iterator[str]:
    rows = read("detection")
    bn = (OURS["bn"], PUBLIC)

    def found(name: str) -> str:
        means = [
            fmean(float(row["separation"]) for row in rows if (row["model"], row["corruption"]) == (model, name))
            for model in bn
        ]
        low, high = (f"{value:.0f}" for value in (min(means), max(means)))
        return low if low == high else f"{low} to {high}"

    yield (
        f"Gaussian noise {found('gaussian_noise')}, glass blur {found('glass_blur')}, impulse noise "
        f"{found('impulse_noise')}, frost {found('frost')}, zoom blur {found('zoom_blur')}, JPEG "
        f"{found('jpeg_compression')}. Brightness ({found('brightness')}), elastic transform "
        f"({found('elastic_transform')}) and fog ({found('fog')}) are not found"
    )
    clean = [float(row["found"]) for row in rows if row["corruption"] == "identity"]
    yield f"Of 2000 clean test images, {min(clean):.1f} to {max(clean):.1f} % lay beyond the 1 % level"
    rule = trueup.Evidence()
    largest = math.log(rule.ramp * rule.budget / (1 / 6)) / math.log(rule.ramp)
    yield f"n is 5 and p at least 1/6: at the default budget, g is {largest:.2f} at most"


def _bound() -> Iterator[str]:
    rows = {(row["model"], row["of"], row["asked"]): row for row in read("budget")}
    models = (PUBLIC, *OURS.values())
    changed = [float(rows[model, "calibration", "2"]["changed"]) for model in models]
    bought = [
        100 * float(rows[model, "test", "0.5"]["gained"]) / float(rows[model, "calibration", "2"]["gained"])
        for model in models
    ]
    yield (
        f"changes {min(changed):.1f} to {max(changed):.1f} % of answers, for the better about as often as for the "
        f"worse. Half a percent buys {min(bought):.0f} to {max(bought):.0f} % of its gain"
    )
    assert len(DOSES) == 10
    yield "It tries the rule in ten doses"
    yield f"strength and base times {min(DOSES):g} to {max(DOSES):g}"
    [stored] = [row for row in read("target_resolution") if row["resolution"] == "1025"]
    yield f"1025 levels per activation: {100 * float(stored['worst_error']):.2g} % of the target's mean"


def _corruptions() -> Iterator[str]:
    cpu, gpu = (
        [row for row in read(f"corruptions_{device}") if row["corruption"] != "identity"] for device in ("cpu", "cuda")
    )

    def times(rows: Sequence[Mapping[str, str]], family: str, *names: str, column: str = "us_per_image") -> list[float]:
        mine = [row for row in rows if row["family"] == family and (not names or row["corruption"] in names)]
        return [float(row[column]) for row in mine if row[column]]

    cifar, imagenet = fmean(times(cpu, "cifar10-c")), fmean(times(cpu, "imagenet-c"))
    whole = fmean(times(cpu, "cifar10-c")) * 950_000 / 1e6
    yield f"CIFAR-10-C: {cifar:.0f} microseconds per image on average, all 950,000 images in {whole:.0f} seconds"
    assert min(times(cpu, "cifar10-c", column="times_as_fast")) > 1
    slow = {"jpeg_compression": "JPEG", "pixelate": "pixelate"}
    fast = [
        float(row["times_as_fast"])
        for row in cpu
        if row["family"] == "imagenet-c" and row["times_as_fast"] and row["corruption"] not in slow
    ]
    jpeg, pixelate = (times(cpu, "imagenet-c", name, column="times_as_fast") for name in slow)
    yield (
        f"ImageNet-C at 224: {imagenet / 1000:.1f} milliseconds per image on average, {min(fast):.1f} to "
        f"{max(fast):.0f} times as fast as `imagecorruptions-imaug`, except for JPEG ({min(jpeg):.1f} to "
        f"{max(jpeg):.1f}) and pixelate ({min(pixelate):.1f} to {max(pixelate):.1f})"
    )
    mnist = [float(row["us_per_image"]) for row in cpu if row["family"] == "mnist-c" and row["corruption"] != "fog"]
    yield f"MNIST-C: {min(mnist):.1f} to {max(mnist):.0f} microseconds per image, and a third of a millisecond"
    cifar, imagenet = fmean(times(gpu, "cifar10-c")), fmean(times(gpu, "imagenet-c"))
    frost = max(times(gpu, "cifar10-c", "frost"))
    yield (
        f"CIFAR-10-C: {cifar:.0f} microsecond per image on average, all 950,000 images in a second; the slowest is "
        f"frost, {frost:.0f} microseconds"
    )
    network = {
        row["other"].rpartition(" ")[2]: float(row["other_us_per_image"])
        for row in gpu
        if row["family"] == "imagenet-c"
    }
    motion, zoom, snow = (max(times(gpu, "imagenet-c", name)) for name in ("motion_blur", "zoom_blur", "snow"))
    yield (
        f"{imagenet:.0f} microseconds per image on average, where a ResNet-50 takes {network['TF32']:.0f} to "
        f"classify it in TF32 and 66 in bfloat16. Motion blur takes longer than either ({motion:.0f} at severity 5), "
        f"zoom blur and snow ({zoom:.0f} and {snow:.0f}) longer than bfloat16"
    )
    mnist = times(gpu, "mnist-c")
    yield f"MNIST-C: {min(mnist):.1f} to {max(mnist):.0f} microseconds per image."
    scale, elastic, zooms = (
        100 * min(times(gpu, family, name, column="same_as_cpu"))
        for family, name in (("mnist-c", "scale"), ("imagenet-c", "elastic_transform"), ("imagenet-c", "zoom_blur"))
    )
    yield (
        f"except for scale of MNIST-C ({scale:.2f} % of them), elastic transform ({elastic:.3f} %) and zoom blur "
        f"({zooms:.4f} %) of ImageNet-C"
    )
    yield "A severity agrees if within-2 is at least 99.5 %."
    yield "within 4.5 standard deviations of ours over seeds"
    yield f"an accuracy has a standard error of up to {100 * math.sqrt(0.25 / 24):.0f} points"


def _method() -> Iterator[str]:
    rule = trueup.Evidence()
    shown = {"depth": str(Fraction(rule.depth).limit_denominator(100)), "counts": "1/4, 1/2, 1"}
    assert rule.counts == (1 / 4, 1 / 2, 1)
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        text = shown.get(field.name) or (f"{value:g}" if isinstance(value, float) else str(value))
        yield f"| `{field.name}` | {text} |"


def _reading() -> Iterator[str]:
    allowed = inspect.signature(trueup.calibrate).parameters["max_changed"].default
    yield f"The default is {allowed:g}."


def _models() -> Iterator[str]:
    rows = [row for row in read("accuracy") if (row["set"], row["architecture"]) == ("cifar10", "resnet20")]
    above = [
        fmean(float(row["test_accuracy"]) - float(row["paper_mean"]) for row in rows if row["norm"] == norm)
        for norm in ("gn", "frn")
    ]
    yield f"end {above[0]:.1f} and {above[1]:.1f} points above the paper's on CIFAR-10"


def _targets() -> Iterator[str]:
    clean = [paper("table2")["identity", label].value for label in ("bn", "bn (c)")]
    worst = [paper("table5")["average", label] for label in ("bn", "bn (c)")]
    before, after = (f"{cell.value:.1f} ± {cell.spread:.1f}" for cell in worst)
    yield f"go from {clean[0]:.2f} to {clean[1]:.2f} on clean images, and from {before} to {after} at severity 5"
    yield f"One of 250 predictions is {100 / 250:.1f} %"
    sizes = {
        row["what"]: float(row["ratio"]) for row in read("performance_cpu") if row["case"].startswith("targets file")
    }
    small, whole = sizes["as saved by default"], sizes["4096 images"]
    yield f"{small:.1f} MB instead of {whole:.0f} for a ResNet-50"


def _choosing(model: str, rule: str, column: str) -> float:
    """Mean over models: the share of changed answers, or the gain over the uncorrected model in another column."""
    values = {(row["model"], row["seed"], row["rule"]): float(row[column]) for row in read("choosing")}
    seeds = [seed for name, seed, spelled in values if (name, spelled) == (model, rule)]
    plain = "uncorrected" if column != "changed" else None
    return fmean(values[model, s, rule] - (values[model, s, plain] if plain else 0.0) for s in seeds)


@functools.cache
def _rows(set_name: str) -> list[EvaluationRow]:
    return read_rows(rows_file(RESULTS, set_name))


@functools.cache
def _over(set_name: str, norm: str, method: str, base: str) -> dict[str, float]:
    """Gains of a method over another on the same models and images, by row of the table."""
    wanted = experiment(f"beyond-{set_name}")
    columns = [column for column in wanted.columns if column.norm == norm]

    def named(name: str) -> object:
        if name == PAPERS:
            return next(c for c in columns if c.method.name.startswith("correct:") or c.method.name == "correct")
        return next(c for c in columns if c.method.name == name)

    found = differences(wanted, named(method), named(base), _rows(set_name))  # type: ignore[arg-type]
    return {name: value for name, (value, _) in found.items()}


def _by_corruption(model: str, method: str) -> dict[str, float]:
    """Gain over the uncorrected model on each corruption of CIFAR-10-C, mean over severities, on all images."""
    rows = [row for row in _rows("cifar10") if row.model == model and row.images == 10_000]
    found = {
        (row.method, row.corruption, row.severity): row.accuracy
        for row in rows
        if row.method in (method, "uncorrected")
    }
    names = {name for kind, name, severity in found if severity and kind == "uncorrected"}
    return {name: fmean(found[method, name, k] - found["uncorrected", name, k] for k in range(1, 6)) for name in names}


def _single(norm: str) -> float:
    """Smallest gain of `Evidence()` on clean images of a single model."""
    clean = {
        (row.seed, row.method): row.accuracy
        for row in _rows("cifar10")
        if row.model == OURS[norm] and row.corruption == "identity" and row.images == 10_000
    }
    seeds = {seed for seed, method in clean if method == "evidence"}
    return min(clean[seed, "evidence"] - clean[seed, "uncorrected"] for seed in seeds)


def _stream(method: str, stream: str) -> float:
    """Accuracy of a method on a stream: three models with batch norm, the fifteen corruptions, all severities."""
    rows = [
        row
        for row in _rows("cifar10")
        if (row.model, row.method, row.stream.partition("/")[0]) == (OURS["bn"], method, stream)
        and row.seed in (0, 1, 2)
        and row.corruption in REPORTED_ON
    ]
    most = max(row.images for row in rows)
    return fmean(row.accuracy for row in rows if row.images == most)
