"""Measure how fast corrupted images are made: images per second, by corruption and severity.

    python benchmarks/corruptions.py --family cifar10-c --threads 2      # on the CPU
    python benchmarks/corruptions.py --device cuda                       # on a GPU, all three families

On the CPU, ImageNet-C and CIFAR-10-C are compared with `imagecorruptions-imaug`, which takes one image at a time. On a
GPU, ImageNet-C is compared with a ResNet-50's forward pass over the same batch, in TF32 and bfloat16, and the bytes are
compared with the CPU's. Images are random: except for spatter, a little, the time does not depend on their content.
Times are the best of `--repeats`. Frost is left out, with a message, if its textures are not under the data root.
"""

from __future__ import annotations

import argparse
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from trueup_lab.data.corruptions import check, corrupt, corruption_names, severities
from trueup_lab.data.corruptions.families import FAMILIES
from trueup_lab.data.root import MissingDataError
from trueup_lab.tables import number, write_table

HERE = Path(__file__).resolve().parent
BATCH = {
    "cpu": {"mnist-c": 2000, "cifar10-c": 1000, "imagenet-c": 16},
    "cuda": {"mnist-c": 10000, "cifar10-c": 10000, "imagenet-c": 256},
}


@dataclass(frozen=True, kw_only=True)
class CorruptionSpeedRow:
    """One corruption and severity. `other` names the program it is compared with, if any."""

    family: str
    corruption: str
    severity: int | None
    device: str
    threads: int
    batch: int
    images_per_s: float = number(".0f")
    us_per_image: float = number(".2f")
    other: str | None
    other_us_per_image: float | None = number(".1f")
    times_as_fast: float | None = number(".2f")
    same_as_cpu: float | None = number(".6f")  # share of bytes


def main() -> None:
    """Time every family, print the times and write the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="repeatable (default: all)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", action="append", help="only this corruption; repeatable")
    parser.add_argument("--severity", type=int, action="append", help="repeatable (default: all)")
    parser.add_argument("--no-other", action="store_true", help="time only our corruptions")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, {name}, {options.threads} threads")
    rows = []
    for family in options.family or list(FAMILIES):
        rows += time_family(family, options)
    path = options.csv or HERE.parent / "results" / f"corruptions_{options.device}.csv"
    write_table(path, CorruptionSpeedRow, rows)
    print(f"{path} written")


def time_family(family: str, options: argparse.Namespace) -> list[CorruptionSpeedRow]:
    """Time all corruptions of a family, print the times and a summary, and return the rows."""
    count = BATCH[options.device][family]
    images = made_up(family, count).to(options.device)
    forward = {}
    if options.device == "cuda" and family == "imagenet-c" and not options.no_other:
        forward = {kind: 1e6 * time_resnet50(count, kind) / count for kind in ("tf32", "bf16")}
        for kind, microseconds in forward.items():
            print(f"{family}: a ResNet-50's forward pass in {kind}: {microseconds:.1f} us per image")
    rows = []
    for name in options.only or corruption_names(family):
        if name not in corruption_names(family):
            continue
        for severity in severities(family, name) or (None,):
            if options.severity and severity not in (None, *options.severity):
                continue
            try:
                seconds = best(
                    lambda name=name, severity=severity: corrupt(images, name, severity, family=family),
                    options.repeats,
                )
            except (MissingDataError, ImportError) as error:
                print(f"{family} {name}: left out ({error})")
                break
            ours = 1e6 * seconds / count
            other, theirs = "", None
            if forward:
                other, theirs = "ResNet-50 forward, TF32", forward["tf32"]
            elif options.device == "cpu" and family != "mnist-c" and not options.no_other:
                other, theirs = "imagecorruptions-imaug", time_imagecorruptions(images, name, severity)
            row = CorruptionSpeedRow(
                family=family,
                corruption=name,
                severity=check(family, name, severity) or None,
                device=options.device,
                threads=options.threads,
                batch=count,
                images_per_s=count / seconds,
                us_per_image=ours,
                other=other if theirs else None,
                other_us_per_image=theirs,
                times_as_fast=theirs / ours if theirs else None,
                same_as_cpu=same_as_cpu(images[:4], name, severity, family) if images.is_cuda else None,
            )
            rows.append(row)
            beside = "" if row.times_as_fast is None else f"   {row.times_as_fast:.2f} times as fast as {other}"
            beside += "" if row.same_as_cpu is None else f"   {row.same_as_cpu:.6f} of the bytes as on the CPU"
            print(f"{family} {name:18s} {severity or '':1}  {ours:10.2f} us per image{beside}", flush=True)
    summary(family, rows, forward)
    return rows


def summary(family: str, rows: Sequence[CorruptionSpeedRow], forward: dict[str, float]) -> None:
    """Print the mean time of a family, and the corruptions that are slower than what they are compared with."""
    if not rows:
        return
    each = np.array([row.us_per_image for row in rows])
    print(
        f"{family}: {each.mean():.1f} us per image on average over {len(rows)} corruptions and severities",
        end="",
    )
    print(f"; {each.mean() * 1e-6 * 1e4 * 95:.0f} s for 95 x 10,000 images" if family == "cifar10-c" else "")
    for kind, microseconds in forward.items():
        slow = sorted({row.corruption for row in rows if row.us_per_image > microseconds})
        print(f"{family}: slower than a ResNet-50's forward pass in {kind}: {', '.join(slow) or 'none'}")
    compared = [row for row in rows if row.times_as_fast is not None]
    if compared and not forward:
        slow = [f"{row.corruption} {row.severity}" for row in compared if (row.times_as_fast or 0) < 1]
        print(f"{family}: slower than imagecorruptions-imaug: {', '.join(slow) or 'none'}")


def same_as_cpu(images: torch.Tensor, name: str, severity: int | None, family: str) -> float:
    """Return the share of bytes that are the same as on the CPU."""
    gpu = corrupt(images, name, severity, family=family).cpu()
    return float((gpu == corrupt(images.cpu(), name, severity, family=family)).double().mean())


def made_up(family: str, count: int) -> torch.Tensor:
    """Return uint8 images of smooth blobs with a little noise."""
    benchmark = FAMILIES[family]
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(min(count, 64), benchmark.channels, 7, 7, generator=generator) * 255
    smooth = F.interpolate(coarse, benchmark.size, mode="bilinear")
    noisy = (smooth + torch.randn(smooth.shape, generator=generator) * 5).clamp(0, 255).to(torch.uint8)
    return noisy.repeat(-(-count // len(noisy)), 1, 1, 1)[:count].contiguous()


def best(run: Callable[[], object], repeats: int) -> float:
    """Return the shortest time of `repeats` runs in seconds, after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def time_resnet50(count: int, kind: str) -> float:
    """Return the seconds of an eager forward pass over a batch, channels last."""
    from trueup_lab.models.resnet50 import ResNet50

    model = ResNet50("bn").cuda().eval().to(memory_format=torch.channels_last)
    x = torch.randn(count, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16, enabled=kind == "bf16"):
        seconds = best(lambda: model(x), 5)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    return seconds


def time_imagecorruptions(images: torch.Tensor, name: str, severity: int | None) -> float | None:
    """Return microseconds per image of `imagecorruptions-imaug`, or None if it is not installed."""
    try:
        import imagecorruptions
    except ImportError:
        return None
    some = [image.permute(1, 2, 0).numpy().copy() for image in images[:8]]

    def run() -> None:
        for image in some:
            imagecorruptions.corrupt(image, corruption_name=name, severity=severity)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return 1e6 * best(run, 3) / len(some)


if __name__ == "__main__":
    main()
