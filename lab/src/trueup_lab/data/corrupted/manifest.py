"""The manifest of a generated set: which files we made, with what, and their checksums."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trueup.atomic import write_atomically

NAME = "trueup-manifest.json"


@dataclass(frozen=True)
class Made:
    """One file, or one folder of images, that was made here; while it is being made, it has no checksum."""

    sha256: str
    bytes: int
    generator: int
    seed: int
    constants: list[list[float]]

    def same_recipe(self, other: Made) -> bool:
        """Whether both were made from the same generator, seed and constants."""
        return (self.generator, self.seed, self.constants) == (other.generator, other.seed, other.constants)


@dataclass
class Manifest:
    """What a folder's manifest says; empty where there is none."""

    folder: Path
    files: dict[str, Made] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of `folder`."""
        path = folder / NAME
        if not path.exists():
            return cls(folder)
        try:
            content = json.loads(path.read_text())
            return cls(folder, {name: Made(**made) for name, made in content["files"].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no manifest of ours ({error}); delete it and make the set again") from error

    def write(self) -> None:
        """Put it on the disk, whole or not at all."""
        content = {
            "origin": "generated",
            "by": "trueup data make",
            "files": {name: asdict(made) for name, made in sorted(self.files.items())},
        }
        write_atomically(self.folder / NAME, (json.dumps(content, indent=1) + "\n").encode())

    def holds(self, name: str, wanted: Made) -> bool:
        """Whether `name` is there, whole, and made as `wanted` says (its checksum and size do not count)."""
        made = self.files.get(name)
        path = self.folder / name
        if made is None or not made.same_recipe(wanted) or not path.exists():
            return False
        return path.stat().st_size == made.bytes and checksum(path) == made.sha256


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
