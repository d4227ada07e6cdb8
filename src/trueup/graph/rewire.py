"""Edit the graph of a forward pass: insert, replace and read nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from trueup.graph.folds import refold, unfold
from trueup.graph.fusion import Chain
from trueup.graph.inputs import batch_of
from trueup.graph.tracing import Place


def insert_batch(graph: fx.Graph) -> fx.Node:
    """Insert a node that counts the images in the inputs."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        return graph.call_function(batch_of, tuple(inputs))


def insert_unfolded(graph: fx.Graph, place: Place, batch: fx.Node | None) -> fx.Node:
    """Unfold the value of a folded site, right after its node."""
    with graph.inserting_after(place.node):
        return graph.call_function(unfold, (place.node, batch, place.channel_dim))


def insert_after(
    graph: fx.Graph,
    place: Place,
    target: str,
    *extra: fx.Node,
    after: fx.Node,
    readers: Collection[fx.Node],
    batch: fx.Node | None = None,
) -> fx.Node:
    """Call the module `target` on a site's value and `extra`, and replace the value by the result for its users.

    `readers` keep the value itself. The call is placed right `after` the site's node or a later one. `batch` is the
    number of images, for folded sites.
    """
    node, kept = place.node, [*readers]
    with graph.inserting_after(after):
        if place.site.folded:
            placed = graph.call_function(refold, (None, node, place.channel_dim))
            with graph.inserting_before(placed):
                rows = graph.call_function(unfold, (node, batch, place.channel_dim))
                inner = graph.call_module(target, (rows, *extra))
            placed.args = (inner, *placed.args[1:])
            kept.append(rows)
        else:
            placed = graph.call_module(target, (node, *extra))
    if place.aliased:
        # The site wrote in place into memory that is read elsewhere, so the correction is written there too.
        with graph.inserting_after(placed):
            graph.call_method("copy_", (node, placed))
    else:
        node.replace_all_uses_with(placed, delete_user_cb=lambda user: user is not placed and user not in kept)
    return placed


def replace_chain(graph: fx.Graph, node: fx.Node, target: str, *extra: fx.Node, chain: Chain) -> fx.Node:
    """Call the module `target` on `node` and `extra` in place of the nodes of a chain.

    The call takes the place of the chain's first node: by then the residual exists and is not overwritten yet.
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


def allow_overwriting(graph: fx.Graph, node: fx.Node, placed: fx.Node) -> None:
    """Tell the call `placed` which module made its input at `node`: it may write its result there."""
    with graph.inserting_before(placed):
        source = graph.get_attr(str(node.target))
    placed.kwargs = {**placed.kwargs, "source": source}


def read_values(graph: fx.Graph, nodes: Sequence[fx.Node], readers: str) -> list[fx.Node]:
    """Call the modules `readers`.0, `readers`.1, ... on the values of `nodes`, and return the calls.

    Each reader is called right after its node, before the value can be overwritten.
    """
    seen = []
    for number, node in enumerate(nodes):
        with graph.inserting_after(node):
            seen.append(graph.call_module(f"{readers}.{number}", (node,)))
    return seen


def combine_values(graph: fx.Graph, values: Sequence[fx.Node], target: str) -> fx.Node:
    """Call the module `target` on the `values`, right after the last of them."""
    order = list(graph.nodes)
    with graph.inserting_after(max(values, key=order.index)):
        return graph.call_module(target, tuple(values))


def call_before_output(graph: fx.Graph, target: str, *values: fx.Node) -> None:
    """Call the module `target` on the `values`, and make the graph return (output, result)."""
    end = next(node for node in reversed(graph.nodes) if node.op == "output")
    with graph.inserting_before(end):
        result = graph.call_module(target, values)
    end.args = ((end.args[0], result),)
