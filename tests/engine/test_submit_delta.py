"""Choices share what they have in common, on their way to the engine as well as in the server."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from dovetail.messages import Abort, Control, GrammarOption, SamplerParams, Submit, ToEngine
from dovetail_server.supervision.wire import OWN, DeltaSubmit, SubmitDecoder, SubmitEncoder, is_alike

LONG = 100_000


def choices(count: int, prompt_ids: list[int], **fields: object) -> list[Submit]:
    """Return the choices of one prompt, as a server makes them."""
    params = SamplerParams(max_tokens=8, logit_bias=dict.fromkeys(range(1000), 1.0))
    first = Submit(rid="r#0", prompt_ids=prompt_ids, params=params, **fields)  # type: ignore[arg-type]
    return [replace(first, rid=f"r#{i}", handle=i + 1, params=replace(params, seed=i * 7)) for i in range(count)]


def sent(messages: list[ToEngine]) -> tuple[list[ToEngine], int]:
    """Return what arrives, and how many bytes it took."""
    writer, reader = SubmitEncoder(), SubmitDecoder()
    frames = [writer.encode(message) for message in messages]
    return [reader.decode(data) for data in frames], sum(map(len, frames))


def test_choices_of_a_long_prompt_send_it_once() -> None:
    """128 choices take little more than one, and share one list where they arrive."""
    one, many = choices(1, [5] * LONG), choices(128, [5] * LONG)
    arrived, size = sent([*many])
    assert arrived == many
    assert len({id(message.prompt_ids) for message in arrived if isinstance(message, Submit)}) == 1
    assert size < sent([*one])[1] + 128 * 200


def test_prompts_of_a_request_send_their_parameters_once() -> None:
    """A thousand prompts with one large bias."""
    first = choices(1, [1, 2])[0]
    many: list[ToEngine] = [replace(first, handle=i, prompt_ids=[i, 2]) for i in range(1000)]
    arrived, size = sent(many)
    assert arrived == many
    assert size < 1000 * 200


@pytest.mark.parametrize("name", sorted({*Submit.__struct_fields__, *SamplerParams.__struct_fields__} - {"params"}))
def test_no_field_is_taken_from_the_request_before(name: str) -> None:
    """Whatever one field of a choice is, it arrives."""
    first, second = choices(2, [1, 2])
    other: object = object()
    if name in Submit.__struct_fields__:
        changed = replace(second, **{name: other})
        assert not is_alike(first, changed) or name in DeltaSubmit.__struct_fields__
    else:
        changed = replace(second, params=replace(second.params, **{name: other}))
        assert not is_alike(first, changed) or name in OWN


def test_what_is_equal_by_chance_arrives_whole() -> None:
    """Two clients with the same words share nothing."""
    ours, theirs = choices(2, [1, 2, 3], owner="a"), choices(2, [1, 2, 3], owner="b", cache_salt="s")
    arrived, _ = sent([*ours, *theirs, ours[0]])
    assert arrived == [*ours, *theirs, ours[0]]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_arrives_as_it_was_sent(seed: int) -> None:
    """Requests, resumed ones, aborts and controls, mixed."""
    chance = random.Random(seed)
    grammar = (GrammarOption(backend="x", kind="regex", source="a+"),)
    pool = [*choices(4, [1, 2]), *choices(4, [3], grammar=grammar), *choices(2, [4], priority=3, cache_salt="x")]
    messages: list[ToEngine] = []
    for number in range(200):
        found = chance.choice(pool)
        if chance.random() < 0.3:
            found = replace(found, output_ids=[chance.randrange(9)], again=True, cached_tokens=1, grammar_option=0)
        if chance.random() < 0.2:
            found = replace(found, params=replace(found.params, max_tokens=chance.randrange(1, 9)))
        if chance.random() < 0.2:
            found = replace(found, prompt_ids=[chance.randrange(9)])
        messages.append(replace(found, handle=number))
        if chance.random() < 0.3:
            messages.append(chance.choice([Abort(number), Control(id=number, op="stats")]))
    assert sent(messages)[0] == messages


def test_a_channel_does_not_begin_with_a_reference() -> None:
    """What refers to nothing is no request."""
    writer = SubmitEncoder()
    frames = [writer.encode(message) for message in choices(2, [1])]
    with pytest.raises(ValueError, match="the first"):
        SubmitDecoder().decode(frames[1])
