"""Made-up requests are served before real ones, and leave nothing behind."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dovetail.engine.core import EngineCore
from dovetail.engine.first_requests import PARAMS, serve_first
from dovetail.messages import SamplerParams, Submit
from dovetail_testing.engine import make_core
from dovetail_testing.models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return make_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


def reply(core: EngineCore) -> list[int]:
    """The tokens of one seeded request."""
    params = SamplerParams(max_tokens=12, temperature=1.0, seed=3, frequency_penalty=0.5)
    core.handle(Submit(rid="1", handle=1, prompt_ids=list(range(30)), params=params))
    ids: list[int] = []
    while core.has_work:
        ids += [token for delta in core.step().deltas for token in delta.ids]
    return ids


def test_they_leave_nothing_behind(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No page, no cached prefix, no row, no line in the log; the next request gets what it gets without them."""
    plain = make_core(model)
    want = reply(plain)
    plain.close()
    core = make_core(model)
    caplog.clear()  # of what the plain one has logged, where the level was low before
    with caplog.at_level(logging.INFO):
        serve_first(core)
    assert not core.has_work
    assert core.pages.num_used == 0
    assert core.pages.tree.num_pages() == 0
    assert len(core.rows.free) == core.settings.max_running_requests
    assert "batch." not in caplog.text
    assert core.step_count >= 3 * (len(PARAMS) + 1)
    assert reply(core) == want
    core.close()


@pytest.mark.parametrize("max_total_tokens", [32, 512])
def test_they_fit_into_any_cache(model: Path, max_total_tokens: int) -> None:
    """A cache of two pages is enough for them."""
    core = make_core(model, max_total_tokens=max_total_tokens)
    serve_first(core)
    assert not core.has_work
    core.close()
