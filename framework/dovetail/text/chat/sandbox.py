"""The sandbox that chat templates run in: Jinja without side effects, bounded in time and size.

Templates come with a model or from the operator, and run in the server's process. Jinja's sandbox keeps them from
reaching Python objects; it bounds neither time nor memory. Bounded here (`budget` counts, `bounds` has the functions):

- *time*: a check is compiled into every loop iteration, loop condition and macro call, behind each comparison and slice
  that may take long, before each value that is printed, and into what filters iterate over;
- *size*: operators, filters and methods that can make more than they were given are checked before they run; lists and
  dicts carry a weight (the text they would print), so that nesting cannot explode either; a list that the template
  wrote itself may be changed by `append`, `extend`, `insert` and `pop` (Kimi-K2's does so);
- *numbers*: what operators and filters make has a bounded length;
- *output*: every printed value is counted, in captured blocks too, and the text of a loop's body at each iteration.

Each limit raises `TemplateLimitError`, which ends the render, and nothing else.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context, pass_environment
from jinja2.visitor import NodeTransformer

from dovetail.text.chat import bounds
from dovetail.text.chat.budget import OwnList, RenderBudget, TemplateLimitError
from dovetail.text.chat.deterministic import choice, strftime_now
from dovetail.text.chat.printed import printable

_NEWLINE = re.compile(r"\r\n|\r|\n")
_JOINED = 4096
"""Pieces of text that are joined at a time: each takes some 60 bytes beside its characters."""
_MAX_BASE, _MAX_POWER = 1 << 16, 64
_LONGEST_TIME = " " * 64
"""As long as a part of a time is at most."""
_CHANGES = {"append", "extend", "insert", "pop"}
_SEARCHES = {"in", "notin"}  # codespell:ignore notin - Jinja spells it so


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's own text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _concat(pieces: Iterable[str]) -> str:
    """Join what a template, or a macro, writes."""
    if isinstance(pieces, list):
        return "".join(pieces)
    left, joined = iter(pieces), []
    while some := list(islice(left, _JOINED)):
        joined.append("".join(some))
    return "".join(joined)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that Hugging Face templates expect, with the limits above."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    concat = staticmethod(_concat)

    def __init__(self) -> None:
        # Looking for constants takes time in proportion to the square of an expression's depth, and runs filters.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock], optimized=False
        )
        self.budget = budget = RenderBudget()
        self.tick, self.check = budget.tick, budget.check
        self.finalize = pass_context(lambda _, value: budget.printed(value))  # one with a context is given no constants
        self.passed, self.step = budget.passed, budget.step
        self.own, self.joined = self._own, self._joined
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=self._strftime_now)
        self.filters.update(tojson=_to_json, join=_join, random=choice)
        for name, function in self.filters.items():
            self.filters[name] = self._guard(name, function)
        tests: dict[str, Any] = self.tests
        tests.update({name: self._guard(name, tests[name]) for name in bounds.TESTS})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, and put the checks where work repeats and where containers are made."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            literal = sum(len(text.data) for text in loop.find_all(nodes.TemplateData))
            tick = _call("tick", nodes.Const(literal))
            body: list[nodes.Node] = loop.body  # type: ignore[attr-defined] # all three have one
            body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno))
        _Checks().visit(tree)
        tree.set_environment(self)
        return tree

    def without_comments(self, source: str) -> str:
        """Return a template's text with its comments emptied: they say nothing of what it writes."""
        if "{#" not in source:
            return source
        source = "\n".join(_NEWLINE.split(source))  # as the lexer reads it
        kept, end = [], 0
        for _, kind, text in self.lex(source):
            begin = source.index(text, end)  # whitespace that the template drops lies between two tokens
            kept += [source[end:begin], "" if kind == "comment" else text]
            end = begin + len(text)
        return "".join(kept) + source[end:]

    def names_in(self, source: str) -> str:
        """Return the names of variables, attributes and functions in a template's code, a space between two."""
        return " ".join(text for _, kind, text in self.lex(source) if kind == "name")

    def printable(self, source: str) -> str:
        """Return the constant texts that a template may print."""
        return printable(super()._parse(source, None, None))

    def _own(self, value: list[Any]) -> OwnList:
        """Take a list that the template writes."""
        budget, made = self.budget, OwnList(value)
        budget.tick()
        made.weight = budget.weigh(value)
        if made.weight > budget.limits.chars:
            budget.size(made.weight)
        return made

    def _strftime_now(self, pattern: str) -> str:
        """Write the time of the moment; the function that templates know."""
        bounds.check_format(self.budget, pattern, (_LONGEST_TIME,), "%")
        return strftime_now(pattern)

    def _joined(self, parts: tuple[Any, ...]) -> str:
        """Run `a ~ b`, counting before building."""
        budget = self.budget
        budget.tick()
        budget.size(sum(map(budget.weigh, parts)))
        return "".join(map(str, parts))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow the methods that change a list of the template's own, beside what Jinja's sandbox allows."""
        return (isinstance(obj, OwnList) and attr in _CHANGES) or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run an operator that can build more than it was given."""
        budget = self.budget
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, bytes, list, tuple)) and isinstance(other, int):
                    budget.size((budget.weigh(one) + 1) * max(other, 0))
                    if not isinstance(one, (str, bytes)):
                        budget.count(len(one) * max(other, 0))
        elif operator == "**" and not (abs(left) <= _MAX_BASE and abs(right) <= _MAX_POWER):
            raise TemplateLimitError("the chat template raises to too large a power")
        elif operator == "%" and isinstance(left, (str, bytes)):
            bounds.check_format(budget, left, right if isinstance(right, tuple) else (right,), "%")
        return budget.check(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, macro or method from a template."""
        budget = __self.budget
        owner = getattr(__obj, "__self__", None)
        if owner is budget or owner is __self:  # compiled in by `_call`: no template has these
            return __obj(*args)
        if __obj is dict or __obj is Namespace or owner is dict:  # slow for numbers with one hash
            args = tuple(arg if isinstance(arg, (dict, str)) else budget.each(arg) for arg in args[:1]) + args[1:]
        if isinstance(owner, (str, bytes, int)):
            name = __obj.__name__
            if name == "join" and args:
                args = ([*budget.each(args[0])],)
            if (bound := bounds.METHODS.get(name)) is not None:
                bound(budget, owner, args, kwargs)
        elif isinstance(owner, OwnList) and __obj.__name__ in _CHANGES:
            args = ([*budget.each(args[0])],) if __obj.__name__ == "extend" and args else args
            budget.grow(owner, args[0] if __obj.__name__ == "extend" and args else args)
        return budget.check(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed `str.format` of a template, its widths and its size checked."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def guarded(*args: Any, **kwargs: Any) -> str:
            bounds.check_format(self.budget, value.__self__, (*args, *kwargs.values()), "{")
            return wrapped(*args, **kwargs)

        return guarded

    def _guard(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter, or a test that may take a while; `wraps` keeps the attribute by which Jinja passes it one."""
        at = 1 if hasattr(function, "jinja_pass_arg") else 0
        budget, bound, iterates = self.budget, bounds.FILTERS.get(name), name in bounds.ITERATING

        @functools.wraps(function, assigned=())
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if bound is not None:
                bound(budget, args[at], args[at + 1 :], kwargs)
            if iterates:
                args = (*args[:at], budget.each(args[at]), *args[at + 1 :])
            return budget.check(function(*args, **kwargs))

        return guarded


class _Checks(NodeTransformer):
    """Wraps what can build much, or take long, in a check."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        node = super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.List):
            return _call("own", node)
        if isinstance(node, nodes.Concat):
            return _call("joined", nodes.Tuple(node.nodes, "load", lineno=node.lineno))
        if (isinstance(node, nodes.Dict) and node.items) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return _call("check", node)
        is_slice = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        if is_slice or (isinstance(node, nodes.Compare) and _may_take_long(node)):
            return _call("passed", node)
        if isinstance(node, nodes.For) and node.test is not None:
            step = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None, lineno=node.lineno)
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        return node


def _may_take_long(node: nodes.Compare) -> bool:
    """Whether a comparison looks through something: with a constant it is over at once, but to find one in a list."""
    operands = [node.expr, *(operand.expr for operand in node.ops)]
    if all(isinstance(operand.op, str) and operand.op not in _SEARCHES for operand in node.ops):
        return not any(isinstance(operand, nodes.Const) for operand in operands)
    return not all(isinstance(operand, nodes.Const) for operand in operands[1:])


def _call(name: str, arg: nodes.Node) -> nodes.Call:
    """Call a function of the environment by an expression that no template can write or shadow."""
    return nodes.Call(nodes.EnvironmentAttribute(name), [arg], [], None, None, lineno=arg.lineno)


@pass_environment
def _join(environment: ChatEnvironment, value: Any, d: str = "", attribute: Any = None) -> str:
    """Join as Jinja's filter does, counting before building."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    parts: list[str] = []
    size, glue = 0, str(d)
    for item in value:
        size += environment.budget.weigh(item) + len(glue)
        environment.budget.size(size)
        parts.append(str(item))
    return glue.join(parts)


@pass_environment
def _to_json(
    environment: ChatEnvironment,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does: no HTML escapes, text left as it is."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    return "".join(environment.budget.written(encoder.iterencode(value)))  # indentation grows with each level


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))
