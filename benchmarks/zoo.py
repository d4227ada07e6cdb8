"""Try the library on one model of every family of timm, torchvision and Hugging Face transformers, with random weights.

    python benchmarks/zoo.py                              # all sources that are installed; results/zoo.csv
    python benchmarks/zoo.py --source timm --processes 8 --seconds 600
    python benchmarks/zoo.py --only swinv2 --compile all
    python benchmarks/zoo.py --document                   # write the table of docs/any-model.md from the file

Each model gives one row: how its sites were found and how many there are, whether both rules run and give finite
answers, how far the answer of an image alone is from its answer in a batch (beside the model's own such distance,
relative to the spread of its outputs), whether the state_dict is the model's, and, for a sample of models, whether the
corrected module compiles as one graph and exports where the model itself does. Rows that are there already, for the
same versions, are not computed again, so an interrupted run continues. timm needs no torchvision for its models: where
that does not import, empty modules stand in for it.
"""

from __future__ import annotations

import argparse
import csv
import importlib.machinery
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trueup
from trueup.graph import Inputs, is_list_of_images, tensors_in

RESULTS = Path(__file__).parents[1] / "results" / "zoo.csv"
DOCUMENT = Path(__file__).parents[1] / "docs" / "any-model.md"
COLUMNS = [
    *("source", "family", "model", "versions", "input", "parameters", "traced", "why"),
    *("activations", "norms", "folded", "left", "evidence", "correction", "finite", "state_dict"),
    *("own_difference", "evidence_difference", "correction_difference", "compiles", "exports", "seconds", "error"),
]
BATCH = 3
LARGEST = 400_000_000  # parameters
EVIDENCE = trueup.Evidence(budget=1.0, strength=0.05)
SAMPLE = {"timm": 14, "torchvision": 6, "transformers": 12}  # models that are compiled and exported

# Small before large, by the words that names use.
SIZES = (
    "atto femto pico nano xxs xxt xxsmall xxtiny xs xsmall xt mini tiny t0 m0 b0 s0 s1 l1 a0 lite0 18 small 19 21 26"
)
POPULAR = [
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "seresnet18",
    "resnest14d",
    "res2net50_26w_4s",
    "regnety_004",
    "densenet121",
    "vgg16_bn",
    "inception_v3",
    "inception_v4",
    "xception41",
    "dla34",
    "dpn68",
    "hrnet_w18_small",
    "cspdarknet53",
    "repvgg_a0",
    "mobilenetv2_100",
    "mobilenetv3_small_100",
    "mobilenetv3_large_100",
    "tf_mobilenetv3_small_100",
    "mobilenetv4_conv_small",
    "mnasnet_100",
    "fbnetc_100",
    "ghostnet_100",
    "efficientnet_b0",
    "efficientnet_lite0",
    "tf_efficientnet_b0",
    "tf_efficientnetv2_b0",
    "efficientnetv2_rw_t",
    "convnext_tiny",
    "convnextv2_atto",
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "deit_tiny_patch16_224",
    "beit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "maxvit_tiny_tf_224",
    "coatnet_0_rw_224",
    "mobilevit_s",
    "mobilevitv2_100",
    "edgenext_xx_small",
    "efficientformer_l1",
    "poolformer_s12",
    "pvt_v2_b0",
]


@dataclass(frozen=True)
class Case:
    """One model to try. `make` returns the model, a batch of its inputs, and what the inputs are in words."""

    source: str
    family: str
    model: str
    make: Callable[[], tuple[nn.Module, Inputs, str]]


def timm_cases() -> Iterator[Case]:
    """One small model of each of timm's modules, and popular ones."""
    timm = import_timm()
    sizes = SIZES.split()

    def rank(name: str) -> tuple[int, int, str]:
        words = [word if word in sizes else word.rstrip("0123456789") for word in name.replace(".", "_").split("_")]
        return min((sizes.index(word) for word in words if word in sizes), default=len(sizes)), len(name), name

    def make(name: str) -> Callable[[], tuple[nn.Module, Inputs, str]]:
        def build() -> tuple[nn.Module, Inputs, str]:
            model = timm.create_model(name, pretrained=False)
            channels, height, width = model.pretrained_cfg["input_size"]
            return model, images(channels, height, width), f"{height} x {width}"

        return build

    seen = set()
    for module in timm.list_modules():
        if names := [name for name in timm.list_models(module=module) if not name.startswith("test_")]:
            name = min(names, key=rank)
            seen.add(name)
            yield Case("timm", module, name, make(name))
    for name in POPULAR:
        if name not in seen and timm.is_model(name):
            yield Case("timm", "popular", name, make(name))


def torchvision_cases() -> Iterator[Case]:
    """One model of each of torchvision's classification families, and its models of other tasks."""
    from torchvision import models

    def case(family: str, name: str, inputs: Callable[[], Inputs], what: str, **options: Any) -> Case:
        def build() -> tuple[nn.Module, Inputs, str]:
            backbone = {"weights_backbone": None} if family in ("detection", "segmentation") else {}
            return models.get_model(name, weights=None, **backbone, **options), inputs(), what

        return Case("torchvision", family, name, build)

    for name in (
        *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet"),
        *("inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet18"),
        *("resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "swin_t", "swin_v2_t", "vgg11_bn", "vit_b_16"),
        "wide_resnet50_2",
    ):
        size = 299 if name == "inception_v3" else 256 if name == "swin_v2_t" else 224
        extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        yield case("classification", name, lambda size=size: images(3, size, size), f"{size} x {size}", **extra)
    for name in ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        yield case("segmentation", name, lambda: images(3, 128, 160), "128 x 160")
    for name in (
        *("fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2", "fasterrcnn_mobilenet_v3_large_320_fpn"),
        *("maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn", "retinanet_resnet50_fpn", "fcos_resnet50_fpn"),
    ):
        threshold = "box_score_thresh" if "rcnn" in name else "score_thresh"
        small = {"min_size": 128, "max_size": 160, threshold: 0.0}  # random weights are sure of nothing
        yield case("detection", name, pictures, "list of 128 x 160", **small)
    for name in ("ssd300_vgg16", "ssdlite320_mobilenet_v3_large"):
        yield case("detection", name, pictures, "list of 128 x 160", score_thresh=0.0)
    for name in ("r3d_18", "mc3_18", "r2plus1d_18", "s3d"):
        frames = 16 if name == "s3d" else 8
        side = 224 if name == "s3d" else 112
        yield case("video", name, lambda f=frames, s=side: Inputs((noise(BATCH, 3, f, s, s),)), f"{frames} frames")
    yield case("video", "mvit_v1_b", lambda: Inputs((noise(BATCH, 3, 16, 224, 224),)), "16 frames")
    yield case("video", "swin3d_t", lambda: Inputs((noise(BATCH, 3, 8, 112, 112),)), "8 frames")
    yield case("flow", "raft_small", lambda: Inputs((noise(BATCH, 3, 128, 160), noise(BATCH, 3, 128, 160))), "pairs")


def transformers_cases() -> Iterator[Case]:
    """Hugging Face models from small configurations."""
    import transformers as hf

    width = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    plain = {**width, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
    stages = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
    swin = {"image_size": 64, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    backbone = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "out_features": ["stage2"]}
    detr = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "num_queries": 5,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
    }

    def case(name: str, task: str, size: int, config: Callable[[], Any]) -> Case:
        def build() -> tuple[nn.Module, Inputs, str]:
            model = getattr(hf, f"{name}For{task}")(config())
            return model, Inputs((), {"pixel_values": noise(BATCH, 3, size, size)}), f"pixel_values {size} x {size}"

        return Case("transformers", name, f"{name}For{task}", build)

    image = "ImageClassification"
    yield case("ViT", image, 32, lambda: hf.ViTConfig(**plain))
    yield case("DeiT", image, 32, lambda: hf.DeiTConfig(**plain))
    yield case("Beit", image, 32, lambda: hf.BeitConfig(**plain))
    yield case("Dinov2", image, 32, lambda: hf.Dinov2Config(**width, image_size=32, patch_size=8))
    yield case("ResNet", image, 64, lambda: hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]))
    yield case("ConvNext", image, 64, lambda: hf.ConvNextConfig(**stages))
    yield case("ConvNextV2", image, 64, lambda: hf.ConvNextV2Config(**stages))
    yield case("Swin", image, 64, lambda: hf.SwinConfig(**swin))
    yield case("Swinv2", image, 64, lambda: hf.Swinv2Config(**swin))
    yield case("MobileNetV2", image, 64, lambda: hf.MobileNetV2Config(depth_multiplier=0.25, initializer_range=0.3))
    yield case("Segformer", "SemanticSegmentation", 64, lambda: hf.SegformerConfig(**stages, decoder_hidden_size=16))
    yield case(
        "Detr", "ObjectDetection", 64, lambda: hf.DetrConfig(**detr, backbone_config=hf.ResNetConfig(**backbone))
    )


SOURCES = {"timm": timm_cases, "torchvision": torchvision_cases, "transformers": transformers_cases}


def import_timm() -> Any:
    """Import timm, with empty modules in torchvision's place where that does not import."""

    class Anything(type):
        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything(name, (), {})  # one of its own: they are keys of dictionaries

    class StandIn(metaclass=Anything):
        pass

    class Empty(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return StandIn

    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        parts = ("", ".transforms", ".transforms.functional", ".ops", ".ops.misc", ".models", ".datasets")
        for name in (f"torchvision{part}" for part in (*parts, ".models.feature_extraction")):
            module = Empty(name)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module
            if "." in name:
                setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    import timm

    return timm


def noise(*shape: int) -> Tensor:
    """Smooth noise, the same every time."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return made + torch.nn.functional.avg_pool1d(made.flatten(0, -2), 9, 1, 4).reshape(shape) * 3


def images(channels: int, height: int, width: int) -> Inputs:
    """A batch of one tensor."""
    return Inputs((noise(BATCH, channels, height, width),))


def pictures() -> Inputs:
    """A list of images, as detectors take them: of one size, because others are padded to the largest of a batch."""
    return Inputs((list(noise(BATCH, 3, 128, 160).sigmoid()),))


def measure(case: Case, *, compile_too: bool, device: str) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    row: dict[str, Any] = {"source": case.source, "family": case.family, "model": case.model, "error": ""}
    start = time.perf_counter()
    try:
        model, inputs, row["input"] = case.make()
        row["parameters"] = sum(p.numel() for p in model.parameters())
        if row["parameters"] > LARGEST:
            raise MemoryError("too large to be tried")
        without_constants(model)
        model, inputs = model.eval().to(device), inputs.to(torch.device(device))
        own = output(model, inputs)
        row["own_difference"] = alone_and_together(model, inputs)
        before = {key: value.clone() for key, value in tensors_of(model).items()}
        batch = dict(inputs.kwargs) if inputs.kwargs else inputs.args
        targets = trueup.calibrate(model, [batch], decide=False, transform=lambda given: given)
        row |= {"traced": targets.sites.traced, "why": targets.sites.why}
        row |= {"activations": len(targets.activations), "norms": len(targets.norms)}
        row |= {"folded": sum(site.folded for site in targets.sites), "left": " ".join(targets.sites.left)}
        row["state_dict"], row["finite"] = True, True
        robust = None
        for name, rule, there in (
            ("evidence", EVIDENCE, targets.norms),
            ("correction", trueup.Correction(), targets.activations),
        ):
            if not there:
                row[name] = "no site"
                continue
            robust = trueup.correct(model, targets, rule)
            out = output(robust, inputs)
            row[name] = "runs" if distance(out, own) > 0 else "changes nothing"
            row["finite"] &= all(t.isfinite().all().item() for t in tensors_in(out)) or not all(
                t.isfinite().all().item() for t in tensors_in(own)
            )
            row[f"{name}_difference"] = alone_and_together(robust, inputs)
            same = tensors_of(robust)
            row["state_dict"] &= same.keys() == before.keys() and all(same[k].equal(before[k]) for k in before)
        row["state_dict"] &= all(value.equal(before[key]) for key, value in tensors_of(model).items())
        if compile_too and robust is not None:
            row["compiles"] = compare(compiles, model, robust, inputs)
            row["exports"] = compare(exports, model, robust, inputs)
    except TimeoutError:
        row["error"] = "took too long"
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def without_constants(model: nn.Module) -> None:
    """Make constant parameters random: a gate that starts at zero would hide what is behind it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() > 1 and not parameter.std():
                parameter.add_(0.1 * torch.randn_like(parameter))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of a state_dict."""
    return {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}


def output(module: nn.Module, inputs: Inputs) -> Any:
    """Output on a copy of the inputs."""
    given = inputs.to(None, copy=True)
    with torch.no_grad():
        return module(*given.args, **given.kwargs)


def alone_and_together(module: nn.Module, inputs: Inputs) -> float:
    """Largest difference between the first image's answer alone and in a batch, in spreads of the outputs."""
    count = len(inputs)
    together, alone = (first_image(output(module, part), n) for part, n in ((inputs, count), (inputs.part(0, 1), 1)))
    return distance(together, alone)


def first_image(out: Any, count: int) -> list[Tensor]:
    """The first image's part of an output."""
    if isinstance(out, list) and len(out) == count and not is_list_of_images(out) and isinstance(out[0], dict):
        return list(tensors_in(out[0]))
    return [tensor[:1] for tensor in tensors_in(out) if tensor.dim() and tensor.shape[0] == count]


def distance(a: Any, b: Any) -> float:
    """Largest difference of two outputs, in spreads of the second; infinite if they have other shapes."""
    ours, theirs = ([t.double() for t in tensors_in(out)] for out in (a, b))
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    pairs = [(x, y) for x, y in zip(ours, theirs, strict=True) if x.numel()]
    scaled = ((x - y).abs().max() / y.std(correction=0).clamp(min=1e-300) for x, y in pairs)
    return max((float(f"{float(value):.2g}") for value in scaled), default=0.0)


def compiles(module: nn.Module, inputs: Inputs) -> None:
    """Compile as one graph."""
    torch._dynamo.reset()
    output(torch.compile(module, fullgraph=True, backend="aot_eager"), inputs)  # type: ignore[arg-type]


def exports(module: nn.Module, inputs: Inputs) -> None:
    """Export."""
    torch.export.export(module, inputs.args, dict(inputs.kwargs))


def compare(does: Callable[[nn.Module, Inputs], None], model: nn.Module, robust: nn.Module, inputs: Inputs) -> str:
    """Whether something that works with the model works with the corrected one."""
    try:
        does(robust, inputs)
    except TimeoutError:
        raise
    except Exception as error:
        try:
            does(model, inputs)
        except TimeoutError:
            raise
        except Exception:
            return "neither"
        return f"no: {' '.join(str(error).split())[:200]}"
    return "yes"


def versions() -> str:
    """Versions on which a row depends."""
    from importlib import metadata

    found = {"trueup": trueup.__version__, "torch": torch.__version__.split("+")[0]}
    for name in ("timm", "torchvision", "transformers"):
        try:
            found[name] = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return json.dumps(found)


def relevant(text: str, source: str) -> dict[str, str]:
    """The versions that matter for models of a source."""
    known = json.loads(text)
    return {key: known.get(key, "") for key in ("trueup", "torch", source)}


def work(queue: Any, results: Any, limit: int, device: str, sources: list[str]) -> None:
    """Measure cases from the queue, each for at most `limit` seconds."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    cases = {(case.source, case.model): case for source in sources for case in SOURCES[source]()}

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    while (job := queue.get()) is not None:
        source, name, compile_too = job
        signal.alarm(limit)
        row = measure(cases[source, name], compile_too=compile_too, device=device)
        signal.alarm(0)
        results.put(row)


def works(row: dict[str, Any]) -> bool:
    """Whether everything that was tried with a model works."""
    ran = row["error"] == "" and "changes nothing" not in (row["evidence"], row["correction"])
    ran = ran and "runs" in (row["evidence"], row["correction"])
    kept = row["finite"] == row["state_dict"] == "True"
    portable = not any(row[key].startswith("no") for key in ("compiles", "exports"))
    return ran and kept and portable and alone_as_together(row)


def alone_as_together(row: dict[str, Any]) -> bool:
    """Whether `Evidence` adds little to the difference that the model's own answer makes, alone and in a batch.

    The paper's rule is discontinuous at zero, so that rounding may move a value by a whole step: it is not counted.
    """
    own, other = (float(row[key] or 0) for key in ("own_difference", "evidence_difference"))
    return not other > 10 * own + 1e-3


def table(rows: list[dict[str, Any]]) -> str:
    """Counts per source and family of tasks, in Markdown."""
    lines = [
        "| models | tried | work | of these traced, watched | compile and export, of those tried |",
        "|" + "---|" * 5,
    ]
    groups = {
        "timm, one per family": lambda row: row["source"] == "timm" and row["family"] != "popular",
        "timm, popular": lambda row: row["source"] == "timm" and row["model"] in POPULAR,
        "torchvision": lambda row: row["source"] == "torchvision",
        "transformers": lambda row: row["source"] == "transformers",
    }
    for name, belongs in groups.items():
        some = [row for row in rows if belongs(row)]
        good = [row for row in some if works(row)]
        traced = sum(row["traced"] == "True" for row in good)
        sampled = [row for row in some if row["compiles"]]
        portable = sum(row["compiles"] == row["exports"] == "yes" for row in sampled)
        lines.append(
            f"| {name} | {len(some)} | {len(good)} | {traced}, {len(good) - traced} | {portable} of {len(sampled)} |"
        )
    bad = [f"`{row['model']}` ({row['error'] or 'see the file'})" for row in rows if not works(row)]
    return "\n".join(lines) + "\n" + (f"\nNot: {', '.join(bad)}.\n" if bad else "")


def document(text: str, rows: list[dict[str, Any]]) -> str:
    """The text of the document, with the table in it."""
    before, _, rest = text.partition("<!-- zoo -->\n")
    return f"{before}<!-- zoo -->\n{table(rows)}<!-- /zoo -->{rest.partition('<!-- /zoo -->')[2]}"


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="append", choices=list(SOURCES), help="all that are installed, by default")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--limit", type=int, default=120, help="seconds per model")
    parser.add_argument("--seconds", type=int, default=3600, help="seconds in all; what is not done then is left out")
    parser.add_argument("--compile", choices=["all", "sample", "none"], default="sample", help="and export")
    parser.add_argument("--again", action="store_true", help="try models again that failed")
    parser.add_argument("--missing", action="store_true", help="only models without a row of any version")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--document", action="store_true", help="only write the table of the document")
    options = parser.parse_args()
    if options.document:
        with options.out.open(encoding="utf-8") as file:
            DOCUMENT.write_text(
                document(DOCUMENT.read_text(encoding="utf-8"), list(csv.DictReader(file))), encoding="utf-8"
            )
        return
    end = time.monotonic() + options.seconds
    rows = list(csv.DictReader(options.out.open(encoding="utf-8"))) if options.out.exists() else []
    now = versions()
    done = {
        (row["source"], row["model"])
        for row in rows
        if (options.missing or relevant(row["versions"], row["source"]) == relevant(now, row["source"]))
        and not (options.again and row["error"])
    }
    jobs, sources = [], []
    for source in options.source or SOURCES:
        try:
            cases = list(SOURCES[source]())
        except ImportError as error:
            print(f"{source}: {error}")
            continue
        sources.append(source)
        every = max(1, len(cases) // SAMPLE[source])
        for number, case in enumerate(cases):
            sampled = {"all": True, "none": False}.get(options.compile, number % every == 0)
            if (source, case.model) not in done and options.only in case.model:
                jobs.append((source, case.model, sampled))
    jobs.sort(key=lambda job: not job[2])  # the long ones first
    context = multiprocessing.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    for job in [*jobs, *[None] * options.processes]:
        queue.put(job)
    arguments = (queue, results, options.limit, options.device, sources)
    workers = [context.Process(target=work, args=arguments, daemon=True) for _ in range(options.processes)]
    for worker in workers:
        worker.start()
    for number in range(len(jobs)):
        try:
            row = results.get(timeout=max(0.1, end - time.monotonic()))
        except Exception:
            print(f"stopped after {number} of {len(jobs)} models; run again to go on")
            break
        row["versions"] = now
        rows = [r for r in rows if (r["source"], r["model"]) != (row["source"], row["model"])] + [row]
        write(options.out, rows)
        print(f"{number + 1}/{len(jobs)} {row['source']} {row['model']} {row['seconds']} s {row['error'] or 'ok'}")
    for worker in workers:
        worker.kill()


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows, in a fixed order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    with beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["source"], row["family"], row["model"])))
    beside.replace(path)


if __name__ == "__main__":
    main()
