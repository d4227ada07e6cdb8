"""Write and parse methods as text, such as `correct:lambda1=1.0,lambda2=0.2`."""

from __future__ import annotations

import dataclasses
from typing import Any


def spell(method: Any) -> str:
    """Return a method's kind and the fields that differ from its defaults.

    A number has one spelling, so that `prior=16` and `prior=16.0` are the same method. Several numbers are joined by
    slashes: `counts=0.5/0.5/1.0`.
    """
    changed = [
        f"{field.name}={_plain(field.default, getattr(method, field.name))}"
        for field in dataclasses.fields(method)
        if getattr(method, field.name) != field.default
    ]
    return f"{method.kind}:{','.join(changed)}" if changed else str(method.kind)


def read_fields(kind: Any, text: str) -> dict[str, Any]:
    """Parse `name=value,...` into fields of the dataclass `kind`, in the types of its defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in defaults:
            raise ValueError(f"{kind.kind} has no option {name!r}; it has {', '.join(defaults) or 'no options'}")
        values[name] = _read(name, value, type(defaults[name]))
    return values


def _plain(default: Any, value: Any) -> str:
    if isinstance(default, tuple):
        return "/".join(_plain(each, number) for each, number in zip(default, value, strict=True))
    if isinstance(default, float):
        return str(float(value))
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _read(name: str, value: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[value.lower()]
        if kind is int:
            return int(value) if value.lstrip("+-").isdigit() else float(value)
        if kind is tuple:
            return tuple(float(part) for part in value.split("/"))
        return kind(value)
    except (KeyError, ValueError):
        words: dict[object, str] = {bool: "True or False", tuple: "numbers joined by slashes, such as 0.25/0.5/1.0"}
        wanted = words.get(kind, "a number")
        raise ValueError(f"{name}={value!r}: expected {wanted}") from None
