"""What the sites and rules of one forward pass share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Context:
    """What the sites of one forward pass share."""

    fitting: bool = False
    rules: dict[str, Any] = field(default_factory=dict)  # kind of site -> rule
    memory: dict[str, Any] = field(default_factory=dict)  # what a rule carries from site to site, an image a row
    depth: int = 0  # sites met so far
    probing: bool = False  # a pass that only reads what the gate needs


class Enough(Exception):  # noqa: N818
    """The gate has what it needs: the rest of the probing pass is not run."""
