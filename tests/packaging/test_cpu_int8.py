"""The kernel set in C: it is compiled and installed as users do, passes its own tests, and computes a served model."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import requests
from clean_env import ROOT, CleanEnv, chat, copy_of, serving
from warm_starts import WarmStarts

from dovetail.contracts.device import DeviceView
from dovetail.contracts.kernels import make_ask
from dovetail.sdk.quantization.forms import Scaled

pytestmark = pytest.mark.install
PACKAGE = ROOT / "plugins/backends/dovetail-cpu-int8"
FLAGS = ("--dtype", "bfloat16", "--quantization", "int8")


@pytest.fixture(scope="module")
def with_set(tmp_path_factory: pytest.TempPathFactory, wheel: Path, warm: WarmStarts) -> CleanEnv:
    """An environment with Dovetail's wheel and this package, compiled there."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler: cc, gcc and clang are not there")
    pytest.importorskip("setuptools")
    env = CleanEnv(tmp_path_factory.mktemp("clean"))
    env.env["XDG_CACHE_HOME"] = str(env.folder / "cache")  # what `auto` measures is kept there
    env.install(wheel, copy_of(PACKAGE, env))
    warm.add(env.bin / "python")
    return env


@pytest.mark.full
def test_its_own_tests_pass(with_set: CleanEnv) -> None:
    """The conformance kit among them, against what was compiled; the doctor has nothing to say."""
    tests = str(with_set.folder / "src" / PACKAGE.name / "test_dovetail_cpu_int8.py")
    out = with_set.run(str(with_set.bin / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", tests)
    assert " passed" in out
    assert "no problems" in with_set.run(str(with_set.bin / "dovetail"), "plugin", "doctor")


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["cpu-int8,auto", "auto"])
def test_it_serves(kernels: str, with_set: CleanEnv) -> None:
    """Named it computes a model's products, and `auto` measures it; the reply is right, and the table says who does."""
    with serving(with_set, *FLAGS, "--kernels", kernels) as base:
        assert "Paris" in chat(base, temperature=0, max_tokens=24)["choices"][0]["message"]["content"]
        table = requests.get(f"{base}/get_server_info", timeout=60).json()["engine"]["kernels"]
    uses = [use for use in table if use["operation"].startswith("packed_norm")]
    assert uses
    for use in uses:
        if kernels == "auto":
            assert "cpu-int8" in use["measured"] or "cpu-int8" in dict(use["others"])
        else:
            assert {name for *_, name in use["served"]} == {"cpu-int8"}


def test_without_its_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was not compiled it claims nothing, with the reason in one line."""
    assert not list((PACKAGE / "src").rglob("*.so"))
    monkeypatch.syspath_prepend(str(PACKAGE / "src"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "dovetail_cpu_int8"]:
        monkeypatch.delitem(sys.modules, name)
    made: Any = __import__("dovetail_cpu_int8").CpuInt8()
    try:
        ask = make_ask("packed_linear", DeviceView("cpu"), "bfloat16", {"N": 8, "K": 8}, {"form": Scaled()})
        why = made.serves(ask)
        assert "its library was not compiled" in why
        assert "\n" not in why
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "dovetail_cpu_int8"]:
            del sys.modules[name]
