"""Compile a traced forward pass to a function that looks up each object on the path to a module once.

torch.fx writes every module as a path from the root, `self.model.layer1.block.conv`. Each step is a call of
`nn.Module.__getattr__`, and in a network of a hundred layers these calls take as long as ten layers. A step to a
module is written as the look-up in a dictionary that this call would end in.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

from torch import fx, nn

Path = tuple[str, ...]


def function_of(graph: fx.Graph, root: nn.Module) -> Callable[..., Any]:
    """Compile the graph to a function of the module `root`, or a copy of it, and its inputs.

    fx.GraphModule keeps the source of every graph ever made, so a service that makes many would grow.
    """
    graph.on_generate_code(lambda _: lambda lines: hoist_paths(lines, functools.partial(_is_submodule, root)))
    code = graph.python_code(root_module="self")
    names: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<trueup: a model with its corrections>", "exec"), names)
    function: Callable[..., Any] = names["forward"]
    return function


def hoist_paths(lines: list[str], is_module: Callable[[Path], bool] = lambda _: False) -> list[str]:
    r"""Rewrite generated code to look up each object on a path from `self` once; `is_module` says which are modules.

    >>> print("".join(hoist_paths(["a = self.model.one(x)\n", "return self.model.two(a)\n"])))
    on_path_0 = self.model
    a = on_path_0.one(x)
    return on_path_0.two(a)
    <BLANKLINE>
    """
    names: dict[Path, str] = {}
    text, local = "".join(lines), "on_path_"
    while local in text:  # taken by a node
        local = f"_{local}"
    tree = _Shorten(names, local, is_module).visit(ast.parse(text))
    first = [f"{name} = {ast.unparse(_look_up(names, path, is_module))}\n" for path, name in names.items()]
    return [*first, *(ast.unparse(statement) + "\n" for statement in tree.body)]


class _Shorten(ast.NodeTransformer):
    """Replaces the objects on paths from `self` by local names, and collects the names."""

    def __init__(self, names: dict[Path, str], local: str, is_module: Callable[[Path], bool]) -> None:
        self._names, self._local, self._is_module = names, local, is_module

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._shortened(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self._shortened(node) if _path(node) is not None else self.generic_visit(node)

    def _shortened(self, node: ast.Attribute | ast.Call) -> ast.AST:
        path = _path(node)
        if path is None:
            return self.generic_visit(node)
        for end in range(1, len(path)):
            self._names.setdefault(path[:end], f"{self._local}{len(self._names)}")
        return _look_up(self._names, path, self._is_module)


def _path(node: ast.AST) -> Path | None:
    """Names from `self` to an attribute, written as `a.b` or `getattr(a, "b")`; None for anything else."""
    if isinstance(node, ast.Name):
        return () if node.id == "self" else None
    if isinstance(node, ast.Attribute):
        found, name = _path(node.value), node.attr
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and len(node.args) == 2
        and isinstance(node.args[1], ast.Constant)
    ):
        found, name = _path(node.args[0]), str(node.args[1].value)
    else:
        return None
    return None if found is None else (*found, name)


def _is_submodule(root: nn.Module, path: Path) -> bool:
    """Return whether every step of a path leads to a submodule, by the name under which it was registered."""
    module: nn.Module | None = root
    for name in path:
        module = None if module is None or name in module.__dict__ else module._modules.get(name)
    return module is not None


def _look_up(names: dict[Path, str], path: Path, is_module: Callable[[Path], bool]) -> ast.expr:
    """Expression for a path: the local name of all but its last step, then that step."""
    *before, last = path
    root, name = ast.Name(names.get(tuple(before), "self")), ast.Constant(last)
    if is_module(path):
        return ast.Subscript(ast.Attribute(root, "_modules"), name)
    return ast.Attribute(root, last) if last.isidentifier() else ast.Call(ast.Name("getattr"), [root, name], [])
