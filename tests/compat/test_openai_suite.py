"""OpenAI's Python client's own tests of its API, against a server of the demo model under the names that they use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import Worker, install

from dovetail.demo import MODEL_DIR

pytestmark = [pytest.mark.full, pytest.mark.registry, pytest.mark.timeout(600)]
VERSION = "3.54.0"
NAMES = "dovetail-demo gpt-6-astra gpt-3.5-turbo-instruct text-embedding-3-small model"
CLIENTS = "not aiohttp and not loose and not Async and not raw_response and not streaming_response"
"""Clients that check no reply, asynchronous ones, and the same requests for the raw reply and for one that is streamed
to the caller see nothing that the strict ones do not."""
PARTS = (
    *("chat", "responses", "test_completions.py", "test_models.py", "test_files.py", "test_batches.py"),
    *("test_embeddings.py", "test_responses.py"),
)
MADE_UP = (
    *("'resp_677efb5139a88190b512bc3fef8e535d'", "'resp_123'", "'response_id'", "'file_id'", "'batch_id'", "'after'"),
    *("'completion_id'", "'ft:gpt-4o-mini:acemeco:suffix:abc123'"),
)
"""Ids of what is not there: they were written for a server that answers with examples."""
REFUSED = {
    "web_search_options": "beside both tools and functions, and a bias for the token 'foo'",
    "suffix": "the model has no tokens for it; also a bias for the token 'foo'",
    "tools[0].async": "beside made-up conversations, prompts and responses",
}
"""What is refused with its reason, and what else of the same request could not be done."""


BASE64 = "base64"
"""The client asks for it where it is not told otherwise, decodes it after it has checked the reply, and checks for
numbers: so the strict one refuses what it asked for, of OpenAI's own server, too."""


def nested(folder: Path) -> Path:
    """The demo model as one whose vectors may be cut: a test asks for one number of each."""
    shutil.copytree(MODEL_DIR, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_matryoshka": True}))
    return folder


def test_everything_that_asks_for_what_is_there_passes(tmp_path: Path, python_package: Callable[..., Path]) -> None:
    """A test fails only at an id that its authors made up, or at a field that is refused for the reason above."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    install(
        [*pip, "--no-build-isolation", "--no-binary", "openai", "-d", str(tmp_path), f"openai=={VERSION}"], "openai"
    )
    (archive,) = tmp_path.glob("openai-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    source = tmp_path / f"openai-{VERSION}"
    extra = python_package("pytest-asyncio==1.4.0")
    # Most requests have no bound: the demo model's replies to "string" would otherwise end where its context does.
    flags = f"--served-model-name {NAMES} --context-length 512"
    worker = Worker(f"{flags} --model-path {nested(tmp_path / 'model')}")
    try:
        worker.wait()
        report = tmp_path / "report.xml"
        tests = [f"tests/api_resources/{part}" for part in PARTS]
        options = ["-q", "-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-o", "addopts=", "-k", CLIENTS]
        options += [f"--junit-xml={report}"]
        paths = os.pathsep.join([str(source / "src"), str(extra)])
        command = [sys.executable, "-m", "pytest", *options, *tests]
        env = {**os.environ, "TEST_API_BASE_URL": f"{worker.base}/v1", "PYTHONPATH": paths}
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # hypothesis and schemathesis take two seconds to load
        done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, timeout=480, check=False)
    finally:
        worker.close()
    assert report.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    cases = list(ET.parse(report).iter("testcase"))
    reasons: Counter[str] = Counter()
    for case in cases:
        for failure in [*case.findall("failure"), *case.findall("error")]:
            text = (failure.get("message") or "") + (failure.text or "")[-2000:]
            found = next((name for name in (*MADE_UP, *REFUSED) if name in text), None)
            if "Embeddings" in (case.get("classname") or "") and "APIResponseValidationError" in text:
                found = BASE64
            assert found is not None, (case.get("classname"), case.get("name"), text[-600:])
            reasons["made up" if found in MADE_UP else found] += 1
    print(f"{len(cases) - reasons.total()} of {len(cases)} pass; {dict(reasons)}")
    assert len(cases) > 60
    assert reasons[BASE64] <= 6
    assert {name: count for name, count in reasons.items() if name not in ("made up", BASE64)} == {
        "web_search_options": 2, "suffix": 2, "tools[0].async": 3,
    }  # fmt: skip
