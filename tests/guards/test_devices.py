"""The core asks `Device` about devices and knows no compiler of kernels: nothing in it names CUDA or imports Triton."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import dovetail
import dovetail_offline
import dovetail_testing

CORE, OFFLINE, KIT = (Path(package.__file__ or "").parent for package in (dovetail, dovetail_offline, dovetail_testing))
CONTRACT = "contracts/device.py"
"""Where the core may say what a device is."""
ASKS = re.compile(r"\bis_cuda\b|\bdevice\.type\b|\bplace\.type\b")
ANSWERS = {CONTRACT: 1, "contracts/attention.py": 2, "runtime/device/devices.py": 4}
"""Places that compare types of torch's devices: what answers for one, and kinds that a backend declares."""
NAMED = {
    "base/settings.py": "disable_cuda_graph",  # users' word for graphs, as in vLLM and SGLang
    "plugins/process_state.py": "cuda",  # torch's own switches: a plugin that leaves one changed is named
}
"""Identifiers that name CUDA, by file."""
READS = "disable_cuda_graph"
"""That setting, which other files read."""
TRITON = re.compile(r"^triton(\.|$)")


def files(*packages: Path) -> Iterator[tuple[str, str]]:
    """Yield each file's path within its package, and its text."""
    for package in packages:
        for file in sorted(package.rglob("*.py")):
            yield str(file.relative_to(package)), file.read_text(encoding="utf-8")


def names_of(tree: ast.AST) -> Iterator[str]:
    """Yield every identifier."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield value


def words_of(tree: ast.AST) -> Iterator[str]:
    """Yield string constants of one word: names of things, not texts for users."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.value


def named(path: str, text: str) -> set[str]:
    """Return the identifiers of a file that name CUDA or NCCL."""
    found = {name for name in names_of(ast.parse(text)) if re.search("cuda|nccl", name, re.IGNORECASE)}
    return found - {READS} if path != "base/settings.py" else found


def imported(text: str) -> set[str]:
    """Return the modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_only_what_answers_asks_which_device_there_is() -> None:
    """All others ask `device_of(…)` or `is_on_host`."""
    found = {path: len(ASKS.findall(text)) for path, text in files(CORE, OFFLINE)}
    assert {path: num for path, num in found.items() if num} == ANSWERS


def test_nothing_names_cuda() -> None:
    """Neither an identifier nor a constant, but for those that are listed with their reason."""
    assert {
        path: name for path, text in files(CORE, OFFLINE) if path != CONTRACT for name in named(path, text)
    } == NAMED
    words = Counter(
        path
        for path, text in files(CORE, OFFLINE)
        for word in words_of(ast.parse(text))
        if path != CONTRACT and word.lower() in ("cuda", "nccl")
    )
    assert not words


def test_no_file_of_the_framework_imports_triton() -> None:
    """Kernels in it are the built-in set's, and anybody's."""
    found = [path for path, text in files(CORE, OFFLINE, KIT) if any(TRITON.match(name) for name in imported(text))]
    assert not found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch\ntorch.cuda.synchronize()", {"cuda"}),
        ("def f(is_cuda): ...", {"is_cuda"}),
        ("from a.cuda_ranks import B", {"a.cuda_ranks"}),
        ("x.disable_cuda_graph", set()),
        ("# torch.cuda\nx = 'on CUDA'", set()),
    ],
)
def test_the_guard_sees_names(text: str, names: set[str]) -> None:
    """In calls, arguments and imports, not in comments and texts."""
    assert named("a.py", text) == names


def test_the_guard_sees_imports() -> None:
    """Also those within functions."""
    text = "def f():\n    from triton.language import load\n    import triton"
    assert imported(text) == {"triton", "triton.language"}
