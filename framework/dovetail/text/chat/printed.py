"""The constant texts that a chat template can print: those in its output, and in variables and macros used there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from jinja2 import nodes

_HOLDERS = (nodes.Assign, nodes.AssignBlock, nodes.For, nodes.Macro)


def printable(tree: nodes.Template) -> str:
    """Return the texts of a template that a conversation may show, a line between two.

    A branch whose condition is a constant that rules it out shows none, nor does a variable that no output uses.
    """
    shown: list[nodes.Node] = []
    held: dict[str, list[nodes.Node]] = defaultdict(list)
    _collect(tree.body, shown, held)
    texts, names, done = [], list(shown), set()
    while names:
        for node in _leaves(names.pop()):
            if isinstance(node, nodes.Name):
                names += [] if node.name in done else held[node.name]
                done.add(node.name)
            else:
                texts.append(node.data if isinstance(node, nodes.TemplateData) else node.value)
    return "\n".join(texts)


def _collect(body: Iterable[nodes.Node], shown: list[nodes.Node], held: dict[str, list[nodes.Node]]) -> None:
    """Sort a body's parts: what is shown, and what variables, loops and macros hold."""
    for node in body:
        if isinstance(node, _HOLDERS):
            inner: list[nodes.Node] = []
            if isinstance(node, nodes.Macro | nodes.AssignBlock):
                _collect(node.body, inner, held)
            else:
                inner.append(node.node if isinstance(node, nodes.Assign) else node.iter)
            for name in [node.name] if isinstance(node, nodes.Macro) else _names(node.target):
                held[name] += inner
        if isinstance(node, nodes.Output):
            shown.append(node)
        elif isinstance(node, nodes.If):
            _collect(_branches(node), shown, held)
        elif not isinstance(node, nodes.Macro | nodes.AssignBlock | nodes.Expr):
            _collect(node.iter_child_nodes(), shown, held)


def _branches(node: nodes.If) -> Iterator[nodes.Node]:
    """Yield what stands in the branches of a condition that are not ruled out."""
    for one in (node, *node.elif_):
        fits = _truth(one.test)
        if fits is not False:
            yield from one.body
        if fits:
            return
    yield from node.else_


def _truth(node: nodes.Node) -> bool | None:
    """Return what a condition says whatever the conversation; None where that depends on it."""
    if isinstance(node, nodes.Const):
        return bool(node.value)
    if isinstance(node, nodes.Not):
        inner = _truth(node.node)
        return None if inner is None else not inner
    if isinstance(node, nodes.And | nodes.Or):
        decides = isinstance(node, nodes.Or)
        sides = (_truth(node.left), _truth(node.right))
        return decides if decides in sides else None if None in sides else not decides
    return None


def _leaves(node: nodes.Node) -> Iterator[nodes.Name | nodes.TemplateData | nodes.Const]:
    """Yield the texts and names of what is printed."""
    if isinstance(node, nodes.CondExpr) and (fits := _truth(node.test)) is not None:
        chosen = node.expr1 if fits else node.expr2
        yield from _leaves(chosen) if chosen is not None else ()
    elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "raise_exception":
        return
    elif isinstance(node, nodes.Name | nodes.TemplateData):
        yield node
    elif isinstance(node, nodes.Const):
        yield from (node,) if isinstance(node.value, str) else ()
    else:
        for child in node.iter_child_nodes():
            yield from _leaves(child)


def _names(target: nodes.Node) -> list[str]:
    """Return the names that an assignment sets; of an attribute the object's."""
    if isinstance(target, nodes.Name | nodes.NSRef):
        return [target.name]
    return [name for child in target.iter_child_nodes() for name in _names(child)]
