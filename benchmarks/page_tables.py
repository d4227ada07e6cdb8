"""Tables of pages, written from the CSV files that the pages name, between `<!-- NAME -->` and `<!-- /NAME -->`.

python benchmarks/page_tables.py    # rewrites README.md and the pages that `documents` names
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from trueup_lab.evaluation import read_rows
from trueup_lab.experiments import differences, experiment, rows_file
from trueup_lab.figures.explained import bench_costs
from trueup_lab.page_blocks import rewrite
from trueup_lab.performance import read_timings
from trueup_lab.tables import read_dicts

ROOT = Path(__file__).resolve().parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "results"
PUBLIC = "resnet20_cifar10_bn_public"
OURS = {"bn": "resnet20-bn-cifar10", "gn": "resnet20-gn-cifar10", "frn": "resnet20-frn-cifar10"}
RESNET50 = "resnet50_v1_imagenet_bn"
NO_GATE = "evidence:budget=1.0,strength=0.002,base=0.045"
# Settings of the ablations, as choosing.csv spells them.
ABLATIONS = {
    "evidence": "`Evidence()`",
    "evidence:base=0.0": "`base=0`",
    "evidence:base=0.04": "`base=0.04`",
    "evidence:base=0.12": "`base=0.12`",
    "evidence:strength=0.03": "`strength=0.03`",
    "evidence:strength=0.1": "`strength=0.1`",
    "evidence:least=0.0": "`least=0`",
    "evidence:least=0.1": "`least=0.1`",
    "evidence:least=0.2": "`least=0.2`",
    "evidence:budget=0.005": "`budget=0.005`",
    "evidence:budget=0.02": "`budget=0.02`",
    "evidence:bands=False": "`bands=False`",
    "evidence, all count 1": "`counts=(1, 1, 1)`: all evidence counts in full",
    "evidence, means count half": "`counts=(0.5, 0.5, 1)`: means count half",
    "evidence, low bands count 1": "`counts=(0.25, 1, 1)`: low bands count in full",
    "evidence, all norms": "`depth=1`: all norms",
    "evidence, but the last tenth": "`depth=0.9`: all norms but the last tenth",
    "evidence:budget=1.0,strength=0.0,base=0.045": "`budget=1, strength=0, base=0.045`",
    "evidence:budget=1.0,strength=0.002,base=0.0": "`budget=1, strength=0.002, base=0`",
    "evidence:budget=1.0,strength=0.002,base=0.03": "`budget=1, strength=0.002, base=0.03`",
    NO_GATE: "`budget=1, strength=0.002, base=0.045`",
    "evidence:budget=1.0,strength=0.002,base=0.06": "`budget=1, strength=0.002, base=0.06`",
    "evidence:budget=1.0,strength=0.01,base=0.045": "`budget=1, strength=0.01, base=0.045`",
    "bn-mix:prior=16": "BN mixing, N = 16",
    "bn-mix": "BN mixing, N = 8",
    "bn-mix:prior=4": "BN mixing, N = 4",
}
Row = Mapping[str, str]
COSTS = "https://trueup-ml.github.io/trueup/performance.html"


def main() -> None:
    """Rewrite all tables."""
    for path, tables in documents().items():
        rewrite(path, tables)


def documents() -> dict[Path, dict[str, str]]:
    """Pages and their tables."""
    return {
        ROOT / "README.md": {"cost": cost_in_words()},
        DOCS / "bound.md": {"budget": budget_table(read("budget"))},
        DOCS / "gate.md": {"detection": detection_table(read("detection"))},
        DOCS / "kernels.md": {"fast path": fast_path_table(read("fast_path"))},
        DOCS / "monitoring.md": {
            "drift": drift_table(read("drift")),
            "monitor": monitor_table([*read("monitor_cpu"), *read("monitor_h200")]),
        },
        DOCS / "models.md": {"training speed": speed_table(read("training_speed"))},
        DOCS / "lab-notes.md": {"ablations": ablation_table(read("choosing"))},
        DOCS / "evidence-results.md": {
            "cifar10": gains_table("cifar10", {"public": "published ResNet-20, BN", "bn": "ours, BN", **_ours()}),
            "mnist": gains_table("mnist", {"bn": "BN", "frn": "FRN", "gn": "GN"}),
            "imagenet": imagenet_table(),
        },
        DOCS / "targets.md": {
            "resolution": resolution_table(read("target_resolution")),
            "readings resnet20": readings_table(read("readings"), "resnet20", ".2f"),
            "readings resnet50": readings_table(read("readings"), "resnet50", ".1f"),
            "small": small_table(read("small_targets")),
        },
    }


def cost_in_words() -> str:
    """Cost of a correction on a GPU, over architectures, and on a CPU."""
    costs = bench_costs(RESULTS)

    def spread(way: str) -> str:
        found = sorted(by[way] for by in costs.values() if way in by)
        return f"{found[0]:.2f} to {found[-1]:.2f} (median {median(found):.2f})"

    [cpu] = [
        row.ratio
        for row in read_timings(RESULTS / "performance_cpu.csv")
        if row.case == "ResNet-20, batch 32, two CPU threads" and row.what == "evidence, no gate"
    ]
    [serving] = [float(row["ratio"]) for row in read_dicts(RESULTS / "deployment.csv") if "two cores" in row["route"]]
    compiled = sorted(
        row.ratio
        for row in read_timings(RESULTS / "performance_h200.csv")
        if row.case.endswith(", batch 64, bfloat16, compiled") and row.what == "evidence, no gate"
    )
    ways = {"64 images in bfloat16": ", batch 64, bfloat16", "64 in TF32": ", batch 64, TF32"}
    ways |= {"one image": ", batch 1", "one image in a CUDA graph": ", batch 1, CUDA graph"}
    listed = ", ".join(f"{spread(way)} for {name}" for name, way in ways.items())
    text = (
        f"Cost, as a multiple of the model's time, over up to {len(costs)} networks on an H200: {listed}. "
        f"With both compiled by torch.compile it is {compiled[0]:.2f} to {compiled[-1]:.2f}: leave that out on a GPU. "
        f"A ResNet-20 on two CPU cores takes {cpu:.2f} or {serving:.2f} times, in two measurements. "
        f"[What it costs]({COSTS}) has the rest."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def budget_table(rows: Sequence[Row]) -> str:
    """Share of answers that change, and gain, by limit and by the images that a rule was chosen on."""
    models = {PUBLIC: "published, BN", OURS["bn"]: "ours, BN", OURS["gn"]: "ours, GN", OURS["frn"]: "ours, FRN"}
    body = []
    for of, images in (("test", "images that are new"), ("calibration", "training images")):
        for asked in ("0.5", "1", "2"):
            found = {row["model"]: row for row in rows if (row["of"], row["asked"]) == (of, asked)}
            cells = [f"{float(found[m]['changed']):.2f} ({float(found[m]['gained']):.1f})" for m in models]
            body.append([f"{asked} %", images, *cells])
    return _markdown(["at most", "chosen by", *models.values()], body)


def detection_table(rows: Sequence[Row]) -> str:
    """Area under the ROC curve by severity, mean over the corruptions."""
    models = {OURS["bn"]: "ours, BN", PUBLIC: "published, BN", OURS["frn"]: "ours, FRN", OURS["gn"]: "ours, GN"}
    severities = ("1", "2", "3", "4", "5")
    body = []
    for model, name in models.items():
        found = [[r for r in rows if (r["model"], r["severity"]) == (model, severity)] for severity in severities]
        body.append([name, *(f"{fmean(float(row['separation']) for row in some):.1f}" for some in found)])
    return _markdown(["severity", *severities], body)


def ablation_table(rows: Sequence[Row]) -> str:
    """Gains of each setting on clean images and on the four corruptions, mean over the models of a name."""
    models = {PUBLIC: "published, BN", **{OURS[n]: f"ours, {n.upper()}" for n in OURS}, RESNET50: "ResNet-50"}
    values = {(row["model"], row["seed"], row["rule"]): row for row in rows}

    def cell(model: str, rule: str) -> str:
        seeds = [seed for name, seed, spelled in values if (name, spelled) == (model, rule)]
        pairs = [(values[model, seed, rule], values[model, seed, "uncorrected"]) for seed in seeds]
        if not pairs:
            return ""
        clean, gained = (fmean(float(a[what]) - float(b[what]) for a, b in pairs) for what in ("clean", "chosen"))
        return f"{signed(clean, '.1f' if model == RESNET50 else '.2f')} / {gained:.2f}"

    body = [[label, *(cell(model, rule) for model in models)] for rule, label in ABLATIONS.items()]
    return _markdown(["", *models.values()], body)


def gains_table(set_name: str, norms: Mapping[str, str]) -> str:
    """Gains of each method, clean / corrupted, mean over models; in italics where fewer models were measured."""
    wanted = {
        "cifar10": ["the paper's correction", "BN mixing, N = 4", "BN mixing, N = 8", "BN mixing, N = 16", *_RULES],
        "mnist": ["the paper's correction", '`location="match"`', "BN mixing, N = 4", "`Evidence()`"],
    }[set_name]
    found = {norm: _gains(set_name, norm) for norm in norms}
    body = []
    for label in wanted:
        cells = []
        for norm in norms:
            gain = found[norm].get(label)
            shown = "" if gain is None else f"{signed(gain['clean'])} / {signed(gain['average'])}"
            most = max(gain["models"] for gain in found[norm].values())
            cells.append(f"*{shown}*" if gain is not None and gain["models"] < most else shown)
        body.append([_NAMES.get(label, label), *cells])
    return _markdown(["", *norms.values()], body)


def imagenet_table() -> str:
    """Gains on ImageNet-C: clean, all severities, the highest severity."""
    found = _gains("imagenet", "bn")
    labels = ["the paper's correction", "BN mixing, N = 8", "BN mixing, N = 16", "`Evidence()`", *list(_RULES)[1:]]
    body = []
    for label in labels:
        gain = found[label]
        name = _NAMES.get(label, label).partition(":")[0] if label in _RULES else label
        body.append([name, signed(gain["clean"], ".1f"), signed(gain["average"]), signed(gain["severity 5"])])
    return _markdown(["", "clean", "corrupted", "severity 5"], body)


def resolution_table(rows: Sequence[Row]) -> str:
    """Error of targets by the number of quantile levels."""
    body = [
        [
            f"**{row['resolution']}**" if row["resolution"] == "1025" else row["resolution"],
            f"{_two_digits(100 * float(row['worst_error']))} %",
            f"{_two_digits(100 * float(row['worst_stated_error']))} %",
            f"{100 * float(row['same_predictions']):.4g} %",
            f"{float(row['file_kb']) / 1000:.1f} MB",
        ]
        for row in rows
    ]
    head = ["levels", "error of the target, worst site", "stated error, worst site"]
    return _markdown([*head, "same predictions on blurred images", "file"], body)


def readings_table(rows: Sequence[Row], network: str, form: str) -> str:
    """Accuracy of both readings of the paper, clean and by severity."""
    methods = {"uncorrected": "uncorrected", "keep": "keep", "match": "match"}
    methods["keep, not sparse"] = "keep, without the sparsity term"
    body = []
    for method, name in methods.items():
        mine = [row for row in rows if (row["network"], row["method"]) == (network, method)]
        if mine:
            accuracies = [_accuracy(row for row in mine if row["severity"] == severity) for severity in "0135"]
            body.append([name, *(format(value, form) for value in (*accuracies, fmean(accuracies[1:])))])
    head = ["accuracy in %", "clean", "severity 1", "severity 3", "severity 5", "mean of the three"]
    return _markdown(head, body)


def drift_table(rows: Sequence[Row]) -> str:
    """Number of corrupted images until the alarm, and the share of them that look unusual."""
    body = []
    for row in rows:
        name = row["corruption"].replace("_", " ").replace("identity", "none")
        body.append([name, row["severity"], row["delay"] or "no alarm", f"{float(row['found']):.0f} %"])
    return _markdown(["corruption", "severity", "corrupted images until the alarm", "p at most 0.05"], body)


def fast_path_table(rows: Sequence[Row]) -> str:
    """Differences between the paper's rule by histograms and the exact one."""
    body = []
    for network, name in {"resnet20": "ResNet-20, CIFAR-10-C", "resnet50": "ResNet-50, ImageNet-C"}.items():
        mine = [row for row in rows if row["network"] == network]
        by_corruption: dict[str, list[float]] = {}
        for row in mine:
            difference = 100 * (int(row["right_fast"]) - int(row["right_exact"])) / int(row["images"])
            by_corruption.setdefault(row["corruption"], []).append(difference)
        means = [fmean(values) for values in by_corruption.values()]
        agree = [100 * int(row["agree"]) / int(row["images"]) for row in mine]
        largest = max(map(abs, means))
        cells = (f"{fmean(means):.2f} points", f"{largest:.2f} points", f"{fmean(agree):.1f} %")
        body.append([name, f"{len(mine)} sets of {mine[0]['images']}", *cells])
    return _markdown(
        ["network", "images", "mean difference", "largest of a corruption", "predictions that agree"], body
    )


def monitor_table(rows: Sequence[Row]) -> str:
    """Cost of a report and of a monitor, as shares of the model's time."""
    names = {"resnet20": "ResNet-20, 32 x 32", "resnet50": "ResNet-50, 224 x 224"}
    body = []
    for row in rows:
        if row["rule"] == "no gate":
            shares = [100 * float(row[part]) for part in ("update_share", "report_share", "report_all_share")]
            device = row["device"].replace("cpu", "CPU")
            cells = (f"{shares[0]:.2f} %", f"{shares[1]:.0f} %", f"{shares[2]:.0f} %")
            body.append([names[row["model"]], device, row["batch"], *cells])
    return _markdown(["model", "device", "batch", "`update`", "`report=True`", '`report="all"`'], body)


def small_table(rows: Sequence[Row]) -> str:
    """Accuracy with a whole and with a small targets file, and how far logits move."""
    rules = {
        "chosen by calibration": "the one that calibration chose",
        "strength 0.02, no gate": "`Evidence(budget=1, strength=0.02, base=0)`",
        "strength 0.1, no gate": "`Evidence(budget=1, strength=0.1, base=0)`",
        "Evidence()": "`Evidence()`",
    }
    found = {(row["rule"], row["targets"]): row for row in rows}
    body = []
    for rule, name in rules.items():
        whole, small, half = (found[rule, targets] for targets in ("whole", "small", "other half"))
        accuracies = [f"{float(row['accuracy']):.1f} %" for row in (whole, small)]
        body.append([name, *accuracies, *(f"{100 * float(row['moved']):.1f} %" for row in (small, half))])
    return _markdown(["rule", "whole file", "small file", "difference", "half of the images"], body)


def speed_table(rows: Sequence[Row]) -> str:
    """Milliseconds per model and step, eight models at once, by variant of the engine and norm."""
    variants = {
        "default": "compiled, channels last, one CUDA graph per model",
        "default,autotune": "the same, cuDNN choosing its algorithms by timing (`--autotune`)",
        "default,combo": "the same as the first, small kernels merged (`--combo`)",
        "default,nchw": "the same as the first, channels first",
    }
    norms = {"bn": "batch norm", "gn": "group norm", "frn": "filter response norm"}
    found = {(r["variant"], r["norm"]): float(r["ms_a_model_and_step"]) for r in rows if r["models"] == "8"}
    body = [
        [name, *(f"{found[variant, norm]:.2f}" if (variant, norm) in found else "" for norm in norms)]
        for variant, name in variants.items()
    ]
    return _markdown(["", *norms.values()], body)


_RULES = {"`Evidence()`": None, "least": None, "no gate": None}
_NAMES = {
    "least": "`Evidence(least=0)`: images that look usual are left alone",
    "no gate": "`Evidence(budget=1, strength=0.002, base=0.045)`: no gate",
    '`location="match"`': 'the same, `location="match"`',
}
_LABELS: dict[str, Callable[[str], bool]] = {
    "the paper's correction": lambda name: name.partition(":")[0] == "correct" and "match" not in name,
    '`location="match"`': lambda name: name.partition(":")[0] == "correct" and "match" in name,
    "BN mixing, N = 4": lambda name: name == "bn-mix:prior=4",
    "BN mixing, N = 8": lambda name: name == "bn-mix",
    "BN mixing, N = 16": lambda name: name == "bn-mix:prior=16",
    "`Evidence()`": lambda name: name == "evidence",
    "least": lambda name: name == "evidence:least=0.0",
    "no gate": lambda name: name == NO_GATE,
}


def _gains(set_name: str, norm: str) -> dict[str, dict[str, float]]:
    """Gains of the methods on the models of a norm, by label, and how many models there were."""
    wanted = experiment(f"beyond-{set_name}")
    rows = read_rows(rows_file(RESULTS, set_name))
    plain, *others = [column for column in wanted.columns if column.norm == norm]
    gains = {}
    for column in others:
        for label, is_it in _LABELS.items():
            if is_it(column.method.name) and (found := differences(wanted, column, plain, rows)):
                of = {row.seed for row in rows if row.method == column.method.name and _has_norm(row.model, norm)}
                gains[label] = {name: value for name, (value, _) in found.items()} | {"models": len(of)}
    return gains


def _has_norm(model: str, norm: str) -> bool:
    return model.endswith("public") if norm == "public" else f"-{norm}-" in model or norm == "imagenet"


def _ours() -> dict[str, str]:
    return {"gn": "ours, GN", "frn": "ours, FRN"}


def _accuracy(rows: Iterable[Row]) -> float:
    """Mean over the test sets."""
    return fmean(100 * int(row["right"]) / int(row["images"]) for row in rows)


def read(name: str) -> list[Row]:
    return read_dicts(RESULTS / f"{name}.csv")


def signed(value: float, form: str = ".2f") -> str:
    """A number with its sign; a zero without.

    >>> signed(0.1), signed(-0.001), signed(-1, ".1f")
    ('+0.10', '0.00', '-1.0')
    """
    text = format(value, f"+{form}")
    return text if float(text) else text[1:]


def _two_digits(value: float) -> str:
    return f"{value:.2g}"


def _markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    rows = ["|" + "|".join(line) + "|" if set(line) == {"---"} else f"| {' | '.join(line)} |" for line in lines]
    return "\n".join(row.replace("|  |", "| |").replace("|  |", "| |") for row in rows) + "\n"


if __name__ == "__main__":
    main()
