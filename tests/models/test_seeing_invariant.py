"""With `--batch-invariant`, a request with images has the same bits alone, beside others, in chunks, after a hit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import seeing
from seeing import Prompts, picture
from test_seeing import TEXTS, parts_of, run

from dovetail.contracts.errors import ConfigError
from dovetail.messages import SamplerParams, Submit, TokenDelta
from dovetail_models.mistral import Mistral
from dovetail_models.pixtral import Pixtral
from dovetail_testing.engine import make_core, serve, tokens

KINDS = [
    *("gemma3", "gemma4"),
    pytest.param("llama4", marks=pytest.mark.full),
    *(pytest.param(kind, marks=pytest.mark.full) for kind in ("glm4v", "glm4v_moe")),
    *(
        pytest.param(kind, marks=pytest.mark.full)
        for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "llava", "mistral3", "internvl")
    ),
]
SMALL: dict[str, Any] = {"chunked_prefill_size": 23, "page_size": 3}


def seen(deltas: Sequence[TokenDelta]) -> tuple[list[int], list[Any]]:
    """Tokens, and log probabilities to the last bit."""
    return tokens(deltas), [logprob for delta in deltas for logprob in delta.logprobs or ()]


def asked(prompts: Prompts) -> list[Submit]:
    """Greedy and sampled requests: text alone, one to three images, and two that begin alike with an image."""
    long = list(range(3, 60))
    each = [*(parts_of(num) or [TEXTS[0]] for num in range(4))]
    each += [[long, picture(57, 91, seed=5), rest] for rest in ([7, 8], [9, 8, 7])]
    more = {"max_tokens": 6, "ignore_eos": True, "logprobs": 3}
    params = [SamplerParams(temperature=0.8 * (i % 2), seed=i + 1, **more) for i in range(len(each))]
    return [
        msgspec.structs.replace(prompts.submit(parts, rid=str(i)), params=params[i]) for i, parts in enumerate(each)
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_with_images_has_the_same_bits_in_any_company(kind: str, dtype: str, tmp_path: Path) -> None:
    """In both dtypes; an image that sees both ways is one chunk, beside others or behind a part that is cached."""
    seeing.make_vl(tmp_path, kind)
    submits = asked(Prompts(tmp_path, tmp_path / "files"))
    on: dict[str, Any] = {"batch_invariant": True, "dtype": dtype}
    one_by_one = {"disable_radix_cache": True, "max_running_requests": 1}
    alone = [seen(serve(tmp_path, [submit], **one_by_one, **on)[0]) for submit in submits]
    assert alone[4] != alone[5]
    for more in ({}, SMALL):
        assert [seen(deltas) for deltas in serve(tmp_path, submits, **more, **on)] == alone
    core = make_core(tmp_path, page_size=4, **on)
    first, second = (run(core, [submit])[0] for submit in submits[4:])
    assert [seen(first), seen(second)] == alone[4:]
    if not core.pages.states.groups:  # states are copied every 64 tokens only
        assert (second[0].cached_tokens or 0) >= 57


def test_the_text_part_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plugin of the text part does not, the start is refused by its name."""
    seeing.make_vl(tmp_path, "mistral3")
    assert make_core(tmp_path, batch_invariant=True)
    monkeypatch.setattr(Mistral, "batch_invariant", False)
    with pytest.raises(ConfigError, match=r"\(Mistral\) does not say that it is batch-invariant"):
        make_core(tmp_path, batch_invariant=True)
    monkeypatch.undo()
    monkeypatch.setattr(Pixtral, "batch_invariant", False)
    with pytest.raises(ConfigError, match=r"Mistral3ForConditionalGeneration \(Pixtral\) does not say"):
        make_core(tmp_path, batch_invariant=True)
