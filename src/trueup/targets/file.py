"""The targets file: one safetensors file, versioned and checksummed, and checked in every part when it is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from torch import Tensor

from trueup.atomic import write_atomically
from trueup.rules import Evidence
from trueup.targets import small
from trueup.targets.activation import ActivationTarget
from trueup.targets.decision import Decision
from trueup.targets.fingerprint import Fingerprint
from trueup.targets.norm import NormTarget
from trueup.targets.sites import Sites

if TYPE_CHECKING:
    from trueup.targets.values import Targets

FORMAT = "trueup-targets"
VERSION = 6
"""Version of the file format; newer files are refused. 1 had no norms, 2 no gate, 3 no checksum, 4 no small files, 5 no
learned weights."""

_GROUPS = {"activations": "", "norms": "", "gate": "gate_"}  # each with a prefix of its tensors' names
_FORMER_NAMES = {"activations": "sites", "norms": "channels", "gate": "gate"}  # up to version 3
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.int64: "I64", torch.uint8: "U8"}


def contents(targets: Targets, *, reduced: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Everything that a file holds: tensors by name, and text by name. A `reduced` file holds less (see `small`)."""
    rule = targets.rule if targets.rule is not None and targets.rule.changes else None
    gate_stays_whole = rule is not None and rule.gated
    most = {} if gate_stays_whole else {"gate": small.SMALL_GATE_SAMPLE}
    tensors: dict[str, Tensor] = {"sampled": targets.sampled[: most.get("gate") if reduced else None]}
    tuned, settled = (
        any(getattr(norm, part) is not None for norm in targets.norms.values()) for part in ("weights", "settled")
    )
    version = 6 if tuned else 5 if reduced or settled else 4  # the lowest, which older versions of this library read
    metadata = {"format": FORMAT, "version": str(version), "fingerprint": targets.fingerprint.to_json()}
    if targets.decision is not None:
        metadata["decision"] = targets.decision.to_json()
    if targets.sites:
        metadata["sites"] = targets.sites.to_json()
    for group, prefix in _GROUPS.items():
        records = {}
        for name, target in getattr(targets, group).items():
            if reduced and group == "norms" and rule is not None:
                target = target.settle(rule)
            values = {part.name: getattr(target, part.name) for part in dataclasses.fields(target)}
            parts = {key: value for key, value in values.items() if isinstance(value, Tensor)}
            for key in [key for key in values if key.startswith("settled")]:  # the rule is the decision's
                values.pop(key)
            if reduced and (group != "gate" or most):
                parts["sample"] = parts["sample"][: most.get(group, small.SMALL_SAMPLE)]
                if isinstance(target, NormTarget):
                    parts["sample"], parts["grid"] = small.encode(parts["sample"])
            tensors |= {f"{name}/{prefix}{key}": value.contiguous() for key, value in parts.items()}
            records[name] = {key: value for key, value in values.items() if key not in parts}
        metadata[group] = json.dumps(records)
    return tensors, metadata


def write(path: str | PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file whole or not at all. The same contents give the same bytes."""
    metadata = {**metadata, "checksum": checksum(tensors, metadata)}
    header: dict[str, Any] = {"__metadata__": metadata}
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps each tensor aligned
    end, parts = 0, []
    for name in names:
        parts.append(bytes_of(tensors[name]))
        begin, end = end, end + len(parts[-1])
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write_atomically(Path(path), struct.pack("<Q", len(text)) + text + b"".join(parts))


def size(tensors: Mapping[str, Tensor]) -> int:
    """Size of a file's tensors in bytes, which is nearly all of the file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """Read the fields of `Targets`. Raises ValueError, with the file's name and the reason, if anything is wrong."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no targets at {path}; make them with trueup.calibrate(model, loader).save(path)")
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            version = _version(path, metadata)
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a trueup targets file, or is damaged or cut short ({error})") from error
    try:
        if version >= 4 and metadata.get("checksum") != checksum(tensors, metadata):
            raise ValueError("its contents do not match its checksum")
        decision = Decision.from_json(metadata["decision"]) if "decision" in metadata else None
        rule = None if decision is None else decision.rule
        groups = {group: dict(_targets(group, version, metadata, tensors, rule)) for group in _GROUPS}
        _check_no_orphans(groups, tensors)
        if rule is not None and rule.tuned and not any(f"{name}/weights" in tensors for name in groups["norms"]):
            raise ValueError(f"it chose {rule} but holds no learned weights")
        if not (groups["activations"] or groups["norms"]):
            raise ValueError("it holds no targets")
        _check_tensor("sampled", tensors["sampled"], torch.int64, 1)
        for name, target in ((name, target) for group in groups.values() for name, target in group.items()):
            if not 1 <= len(target.sample) <= min(len(tensors["sampled"]), target.images):
                raise ValueError(
                    f"site {name!r} has statistics of {len(target.sample)} single images, but {target.images} images "
                    f"were seen and {len(tensors['sampled'])} are named"
                )
        return {
            **groups,
            "sampled": tensors["sampled"],
            "fingerprint": Fingerprint.from_json(metadata["fingerprint"]),
            "decision": decision,
            "sites": Sites.from_json(metadata["sites"]) if version >= 4 and "sites" in metadata else Sites(),
        }
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(f"{path} is a damaged trueup targets file: {what}; calibrate again") from error


def _version(path: str | PathLike[str], metadata: Mapping[str, str]) -> int:
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is a safetensors file without trueup targets")
    version = metadata.get("version", "")
    if not (version.isascii() and version.isdigit()):
        raise ValueError(f"{path} is a damaged trueup targets file (format version {version!r})")
    if int(version) > VERSION:
        raise ValueError(
            f"{path} has format version {version}, this trueup reads up to {VERSION}: upgrade trueup, or calibrate "
            "again"
        )
    return int(version)


def _targets(
    group: str, version: int, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], rule: Evidence | None
) -> Iterator[tuple[str, ActivationTarget | NormTarget]]:
    """Targets of a group by name; none in a file of a version that did not have the group."""
    records = json.loads(metadata.get(group if version >= 4 else _FORMER_NAMES[group], "{}"))
    for name, record in records.items():
        prefix = f"{name}/{_GROUPS[group]}"
        shape, images = tuple(record["shape"]), record["images"]
        if not all(_is_count(side) for side in (*shape, images)):
            raise ValueError(f"site {name!r} has shape {shape} and {images!r} images")
        total, sample = tensors[f"{prefix}total"], tensors[f"{prefix}sample"]
        if group == "activations":
            square, levels = tensors[f"{prefix}square"], tensors.get(f"{prefix}levels")
            _check_tensor(name, total, torch.float64, 1, ascending=True)
            _check_tensor(name, square, torch.float64, 1, negative=False)
            _check_tensor(name, sample, torch.float32, 2, ascending=True)
            if levels is not None:
                _check_tensor(name, levels, torch.float64, 1, ascending=True)
                if levels[0] != 0 or levels[-1] != 1 or (levels.diff() <= 0).any():
                    raise ValueError(f"the quantile levels of site {name!r} do not rise from 0 to 1")
            loss = record["loss"]
            if isinstance(loss, bool) or not isinstance(loss, int | float) or not 0 <= loss < float("inf"):
                raise ValueError(f"site {name!r} has the compression loss {loss!r}")
            yield name, ActivationTarget(shape, levels, total, square, loss, images, sample)
        else:
            _check_tensor(name, total, torch.float64, 2)
            if sample.dtype == torch.uint8 and version >= 5:
                sample = small.decode(sample, tensors[f"{prefix}grid"])
            _check_tensor(name, sample, torch.float16, 3)
            for variances in (total[1:], sample[:, 1:]):
                _check_tensor(name, variances, variances.dtype, variances.dim(), negative=False)
            settled = tensors.get(f"{prefix}settled") if rule is not None else None
            drift, drifted = tensors.get(f"{prefix}drift"), record.get("drifted", 0)
            if drift is not None:
                _check_tensor(name, drift, torch.float64, 2, negative=False)
                if not _is_count(drifted) or drift.shape != total[:4].shape:
                    raise ValueError(f"the drift of site {name!r} has shape {tuple(drift.shape)} of {drifted!r} images")
            elif type(drifted) is not int or drifted != 0 or record.get("drift") is not None:
                raise ValueError(f"site {name!r} has no drift, but counts {drifted!r} images for it")
            weights = tensors.get(f"{prefix}weights")
            if weights is not None:
                _check_tensor(name, weights, torch.float32, 2)
                if bool((weights <= 0).any()):
                    raise ValueError(f"the learned weights of site {name!r} are not all positive")
            known = None if settled is None else rule
            target = NormTarget(shape, total, images, sample, drift, drifted, weights, settled, known)
            if fault := target.fault_of_settled():
                raise ValueError(f"the settled statistics of site {name!r} hold {fault}")
            yield name, target


def _check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, dims: int, *, ascending: bool = False, negative: bool = True
) -> None:
    if tensor.dtype != dtype or tensor.dim() != dims or not tensor.numel():
        raise ValueError(f"{name!r} holds {tensor.dtype} of shape {tuple(tensor.shape)}, expected {dims}-D {dtype}")
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise ValueError(f"{name!r} holds NaN or infinity")
    if not negative and (tensor < 0).any():
        raise ValueError(f"squares or variances of {name!r} are negative")
    if ascending and (tensor.diff(dim=-1) < -1e-6 * tensor.abs().amax(dim=-1, keepdim=True)).any():
        raise ValueError(f"the quantiles of {name!r} are not ascending")


def _check_no_orphans(groups: Mapping[str, Mapping[str, object]], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor belongs to no target: then the target of a site was lost."""
    prefixes = {f"{name}/{_GROUPS[group]}" for group, targets in groups.items() for name in targets}
    for name in tensors.keys() - {"sampled"}:
        site, _, part = name.rpartition("/")
        prefix = f"{site}/gate_" if part.startswith("gate_") else f"{site}/"
        if prefix not in prefixes:
            raise ValueError(f"the tensor {name!r} belongs to no site")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 53


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of all tensors and all text, except the text called "checksum"."""
    digest = hashlib.sha256(json.dumps({k: v for k, v in metadata.items() if k != "checksum"}, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    """Content of a tensor, row after row."""
    data: bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data
