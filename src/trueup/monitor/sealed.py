"""Sealed JSON: text with a kind, a version and a checksum, so that damaged files are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def seal(kind: str, version: int, content: Mapping[str, Any]) -> str:
    """Return the text that `unseal` reads."""
    known = {"format": kind, "version": version, **content}
    return json.dumps({**known, "sha256": _digest(known)})


def unseal(text: str, kind: str, version: int) -> dict[str, Any]:
    """Return the content of a sealed text. Raises ValueError if it is something else, or damaged."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a {kind}: {error}") from error
    if not isinstance(found, dict) or found.get("format") != kind:
        raise ValueError(f"not a {kind}")
    if found.get("version") != version:
        raise ValueError(f"a {kind} of version {found.get('version')}; this trueup reads version {version}")
    if found.pop("sha256", None) != _digest(found):
        raise ValueError(f"a damaged {kind}: its contents do not match its checksum")
    return {key: value for key, value in found.items() if key not in ("format", "version")}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
