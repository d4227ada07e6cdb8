"""The manifest of a generated set: its files, how they were generated, and their checksums."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trueup.atomic import write_atomically

NAME = "trueup-manifest.json"


@dataclass(frozen=True)
class Made:
    """A generated file, or folder of images. While it is being written, `sha256` is empty."""

    sha256: str
    bytes: int
    generator: int
    seed: int
    constants: list[list[float]]

    def same_recipe(self, other: Made) -> bool:
        """Whether both have the same generator version, seed and constants."""
        return (self.generator, self.seed, self.constants) == (other.generator, other.seed, other.constants)


@dataclass
class Manifest:
    """Manifest of a folder; empty if the folder has none."""

    folder: Path
    files: dict[str, Made] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of `folder`."""
        path = folder / NAME
        if not path.exists():
            return cls(folder)
        try:
            content = json.loads(path.read_text())
            return cls(folder, {name: Made(**made) for name, made in content["files"].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a manifest of trueup ({error}); delete it and try again") from error

    def write(self) -> None:
        """Write the manifest atomically."""
        content = {
            "origin": "generated",
            "by": "trueup data make",
            "files": {name: asdict(made) for name, made in sorted(self.files.items())},
        }
        write_atomically(self.folder / NAME, (json.dumps(content, indent=1) + "\n").encode())

    def holds(self, name: str, wanted: Made) -> bool:
        """Whether `name` exists undamaged and was generated like `wanted`, whose checksum and size are ignored."""
        made = self.files.get(name)
        path = self.folder / name
        if made is None or not made.same_recipe(wanted) or not path.exists():
            return False
        return path.stat().st_size == made.bytes and checksum(path) == made.sha256


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
