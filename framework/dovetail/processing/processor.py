"""`Processor`: tokenizer, chat template and parsers, with what the started engine allows; for the server and `LLM`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dovetail.base.distribution import DISTRIBUTION
from dovetail.checkpoint.formats import AUTO, Formats
from dovetail.contracts.errors import RequestError
from dovetail.contracts.output import TemplateView
from dovetail.contracts.processor import ImageProcessor
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.grammar.pipeline import StructuredOutputs
from dovetail.messages import EngineInfo
from dovetail.plugins import LoadedPlugins, PlannedPlugin, PluginPlan, load
from dovetail.plugins.loader import describe
from dovetail.processing.embeddings import Embedder, TextRules
from dovetail.processing.images import ImageLoader, Message, PreparedImage, make_image_processor
from dovetail.processing.oddities import oddities, usable_defaults
from dovetail.processing.refusals import prompt_far_too_long, prompt_too_big, token_without_row
from dovetail.processing.reranker import Reranker
from dovetail.processing.sampling import LogitsRequests, SamplingLimits
from dovetail.processing.tasks import Tasks
from dovetail.processing.text_settings import TextSettings, template_switches
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.text.chat.budget import FULL, INLINE
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.parsing.fitted import bound_reasoning, bound_tools, thinking_behind
from dovetail.text.tokenizer.tokenizer import Tokenizer, check_text

ELSEWHERE = ("reasoning_parser", "tool_parser", "processor", "api", "checkpoint")
"""Kinds of plugins that another process which reads bodies needs, too."""
BYTES_PER_TOKEN = 32
"""No tokenizer packs ordinary text so tightly: a prompt of more bytes per token of context cannot fit."""
MIN_PROMPT_BYTES = 1 << 16
SAMPLED = 1 << 17
"""Of texts above so many characters, parts are tokenized first, a quarter of it, or of a megabyte where it has more."""
SAMPLES, MAX_SAMPLE = 16, 1 << 14
CLIPPED, BESIDE = 1 << 12, 1 << 6
"""Of a text that will be cut at least so many characters are read, and so many tokens more than are kept."""
MORE_TOKENS = 1 << 16
"""By so many tokens more than twice the context is what parts of a text say of the whole believed to be too long."""


logger = logging.getLogger(__name__)


class ProcessorSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Where tokenizer, template and parsers come from.

    Attributes:
        folder: The tokenizer's.
        model: The model's, whose configuration holds.
        chat_template: As `--chat-template`.
        plan: The parsers of the plugin plan, and the formats that read the model.
        load_format: As `--load-format`.
    """

    folder: str
    model: str
    chat_template: str | None = None
    plan: PluginPlan = PluginPlan()
    load_format: str = AUTO


SHARED = ("limits", "template_defaults", "tasks", "rules", "reranker")
"""What a prompt depends on beside its request, by the names that both classes have for it."""


class ProcessorStart(msgspec.Struct, frozen=True, kw_only=True):
    """How another process gets the same."""

    setup: ProcessorSetup
    limits: SamplingLimits
    template_defaults: dict[str, Any]
    tasks: Tasks
    rules: TextRules
    reranker: Reranker


class Processor:
    """What turns requests into token ids and tokens into replies. Safe to share between threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        tools_name: str = "",
        plugins: LoadedPlugins | None = None,
        setup: ProcessorSetup | None = None,
        model: ModelFolder | None = None,
    ) -> None:
        """Keep the parts; `with_engine_limits` adds what follows from the settings and the started engine.

        Args:
            tokenizer: The model's.
            template: The chat template.
            reasoning: Parser in use.
            tools: Parser in use.
            tools_name: The name of `tools`, for errors.
            plugins: With the grammar backends.
            setup: How another process gets the same; None if it cannot.
            model: What the model's folder says; None: nothing of embeddings and scores.
        """
        self.tokenizer = tokenizer
        self.template = template
        self.reasoning = reasoning
        if reasoning is not None:
            reasoning.spec(tokenizer, template, ParserRequest())  # what fails here would fail each request
            template.begin_thinking = thinking_behind(reasoning, tokenizer, template)
        self.tools = tools
        self.tools_name = tools_name
        self.load_images: ImageLoader = _not_here
        """Loads images; where this process does not, it says so."""
        self.begun: Callable[[list[int], int], None] | None = None
        """As of `Tokenizer.encode`, for the prompt that is made ready; None: nobody wants to know."""
        self.grammar = StructuredOutputs({})
        self.embedder = Embedder()
        self.rules = TextRules()
        """What becomes of texts that embeddings are made of."""
        self.reranker = Reranker()
        self.tasks = Tasks()
        self.processors = LogitsRequests({}) if plugins is None else LogitsRequests.load(plugins)
        self.images: ImageProcessor | None = None
        """What turns images into prompts' tokens; None: the server reads text only."""
        if plugins is not None and model is not None:
            self.images = make_image_processor(plugins, model, tokenizer.added_tokens)
        self._plugins = plugins
        self._setup = setup
        self._model = model
        self.template_defaults: dict[str, Any] = {}
        self.plugin_states: list[tuple[str, str, str, str]] = []
        """What loading found, as arguments of `Registry.mark`."""
        self.limits = SamplingLimits(vocab_size=tokenizer.vocab_size, context_len=0, max_prompt_bytes=0)

    @classmethod
    def load(cls, settings: TextSettings, plan: PluginPlan, model: ModelFolder) -> Processor:
        """Load everything that settings and plan name.

        Args:
            settings: Of the text.
            plan: The plugins.
            model: What the model's folder says.

        Raises:
            ConfigError: The tokenizer, the template or a parser cannot be used.
        """
        return cls.of_plugins(settings, load(plan, "api"), model)

    @classmethod
    def of_plugins(cls, settings: TextSettings, plugins: LoadedPlugins, model: ModelFolder) -> Processor:
        """Make it of plugins that have been loaded; arguments are those of `load`.

        Raises:
            ConfigError: See `load`.
        """
        plan = plugins.plan
        parsers = tuple(planned for planned in plan.plugins if planned.kind in ELSEWHERE)
        made = cls._of(
            ProcessorSetup(
                folder=str(model.tokenizer_path),
                model=str(model.path),
                chat_template=settings.chat_template,
                plan=msgspec.structs.replace(plan, plugins=parsers),
                load_format=model.formats.named,
            ),
            plugins,
            model,
        )
        made.plugin_states = plugins.states()
        if settings.processor is None and settings.no_decoder:
            made.template.no_images = settings.no_decoder
        return made

    @classmethod
    def of_start(cls, start: ProcessorStart) -> Processor:
        """Load what another process has, but for grammars.

        Raises:
            ConfigError: See `load`.
        """
        setup, plugins = start.setup, load(start.setup.plan, "api")
        formats = Formats.of_plan(plugins, setup.load_format)
        model = ModelFolder(Path(setup.model), Path(setup.folder), weights=False, formats=formats)
        made = cls._of(setup, plugins, model)
        made.template.limits = FULL
        for name in SHARED:
            setattr(made, name, getattr(start, name))
        return made

    @classmethod
    def _of(cls, setup: ProcessorSetup, plugins: LoadedPlugins, model: ModelFolder) -> Processor:
        reasoning = setup.plan.of_kind("reasoning_parser")
        tools = setup.plan.of_kind("tool_parser")
        tokenizer = Tokenizer.of_files(model.tokenizer_path, model.texts)
        template = ChatTemplate.load(tokenizer.files, setup.chat_template)
        return cls(
            tokenizer,
            template,
            reasoning=bound_parser(plugins, reasoning[0], template, bound_reasoning) if reasoning else None,
            tools=bound_parser(plugins, tools[0], template, bound_tools) if tools else None,
            tools_name=tools[0].name if tools else "",
            plugins=plugins,
            setup=setup,
            model=model,
        )

    def planned(self, kind: str) -> PlannedPlugin | None:
        """Return the plan's plugin of a kind that has one at most; None where it has none."""
        return None if self._plugins is None else next(iter(self._plugins.plan.of_kind(kind)), None)

    def with_engine_limits(self, info: EngineInfo, settings: TextSettings) -> Processor:
        """Set the limits of the started engine and return self.

        Raises:
            ConfigError: The model cannot do what `--task` asks for.
        """
        if self._model is not None:
            self.embedder = Embedder.of_folder(self._model, info.pool)
            self.reranker = Reranker.of_folder(self._model, self.tokenizer, self.template, info.num_labels)
        declared = self.embedder.is_declared and not self.reranker.is_declared
        self.tasks = Tasks.of(info, settings.task, embeds=declared, answers=self.reranker.is_declared)
        self.rules = self.embedder.rules
        context_len = min(info.context_len, info.max_total_tokens or info.context_len)  # 0: nothing is cached
        if not info.generates and settings.context_length is None:
            context_len = min(context_len, self.embedder.max_tokens or context_len)
        default_bytes = max(MIN_PROMPT_BYTES, BYTES_PER_TOKEN * context_len)
        defaults = usable_defaults(self.tokenizer) if settings.sampling_defaults == "model" else {}
        self.limits = SamplingLimits(
            vocab_size=info.vocab_size,
            context_len=context_len,
            max_prompt_bytes=settings.max_prompt_bytes or default_bytes,
            max_logprobs=settings.max_logprobs,
            max_tokens_beyond=settings.max_tokens_beyond,
            defaults=defaults | settings.preferred_sampling_params,
        )
        self.template_defaults = settings.default_chat_template_kwargs
        self.template.limits = FULL
        for note in oddities(self.tokenizer, info.vocab_size, generates=info.generates):
            logger.warning("%s", note)
        if self._plugins is not None:
            self.grammar = StructuredOutputs.load(
                self._plugins,
                self.tokenizer,
                info.vocab_size,
                strict_schema=settings.strict_schema,
                enforced_only=settings.refuse_validate_only,
                compact=settings.compact_json,
            )
        return self

    @property
    def model_revision(self) -> str:
        """What tells this model's weights from those of others at a server."""
        return "" if self._setup is None else self._setup.model

    def keep_inline(self) -> None:
        """Render and tokenize here only what cannot take long, from now on; the rest raises `InlineCostError`.

        For a server: others wait while it prepares a request, and it has processes that can be killed.
        """
        self.template.limits = INLINE
        self.tokenizer.keep_inline()

    def start_elsewhere(self) -> ProcessorStart | None:
        """Return what another process starts with; None if it cannot have the same."""
        if self._setup is None:
            return None
        return ProcessorStart(setup=self._setup, **{name: getattr(self, name) for name in SHARED})

    def template_kwargs(self, effort: str | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the chat template's variables: the server's, over them what a request says of thinking and gives."""
        return {**self.template_defaults, **template_switches(effort, given)}

    def notes(self) -> list[str]:
        """Say in short phrases what was loaded."""
        notes = [f"{self.tokenizer.vocab_size:,} tokens"]
        if not self.template.source:
            notes.append("no chat template")
        if self.template.problem is not None:
            notes.append(f"requests will not be rendered: {self.template.problem}")
        if self.tokenizer.unbounded is not None:
            texts = (
                f"texts of {self.tokenizer.inline_chars} characters or more" if self.tokenizer.inline_chars else "texts"
            )
            notes.append(f"{texts} are tokenized in processes of their own: {self.tokenizer.unbounded}")
        return notes

    def encode(self, text: str, param: str, *, add_special_tokens: bool, keeps: bool = False) -> list[int]:
        """Tokenize a prompt, refusing by its size first; `keeps` as of `Tokenizer.encode`.

        Raises:
            RequestError: Too big to fit the context, not Unicode text, or it needs a token that the model has not.
        """
        self.check_length(text, param)
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, keeps=keeps, begun=self.begun)
        return self.embedded(ids, param)

    def embedded(self, ids: list[int], param: str) -> list[int]:
        """Return the tokens of a text, all of which the model has a row for.

        Raises:
            RequestError: It has none for one; some tokenizers have more tokens than their model.
        """
        rows = self.limits.vocab_size
        if self.tokenizer.vocab_size > rows and (last := max(ids, default=0)) >= rows:
            raise token_without_row(self.tokenizer.token_text(last), last, rows, param)
        return ids

    def encode_text(
        self, text: str, param: str, *, most: int | None = None, side: str | None = None, name: str | None = None
    ) -> list[int]:
        """Tokenize a text that an embedding is made of: behind its prompt, and cut to `most` tokens.

        An encoder's text keeps the special tokens at both ends, and the others are cut on the right if no `side` is
        given, as its tokenizer does; else ids are cut, on the left.

        Raises:
            RequestError: As `encode`, or there is no such prompt.
        """
        text = self.rules.applied(text, name)
        cuts_left = side == "left" if self.tasks.encodes else side != "right"
        text = self.clipped(text, param, most, cuts_left=cuts_left)
        if self.tasks.encodes:
            return self.embedded(self.tokenizer.encode_within(text, most=most, cuts_left=cuts_left)[0], param)
        ids = self.embedded(self.tokenizer.encode(text, add_special_tokens=True), param)
        return ids if most is None else ids[:most] if side == "right" else ids[-most:]

    def clipped(self, text: str, param: str, most: int | None, *, cuts_left: bool = False) -> str:
        """Return a text of which `most` tokens will be kept, without most of what will be cut; checked by its size.

        What is left is a good deal longer: where a text is cut, its last tokens are others.

        Raises:
            RequestError: As `check_length`.
        """
        size = CLIPPED if most is None else CLIPPED + BYTES_PER_TOKEN * most
        while most is not None and size < len(text):
            part = text[-size:] if cuts_left else text[:size]
            self.check_length(part, param)
            if len(self.tokenizer.encode(part, add_special_tokens=False)) > most + BESIDE:
                return part
            size *= 2
        self.check_length(text, param)
        return text

    def check_length(self, text: str, param: str) -> None:
        """Refuse a text by its size, or by a look at parts of it, before it is tokenized.

        Raises:
            RequestError: Too big to fit the context, or not Unicode text.
        """
        limit = self.limits.max_prompt_bytes
        if len(text) > limit or (len(text) * 4 > limit and len(text.encode(errors="replace")) > limit):
            raise prompt_too_big(len(text.encode(errors="replace")), limit, self.limits.context_len, param)
        if len(text) > SAMPLED:
            check_text(text)
            self._check_tokens(text, param)

    def _check_tokens(self, text: str, param: str) -> None:
        """Refuse a text that is far beyond the context, by a look at parts of it: a token takes a hundred bytes.

        Raises:
            RequestError: It has very many tokens.
        """
        step = len(text) // SAMPLES
        size = min(step // 4, MAX_SAMPLE)
        parts = [text[at * step : at * step + size] for at in range(SAMPLES)]
        num = sum(len(self.tokenizer.encode(part, add_special_tokens=False)) for part in parts)
        about = num * len(text) // (SAMPLES * size)
        if about > 2 * self.limits.context_len + MORE_TOKENS:
            raise prompt_far_too_long(about, self.limits.context_len, param)

    def check_size(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a conversation by the size of its text, before it is rendered.

        Raises:
            RequestError: It cannot fit the context.
        """
        size = sum(text_size(message) for message in messages)
        if size > self.limits.max_prompt_bytes:
            raise prompt_too_big(size, self.limits.max_prompt_bytes, self.limits.context_len, "messages")


def _not_here(parts: Sequence[tuple[Message, str]], salt: str) -> Sequence[PreparedImage]:
    raise RequestError("images are read by a server only: send them to `dovetail serve`", param=parts[0][1])


def text_size(message: Mapping[str, Any]) -> int:
    """Return a lower bound of a message's bytes. What has no form counts nothing: the template's reader refuses it."""
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, (list, tuple)) else ()
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return sum(len(text) for text in texts if isinstance(text, str))


def bound_parser(plugins: LoadedPlugins, planned: PlannedPlugin, template: TemplateView, bind: Any) -> Any:
    """Make a parser, for a model's template."""
    parser = plugins.get(planned.kind, planned.qualified)()
    return bind(parser, template, "" if planned.distribution == DISTRIBUTION else describe(planned))
