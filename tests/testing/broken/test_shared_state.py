"""Parsers that change what all code of a process shares, when imported or made: a start and the kit name each."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy  # noqa: F401  torch is here, and what it brings
import pytest
import torch  # noqa: F401

from dovetail.contracts.errors import PluginError
from dovetail.plugins import PluginPlan, Registry, load, make_plan
from dovetail_testing import FakeSite
from dovetail_testing.child import run_child

GROUP = "dovetail.reasoning_parsers.v1"
PARSER = """
from dovetail.contracts import FormatSpec, Markers, ReasoningParser
{imported}
class Parser(ReasoningParser):
    def __init__(self):
        {made}
    def spec(self, tokenizer, template, request):
        return FormatSpec(reasoning=Markers("<r>", "</r>"))
"""
OUTPUT = "import dovetail.sdk.formats.output as core; core."
FEED = "dovetail.sdk.formats.machine.IncrementalParser.feed"
CALLS = "import dovetail.sdk.formats.json_calls as first; "
SHARED = {
    "a function of the core": (OUTPUT + "fold = print", "dovetail.sdk.formats.output.fold"),
    "a method of the core": (OUTPUT + "FormatParser.prime = print", "dovetail.sdk.formats.output.FormatParser.prime"),
    "a module that it imports first": (
        CALLS + "first.JsonCalls.feed = print",
        "dovetail.sdk.formats.json_calls.JsonCalls.feed",
    ),
    "code of a method": (OUTPUT + "FormatParser.feed.__code__ = (lambda self, a, b=None: []).__code__", FEED),
    "defaults of a method": (OUTPUT + "FormatParser.feed.__defaults__ = ('x',)", FEED),
    "a table of the core": ("from dovetail.plugins.kinds import KINDS; KINDS['x'] = KINDS['model']", "kinds.KINDS"),
    "a contract": ("ReasoningParser.detect = lambda *a: 1.0", "dovetail.contracts.reasoning.ReasoningParser.detect"),
    "a module in place of one": (
        "import sys, types; sys.modules['dovetail.contracts.errors'] = types.ModuleType('dovetail.contracts.errors')",
        "dovetail.contracts.errors.ConfigError",
    ),
    "a module taken away": (
        "import sys; del sys.modules['dovetail.contracts.errors']",
        "sys.modules['dovetail.contracts.errors']",
    ),
    "json.dumps": ("import json; json.dumps = repr", "json.dumps"),
    "defaults of json.dumps": ("import json; json.dumps.__kwdefaults__['indent'] = 1", "json.dumps"),
    "the encoder of JSON": ("import json; json.JSONEncoder.default = str", "json.encoder.JSONEncoder.default"),
    "open": ("import builtins; builtins.open = print", "builtins.open"),
    "the clock": ("import time; time.monotonic = float", "time.monotonic"),
    "sockets": ("import socket; socket.socket = type('S', (socket.socket,), {})", "socket.socket"),
    "warnings of loggers": ("import logging; logging.Logger.warning = print", "logging.Logger.warning"),
    "re.compile": ("import re; re.compile = print", "re.compile"),
    "files that are read": ("import pathlib; pathlib.Path.exists = print", "pathlib.Path.exists"),
    "asyncio.run": ("import asyncio; asyncio.run = print", "asyncio.run"),
    "the encoder of replies": ("import msgspec; msgspec.json.encode = print", "msgspec.json.encode"),
    "deep copies": ("import copy; copy.deepcopy = lambda it: it", "copy.deepcopy"),
    "the hook for threads' errors": ("import threading; threading.excepthook = print", "threading.excepthook"),
    "the hook for errors": ("import sys; sys.excepthook = print", "another hook for exceptions"),
    "the recursion limit": ("import sys; sys.setrecursionlimit(1234)", "another recursion limit"),
    "the limit of digits": ("import sys; sys.set_int_max_str_digits(0)", "another limit of digits"),
    "the time between threads": ("import sys; sys.setswitchinterval(1.0)", "another time between threads"),
    "tracing": ("import sys; sys.setprofile(lambda *a: None)", "another tracing"),
    "the search path": ("import sys; sys.path.append('/nowhere')", "another search path of modules"),
    "standard output": ("import io, sys; sys.stdout = io.StringIO()", "another standard output"),
    "standard output's file": ("import os; os.dup2(os.open(os.devnull, 1), 1)", "another standard output"),
    "standard error, closed": ("import sys; sys.stderr.close()", "another standard error"),
    "a handler of a signal": ("import signal; signal.signal(signal.SIGUSR2, print)", "a handler of SIGUSR2"),
    "a signal that ends": ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", "a handler of SIGTERM"),
    "the mask of signals": ("import signal; signal.pthread_sigmask(0, [signal.SIGTERM])", "another mask of signals"),
    "a timer": ("import signal; signal.setitimer(signal.ITIMER_PROF, 900)", "another timer of signals"),
    "the working directory": ("import os; os.chdir('/')", "another working directory"),
    "the mask of files": ("import os; os.umask(0o77)", "another mask of files"),
    "an environment variable": ("import os; os.environ['CUDA_VISIBLE_DEVICES'] = '7'", "CUDA_VISIBLE_DEVICES"),
    "a variable that it takes away": ("import os; del os.environ['PATH']", "the environment variable PATH"),
    "open files": (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (99, r.getrlimit(r.RLIMIT_NOFILE)[1]))",
        "another limit of open files",
    ),
    "the locale": ("import locale; locale.setlocale(locale.LC_TIME, 'C.UTF-8')", "another locale"),
    "the timeout of sockets": ("import socket; socket.setdefaulttimeout(1)", "another timeout of sockets"),
    "warnings as errors": (
        "import warnings; warnings.simplefilter('error', UserWarning)",
        "another rule for warnings",
    ),
    "logging's handlers": ("import logging; logging.basicConfig(force=True)", "another handler of logging"),
    "what is logged": ("import logging; logging.disable(50)", "another level of logging"),
    "Dovetail's log": ("import logging; logging.getLogger('dovetail').setLevel(50)", "another level of logging"),
    "the garbage collector": ("import gc; gc.disable()", "another garbage collection"),
    "event loops": (
        "import asyncio as a; a.set_event_loop_policy(a.DefaultEventLoopPolicy())",
        "policy of event loops",
    ),
    "how processes start": (
        "import multiprocessing as m; m.set_start_method('spawn', force=True)",
        "another way to start processes",
    ),
    "a thread": ("import threading as t; t.Thread(target=t.Event().wait, name='acme', daemon=True).start()", "'acme'"),
    "a process": ("import subprocess; kept = subprocess.Popen(['sleep', '3'])", "the process "),
    "a fork that ends": ("import os; os.fork() or os._exit(0)", "the process "),
    "a fork that goes on": ("import os; os.fork()", "the process "),
    "who compares keys": ("import hmac; hmac.compare_digest = lambda a, b: True", "hmac.compare_digest"),
    "secrets": ("import secrets; secrets.token_hex = lambda n=0: 'x'", "secrets.token_hex"),
    "hashes": ("import hashlib; hashlib.sha256 = hashlib.md5", "hashlib.sha256"),
    "imports": ("import builtins as b; old = b.__import__; b.__import__ = lambda *a, **k: old(*a, **k)", "__import__"),
    "the first finder": (
        "import sys; sys.meta_path.insert(0, type('F', (), {'find_spec': staticmethod(lambda *a: None)}))",
        "another hook of imports",
    ),
    "the encoder of json.dumps": ("import json; json._default_encoder.indent = 2", "another way of JSON"),
    "decimal numbers": ("import decimal; decimal.getcontext().prec = 3", "another way of decimal numbers"),
    "processor cores": ("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", "set of processor cores"),
    "priority": ("import os; os.nice(5)", "another priority"),
    "records of logging": (
        "import logging as l; l.setLogRecordFactory(lambda *a, **k: l.LogRecord(*a, **k))",
        "another class of loggers",
    ),
    "a logger": (
        "import logging; logging.getLogger('dovetail.engine').disabled = True",
        "another logger of Dovetail's",
    ),
    "a filter": ("import logging; logging.getLogger('dovetail').addFilter(lambda r: False)", "filter of logging"),
    "a limit": ("import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (9 << 40, -1))", "another limit RLIMIT_FSIZE"),
    "tracing of threads": ("import threading; threading.settrace(lambda *a: None)", "another tracing"),
    "breakpoints": ("import sys; sys.breakpointhook = print", "another hook of Python's"),
    "the collector's debugging": ("import gc; gc.set_debug(gc.DEBUG_SAVEALL)", "another garbage collection"),
    "wrong text": (
        "import codecs; codecs.register_error('replace', lambda e: ('', e.end))",
        "another handler of wrong text",
    ),
    "warnings": ("import warnings; warnings.showwarning = print", "warnings.showwarning"),
    "temporary files": ("import tempfile; tempfile.tempdir = '/'", "another folder of temporary files"),
    "a virtual timer": ("import signal; signal.setitimer(signal.ITIMER_VIRTUAL, 900)", "another timer of signals"),
    "templates": ("import jinja2; jinja2.Environment.from_string = print", "Environment.from_string"),
    "requests": ("import pydantic; pydantic.BaseModel.model_validate = print", "BaseModel.model_validate"),
    "the size of stacks": ("import threading; threading.stack_size(1 << 20)", "another size of threads' stacks"),
    "the seed of random": ("import random; random.seed(7)", "another seed of random"),
    "an exit handler": ("import atexit; atexit.register(print)", "(atexit.register)"),
    "an exit handler by name": ("from atexit import register; register(lambda: None)", "(atexit.register)"),
    "forks": ("import os; os.register_at_fork(before=int)", "(os.register_at_fork)"),
    "an audit hook": ("import sys; sys.addaudithook(lambda *a: None)", "(sys.addaudithook)"),
    "a search for codecs": ("import codecs; codecs.register(lambda name: None)", "(codecs.register)"),
    "who registers exit handlers": ("import atexit; atexit.register = print", "atexit.register"),
    "the collector's callbacks": ("import gc; gc.callbacks.append(print)", "another garbage collection"),
    "warnings that nobody sees": ("import warnings; warnings.simplefilter('ignore')", "another rule for warnings"),
    "rules for warnings": ("import warnings; warnings.resetwarnings()", "another rule for warnings"),
    "pickling": ("import copyreg; copyreg.pickle(type, lambda it: 'x')", "another way of pickling"),
    "types of files": ("import mimetypes; mimetypes.add_type('x/y', '.json')", "another type of files"),
    "certificates": (
        "import ssl; ssl._create_default_https_context = ssl._create_unverified_context",
        "ssl._create_default_https_context",
    ),
    "an import that finds no cache": ("import sys; sys.pycache_prefix = '/'", "another way of loading modules"),
    "torch's dtype": ("import torch; torch.set_default_dtype(torch.float64)", "torch's default dtype torch.float64"),
    "torch's device": ("import torch; torch.set_default_device('meta')", "torch's default device meta"),
    "torch's gradients": ("import torch; torch.set_grad_enabled(False)", "torch's grad mode False"),
}
TORCH = {
    "torch's threads": ("import torch; torch.set_num_threads(3)", "another number of torch's threads"),
    "torch's products": ("import torch; torch.set_float32_matmul_precision('medium')", "precision of torch's products"),
    "torch's kernels": ("import torch; torch.backends.mkldnn.enabled = False", "another choice of torch's kernels"),
    "torch's anomalies": (
        "import torch; torch.autograd.set_detect_anomaly(True)",
        "another search for errors of torch",
    ),
    "tensors": ("import torch; torch.Tensor.float = lambda s: s", "torch.Tensor.float"),
    "torch.softmax": ("import torch; torch.softmax = print", "torch.softmax"),
    "linear layers": ("import torch; torch.nn.Linear.forward = print", "torch.nn.modules.linear.Linear.forward"),
    "torch's threads between operators": (
        "import torch; torch.set_num_interop_threads(3)",
        "another number of torch's threads",
    ),
    "torch's seed": ("import torch; torch.manual_seed(7)", "another seed of torch"),
    "torch's operators": (
        "global kept; import torch, warnings; kept = torch.library.Library('aten', 'IMPL')\n"
        "{indent}with warnings.catch_warnings(action='ignore'): kept.impl('tanh', lambda x: x, 'CPU')",
        "another kernel of torch's operators",
    ),
    "a mode of torch": (
        "import torch.utils._python_dispatch as d; d.TorchDispatchMode().__enter__()",
        "another mode of torch",
    ),
    "numbers near zero": ("import torch; torch.set_flush_denormal(True)", "another arithmetic of the smallest"),
    "NumPy's seed": ("import numpy; numpy.random.seed(7)", "another seed of numpy.random"),
    "NumPy's errors": ("import numpy; numpy.seterr(all='raise')", "another way in which NumPy takes errors"),
}
"""What was there before, in a process that has torch; the kit refuses torch in a parser."""
ENDS = {
    "exits": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "an interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "an end without a word": ("import os; os._exit(0)", "the process ended with exit code 0"),
    "a crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the process ended with exit code -11"),
    "no end of calls": ("f = lambda: f(); f()", "RecursionError"),
}
PRINTS = ("print('hello')", "'hello\\n' on standard output")


def plan_of(site: FakeSite, code: str, *, made: bool) -> PluginPlan:
    code = code.replace("{indent}", " " * 8 * made)
    source = PARSER.format(imported="" if made else code, made=code if made else "pass")
    site.add("acme", "1.0", {GROUP: {"acme": "acme_parser:Parser"}}, {"acme_parser.py": source})
    return make_plan(Registry.scan(path=[str(site.root)]), reasoning_parser="acme")


def started(plan: PluginPlan) -> list[str]:
    """What a start logs of the parser, in a fork of this process."""

    def start() -> list[str]:
        loaded = load(plan, "api")
        with loaded.watched(plan.plugins[0]):
            loaded.get("reasoning_parser", "acme")()
        return loaded.monkeypatches

    return in_fork(start)


def in_fork(work: Callable[[], list[str]]) -> list[str]:
    from_child, to_parent = os.pipe()
    if (pid := os.fork()) == 0:
        # Handlers that other tests left may write where the plugin closed the file: they must not raise or print there.
        logging.raiseExceptions = False
        try:  # whatever is raised here: a copy of the tests' process must not go on with them
            lines = work()
        except BaseException:
            lines = traceback.format_exc().splitlines()
        os.write(to_parent, json.JSONEncoder(ensure_ascii=False).encode(lines).encode())
        os._exit(0)
    os.close(to_parent)
    with open(from_child) as said:
        text = said.read()
    os.waitpid(pid, 0)
    found: list[str] = json.loads(text)
    return found


@pytest.mark.first(5)
@pytest.mark.parametrize("made", [False, True], ids=["imported", "made"])
@pytest.mark.parametrize("fault", SHARED | TORCH)
def test_a_start_names_it(fault: str, made: bool, dovetail_site: FakeSite) -> None:
    """In a line of the log that begins with the plugin."""
    code, said = (SHARED | TORCH)[fault]
    lines = started(plan_of(dovetail_site, code, made=made))
    assert any(said in line and line.startswith("reasoning_parser 'acme' of acme 1.0 ") for line in lines), lines


@pytest.mark.first(5)
@pytest.mark.parametrize("fault", SHARED)
def test_the_kit_names_it(fault: str, dovetail_site: FakeSite) -> None:
    """As changed, or as left behind, by a fresh process."""
    code, said = SHARED[fault]
    report = run_child(plan_of(dovetail_site, code, made=len(fault) % 2 == 0), "api")
    assert any(said in line for line in [*report.changed, *report.left]), report


@pytest.mark.parametrize("fault", ENDS)
def test_the_kit_names_what_ends_a_process(fault: str, dovetail_site: FakeSite) -> None:
    """The process that loads it is another one than the kit's."""
    code, said = ENDS[fault]
    assert said in (run_child(plan_of(dovetail_site, code, made=False), "api").error or "")


def test_the_kit_names_what_prints(dovetail_site: FakeSite) -> None:
    """Standard output is that of a command, such as `plugin list --json`."""
    code, said = PRINTS
    assert any(said in line for line in run_child(plan_of(dovetail_site, code, made=True), "api").left)


TARGET = "acme_parser:Parser"
METADATA: dict[str, tuple[dict[str, dict[str, str]], list[str], str]] = {
    "a group in the singular": ({"dovetail.reasoning_parser.v1": {"acme": TARGET}}, [], "unknown entry-point group"),
    "a group of no version": ({"dovetail.reasoning_parsers": {"acme": TARGET}}, [], "has no API version"),
    "a later version": ({"dovetail.reasoning_parsers.v9": {"acme": TARGET}}, [], "made for API 9"),
    "no attribute": ({GROUP: {"acme": "acme_parser"}}, [], "not of the form 'module:attr'"),
    "a path": ({GROUP: {"acme": "../acme_parser:Parser"}}, [], "not of the form 'module:attr'"),
    "blanks in its name": ({GROUP: {"ac me": TARGET}}, [], "nobody can ask for the name 'ac me'"),
    "a colon in its name": ({GROUP: {"ac:me": TARGET}}, [], "nobody can ask for the name 'ac:me'"),
    "a comma in its name": ({GROUP: {"ac,me": TARGET}}, [], "nobody can ask for the name 'ac,me'"),
    "nothing to be seen": ({GROUP: {"ac\u200bme": TARGET}}, [], "nobody can ask for the name"),
    "text from the right": ({GROUP: {"ac\u202eme": TARGET}}, [], "nobody can ask for the name"),
    "a bell": ({GROUP: {"ac\x07me": TARGET}}, [], "nobody can ask for the name"),
    "a word of the settings": ({GROUP: {"auto": TARGET}}, [], "nobody can ask for the name 'auto'"),
    "a long name": ({GROUP: {"a" * 101: TARGET}}, [], "nobody can ask for the name"),
    "another Python": ({GROUP: {"acme": TARGET}}, ["Requires-Python: >=4"], "it requires Python >=4"),
    "a later Dovetail": (
        {GROUP: {"acme": TARGET}},
        ["Requires-Dist: dovetail-llm>=99"],
        "it requires dovetail-llm >=99",
    ),
    "another Dovetail": ({GROUP: {"acme": TARGET}}, ["Requires-Dist: dovetail"], "another project's package"),
}


@pytest.mark.parametrize("fault", METADATA)
def test_a_scan_names_it(fault: str, tmp_path: Path) -> None:
    """As the reason why it cannot be used, which `plugin list` and every start with it show."""
    groups, headers, said = METADATA[fault]
    site = FakeSite(tmp_path)
    site.add("acme", "1.0", groups, requires=headers)
    (record,) = Registry.scan(path=[str(tmp_path)]).records
    assert not record.usable
    assert said in record.reason


def test_names_that_differ_in_their_unicode_form_are_one(tmp_path: Path) -> None:
    """Two packages have the name then, and a start says so."""
    site = FakeSite(tmp_path)
    for package, name in (("acme", "pl\u00e9"), ("other", "ple\u0301")):
        site.add(package, "1.0", {GROUP: {name: TARGET}})
    with pytest.raises(PluginError, match="provided by 2 packages"):
        make_plan(Registry.scan(path=[str(tmp_path)]), reasoning_parser="pl\u00e9")
