"""Hooks plugins with one fault each: the kit names every fault."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from dovetail.contracts import HealthCheck, RouteSet, hookimpl
from dovetail.contracts.observers import CacheObserver, RequestObserver, StatLogger
from dovetail_testing import check_class, conformance_class


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def silent(scope: Any, receive: Any, send: Any) -> None:
    return None


async def raising(scope: Any, receive: Any, send: Any) -> None:
    raise LookupError(scope["path"])


class Logger(StatLogger):
    def log(self, stats: Any) -> None:
        return None


class WaitingLogger(StatLogger):
    async def log(self, stats: Any) -> None:  # type: ignore[override]
        return None


class WaitingObserver(RequestObserver):
    async def http_ended(self, request: Any) -> None:  # type: ignore[override]
        return None


class LosingObserver(RequestObserver):
    def events_lost(self, num_events: int) -> None:
        raise ValueError(num_events)


class RaisingCache(CacheObserver):
    """Knows only whom it was told of before."""

    def cache_changed(self, events: Any) -> None:
        known = {3: (), 4: ()}
        for event in events:
            for page in event.pages:
                known[page]


class RaisingLogger(StatLogger):
    def log(self, stats: Any) -> None:
        raise OSError("disk full")


class HoardingObserver(RequestObserver):
    """Notes when a request began, by its number, and never forgets."""

    def __init__(self) -> None:
        self.began: dict[int, float] = {}

    def request_started(self, event: Any) -> None:
        self.began[event.number] = 0.0


class RecentObserver(HoardingObserver):
    """Forgets what has ended by its number, and keeps the last few, which is no fault."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[Any] = deque(maxlen=2000)

    def request_ended(self, event: Any) -> None:
        self.began.pop(event.number, None)
        self.recent.append(event)


@dataclass
class Settings:
    greeting: str = "hello"
    loud: bool = False


class Right:
    """One implementation of every hook."""

    @hookimpl
    def dovetail_settings(self) -> Any:
        return Settings

    @hookimpl
    def dovetail_reasoning_parsers(self, registry: Any) -> Any:
        registry.add("kit-qwen3", "dovetail_parsers.reasoning.think_tags:Qwen3Reasoning")

    @hookimpl
    def dovetail_configure(self, draft: Any, facts: Any) -> Any:
        draft.set("page_size", 16, why="it is tested with it")

    @hookimpl
    def dovetail_select(self, kind: str, facts: Any) -> Any:
        return "kit-qwen3" if kind == "reasoning_parser" else None

    @hookimpl
    def dovetail_process_start(self, ctx: Any) -> Any:
        return None

    @hookimpl
    def dovetail_process_stop(self, ctx: Any) -> Any:
        return None

    @hookimpl
    def dovetail_routes(self, ctx: Any) -> Any:
        return RouteSet(routes={"/hello/{name}": hello})

    @hookimpl
    def dovetail_request_observers(self, ctx: Any) -> Any:
        return RecentObserver()

    @hookimpl
    def dovetail_stat_loggers(self, ctx: Any) -> Any:
        return Logger()

    @hookimpl
    def dovetail_cli_commands(self, commands: Any) -> Any:
        commands.add("kit-hello", "dovetail_testing.run:run_conformance", help="Say hello.")

    @hookimpl
    def dovetail_health(self, ctx: Any) -> Any:
        return HealthCheck(name="fine", check=lambda: None)


def broken(hook: str, function: Callable[..., Any]) -> Any:
    """Return a plugin with one hook that is not like the right one's."""
    return type("Broken", (Right,), {hook: hookimpl(function), "__module__": __name__})()


def routes(**kwargs: Any) -> Any:
    return broken("dovetail_routes", lambda self, ctx: RouteSet(routes=kwargs))


def fail_on_stop(self: Any, ctx: Any) -> Any:
    raise ConnectionError(f"no peer for {ctx.role}")


def register_missing(self: Any, registry: Any) -> Any:
    registry.add("x", "acme_missing:Parser")


def register_wrong(self: Any, registry: Any) -> Any:
    registry.add("x", "dovetail_parsers.tools.hermes:HermesTools")


def register_changing(self: Any, registry: Any) -> Any:
    register_changing.count = getattr(register_changing, "count", 0) + 1  # type: ignore[attr-defined]
    registry.add("x", f"dovetail_parsers.reasoning.think_tags:Qwen{register_changing.count}")  # type: ignore[attr-defined]


def propose_without_reason(self: Any, draft: Any) -> Any:
    draft.set("page_size", 64, why=" ")


def propose_unknown(self: Any, draft: Any) -> Any:
    draft.set("pagesize", 64, why="speed")


class Forgetful(Right):
    """Returns its health check once."""

    checks = 0

    @hookimpl
    def dovetail_health(self, ctx: Any) -> Any:
        self.checks += 1
        return HealthCheck(name="once", check=lambda: None) if self.checks == 1 else None


@dataclass
class Lossy:
    greeting: str = "hello"

    def __post_init__(self) -> None:
        self.greeting = "hello"


FAULTS: dict[str, tuple[Any, str, str]] = {
    "hook raises": (
        broken("dovetail_health", lambda self, ctx: 1 / 0),
        "test_health",
        "dovetail_health raised ZeroDivisionError: division by zero",
    ),
    "unknown hook": (
        broken("dovetail_route", lambda self, ctx: None),
        "test_fits_the_hooks",
        "did you mean dovetail_rout",
    ),
    "unknown argument": (
        broken("dovetail_select", lambda self, kind, model: None),
        "test_fits_the_hooks",
        "Argument(s) {'model'} are declared in the hookimpl but can not be found",
    ),
    "no hook at all": (object(), "test_fits_the_hooks", "it implements no hook: mark functions with @hookimpl"),
    "registers what does not exist": (
        broken("dovetail_reasoning_parsers", register_missing),
        "test_registration",
        "its target 'acme_missing:Parser' cannot be imported",
    ),
    "registers another kind": (
        broken("dovetail_reasoning_parsers", register_wrong),
        "test_registration",
        "dovetail_parsers.tools.hermes:HermesTools is no subclass of ReasoningParser",
    ),
    "registers anew each time": (
        broken("dovetail_reasoning_parsers", register_changing),
        "test_registration",
        "already registered as",
    ),
    "selects what is not installed": (
        broken("dovetail_select", lambda self, kind: "acme-9"),
        "test_select_names_a_plugin",
        "dovetail_select answers 'acme-9' for model",
    ),
    "proposes without a reason": (
        broken("dovetail_configure", propose_without_reason),
        "test_configure_gives_reasons",
        "it proposes page_size = 64 without a reason",
    ),
    "proposes an unknown setting": (
        broken("dovetail_configure", propose_unknown),
        "test_configure_gives_reasons",
        "setting 'pagesize': unknown",
    ),
    "raises when stopped": (
        broken("dovetail_process_stop", fail_on_stop),
        "test_process_start_and_stop",
        "dovetail_process_stop raised ConnectionError: no peer for api (role api)",
    ),
    "routes of another shape": (
        broken("dovetail_routes", lambda self, ctx: {"/hello": hello}),
        "test_routes",
        "not a RouteSet",
    ),
    "route without a slash": (routes(hello=hello), "test_routes", "route 'hello' does not start with '/'"),
    "route that does not answer": (routes(**{"/a": silent}), "test_routes", "route '/a': no response is sent"),
    "route that raises": (routes(**{"/a/{b}": raising}), "test_routes", "GET raised LookupError: /a/x"),
    "observer of another shape": (
        broken("dovetail_request_observers", lambda self, ctx: print),
        "test_request_observers",
        "not a RequestObserver",
    ),
    "logger that raises": (
        broken("dovetail_stat_loggers", lambda self, ctx: RaisingLogger()),
        "test_stat_loggers",
        "RaisingLogger.log raised OSError: disk full",
    ),
    "observer that nobody would await": (
        broken("dovetail_request_observers", lambda self, ctx: WaitingObserver()),
        "test_request_observers",
        "WaitingObserver.http_ended is `async def`, and nobody would await it",
    ),
    "observer that cannot be slow": (
        broken("dovetail_request_observers", lambda self, ctx: [RequestObserver(), LosingObserver()]),
        "test_request_observers",
        "LosingObserver.events_lost raised ValueError: 3",
    ),
    "hoards requests": (
        broken("dovetail_request_observers", lambda self, ctx: [RequestObserver(), HoardingObserver()]),
        "test_observers_keep_nothing_of_requests",
        "HoardingObserver keeps ",
    ),
    "logger that nobody would await": (
        broken("dovetail_stat_loggers", lambda self, ctx: WaitingLogger()),
        "test_stat_loggers",
        "WaitingLogger.log is `async def`, and nobody would await it",
    ),
    "observer of the cache that raises": (
        broken("dovetail_cache_observers", lambda self, ctx: RaisingCache()),
        "test_cache_observers",
        "RaisingCache.cache_changed raised KeyError: 5",
    ),
    "no observer of the cache": (
        broken("dovetail_cache_observers", lambda self, ctx: Logger()),
        "test_cache_observers",
        "not a CacheObserver",
    ),
    "command without a target": (
        broken("dovetail_cli_commands", lambda self, commands: commands.add("a", "dovetail.utils:nothing", help="A.")),
        "test_cli_commands",
        "command 'a': its target 'dovetail.utils:nothing' cannot be imported",
    ),
    "health check that says too much": (
        broken("dovetail_health", lambda self, ctx: HealthCheck(name="x", check=lambda: "two\nlines")),
        "test_health",
        "health check 'x' answers 'two\\nlines'; return None or one line",
    ),
    "answers once": (
        Forgetful(),
        "test_a_broken_neighbour_does_not_matter",
        "dovetail_health returns [] beside a broken plugin, alone [<class",
    ),
    "settings lost": (
        broken("dovetail_settings", lambda self: Lossy),
        "test_options_round_trip",
        "option 'greeting' is lost: 'good day' was given",
    ),
}


def test_a_right_plugin_passes() -> None:
    """The plugin that the faults are made from has none."""
    report = check_class(conformance_class("hooks", plugin_class=Right(), options={"greeting": "good day"}))
    assert report.passed, report.text()


@pytest.mark.first(14)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_the_fault(fault: str, caught: Callable[..., None]) -> None:
    """A hooks plugin with one fault fails the test for it, with a message that names it."""
    plugin, test, message = FAULTS[fault]
    options = {"options": {"greeting": "good day"}} if fault == "settings lost" else {}
    caught("hooks", plugin, test, message, select=test, **options)
