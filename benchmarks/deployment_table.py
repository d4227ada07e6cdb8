"""Tables of docs/deployment.md, from results/deployment.csv and results/quantised.csv.

python benchmarks/deployment_table.py            # rewrite the tables
python benchmarks/deployment_table.py --check    # fail if the document does not show what the files hold
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from trueup_lab.tables import read_dicts

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "deployment.md"


def main() -> None:
    """Rewrite or check the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = DOCUMENT.read_text(encoding="utf-8")
    wanted = text
    for name, lines in {"deployment": deployment(), "graphs": graphs(), "quantised": quantised()}.items():
        block = "\n".join([f"<!-- {name} -->", *lines, f"<!-- /{name} -->"])
        wanted = re.sub(f"<!-- {name} -->.*<!-- /{name} -->", lambda _, block=block: block, wanted, flags=re.DOTALL)
    if parser.parse_args().check:
        if text != wanted:
            raise SystemExit(f"{DOCUMENT} does not show its files; run python benchmarks/deployment_table.py")
    else:
        DOCUMENT.write_text(wanted, encoding="utf-8")


def deployment() -> list[str]:
    """One line per route and batch size, with and without a gate, then the paper's rule, and one per way of serving."""
    rows = _read("deployment")
    gated = {(row["route"], row["batch"]): row for row in rows if row["rule"] == "gated"}
    lines = [
        "| route | imports | batch | difference | model | corrected | ratio | ratio with a gate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["rule"] == "gated":
            continue
        unit = "ms" if row["unit"].startswith("ms") else row["unit"]
        digits = 2 if unit == "ms" else 0
        times = [f"{float(row[key]):.{digits}f} {unit}" for key in ("model", "corrected")]
        ratio = "" if unit.startswith("bytes") else row["ratio"]
        paper = row["rule"] == "paper"
        other = "" if paper else gated.get((row["route"], row["batch"]), {}).get("ratio", "")
        route = row["route"] + ", the paper's rule" * paper
        cells = [route, row["needs"], row["batch"], row["difference"], *times, ratio, other]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def graphs() -> list[str]:
    """Sizes of the exported graph, times of exporting, rounding, and the paper's rule."""
    rows = {(row["route"], row["rule"]): row for row in _read("deployment")}
    slower = [row["ratio"] for row in _read("deployment") if (row["route"], row["rule"]) == ("onnxruntime", "paper")]
    weighed, gated = (rows["onnxruntime", rule] for rule in ("no gate", "gated"))
    alone, nodes = int(weighed["nodes_model"]), [int(row["nodes_corrected"]) for row in (weighed, gated)]
    each = [round((count - alone) / NORMS) for count in nodes]
    takes = [float(row["prepare_corrected"]) / float(row["prepare_model"]) for row in (weighed, gated)]
    far = [
        max(float(row["difference"]) for (route, own), row in rows.items() if own == rule and route in _EXPORTS)
        for rule in ("no gate", "gated")
    ]
    size = (
        f"- **Size of a graph**: an ONNX file has {alone} nodes for the model, {nodes[0]} for the corrected model and "
        f"{nodes[1]} with a gate and a base. That is {each[0]} and {each[1]} more per corrected norm, because ONNX has "
        "no operator for what is one kernel in eager mode: fifteen act on whole maps, and the others weigh a few "
        "numbers per channel. Compilers fuse them; ONNX Runtime and plain `torch.export` do not, and pay for each. If "
        f"single images matter, prefer AOTInductor. Exporting takes {takes[0]:.1f} and {takes[1]:.1f} times as long as "
        "exporting the model."
    )
    rounding = (
        f"- **Rounding**: without a gate, exported models differ from eager mode by {far[0]:.1e} at most. A gate "
        "amplifies the rounding of the convolutions before it: with one, eager mode itself is "
        f"{float(rows['eager', 'gated']['difference']):.1e} away from float64, and exported models differ from eager "
        f"mode by up to {far[1]:.1e}."
    )
    paper = (
        "- **The paper's rule** (`Correction`) is exported as a sort of all activations of an image, because ONNX has "
        f"no histogram, and takes {float(slower[0]):.0f} to {float(slower[-1]):.0f} times the model's time. It treats "
        "zeros and the smallest positive values differently, so it amplifies the rounding of another library, batch "
        "size or processor: logits differ from those of the same sort in eager mode by up to "
        f"{float(rows['onnxruntime', 'paper']['difference']):.2f}, and those of eager mode's histogram from a sort in "
        f"float64 by {float(rows['eager', 'paper']['difference']):.2f}. All answers were equal even so. Eager "
        "mode and `torch.compile` keep the histogram."
    )
    return [line for point in (size, rounding, paper) for line in textwrap.wrap(point, 130, subsequent_indent="  ")]


def quantised() -> list[str]:
    """Means over the corrupted sets, one line per network."""
    groups: dict[tuple[str, str, str], dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for row in _read("quantised"):
        network = "corrected" if row["rule"] else "model"
        groups[row["quantisation"], network, row["order"]][
            "clean" if row["corruption"] == "clean" else "corrupted"
        ].append(row)
    lines = [
        "| quantisation | network | clean accuracy | corrupted accuracy | agreement, clean | agreement, corrupted |",
        "|---|---|---|---|---|---|",
    ]
    for (quantisation, network, order), sets in groups.items():
        cells = [f"{100 * fmean(float(row[key]) for row in sets[kind]):.1f}" for key, kind in _COLUMNS]
        name = f"{network} ({order})" if order else network
        lines.append(f"| {quantisation} | {name} | {' | '.join(cells)} |")
    return lines


NORMS = 20  # that Evidence corrects in a ResNet-20
_EXPORTS = ("torch.export", "torch.jit.trace", "aotinductor", "onnxruntime", "openvino", "executorch")
_COLUMNS = [(key, kind) for key in ("accuracy", "agreement") for kind in ("clean", "corrupted")]


def _read(name: str) -> list[dict[str, str]]:
    return read_dicts(ROOT / "results" / f"{name}.csv")


if __name__ == "__main__":
    main()
