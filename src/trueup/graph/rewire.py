"""Edits to the graph of a forward pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from trueup.graph.fusion import Chain


def insert_after(
    graph: fx.Graph,
    node: fx.Node,
    target: str,
    *extra: fx.Node,
    aliased: bool,
    after: fx.Node,
    readers: Collection[fx.Node],
) -> fx.Node:
    """Call the module `target` on `node` and `extra`, and let every user of `node` use the result instead.

    `readers` keep the value of `node` itself. The call is placed right `after` that node or a later one.
    """
    with graph.inserting_after(after):
        placed = graph.call_module(target, (node, *extra))
    if aliased:
        # Other names refer to the memory that was written in place, so the correction is written there too.
        with graph.inserting_after(placed):
            graph.call_method("copy_", (node, placed))
    else:
        node.replace_all_uses_with(placed, delete_user_cb=lambda user: user is not placed and user not in readers)
    return placed


def replace_chain(graph: fx.Graph, node: fx.Node, target: str, *extra: fx.Node, chain: Chain) -> fx.Node:
    """Call the module `target` on `node` and `extra` in place of the nodes of a chain.

    The call stands where the chain's first node stood: its residual exists by then and is not overwritten yet.
    """
    with graph.inserting_before(chain.nodes[0]):
        placed = graph.call_module(target, (node, *extra), chain.arguments)
    chain.nodes[-1].replace_all_uses_with(placed)
    for passed in reversed(chain.nodes):
        graph.erase_node(passed)
    return placed


def defer_norm(graph: fx.Graph, node: fx.Node, placed: fx.Node) -> None:
    """Let the call `placed` apply the batch norm at `node`: it gets the norm's input, and the module as `norm`."""
    with graph.inserting_before(placed):
        norm = graph.get_attr(str(node.target))
    placed.args = (node.args[0], *placed.args[1:])
    placed.kwargs = {**placed.kwargs, "norm": norm}
    graph.erase_node(node)


def read_values(graph: fx.Graph, nodes: Sequence[fx.Node], readers: str) -> list[fx.Node]:
    """Call the modules `readers`.0, `readers`.1, ... on the values of `nodes`, and return the calls.

    Each reader is called at once, before its value can be overwritten.
    """
    seen = []
    for number, node in enumerate(nodes):
        with graph.inserting_after(node):
            seen.append(graph.call_module(f"{readers}.{number}", (node,)))
    return seen


def combine_values(graph: fx.Graph, values: Sequence[fx.Node], target: str) -> fx.Node:
    """Call the module `target` on the `values`, as soon as all are known."""
    order = list(graph.nodes)
    with graph.inserting_after(max(values, key=order.index)):
        return graph.call_module(target, tuple(values))


def call_before_output(graph: fx.Graph, target: str, *values: fx.Node) -> None:
    """Call the module `target` on the `values` and return the result beside the output: (output, result)."""
    end = next(node for node in reversed(graph.nodes) if node.op == "output")
    with graph.inserting_before(end):
        result = graph.call_module(target, values)
    end.args = ((end.args[0], result),)
