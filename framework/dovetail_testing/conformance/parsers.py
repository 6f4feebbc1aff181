"""What every reasoning and tool-call parser must do, whatever its format."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any, ClassVar

import pytest

from dovetail.contracts.output import FormatSpec, Markers, OutputParser, State, ToolFormat
from dovetail.contracts.reasoning import ParserRequest
from dovetail.plugins import Registry
from dovetail.sdk.formats.output import make_parser
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_testing.checks import check, fail, no_error, shown
from dovetail_testing.conformance import parsing
from dovetail_testing.conformance.base import Conformance, meant_by
from dovetail_testing.conformance.growth import bytes_kept, grows_linearly, time_grows_linearly
from dovetail_testing.conformance.parsing import ParsedReply, RequestForm, check_auto, check_events
from dovetail_testing.parsers import BytesTokenizer, PlainTemplate
from dovetail_testing.samples import Sample

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
_WORDS = ("alpha7", "bravo7", "charlie7", "delta7")
MADE_CUTS = 12
"""Places where a text that is made is cut in two."""
_CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'


class ParserConformance(Conformance):
    """What both kinds of parser share.

    Attributes:
        samples: Outputs and what they mean; without any, texts are made from the declared markers.
        tools: The request's tools, as OpenAI writes them.
        chat_template: Source of a chat template for which the parser is made ready, for one that reads its format off
            the template.
        auto_templates: Sources of chat templates of its models, for which `auto` must choose it.
    """

    samples: ClassVar[Sequence[Sample]] = ()
    tools: ClassVar[Sequence[dict[str, Any]]] = TOOLS
    chat_template: ClassVar[str] = ""
    auto_templates: ClassVar[Sequence[str]] = ()

    _instance: ClassVar[Any]

    @classmethod
    def instance(cls) -> Any:
        """Return the plugin, made once as in a server."""
        if "_instance" not in vars(cls):
            with no_error("making the parser without arguments"):
                cls._instance = cls.plugin()()
                if cls.chat_template:
                    cls._instance = cls._instance.for_template(_chat_template(cls.chat_template))
        return cls._instance

    def declared(self, tokenizer: Tokenizer | None = None) -> FormatSpec:
        """Return the format that the plugin declares for a request."""
        raise NotImplementedError

    def output_parser(self, tokenizer: Tokenizer | None) -> OutputParser:
        """Return a fresh parser for one choice."""
        return make_parser(self.declared(tokenizer), tokenizer, make_id=lambda: "id")

    def _texts(self) -> list[Sample]:
        """The samples, and texts made from the declared markers (whose meaning is not stated)."""
        return [*self.samples, *made_samples(self.declared())]

    def _soup(self, count: int, seed: int) -> list[Sample]:
        rng, spec = random.Random(seed), self.declared()
        pieces = [_CALL, '{"name": "g"', *(sample.text for sample in self.samples)]
        tails = [None, None, *(sample.prompt_tail for sample in self._texts())]
        return [Sample(parsing.soup(spec, pieces, rng), prompt_tail=rng.choice(tails)) for _ in range(count)]

    def _request_forms(self) -> list[RequestForm]:
        return parsing.options(self.declared())

    # The standard tests, those first whose message is the clearest.

    def test_spec_is_well_formed(self) -> None:
        """The declared format has markers, and they differ."""
        spec = self.declared()
        check(isinstance(spec, FormatSpec), f"it declares {shown(spec)} instead of a FormatSpec")
        for what, part in (("reasoning", spec.reasoning), ("tools", spec.tools)):
            if part is not None:
                complete = bool(part.start and part.end)
                if isinstance(part, ToolFormat):
                    complete = bool(part.start or part.also or part.bare)
                check(complete, f"{what}: a marker is empty: {part.start!r}, {part.end!r}")
                check(not part.start or part.start != part.end, f"{what}: start and end marker are both {part.start!r}")

    def test_spec_is_the_same_every_time(self) -> None:
        """The format depends on the request alone, not on the requests before it."""
        first = _without_body(self.declared())
        for number in range(2, 5):
            again = _without_body(self.declared())
            check(again == first, f"it keeps state between requests: declared {again} on call {number}, first {first}")

    def test_auto_finds_it(self) -> None:
        """`auto` chooses the parser for chat templates of its models, by a manifest that is of its format."""
        is_installed = self.plugin_class is None and self.name is not None
        record = meant_by(Registry.scan(), self.kind, str(self.name)) if is_installed else None
        check_auto(self.plugin(), record, self.auto_templates, self.declared())

    def test_samples_parse_as_declared(self) -> None:
        """Each sample gives the reasoning, content and tool calls that it states, as text and as tokens."""
        if not self.samples:
            pytest.skip("no samples declared: samples = [Sample(…)]")
        for sample in self.samples:
            for form in self._request_forms()[:2]:
                got = self._parse(form, [form.whole(sample.text)], sample.prompt_tail)
                want = ParsedReply(sample.reasoning, sample.content, tuple(sample.tool_calls), got.reasoning_tokens, "")
                right = got.visible == want.visible
                check(right, f"sample {sample.text!r} {form.name} gives {got}; it declares {want}")

    def test_interleaved_streams_are_isolated(self) -> None:
        """Replies that are parsed at the same time do not touch each other."""
        for form in self._request_forms():
            for one, two in _pairs(self._texts()):
                alone = [self._parse(form, [form.whole(s.text)], s.prompt_tail) for s in (one, two)]
                both = self._interleaved(form, (one, two))
                for sample, got, want in zip((one, two), both, alone, strict=True):
                    check(
                        got.visible == want.visible,
                        f"state leaks between streams ({form.name}): {sample.text!r} fed in turns with another reply "
                        f"gives {got}, alone {want}",
                    )

    def test_every_split_in_two(self) -> None:
        """An output cut in two at any place gives the result of the whole.

        Of texts that are made, a dozen places are tried.
        """
        for form, sample in self._cases(8, seed=1):
            whole = form.whole(sample.text)
            want = self._parse(form, [whole], sample.prompt_tail)
            is_declared = form.tokenizer is None and sample in self.samples
            most = None if is_declared else MADE_CUTS
            for chunks in parsing.two_chunks(whole, most):
                self._compare(form, sample, chunks, want, parsing.at_cut(chunks))

    def test_single_tokens(self) -> None:
        """An output that arrives one character or token at a time gives the result of the whole."""
        for form, sample in self._cases(20, seed=2):
            whole = form.whole(sample.text)
            want = self._parse(form, [whole], sample.prompt_tail)
            self._compare(form, sample, parsing.singly(whole), want, "fed one by one")

    def test_random_splits(self) -> None:
        """An output in any number of pieces, some of them empty, gives the result of the whole."""
        rng = random.Random(3)
        for form, sample in self._cases(20, seed=3):
            whole = form.whole(sample.text)
            want = self._parse(form, [whole], sample.prompt_tail)
            for _ in range(4):
                chunks = parsing.randomly(whole, rng)
                self._compare(form, sample, chunks, want, f"in {len(chunks)} random pieces")

    def test_nothing_is_lost(self) -> None:
        """Every word of the output is in exactly one place: reasoning, content or a call; none is lost or doubled."""
        markers = parsing.markers_of(self.declared())
        for form in self._request_forms():
            for text in _with_words(self.declared()):
                for chunks in ([form.whole(text)], parsing.singly(form.whole(text))):
                    got = self._parse(form, chunks, None)
                    for word in _WORDS:
                        found, written = got.in_order.count(word), text.count(word)
                        check(found >= written, f"text is lost: {word!r} of {text!r} ({form.name}) is nowhere in {got}")
                        check(found <= written, f"text is duplicated: {word!r} of {text!r} ({form.name}) stands "
                              f"{found} times in {got}")  # fmt: skip
        for form, sample in self._cases(30, seed=4):
            if self.declared().tools is not None or not _declares_all(self.declared()) or form.name.endswith("out"):
                continue
            got = self._parse(form, [form.whole(sample.text)], sample.prompt_tail)
            kept, all_of_it = (parsing.bare(text, markers) for text in (got.in_order, sample.text))
            verb = "lost" if len(kept) < len(all_of_it) else "duplicated or invented"
            check(kept == all_of_it, f"text is {verb}: {sample.text!r} ({form.name}) gives {got}")

    def test_truncation_at_every_position(self) -> None:
        """An output that stops anywhere keeps what was written, a marker's beginning included, and invents nothing."""
        spec = self.declared()
        for form in self._request_forms()[:2]:
            for sample in self._texts():
                whole = form.whole(sample.text)
                full = self._parse(form, [whole], sample.prompt_tail)
                for length in range(len(whole)):
                    written = whole[:length] if form.tokenizer is None else _decoded(form.tokenizer, whole[:length])
                    got = self._parse(form, [whole[:length]], sample.prompt_tail, "length")
                    check_truncated(spec, written, got, full)

    def test_never_raises(self) -> None:
        """Marker soup, random bytes and nothing at all raise in neither `feed` nor `finish`, whatever the reason."""
        rng = random.Random(5)
        for sample in self._soup(60, seed=5):
            for form in self._request_forms():
                parser = parsing.primed(self.output_parser, form, sample.prompt_tail)
                chunks = parsing.randomly(form.whole(sample.text), rng)
                parsing.events_of(parser, chunks, rng.choice(["stop", "length", "abort"]))
        for form in self._request_forms()[1:]:
            size = form.tokenizer.vocab_size if form.tokenizer is not None else 1
            for _ in range(60):
                ids = [rng.randrange(size) for _ in range(rng.randrange(24))]
                parsing.events_of(self.output_parser(form.tokenizer), [ids, []], "length")

    def test_prompt_tail_sets_the_state(self) -> None:
        """`prime` reads the state from what the template appended, and gives nothing out."""
        reasoning = self.declared().reasoning
        if reasoning is None:
            pytest.skip("the format has no reasoning")
        opened, closed = reasoning.start + reasoning.after_start, reasoning.before_end + reasoning.end
        tails = {opened: State.IN, opened + closed + reasoning.after_end: State.OUT, "<|assistant|>\n": State.OPEN}
        for tail, want in tails.items():
            parser = self.output_parser(None)
            got = parser.prime(tail)
            check(got == want, f"after the prompt's tail {tail!r} the state is {got}, not {want}")

    def test_work_is_linear(self) -> None:
        """Twice the output costs about twice the work, counted in operations, however it is cut.

        Each unit stands behind nothing and behind one of the openings in turn.
        """
        texts = self._long_texts()
        openings = list(dict.fromkeys(opening for opening, _ in texts))
        for number, (opening, unit) in enumerate(texts):
            turn = number // len(openings) % len(openings)
            if opening not in ("", openings[turn]):
                continue
            is_linear, one, two = grows_linearly(self._work(opening, unit, 3), 400)
            check(is_linear, f"work grows faster than the output: {opening!r} and then {unit!r} repeated costs {one} "
                  f"operations, twice as much of it {two}")  # fmt: skip

    def test_time_is_linear(self) -> None:
        """No piece costs more because much came before it: nothing searches or copies the whole text again."""
        for opening, unit in self._long_texts()[:2]:
            is_linear, one, four = time_grows_linearly(self._work(opening, unit, 16), 40_000)
            check(is_linear, f"time grows faster than the output: {opening!r} and then {unit!r} repeated takes "
                  f"{one * 1e3:.0f} ms, four times as much of it {four * 1e3:.0f} ms")  # fmt: skip

    def test_keeps_nothing_of_replies(self) -> None:
        """Replies that are over, no two of which are alike, leave nothing behind in the plugin."""
        form, samples = self._request_forms()[0], self._texts()[:4]
        numbers = count()

        def serve() -> None:
            number = next(numbers)
            sample = samples[number % len(samples)]
            self._ask()
            self._parse(form, [form.whole(f"{number} {sample.text} {number}")], sample.prompt_tail)

        kept = bytes_kept(serve, 12)
        check(not kept, f"{kept} bytes more for every reply: keep what belongs to one in the parser of that reply")

    # Helpers.

    def _ask(self) -> None:
        """Ask the plugin what a server asks of it for each request, beside the format."""

    def _parse(self, form: RequestForm, chunks: parsing.Chunks, tail: str | None, reason: str = "stop") -> ParsedReply:
        return parsing.parse(self.output_parser, form, chunks, tail, reason)

    def _cases(self, num_soup: int, seed: int) -> list[tuple[RequestForm, Sample]]:
        texts = [*self._texts(), *self._soup(num_soup, seed)]
        return [(form, sample) for form in self._request_forms() for sample in texts]

    def _compare(self, form: RequestForm, sample: Sample, chunks: parsing.Chunks, want: ParsedReply, how: str) -> None:
        got = self._parse(form, chunks, sample.prompt_tail)
        if got.visible != want.visible:
            what = parsing.difference(got, want)
            fail(
                f"{what} where the stream is cut: {sample.text!r} ({form.name}) {how} gives {got}, in one piece {want}"
            )

    def _interleaved(self, form: RequestForm, samples: Sequence[Sample]) -> list[ParsedReply]:
        made = [parsing.primed(self.output_parser, form, sample.prompt_tail) for sample in samples]
        rows = [parsing.singly(form.whole(sample.text)) for sample in samples]
        events: list[list[Any]] = [[] for _ in samples]
        for step in range(max(map(len, rows))):
            for parser, row, seen in zip(made, rows, events, strict=True):
                if step < len(row):
                    piece = row[step]
                    seen += parser.feed((), piece) if isinstance(piece, str) else parser.feed(piece)
        for parser, seen in zip(made, events, strict=True):
            seen += parser.finish("stop")
        return [parsing.reply_of(parser, seen) for parser, seen in zip(made, events, strict=True)]

    def _long_texts(self) -> list[tuple[str, str]]:
        """Openings, and what is repeated behind them."""
        spec = self.declared()
        markers = parsing.markers_of(spec)
        units = ["a", *(marker[:-1] for marker in markers[:2]), *markers, "\n", '{"', "[1,"]
        openings = [*markers[::2], ""]
        openings += [sample.text[: len(sample.text) // 2] for sample in self.samples[:1]]
        return [(opening, unit) for unit in units for opening in openings]

    def _work(self, opening: str, unit: str, size: int) -> Callable[[int], None]:
        def work(length: int) -> None:
            text = opening + unit * (length // len(unit))
            parser = self.output_parser(None)
            for begin in range(0, len(text), size):
                parser.feed((), text[begin : begin + size])
            parser.finish("length")

        return work


class ReasoningParserConformance(ParserConformance):
    """What every reasoning parser must do."""

    kind = "reasoning_parser"

    def declared(self, tokenizer: Tokenizer | None = None) -> FormatSpec:
        """Return the format that the plugin declares for a request."""
        view = tokenizer or BytesTokenizer()
        with no_error("spec"):
            template = _chat_template(self.chat_template) if self.chat_template else PlainTemplate()
            spec: FormatSpec = self.instance().spec(view, template, ParserRequest())
        return spec

    def test_imports_no_torch(self) -> None:
        """Loading the parser imports neither torch nor transformers: its tests and the server's start stay quick."""
        _check_light(self._child().heavy_after_load)

    def test_spec_takes_any_request(self) -> None:
        """Arguments of a chat template that the format does not know are no error."""
        for arguments in ({"enable_thinking": False}, {"thinking": True}, {"unknown": [1]}, {"enable_thinking": "x"}):
            request = ParserRequest(template_kwargs=arguments)
            with no_error("spec", f" for the request's template arguments {arguments}"):
                self.instance().spec(BytesTokenizer(), PlainTemplate("{{ x }}"), request)

    def test_arguments_are_only_read(self) -> None:
        """The request's template arguments are as they were after `spec`."""
        arguments: dict[str, Any] = {"enable_thinking": True, "unknown": [1]}
        before = deepcopy(arguments)
        self.instance().spec(BytesTokenizer(), PlainTemplate("{{ x }}"), ParserRequest(template_kwargs=arguments))
        check(arguments == before, f"it changes the request's template arguments: {before} became {arguments}")


class ToolParserConformance(ParserConformance):
    """What every tool-call parser must do."""

    kind = "tool_parser"

    def declared(self, tokenizer: Tokenizer | None = None) -> FormatSpec:
        """Return the format that the plugin declares for a request."""
        return self._extended(FormatSpec())

    def _ask(self) -> None:
        self.instance().grammar(deepcopy(list(self.tools)), "auto", False, parallel=True)

    def _extended(self, spec: FormatSpec) -> FormatSpec:
        with no_error("extend"):
            extended: FormatSpec = self.instance().extend(spec, deepcopy(list(self.tools)))
        return extended

    def test_imports_no_torch(self) -> None:
        """Loading the parser imports neither torch nor transformers: its tests and the server's start stay quick."""
        _check_light(self._child().heavy_after_load)

    def test_extend_keeps_the_reasoning_format(self) -> None:
        """What the reasoning parser declared is kept, and tools are added."""
        given = FormatSpec(reasoning=Markers("<think>", "</think>", ended_by_tools=True), initial=State.IN)
        got = self._extended(given)
        check(got.tools is not None, "extend adds no tool format")
        kept = (got.reasoning, got.initial) == (given.reasoning, given.initial)
        check(kept, f"extend loses the reasoning format: {given} became {got}; use dataclasses.replace(spec, tools=…)")

    def test_tools_are_only_read(self) -> None:
        """The request's tools and `tool_choice` are as they were after `extend` and `grammar`."""
        tools, before = deepcopy(list(self.tools)), deepcopy(list(self.tools))
        self.instance().extend(FormatSpec(), tools)
        for choice in ("auto", "required"):
            self.instance().grammar(tools, choice, True, parallel=True)
            self.instance().grammar(tools, choice, False, parallel=False)
        check(tools == before, f"it changes the request's tools: {shown(before)} became {shown(tools)}")
        named = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
        asked = deepcopy(named)
        self.instance().grammar(tools, asked, False, parallel=False)
        check(asked == named, f"it changes the request's tool_choice: {named} became {asked}")

    def test_argument_deltas_are_valid_json(self) -> None:
        """Calls are numbered from 0, started before their arguments and ended once; arguments add up to valid JSON."""
        for form in self._request_forms():
            for sample in self._texts():
                for chunks in ([form.whole(sample.text)], parsing.singly(form.whole(sample.text))):
                    parser = parsing.primed(self.output_parser, form, sample.prompt_tail)
                    check_events(parsing.events_of(parser, chunks), sample)

    def test_events_are_well_formed(self) -> None:
        """In marker soup too, events keep their order: no arguments before a start, no second end, no empty text."""
        for form in self._request_forms():
            for sample in self._soup(40, seed=6):
                parser = parsing.primed(self.output_parser, form, sample.prompt_tail)
                check_events(parsing.events_of(parser, parsing.singly(form.whole(sample.text))), sample)

    def test_grammar_takes_every_tool_choice(self) -> None:
        """`grammar` answers every `tool_choice` with a grammar or None."""
        named = {"type": "function", "function": {"name": self.tools[0]["function"]["name"]}}
        for choice in ("none", "auto", "required", named):
            for strict in (False, True):
                with no_error("grammar", f" for tool_choice {choice!r}"):
                    self.instance().grammar(list(self.tools), choice, strict, parallel=not strict)


def made_samples(spec: FormatSpec) -> list[Sample]:
    """Texts made from a format's markers. What they mean is not stated, only that cutting must not change it."""
    texts = [Sample("no marker at all")]
    if (markers := spec.reasoning) is not None:
        opened, closed = markers.start + markers.after_start, markers.before_end + markers.end
        texts += [
            Sample(f"{opened}think 🎉{closed}{markers.after_end}answer"),
            Sample(f"{markers.start}think{markers.end}answer {markers.start}more{markers.end}"),
            Sample(f"think{closed}answer\n", prompt_tail=opened),
            Sample(f"never closed{markers.end[:-1]}", prompt_tail=opened),
            Sample(f"answer{markers.start}", prompt_tail=opened + closed),
        ]
    if (tools := spec.tools) is not None:
        texts += [
            Sample(f"so\n{tools.start}\n{_CALL}\n{tools.end}"),
            Sample(f"{tools.start}{_CALL}{tools.end}\n{tools.start}{_CALL}{tools.end} and more"),
            Sample(f"{tools.start}no call{tools.end}"),
            Sample(f"so {tools.start[:-1]}"),
        ]
    return texts


def begins(whole: str, arguments: str, written: str) -> bool:
    """Whether arguments that were cut off are a beginning of the whole.

    They may have been closed (`"}`), and may end with the beginning of a marker, which is text once nothing follows.
    """
    return any(_begins(whole, text, written) for text in (arguments, arguments.rstrip('\ufffd"}]')))


@lru_cache(maxsize=4)
def _chat_template(source: str) -> ChatTemplate:
    """Return one template for all tests: what is read off it is kept with it."""
    return ChatTemplate({"default": source})


def _begins(whole: str, arguments: str, written: str) -> bool:
    same = next((at for at, pair in enumerate(zip(arguments, whole, strict=False)) if pair[0] != pair[1]), len(whole))
    tail = arguments[same:].lstrip('"')
    try:
        return not tail or written.endswith(json.loads(f'"{tail}"'))
    except ValueError:
        return False


def check_truncated(spec: FormatSpec, written: str, got: ParsedReply, full: ParsedReply) -> None:
    """Check the reply of an output that was cut off behind `written`; `full` is that of the whole."""
    markers = parsing.markers_of(spec)
    may_be_call = _may_be_call(spec, written)
    for part in (got.reasoning, got.content):
        check(part is None or may_be_call or part in written, f"it invents text: {written!r} cut off there gives {got}")
    if not may_be_call and _declares_all(spec):
        kept, all_of_it = parsing.bare(got.in_order, markers), parsing.bare(written, markers)
        lost = len(kept) < len(all_of_it)
        verb = "swallows text at the end (a marker's beginning is text)" if lost else "duplicates or invents text"
        check(kept == all_of_it, f"it {verb}: {written!r} cut off there gives {got}")
    for (name, arguments), (full_name, whole) in zip(got.calls, full.calls, strict=False):
        end = f"a call cut off after {written[-24:]!r}"
        check(full_name.startswith(name), f"{end} is named {name!r}, no beginning of {full_name!r}")
        same = begins(whole, arguments, written) or not _declares_all(spec)
        check(same, f"{end} has arguments {arguments!r}, no beginning of {whole!r}")


def _may_be_call(spec: FormatSpec, written: str) -> bool:
    """Whether part of the text may have been taken for a call."""
    if (tools := spec.tools) is None:
        return False
    return any(text in written for text in (tools.start, *tools.also)) or any(char in written for char in tools.bare)


def _declares_all(spec: FormatSpec) -> bool:
    """Whether all that is not text stands in the spec: a machine of its own may know of more than markers."""
    return spec.machine is None or spec.reasoning is not None


def _with_words(spec: FormatSpec) -> list[str]:
    """Texts whose words are found again wherever they went."""
    one, two, three, four = _WORDS
    texts = [f"{one} {two}\n\n{three}"]
    if (markers := spec.reasoning) is not None:
        start, end = markers.start, markers.end
        texts += [f"{start}{one}{end}{two}", f"{start}\n{one} {start} {two}\n{end}\n\n{three} {end} {four}"]
        texts += [f"{start}{one}{end[:-1]}", f"{start}{one} {two}", f"{one}{start[:-1]} {two}"]
    if (tools := spec.tools) is not None:
        start, end = tools.start, tools.end
        texts += [f"{one} {start}{two}{end} {three}", f"{one}{start}{two}", f"{one}{start[:-1]}{two}"]
        texts += [f"{one}\n{start}{two}{start}{three}{end}{four}", f"{one}{end}{two}"]
    return texts


def _pairs(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    return [(samples[i], samples[(i + step) % len(samples)]) for step in (0, 1) for i in range(len(samples))]


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def _without_body(spec: FormatSpec) -> FormatSpec:
    return spec if spec.tools is None else replace(spec, tools=replace(spec.tools, body=len))  # type: ignore[arg-type]


def _check_light(heavy: Sequence[str]) -> None:
    found = [name for name in heavy if name in ("torch", "transformers")]
    check(not found, f"loading it imports {' and '.join(found)}, which takes seconds: a parser must load without")
