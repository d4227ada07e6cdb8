"""Changes to the graph of a forward pass: something placed at a node, a value read in passing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from trueup.graph.fusion import Following


def insert_after(
    graph: fx.Graph,
    node: fx.Node,
    target: str,
    *more: fx.Node,
    aliased: bool,
    after: fx.Node,
    beside: Collection[fx.Node],
) -> fx.Node:
    """Let everything that uses the value of `node` use what the module `target` makes of it, and of `more` values.

    Those `beside` still get the value itself. The module is called right `after` a node: this one, or a later one.
    """
    with graph.inserting_after(after):
        placed = graph.call_module(target, (node, *more))
    if aliased:
        # What was written in place is read by other names as well: so is the correction.
        with graph.inserting_after(placed):
            graph.call_method("copy_", (node, placed))
    else:
        node.replace_all_uses_with(placed, delete_user_cb=lambda user: user is not placed and user not in beside)
    return placed


def absorb(graph: fx.Graph, node: fx.Node, target: str, *more: fx.Node, follows: Following) -> fx.Node:
    """Let the module `target` do its own with the value of `node`, and `more` values, and then what follows that.

    It is called where the first of what follows stood: a residual is there by then, and not overwritten yet.
    """
    with graph.inserting_before(follows.nodes[0]):
        placed = graph.call_module(target, (node, *more), follows.arguments)
    follows.nodes[-1].replace_all_uses_with(placed)
    for passed in reversed(follows.nodes):
        graph.erase_node(passed)
    return placed


def fold(graph: fx.Graph, node: fx.Node, placed: fx.Node) -> None:
    """Let a `placed` call apply the module of `node` as well: it gets what that gets, and the module as norm=."""
    with graph.inserting_before(placed):
        norm = graph.get_attr(str(node.target))
    placed.args = (node.args[0], *placed.args[1:])
    placed.kwargs = {**placed.kwargs, "norm": norm}
    graph.erase_node(node)


def read(graph: fx.Graph, nodes: Sequence[fx.Node], looks: str, whole: str) -> tuple[fx.Node, list[fx.Node]]:
    """Call the modules `looks`.0, `looks`.1, ... on the values of `nodes`, and the module `whole` on what they make.

    Each looks at once, before its value can be overwritten. Returns the node of the whole, and those of the looks.
    """
    seen = []
    for number, node in enumerate(nodes):
        with graph.inserting_after(node):
            seen.append(graph.call_module(f"{looks}.{number}", (node,)))
    order = list(graph.nodes)
    with graph.inserting_after(max(seen, key=order.index)):
        return graph.call_module(whole, tuple(seen)), seen
