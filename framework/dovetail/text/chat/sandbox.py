"""The sandbox that chat templates run in: Jinja without side effects, bounded in time and size.

Templates come with a model or from the operator, and run in the server's process. Jinja's sandbox keeps them from
reaching Python objects; it bounds neither time nor memory. Bounded here:

- *time*: a check is compiled into every loop iteration and macro call (the only ways to repeat work in Jinja);
- *size*: operators, filters and string methods that can make more text than they were given are checked before they
  run; lists and dicts carry a weight (the text they would print), so that nesting cannot explode either; a list that
  the template wrote itself may be changed by `append`, `extend`, `insert` and `pop` (Kimi-K2's does so);
- *numbers*: what operators and filters make has a bounded length;
- *output*: every printed value is counted, in captured blocks too, and the text of a loop's body at each iteration.

Each limit raises `TemplateLimitError`, which ends the render, and nothing else.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
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
from jinja2.utils import Namespace, pass_environment
from jinja2.visitor import NodeTransformer

from dovetail.text.chat.moment import choice, strftime_now

MAX_CHARS = 1 << 24
"""Most characters of one render, and of any text or structure built on the way."""
MAX_SECONDS = 5.0
"""Of processor time: a busy machine makes no template wrong."""
MAX_BITS = 4096
"""Of a number: squared again and again, one takes minutes in which nothing else runs."""
EVERY = 16
"""Asking for the time takes as long as a step."""
_CONTAINERS = (list, tuple, dict, set)
_FEW = 16
_JOINED = 4096
"""Pieces of text that are joined at a time: each takes some 60 bytes beside its characters."""
_MAX_WIDTH = 1 << 16
_SIZED_FILTERS = {"center", "indent", "wordwrap", "batch", "slice", "truncate", "tojson", "round"}
_CHANGES = {"append", "extend", "insert", "pop"}
_SIZED_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs"}
_WIDE_FORMAT = re.compile(r"\d{6}")


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template ran too long or built too much."""


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's own text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class RenderBudget(threading.local):
    """What one render has used. Renders run each in one thread, so the state is the thread's."""

    def __init__(self) -> None:
        self.reset()

    def reset(self, seconds: float = float("inf")) -> None:
        """Begin a render of at most `seconds`, or end one."""
        self._deadline = time.thread_time() + seconds
        self._ticks = 0
        self._printed = 0
        self._weights: dict[int, tuple[Any, int]] = {}

    def tick(self, chars: int = 0) -> None:
        """Check the time, and count `chars` of literal text that is about to be printed."""
        self._ticks += 1
        if not self._ticks % EVERY and time.thread_time() > self._deadline:
            raise TemplateLimitError("the chat template ran too long")
        self._count(chars)

    def finalize(self, value: Any) -> Any:
        """Count a value that is about to be printed, and return it."""
        self._count(self.weigh(value))
        return value

    def _count(self, chars: int) -> None:
        self._printed += chars
        self.size(self._printed)

    def size(self, chars: int) -> None:
        """Check the size of something about to be built."""
        if chars > MAX_CHARS:
            raise TemplateLimitError(f"the chat template builds more than {MAX_CHARS} characters")

    def check(self, value: Any) -> Any:
        """Check something just built, and return it."""
        self.tick()
        if isinstance(value, (str, *_CONTAINERS)):
            self.size(self.weigh(value))
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise TemplateLimitError(f"the chat template computes with numbers of more than {MAX_BITS} bits")
        return value

    def weigh(self, value: Any) -> int:
        """Return about how many characters `value` prints, visiting each container once per render.

        Those that hold few texts and numbers, and nothing else, are visited again: to remember what a loop makes at
        each iteration takes much more memory than the text that it writes.
        """
        if isinstance(value, str):
            return len(value)
        if isinstance(value, Namespace):
            raise TemplateLimitError("a namespace inside a list or dict is not supported in chat templates")
        if not isinstance(value, _CONTAINERS):
            return 1
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        items: Iterable[Any] = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        weight = 2 + sum(2 + self._weigh_item(item) for item in items)
        if len(value) > _FEW or any(isinstance(item, _CONTAINERS) for item in items):
            self._weights[id(value)] = (value, weight)  # the reference keeps the id from being reused
        return weight

    def _weigh_item(self, item: Any) -> int:
        if isinstance(item, OwnList):
            item.is_item = True
        return self.weigh(item)

    def grow(self, owner: OwnList, items: Iterable[Any]) -> None:
        """Check a list that is about to take more items."""
        self.tick()
        owner.weight += sum(2 + self._weigh_item(item) for item in items)
        self._weights.pop(id(owner), None)
        if owner.is_item:
            raise TemplateLimitError("the chat template changes a list that stands in another")
        self.size(owner.weight)


class OwnList(list[Any]):
    """A list that the template wrote itself (`[]`): the only thing that a template may change.

    What others hold, such as the request's messages, cannot be changed. A list that stands in another cannot either:
    the weight of the other is known.
    """

    weight = 2
    is_item = False


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
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
        self.budget = budget = RenderBudget()
        self.tick, self.check, self.finalize = budget.tick, budget.check, budget.finalize
        self.own = self._own
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=strftime_now)
        self.filters.update(tojson=_to_json, join=_join, random=choice)
        for name, function in self.filters.items():
            self.filters[name] = self._guard_filter(name, function)

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

    def _own(self, value: list[Any]) -> OwnList:
        """Take a list that the template writes."""
        self.budget.check(value)
        made = OwnList(value)
        made.weight = self.budget.weigh(value)
        return made

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow the methods that change a list of the template's own, beside what Jinja's sandbox allows."""
        return (isinstance(obj, OwnList) and attr in _CHANGES) or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run an operator that can build more than it was given."""
        budget = self.budget
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(other, int):
                    budget.size((budget.weigh(one) + 1) * max(other, 0))
        elif operator == "**" and not (abs(left) <= _MAX_WIDTH and abs(right) <= 64):
            raise TemplateLimitError("the chat template raises to too large a power")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return budget.check(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, macro or method from a template."""
        budget = __self.budget
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = __self._check_method(owner, __obj.__name__, args, kwargs)
        elif isinstance(owner, OwnList) and __obj.__name__ in _CHANGES:
            args = ([*args[0]],) if __obj.__name__ == "extend" and args else args
            budget.grow(owner, args[0] if __obj.__name__ == "extend" and args else args)
        return budget.check(super().call(__context, __obj, *args, **kwargs))

    def _check_method(self, owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Check a string method before it runs; return its arguments, iterators made lists."""
        if name == "join" and args:
            args = ([*args[0]],)
            self.budget.size(sum(self.budget.weigh(item) + len(owner) for item in args[0]))
        elif name == "replace" and len(args) > 1 and isinstance(args[0], str):
            self.budget.size(len(owner) + owner.count(args[0]) * len(args[1]))
        elif name in _SIZED_METHODS:
            _check_widths((*args, *kwargs.values()))
        return args

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed `str.format` of a template, its widths checked."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def guarded(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__)
            _check_widths((*args, *kwargs.values()), most=MAX_CHARS)
            return wrapped(*args, **kwargs)

        return guarded

    def _guard_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter. `wraps` keeps the attribute by which Jinja passes it a context."""
        value_at = 1 if hasattr(function, "jinja_pass_arg") else 0
        budget = self.budget

        @functools.wraps(function, assigned=())
        def guarded(*args: Any, **kwargs: Any) -> Any:
            value, rest = args[value_at], args[value_at + 1 :]
            if name in _SIZED_FILTERS:
                _check_widths((*rest, *kwargs.values()))
            elif name == "replace" and len(rest) > 1:
                text = str(value)
                budget.size(len(text) + text.count(str(rest[0])) * len(str(rest[1])))
            elif name == "format":
                _check_format(str(value))
            return budget.check(function(*args, **kwargs))

        return guarded


class _Checks(NodeTransformer):
    """Wraps `a ~ b` and list and dict displays in a size check."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        node = super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.List):
            return _call("own", node)
        is_display = isinstance(node, nodes.Dict) and node.items
        if is_display or isinstance(node, nodes.Concat) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return _call("check", node)
        return node


def _call(name: str, arg: nodes.Node) -> nodes.Call:
    """Call a function of the environment by an expression that no template can write or shadow."""
    return nodes.Call(nodes.EnvironmentAttribute(name), [arg], [], None, None, lineno=arg.lineno)


def _check_widths(values: Iterable[Any], most: int = _MAX_WIDTH) -> None:
    if any(isinstance(value, int) and value > most for value in values):
        raise TemplateLimitError(f"the chat template asks for a width above {most}")


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text) or "%*" in text:
        raise TemplateLimitError("the chat template formats to too large a width")


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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does: no HTML escapes, text left as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))
