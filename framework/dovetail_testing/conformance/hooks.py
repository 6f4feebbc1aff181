"""What every hooks plugin must do: fit the hooks, return what they promise, and leave its neighbours alone."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from itertools import count
from typing import Any, ClassVar

import pytest

from dovetail.contracts import CliCommands, ConfigDraft, HealthCheck, RouteSet, hookimpl
from dovetail.contracts.errors import PluginError
from dovetail.contracts.observers import (
    CacheEvent,
    CacheObserver,
    ChoiceTimes,
    HttpEnd,
    HttpStart,
    LoadStats,
    RequestEnd,
    RequestObserver,
    RequestProgress,
    RequestStart,
    StatLogger,
)
from dovetail.plugins import KINDS, HookManager, Registry, hookspecs
from dovetail.plugins.manager import REGISTRATION_HOOKS
from dovetail.plugins.plan import PlannedPlugin
from dovetail_testing.checks import as_failure, check, no_error, shown
from dovetail_testing.conformance.base import Conformance, check_round_trip
from dovetail_testing.conformance.growth import bytes_kept

# One request to an ASGI application, without a server.

TIMEOUT_S = 10.0


def response_of(app: Any, path: str) -> int | None:
    """Send `GET path`, with `x` for every `{parameter}`, and return the status, None if no response begins."""
    filled = re.sub(r"{[^}]*}", "x", path)
    names = [name.partition(":")[0] for name in re.findall(r"{([^}]*)}", path)]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": filled,
        "raw_path": filled.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "path_params": dict.fromkeys(names, "x"),
    }
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def main() -> None:
        await asyncio.wait_for(app(scope, receive, send), TIMEOUT_S)

    asyncio.run(main())
    started = [message for message in sent if message["type"] == "http.response.start"]
    return started[0].get("status") if len(started) == 1 else None


HOOKS = tuple(name for name, value in vars(hookspecs).items() if name.startswith("dovetail_") and callable(value))
OBSERVED = 400
"""Requests in each round in which it is counted what is kept: more than a buffer of bounded size is likely to hold."""
_HERE = __name__


class HooksConformance(Conformance):
    """What every hooks plugin must do. `plugin_class` is the module or the object that holds the hooks.

    Attributes:
        facts: What hooks are told of the server that starts.
        remembers: How many requests an observer keeps on purpose behind their end, at most. Beyond 2,000 the kit cannot
            wait for that; a test of the plugin's own shows the bound.
    """

    kind = "hooks"
    remembers: ClassVar[int] = 2000
    facts: ClassVar[Mapping[str, str]] = {"device": "cpu", "architecture": "LlamaForCausalLM", "model_path": "model"}

    def _manager(self) -> HookManager:
        with as_failure(PluginError, "it does not fit the hooks: "):
            return HookManager([(self.planned(), self.plugin())])

    def _has(self, hook: str) -> bool:
        """Whether the plugin implements a hook."""
        found = getattr(self.plugin(), hook, None)
        return callable(found) and hasattr(found, "dovetail_impl")

    def _need(self, *hooks: str) -> None:
        if not any(self._has(hook) for hook in hooks):
            pytest.skip(f"it has no {' or '.join(hooks)}")

    def _roles(self) -> tuple[str, ...]:
        return self.planned().roles

    def _values(self, hook: str) -> list[Any]:
        """What the plugin returns for a hook that is called in its processes."""
        manager, found = self._manager(), []
        for role in self._roles():
            with as_failure(PluginError, "", f" (role {role})"):
                found += [result.value for result in manager.in_process(hook, role)]
        return found

    def _each(self, hook: str) -> Iterator[Any]:
        """What it returns, one or several of a kind, one by one."""
        for value in self._values(hook):
            yield from value if isinstance(value, list | tuple) else [value]

    # The standard tests.

    def test_fits_the_hooks(self) -> None:
        """Every function that is marked as a hook is one, with arguments that it has, and there is at least one."""
        self._manager()
        check(
            any(map(self._has, HOOKS)),
            f"it implements no hook: mark functions with @hookimpl; hooks: {', '.join(HOOKS)}",
        )

    def test_registration(self) -> None:
        """What it registers can be imported and implements its kind's contract; registering twice is no error."""
        self._need(*REGISTRATION_HOOKS.values())
        registry = Registry()
        for _ in range(2):
            self._register(registry)
        for record in registry.records:
            contract = KINDS[record.kind].contract
            found = _import(record.target, f"{record.kind} {record.name!r}")
            if contract is not None:
                base = _import(contract, "the contract")
                fits = inspect.isclass(found) and issubclass(found, base)
                check(fits, f"{record.kind} {record.name!r}: {record.target} is no subclass of {base.__qualname__}")

    def _register(self, registry: Registry) -> None:
        manager, planned = self._manager(), self.planned()
        for kind, hook in REGISTRATION_HOOKS.items():
            given = registry.for_kind(kind, planned.distribution, planned.version)
            self._collect(manager, hook, {"registry": given})

    def _collect(self, manager: HookManager, hook: str, arguments: Mapping[str, Any]) -> list[Any]:
        with as_failure(PluginError):
            return [result.value for result in manager.collect(hook, lambda planned: arguments)]

    def test_select_names_a_plugin(self) -> None:
        """`dovetail_select` answers every kind with None or the name of an installed plugin."""
        self._need("dovetail_select")
        registry = Registry.scan()
        self._register(registry)
        manager = self._manager()
        for kind in KINDS:
            with as_failure(PluginError):
                answer = manager.select(kind, self.facts)
            if answer is not None:
                with as_failure(PluginError, f"dovetail_select answers {answer!r} for {kind}: "):
                    registry.resolve(kind, answer)

    def test_configure_gives_reasons(self) -> None:
        """Every default that it proposes is of a setting that exists, with a reason."""
        self._need("dovetail_configure")
        draft = ConfigDraft(known=_known_settings())
        with as_failure(PluginError):
            self._manager().configure(draft, self.facts)
        for proposal in draft.proposals:
            check(
                bool(proposal.why.strip()), f"it proposes {proposal.key} = {proposal.value!r} without a reason (why=…)"
            )

    def test_process_start_and_stop(self) -> None:
        """Starting and stopping works in each of its processes, and again after that."""
        self._need("dovetail_process_start", "dovetail_process_stop")
        for role in self._roles():
            manager = self._manager()
            for _ in range(2):
                for hook in ("dovetail_process_start", "dovetail_process_stop"):
                    with as_failure(PluginError, "", f" (role {role})"):
                        manager.in_process(hook, role)

    def test_routes(self) -> None:
        """Routes are ASGI applications under paths that start with `/`, and answer a request."""
        self._need("dovetail_routes")
        for routes in self._values("dovetail_routes"):
            check(isinstance(routes, RouteSet), f"dovetail_routes returns {shown(routes)}, not a RouteSet")
            for path, app in routes.routes.items():
                check(path.startswith("/"), f"route {path!r} does not start with '/'")
                check(not path.startswith("/x/"), f"route {path!r}: the prefix /x/<plugin> is added for you")
                with no_error(f"route {path!r}: GET"):
                    status = response_of(app, path)
                check(
                    isinstance(status, int) and 200 <= status < 600, f"route {path!r}: no response is sent: {status!r}"
                )

    def test_request_observers(self) -> None:
        """Observers are RequestObservers, and take a request's start, progress and end, and that of HTTP requests."""
        self._need("dovetail_request_observers")
        for observer in self._each("dovetail_request_observers"):
            what = f"dovetail_request_observers returns {shown(observer)}, not a RequestObserver"
            check(isinstance(observer, RequestObserver), what)
            arrived = HttpStart(number=1, request_id="q", at=1.0, trace={"traceparent": "malformed"})
            start = RequestStart(request_id="r1", num_choices=1, num_prompt_tokens=3, number=1, http=1)
            end = RequestEnd(
                request_id="r1",
                num_prompt_tokens=3,
                num_completion_tokens=2,
                finish_reasons=("stop",),
                seconds=0.1,
                number=1,
                choices=(ChoiceTimes(queued_s=0.01, prefill_s=0.04, decode_s=0.05),),
            )
            first = RequestProgress(request_id="r1", num_tokens=1, first_token_s=0.05, gaps_s=[])
            more = RequestProgress(request_id="r1", num_tokens=1, first_token_s=None, gaps_s=[0.05])
            left = HttpEnd(request_id="q", method="POST", route="", status=None, seconds=0.1)
            http = HttpEnd(request_id="q", method="POST", route="/generate", status=200, seconds=0.1, number=1)
            _calls(observer.http_started, arrived)
            _calls(observer.request_started, start)
            _calls(observer.request_progressed, first)
            _calls(observer.request_progressed, more)
            _calls(observer.request_ended, end)
            _calls(observer.http_ended, http)
            _calls(observer.http_ended, left)
            _calls(observer.events_lost, 3)

    def test_observers_keep_nothing_of_requests(self) -> None:
        """Requests that have ended leave nothing behind in an observer, but for what is bounded."""
        self._need("dovetail_request_observers")
        if self.remembers > HooksConformance.remembers:
            pytest.skip(f"it remembers {self.remembers} requests on purpose")
        for observer in self._each("dovetail_request_observers"):
            kept = bytes_kept(partial(_whole_request, observer, count(10)), OBSERVED)
            check(not kept, f"{type(observer).__name__} keeps {kept} bytes more for every request that has ended: "
                  "forget in request_ended and http_ended what is known by their numbers")  # fmt: skip

    def test_stat_loggers(self) -> None:
        """Loggers are StatLoggers with an interval, and take a snapshot."""
        self._need("dovetail_stat_loggers")
        stats = LoadStats(
            step=1,
            num_running=1,
            num_queued=0,
            num_used_tokens=5,
            num_cached_tokens=0,
            max_total_tokens=100,
            gen_throughput=1.5,
        )
        for logger in self._each("dovetail_stat_loggers"):
            is_logger = isinstance(logger, StatLogger)
            check(is_logger, f"dovetail_stat_loggers returns {shown(logger)}, not a StatLogger")
            check(float(logger.interval_s) > 0, f"interval_s of {type(logger).__name__} is {logger.interval_s!r}")
            _calls(logger.log, stats)

    def test_cache_observers(self) -> None:
        """Observers are CacheObservers and take every call about the cache."""
        self._need("dovetail_cache_observers")
        stored = CacheEvent(pages=[3, 4], token_ids=[1, 2, 3, 4])
        salted = CacheEvent(pages=[5], token_ids=[5, 6], parent=4, cache_salt="s")
        for observer in self._each("dovetail_cache_observers"):
            is_observer = isinstance(observer, CacheObserver)
            check(is_observer, f"dovetail_cache_observers returns {shown(observer)}, not a CacheObserver")
            _calls(observer.cache_cleared, 0)
            _calls(observer.cache_changed, [stored, salted, CacheEvent(pages=[5])])
            _calls(observer.events_lost, 3)
            _calls(observer.cache_changed, [CacheEvent(pages=[4, 3])])

    def test_cli_commands(self) -> None:
        """Commands have a help line and a target that can be imported and called."""
        self._need("dovetail_cli_commands")
        commands = CliCommands(reserved=frozenset({"serve", "plugin", "version"}))
        with as_failure(PluginError):
            self._manager().cli_commands(commands)
        for command in commands.commands.values():
            found = _import(command.target, f"command {command.name!r}")
            check(callable(found), f"command {command.name!r}: {command.target} cannot be called")
            check(bool(command.help.strip()), f"command {command.name!r} has no help line")

    def test_health(self) -> None:
        """A health check has a name and answers None or one line."""
        self._need("dovetail_health")
        for health in self._values("dovetail_health"):
            check(isinstance(health, HealthCheck), f"dovetail_health returns {shown(health)}, not a HealthCheck")
            check(bool(health.name), "the health check has no name")
            answer = _calls(health.check)
            fine = answer is None or (isinstance(answer, str) and answer != "" and "\n" not in answer)
            check(fine, f"health check {health.name!r} answers {answer!r}; return None or one line of what is wrong")

    def test_a_broken_neighbour_does_not_matter(self) -> None:
        """Beside a plugin whose every hook raises, this one is still called and gives the same."""
        neighbour = PlannedPlugin(
            kind="hooks", name="broken", target=f"{_HERE}:_BrokenNeighbour", distribution="neighbour", version="1",
            api=1, roles=self._roles(),
        )  # fmt: skip
        for order in (0, 1):
            pairs = [(self.planned(), self.plugin())]
            pairs.insert(order, (neighbour, _BrokenNeighbour()))
            manager = HookManager(pairs)
            for hook in ("dovetail_routes", "dovetail_health", "dovetail_request_observers", "dovetail_stat_loggers"):
                if not self._has(hook):
                    continue
                alone = [type(value) for value in self._values(hook)[:1]]
                context = {"ctx": _context(self.planned(), self._settings())}
                results = manager.collect(hook, lambda planned, given=context: given, strict=False)  # type: ignore[misc]
                beside = [type(result.value) for result in results if result.plugin.name != "broken"]
                check(alone == beside, f"{hook} returns {beside} beside a broken plugin, alone {alone}")

    def _check_options(self) -> None:
        if self._has("dovetail_settings"):
            declared = self._collect(self._manager(), "dovetail_settings", {})
            for settings in declared:
                check(inspect.isclass(settings), f"dovetail_settings returns {shown(settings)}, not a class")
                check_round_trip(settings, self.options or {})

    def _settings(self) -> Any:
        from dovetail.plugins.options import make_options

        declared = self._collect(self._manager(), "dovetail_settings", {})
        return make_options(declared[0], self.options or {}) if declared else None


def _calls(function: Callable[..., Any], *arguments: Any) -> Any:
    name = getattr(function, "__qualname__", str(function))
    check(not inspect.iscoroutinefunction(function), f"{name} is `async def`, and nobody would await it: use `def`")
    with no_error(name):
        return function(*arguments)


def _import(target: str, what: str) -> Any:
    module, _, path = target.partition(":")
    with as_failure(Exception, f"{what}: its target {target!r} cannot be imported: "):
        found: Any = importlib.import_module(module)
        for attr in path.split("."):
            found = getattr(found, attr)
    return found


def _known_settings() -> frozenset[str]:
    """Names of all settings: the server's where it is installed, which it is with Dovetail."""
    home = "dovetail_server.settings.serve" if importlib.util.find_spec("dovetail_server") else "dovetail.base.settings"
    module = importlib.import_module(home)
    settings = getattr(module, "ServeSettings", None) or module.EngineSettings
    return frozenset(settings.model_fields)


def _context(planned: PlannedPlugin, settings: Any) -> Any:
    from dovetail.contracts import ProcessContext

    return ProcessContext(role=planned.roles[0], plugin=planned.name, options=planned.options, settings=settings)


class _BrokenNeighbour:
    """A hooks plugin whose every hook raises."""

    @hookimpl
    def dovetail_routes(self) -> None:
        raise RuntimeError("broken")

    @hookimpl
    def dovetail_health(self) -> None:
        raise RuntimeError("broken")

    @hookimpl
    def dovetail_request_observers(self) -> None:
        raise RuntimeError("broken")

    @hookimpl
    def dovetail_stat_loggers(self) -> None:
        raise RuntimeError("broken")


def _whole_request(observer: RequestObserver, numbers: Iterator[int]) -> None:
    """Tell of one request, from its headers to its end, that is like none before."""
    number = next(numbers)
    name = f"request-{number}"
    observer.http_started(HttpStart(number=number, request_id=name, at=1.0, trace={}))
    observer.request_started(
        RequestStart(request_id=name, num_choices=1, num_prompt_tokens=3, number=number, http=number)
    )
    observer.request_progressed(RequestProgress(request_id=name, num_tokens=1, first_token_s=0.05, gaps_s=[]))
    observer.request_ended(
        RequestEnd(
            request_id=name, num_prompt_tokens=3, num_completion_tokens=1, finish_reasons=("stop",), seconds=0.1,
            number=number,
        )
    )  # fmt: skip
    observer.http_ended(
        HttpEnd(request_id=name, method="POST", route="/generate", status=200, seconds=0.1, number=number)
    )
