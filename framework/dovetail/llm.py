"""`LLM`: a model in this process, without a server. Batches of thousands, with a progress bar.

```python
from dovetail import LLM, SamplingParams

with LLM("path/to/model") as llm:
    for reply in llm.chat([{"role": "user", "content": "What is the capital of France?"}]):
        print(reply.text)
```
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

from tqdm import tqdm

from dovetail import messages
from dovetail.client.inprocess import InProcessClient
from dovetail.contracts.grammar import GrammarBackend
from dovetail.contracts.reasoning import FormatSpec, ParserRequest, ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.errors import ConfigError, RequestError
from dovetail.grammar.blame import explained
from dovetail.grammar.fields import NAMES, read_grammar
from dovetail.grammar.output_types import fields_of
from dovetail.grammar.refusals import LATER
from dovetail.grammar.route import Route
from dovetail.grammar.structured_outputs import Outcome, StructuredOutputs
from dovetail.grammar.thinking import Use, thinking_of
from dovetail.llm_prompts import Prompt, prompt_ids
from dovetail.llm_types import Embedding, Reply, SamplingParams, as_tuple, engine_params
from dovetail.outlines_model import OutlinesModel, pieces_of, register
from dovetail.plugins import LoadedPlugins, load
from dovetail.plugins.manager import running_hooks
from dovetail.processing.classes import classes_of
from dovetail.processing.embeddings import Embedder
from dovetail.processing.logits import LogitsRequests
from dovetail.processing.offline import read_settings
from dovetail.processing.prepare import prepare
from dovetail.processing.tasks import Tasks
from dovetail.text.chat import ChatTemplate, template_switches
from dovetail.text.formats import bound_reasoning, bound_tools, thinking_behind
from dovetail.text.stream import OutputStream
from dovetail.text.tokenizer import Tokenizer

logger = logging.getLogger("dovetail")
T = TypeVar("T")
Message = Mapping[str, Any]
CANCEL_S = 5.0
"""How long an interrupted call waits for its requests to be aborted."""
RETRY_S = 0.1
"""Between two tries where the engine has no room for another grammar."""


@dataclass(frozen=True)
class _Job:
    """One engine request and the stream that reads its reply."""

    prompt_index: int
    submit: messages.Submit
    output: OutputStream
    route: Route | None = None


class LLM(OutlinesModel):
    """An engine in this process. Thread-safe; `close` it, or use it in a `with` block.

    It is a model of Outlines, too: `outlines.Generator(llm, Type)`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        reasoning_parser: str | type[ReasoningParser] | None = "auto",
        tool_call_parser: str | type[ToolParser] | None = "auto",
        grammar_backend: str | type[GrammarBackend] | None = "auto",
        plugins: str | Sequence[str] = (),
        plugin_options: Mapping[str, Mapping[str, Any]] | None = None,
        plugin_file: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
        deny: str | Sequence[str] = (),
        allow: str | Sequence[str] = (),
        lock: str | PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        """Load a model.

        What is not given comes from the environment (`DOVETAIL_DTYPE`, `DOVETAIL_PLUGIN__ACME__TOP_K`), then from the
        file of `config`, then from the defaults, as for `dovetail serve`.

        Args:
            model: Its folder, or a hub's name; the bundled demo model if not given.
            reasoning_parser: Plugin name, or `auto`: found out from the chat template; None for none; or a class of
                your own. The same holds for every argument that names a plugin: `attention_backend`,
                `schedule_policy`.
            tool_call_parser: As `reasoning_parser`.
            grammar_backend: As `reasoning_parser`; `auto` chooses for each request.
            plugins: Hook plugins to enable. Their routes, observers, checks and commands are a server's.
            plugin_options: Options of plugins, by plugin and name.
            plugin_file: Python files with plugins, or folders with an `__init__.py`. `plugins_dir`, one of the
                settings, takes folders of such files.
            deny: Packages, or `package:plugin`, whose plugins are never imported.
            allow: The only ones that may bring plugins, beside Dovetail's own.
            lock: Lock file of `dovetail plugin lock`.
            settings: Fields of `OfflineSettings`, which are those of `dovetail serve` that are no server's: `dtype`,
                `context_length`, `chat_template`, `strict_schema`, `config`, …

        Raises:
            ConfigError: Something the caller can fix, and how.
        """
        register(type(self))
        named = {"reasoning_parser": reasoning_parser, "tool_call_parser": tool_call_parser}
        lists = {"plugins": plugins, "plugin_file": plugin_file, "deny": deny, "allow": allow}
        settings |= {name: value for name, value in lists.items() if value}
        settings |= {name: value for name, value in (("lock", lock), ("model_path", model)) if value is not None}
        settings |= {n: value for n, value in (named | {"grammar_backend": grammar_backend}).items() if value != "auto"}
        classes = classes_of(settings)
        prepared = prepare(read_settings({**settings, "plugin_options": plugin_options}), classes)
        offline, plan, folder = prepared.settings, prepared.plan, prepared.settings.folder
        for line in offline.auto_notes:
            logger.info("%s", line)
        self._hooks = ExitStack()
        loaded = load(plan, "api")
        self.tokenizer = Tokenizer.load(Path(offline.tokenizer_path) if offline.tokenizer_path else folder)
        self.template = ChatTemplate.load(self.tokenizer, offline.chat_template)
        self._tools_name = offline.tool_call_parser or ""
        self._bind_parsers(loaded)
        self._processors = LogitsRequests.load(loaded)
        self._ids = itertools.count(1)
        self._grammar = StructuredOutputs({})
        # An event loop in a thread of its own: a caller that has one running (a notebook) can use `LLM` all the same.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dovetail-llm", daemon=True)
        self._thread.start()
        self._client = InProcessClient(offline, plan)
        try:
            self._hooks.enter_context(running_hooks(loaded))
            self.info = self._call(self._client.start())
            self._embedder = Embedder.of_checkpoint(folder, self.info.pool)
            self._tasks = Tasks.of(self.info, offline.task, embeds=self._embedder.is_declared, answers=False)
            self._grammar = StructuredOutputs.load(
                loaded, self.tokenizer, self.info.vocab_size, strict_schema=offline.strict_schema
            )
        except BaseException:
            self._stop(wait=False)  # a model that is still loading cannot be interrupted
            raise

    def _bind_parsers(self, loaded: LoadedPlugins) -> None:
        """Make the planned parsers, for this template."""
        self._reasoning: ReasoningParser | None = None
        self._tools: ToolParser | None = None
        for planned in loaded.plan.of_kind("reasoning_parser"):
            self._reasoning = bound_reasoning(loaded.get("reasoning_parser", planned.name)(), self.template)
            self.template.begin_thinking = thinking_behind(self._reasoning, self.tokenizer, self.template)
        for planned in loaded.plan.of_kind("tool_parser"):
            self._tools = bound_tools(loaded.get("tool_parser", planned.name)(), self.template)

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Reply]: ...

    @overload
    def generate(self, prompts: Any, params: Any, *, use_tqdm: bool = True, **typed: Any) -> Any: ...

    def generate(
        self,
        prompts: Any,
        params: Any = None,
        *,
        use_tqdm: bool = True,
        **typed: Any,
    ) -> Any:
        """Continue prompts.

        An Outlines generator gives its output type in place of `params`, and fields of `SamplingParams` by name: then
        the result is the reply's text, as Outlines returns it.

        Args:
            prompts: Text, token ids, or mappings with `prompt` or `prompt_token_ids`, one or many.
            params: One for all, or one per prompt; the model's own defaults if not given.
            use_tqdm: Show a progress bar.
            typed: Beside an output type.

        Returns:
            Replies (`list[Reply]`) in the order of the prompts, `n` in a row for each.

        Raises:
            RequestError: A prompt or a parameter is wrong.
            KeyboardInterrupt: On Ctrl-C. All of the call's requests are aborted; the `LLM` can be used again.
        """
        if typed or not _are_params(params):
            return self._typed(prompts, params, typed)
        self._tasks.check("generate")
        ids = prompt_ids(prompts, self.tokenizer)
        jobs = [
            job
            for index, (prompt, one) in enumerate(zip(ids, self._each(params, len(ids)), strict=True))
            for job in self._jobs(index, prompt, one)
        ]
        return self._call(self._run(jobs, use_tqdm=use_tqdm))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        use_tqdm: bool = True,
    ) -> list[Embedding]:
        """Give the embedding of each prompt: its final hidden states, pooled as the checkpoint says.

        Args:
            prompts: Text, token ids, or mappings with `prompt` or `prompt_token_ids`, one or many.
            dimensions: Keep so many numbers; for models that were trained for it.
            normalize: Scale vectors to length 1; as the checkpoint says if not given.
            use_tqdm: Show a progress bar.

        Raises:
            RequestError: A prompt is empty or longer than the context, or the checkpoint does not allow it.
        """
        self._tasks.check("embed")
        self._embedder.check(dimensions, self.info.hidden_size)
        many = [self._pooling(index, ids) for index, ids in enumerate(prompt_ids(prompts, self.tokenizer, self._text))]

        async def one(submit: messages.Submit) -> Embedding:
            async with aclosing(self._client.submit(submit)) as stream:
                delta = [delta async for delta in stream][-1]
            if delta.pooled is None:
                raise RequestError((delta.finish and delta.finish.message) or "the engine gave no hidden state")
            vector = self._embedder.finish(delta.pooled, dimensions, normalize=normalize)
            return Embedding(
                embedding=vector.tolist(), prompt_token_ids=tuple(submit.prompt_ids), cached_tokens=delta.cached_tokens
            )

        return self._call(_together([one(submit) for submit in many], "Embedding", use_tqdm=use_tqdm))

    def _text(self, text: str) -> str:
        """A text as embeddings are made of it."""
        return self._embedder.rules.applied(text)

    def _pooling(self, index: int, ids: list[int]) -> messages.Submit:
        """The engine's request for one prompt's hidden states."""
        self._check_prompt(index, ids, self.info.context_len)
        params = messages.SamplingParams(max_tokens=1, seed=0)
        return messages.Submit(rid=f"llm-{next(self._ids)}", prompt_ids=ids, params=params, pool=self._embedder.pool)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
        separate_reasoning: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[Reply]:
        """Answer conversations through the chat template.

        Args:
            conversations: One list of messages, or several.
            params: As for `generate`.
            tools: As OpenAI writes them, for all conversations.
            tool_choice: `auto`, `none`, `required`, or OpenAI's object that names a function.
            parallel_tool_calls: False keeps the first call only.
            documents: Passed to the template.
            continue_final_message: The last message of each conversation is the beginning of the reply.
            reasoning_effort: Sets the template's switches of thinking; `none` turns it off.
            separate_reasoning: False leaves reasoning in the text, as the model wrote it.
            chat_template_kwargs: Passed to the template, such as `{"enable_thinking": True}`.
            use_tqdm: Show a progress bar.

        Returns:
            As for `generate`.

        Raises:
            RequestError: A message, tool or parameter is wrong, or the model has no chat template.
        """
        self._tasks.check("generate")
        many: list[Sequence[Message]] = (
            [conversations] if conversations and isinstance(conversations[0], Mapping) else list(conversations)  # type: ignore[list-item,arg-type]
        )
        kwargs = template_switches(reasoning_effort, chat_template_kwargs)
        tools = None if tool_choice == "none" else tools
        wanted = {one.grammar_backend for one in self._each(params, len(many))}
        calls = self._calls_route(tools, tool_choice, parallel_tool_calls, wanted)
        rendering = {"documents": documents, "continue_final_message": continue_final_message}
        parsing = {"separate_reasoning": separate_reasoning}
        jobs = self._chat_jobs(many, params, calls, tools, kwargs, rendering, parsing)
        replies = self._call(self._run(jobs, use_tqdm=use_tqdm))
        return replies if parallel_tool_calls else [replace(r, tool_calls=r.tool_calls[:1]) for r in replies]

    def _chat_jobs(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        calls: Route | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        rendering: Mapping[str, Any] | None = None,
        parsing: Mapping[str, Any] | None = None,
    ) -> list[_Job]:
        """Render conversations; `rendering` and `parsing` are options of the template and of the output parser."""
        jobs: list[_Job] = []
        kwargs = kwargs or {}
        each = self._each(params, len(conversations))
        for index, (conversation, one) in enumerate(zip(conversations, each, strict=True)):
            chat = self.template.render(conversation, tools=tools, template_kwargs=kwargs, **(rendering or {}))
            prompt = self.tokenizer.encode(chat.text, add_special_tokens=False)
            options = {
                "reasoning": self._reasoning,
                "tools": self._tools if tools else None,
                "template": self.template,
                "template_kwargs": kwargs,
                "tool_schemas": tools or (),
                "prompt_tail": chat.tail,
                **(parsing or {}),
            }
            jobs += self._jobs(index, prompt, one, calls, **options)
        return jobs

    def _calls_route(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        choice: str | Mapping[str, Any],
        parallel: bool,
        backends: Set[str | None],
    ) -> Route | None:
        """How tool calls that must be made, or conform, will be enforced; None where they are free."""
        if isinstance(choice, str) and choice not in ("auto", "none", "required"):
            raise RequestError(
                f"tool_choice must be 'auto', 'none', 'required' or an object (given: {choice!r})", param="tool_choice"
            )
        is_strict = any(tool["function"].get("strict") for tool in tools or ())
        if choice == "none" or (choice == "auto" and not (is_strict and tools)):
            return None
        if not tools:
            raise RequestError("tool_choice needs tools", param="tool_choice")
        if self._tools is None:
            raise RequestError(
                "tool_choice needs a tool-call parser that knows the model's format; give tool_call_parser",
                param="tool_choice",
            )
        if len(backends) > 1:
            raise RequestError("tools need one grammar_backend for all conversations", param="grammar_backend")
        front = self._grammar.only(next(iter(backends), None))
        return front.tools(self._tools, self._tools_name, tools, choice, parallel=parallel, param="tool_choice")

    def _continued(self, prompts: Sequence[str], params: SamplingParams) -> list[Reply]:
        return list(self.generate(prompts, params, use_tqdm=False))

    def _answered(self, conversations: Sequence[Sequence[Message]], params: SamplingParams) -> list[Reply]:
        return self.chat(conversations, params, use_tqdm=False)

    def _pieces(self, prompt: str | Sequence[Message], params: SamplingParams) -> Iterator[str]:
        if isinstance(prompt, str):
            [job] = self._jobs(0, self.tokenizer.encode(prompt, add_special_tokens=True), params)
        else:
            [job] = self._chat_jobs([prompt], params)
        return pieces_of(self._loop, self._deltas(job.submit), job.output)

    def flush_cache(self) -> None:
        """Forget all cached prefixes."""
        self._call(self._client.control("flush_cache"))

    def close(self) -> None:
        """Stop the engine and free the model. Safe to call twice."""
        self._stop(wait=True)

    def _stop(self, *, wait: bool) -> None:
        if self._thread.is_alive():
            self._grammar.close()
            self._call(self._client.close(wait=wait))
            self._hooks.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise ConfigError("this LLM was closed; make a new one")
        ended = threading.Event()

        async def run() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except BaseException:  # of the work, or Ctrl-C in the thread that waits for it
            if future.cancel():
                ended.wait(CANCEL_S)
            raise

    def _each(self, params: SamplingParams | Sequence[SamplingParams] | None, num: int) -> Sequence[SamplingParams]:
        if params is None:
            params = SamplingParams(**self.tokenizer.default_sampling)  # type: ignore[arg-type]
        if isinstance(params, SamplingParams):
            return [params] * num
        if len(params) != num:
            raise RequestError(f"{len(params)} sampling parameters for {num} prompts; give one, or one per prompt")
        return params

    def _jobs(
        self, index: int, prompt: list[int], params: SamplingParams, calls: Route | None = None, **parsing: Any
    ) -> list[_Job]:
        room = self.info.context_len - len(prompt)
        self._check_prompt(index, prompt, self.info.context_len - 1, (*params.stop_token_ids, *params.logit_bias))
        route = self._route(params)
        if route is not None and calls is not None:
            raise RequestError(f"{route.param} and tool_choice both constrain the output; give one", param=route.param)
        thinking = self._thinking(params, route or calls, parsing, calls_tools=calls is not None)
        processors = self._processors.read(params.logits_processors)
        route = route or calls
        jobs = []
        for choice in range(params.n):
            submit = messages.Submit(
                rid=f"llm-{next(self._ids)}",
                prompt_ids=prompt,
                params=engine_params(params, choice, room, processors),
                grammar=() if route is None else route.steps,
                thinking=thinking,
            )
            output = OutputStream(
                self.tokenizer,
                stop=as_tuple(params.stop),
                stop_regex=as_tuple(params.stop_regex),
                no_stop_trim=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
                **parsing,
            )
            jobs.append(_Job(index, submit, output, route))
        return jobs

    def _check_prompt(self, index: int, ids: Sequence[int], most: int, others: Sequence[int] = ()) -> None:
        """Refuse a prompt by its length, or by an id of it or beside it.

        Raises:
            RequestError: Naming which prompt.
        """
        if not 1 <= len(ids) <= most:
            raise RequestError(f"prompt {index} has {len(ids)} tokens; possible are 1 to {most}")
        bad = [i for i in (*ids, *others) if not 0 <= i < self.info.vocab_size]
        if bad:
            raise RequestError(f"prompt {index}: token id {bad[0]} is not from 0 to {self.info.vocab_size - 1}")

    def _route(self, params: SamplingParams) -> Route | None:
        """How the grammar of these parameters will be enforced."""
        fields: Mapping[str, Any] = {name: getattr(params, name) for name in NAMES}
        if params.output_type is not None:
            if any(value is not None for value in fields.values()):
                raise RequestError("output_type and another field constrain the output; give one", param="output_type")
            fields = fields_of(params.output_type)
        asked = read_grammar(fields)
        return None if asked is None else self._grammar.only(params.grammar_backend).route(asked)

    def _thinking(
        self, params: SamplingParams, route: Route | None, parsing: Mapping[str, Any], *, calls_tools: bool = False
    ) -> messages.Thinking | None:
        """What the engine must know of a conversation's thinking."""
        if route is None and params.thinking_budget is None:
            return None
        spec = FormatSpec()
        if parsing.get("reasoning") is not None:
            request = ParserRequest(template_kwargs=parsing.get("template_kwargs") or {})
            spec = parsing["reasoning"].spec(self.tokenizer, self.template, request)
        if parsing.get("tools") is not None:
            spec = parsing["tools"].extend(spec, parsing["tool_schemas"])
        param = "thinking_budget" if route is None or params.thinking_budget is not None else route.param
        budget = params.thinking_budget
        use = Use(constrained=route is not None, calls=calls_tools, budget=budget, param=param)
        return thinking_of(spec, self.tokenizer, parsing.get("prompt_tail"), use)

    async def _run(self, jobs: list[_Job], *, use_tqdm: bool) -> list[Reply]:
        return await _together([self._one(job) for job in jobs], "Generating", use_tqdm=use_tqdm)

    async def _deltas(self, submit: messages.Submit) -> AsyncGenerator[messages.TokenDelta, None]:
        """Submit a request, again where too many grammars wait: all prompts of a call come at once."""
        while True:
            async with aclosing(self._client.submit(submit)) as stream:
                async for delta in stream:
                    if delta.finish is not None and delta.finish.code in LATER and not delta.ids:
                        break
                    yield delta
                else:
                    return
            await asyncio.sleep(RETRY_S)

    async def _one(self, job: _Job) -> Reply:
        logprobs: list[messages.TokenLogprob] = []
        prompt_logprobs: list[messages.TokenLogprob] | None = None
        cached, step = 0, None
        left_out: tuple[str, ...] = ()
        code = None
        async with aclosing(self._deltas(job.submit)) as stream:
            async for delta in stream:
                code = None if delta.finish is None else delta.finish.code
                try:
                    job.output.feed(delta)
                except RequestError as error:  # ends this reply, not the others
                    job.output.fail(error.message)
                logprobs += delta.logprobs or ()
                prompt_logprobs = delta.prompt_logprobs or prompt_logprobs
                cached, step, left_out = delta.cached_tokens, delta.grammar_step, delta.grammar_ignored
                if job.output.finish is not None:
                    break
        output, finish = job.output, job.output.finish
        grammar = None
        if job.route is not None and step is not None and finish is not None:
            ended = finish.reason in ("stop", "tool_calls") and not isinstance(finish.matched, str)
            calls = [(call.name, call.arguments) for call in output.tool_calls]
            outcome = Outcome(step=step, left_out=left_out, text=output.text, calls=calls, ended=ended)
            grammar = await asyncio.to_thread(self._grammar.report, job.route, outcome)
        message = finish.message if finish is not None else None
        if message is not None:
            message = await asyncio.to_thread(explained, job.route, code, message)
        return Reply(
            prompt_index=job.prompt_index,
            text=output.text,
            reasoning=output.reasoning,
            reasoning_tokens=output.reasoning_tokens,
            tool_calls=tuple(output.tool_calls),
            token_ids=tuple(output.token_ids),
            prompt_token_ids=tuple(job.submit.prompt_ids),
            finish_reason=finish.reason if finish is not None else "abort",
            matched_stop=finish.matched if finish is not None else None,
            message=message,
            cached_tokens=cached,
            logprobs=logprobs[: output.num_tokens],
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )


async def _together(works: Sequence[Coroutine[Any, Any, T]], what: str, *, use_tqdm: bool) -> list[T]:
    """Run what is given at once, with a progress bar; if one failed, or all are cancelled, none goes on."""
    with tqdm(total=len(works), desc=what, unit="request", disable=not use_tqdm) as bar:
        tasks = [asyncio.create_task(work) for work in works]

        async def told(task: asyncio.Task[T]) -> T:
            result = await task
            bar.update()  # what it raises ends the call: in a callback it would only be logged
            return result

        try:
            return list(await asyncio.gather(*map(told, tasks)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _are_params(params: Any) -> bool:
    """Whether `params` are sampling parameters, and no output type of Outlines'."""
    many = params if isinstance(params, (list, tuple)) else [params]
    return all(each is None or isinstance(each, SamplingParams) for each in many)
