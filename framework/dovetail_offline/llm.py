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
import logging
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, TypeVar, overload

from tqdm import tqdm

from dovetail import messages
from dovetail.client.inprocess import InProcessClient
from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.contracts.grammar import GrammarBackend
from dovetail.contracts.reasoning import ReasoningParser
from dovetail.contracts.tools import ToolParser
from dovetail.grammar.spec.diagnostics import explained
from dovetail.grammar.spec.refusals import LATER
from dovetail.plugins import load
from dovetail.plugins.manager import running_hooks
from dovetail.processing.bounds import MAX_TOKENS
from dovetail.processing.constraints import outcome_of
from dovetail.processing.pairs import (
    PairResult,
    asked_for,
    check_numbers,
    classified,
    most_tokens,
    places_of,
    pooled_of,
    ranked,
    read_pairs,
    scores_of,
)
from dovetail.processing.prepare import prepare
from dovetail.processing.processor import Processor
from dovetail_offline.arguments import Message, Prompt, check_number, messages_of, prompt_ids, texts, typed
from dovetail_offline.classes import classes_of, register_classes
from dovetail_offline.outlines_model import OutlinesModel, pieces_of, register
from dovetail_offline.requests import OfflineRequest, OfflineRequests
from dovetail_offline.settings import read_settings
from dovetail_offline.types import Classification, GeneratedReply, PromptEmbedding, Ranked, SamplingParams, Score

logger = logging.getLogger("dovetail")
T = TypeVar("T")
CANCEL_S = 5.0
"""How long an interrupted call waits for its requests to be aborted."""
RETRY_S = 0.1
"""Between two tries where the engine has no room for another grammar."""


class LLM(OutlinesModel):
    """An engine in this process. Thread-safe; `close` it, or use it in a `with` block.

    It is a model of Outlines, too: `outlines.Generator(llm, Type)`.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
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
            model: Its folder, a hub's name, or a bundled `demo:chat` or `demo:digits`; default: the bundled demo model.
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
        settings |= {name: value for name, value in lists.items() if value is not None and value != ()}
        settings |= {name: value for name, value in (("lock", lock), ("model", model)) if value is not None}
        settings |= {n: value for n, value in (named | {"grammar_backend": grammar_backend}).items() if value != "auto"}
        classes = classes_of(settings)
        prepared = prepare(
            read_settings({**settings, "plugin_options": plugin_options}), partial(register_classes, classes)
        )
        offline, plan = prepared.settings, prepared.plan
        for line in offline.auto_notes:
            logger.info("%s", line)
        self._hooks = ExitStack()
        loaded = load(plan, "api")
        self._processor = Processor.of_plugins(offline, loaded, prepared.model)
        self.tokenizer, self.template = self._processor.tokenizer, self._processor.template
        self._requests = OfflineRequests(self._processor)
        # An event loop in a thread of its own: a caller that has one running (a notebook) can use `LLM` all the same.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dovetail-llm", daemon=True)
        self._thread.start()
        self._client = InProcessClient(offline, plan)
        try:
            self._hooks.enter_context(running_hooks(loaded))
            self.info = self._call(self._client.start())
            self._processor.with_engine_limits(self.info, offline)
        except BaseException:
            self._stop(wait=False)  # a model that is still loading cannot be interrupted
            raise

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[GeneratedReply]: ...

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
            params: One for all, or one per prompt; default: the model's own.
            use_tqdm: Show a progress bar.
            typed: Beside an output type.

        Returns:
            Replies (`list[GeneratedReply]`) in the order of the prompts, `n` in a row for each.

        Raises:
            RequestError: A prompt or a parameter is wrong.
            KeyboardInterrupt: On Ctrl-C. All of the call's requests are aborted; the `LLM` can be used again.
        """
        if typed or not _are_params(params):
            return self._typed(prompts, params, typed)
        self._processor.tasks.check("generate")
        ids = prompt_ids(prompts, self._encode)
        each = self._requests.each(params, len(ids))
        jobs = [
            job
            for index, (prompt, one) in enumerate(zip(ids, each, strict=True))
            for job in self._requests.continued(index, prompt, one)
        ]
        return self._call(self._run(jobs, use_tqdm=use_tqdm))

    def _encode(self, text: str) -> list[int]:
        return self._processor.encode(text, "prompt", add_special_tokens=True)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        use_tqdm: bool = True,
    ) -> list[PromptEmbedding]:
        """Give the embedding of each prompt: its final hidden states, pooled as the checkpoint says.

        Args:
            prompts: Text, token ids, or mappings with `prompt` or `prompt_token_ids`, one or many.
            dimensions: Number of values to keep; for models that were trained for it.
            normalize: Scale vectors to length 1; default: as the checkpoint says.
            use_tqdm: Show a progress bar.

        Raises:
            RequestError: A prompt is empty or longer than the context, or the checkpoint does not allow it.
        """
        self._processor.tasks.check("embed")
        typed(dimensions, int | None, "dimensions")
        typed(normalize, bool | None, "normalize")
        self._processor.embedder.check(dimensions, self.info.hidden_size)
        pool = self._processor.embedder.pool
        ids = prompt_ids(prompts, lambda text: self._encode(self._processor.rules.applied(text)))
        many = [self._requests.pooled(index, one, pool).submit for index, one in enumerate(ids)]
        return [
            PromptEmbedding(
                embedding=self._processor.embedder.finish(pooled_of(delta), dimensions, normalize=normalize).tolist(),
                prompt_token_ids=tuple(submit.prompt_ids),
                cached_tokens=delta.cached_tokens,
            )
            for submit, delta in zip(many, self._last(many, "Embedding", use_tqdm=use_tqdm), strict=True)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool = True,
        use_tqdm: bool = True,
    ) -> list[Score]:
        """Tell how well texts go together, as `/v1/score` does.

        Args:
            data_1: A text that is compared with each of `data_2`, or a list of equal length, compared pairwise.
            data_2: One or many.
            truncate_prompt_tokens: Maximum tokens of a prompt; -1: the model's maximum.
            use_activation: False: numbers as the model gives them.
            use_tqdm: Show a progress bar.

        Raises:
            RequestError: A text is too long, lists do not match, or the model compares none.
        """
        return self._compared((data_1, data_2), ("data_1", "data_2"), truncate_prompt_tokens, use_activation, use_tqdm)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruct: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[Ranked]:
        """Order documents by how well they go with a query, the best first, as `/v1/rerank` does.

        Args:
            query: What they are compared with.
            documents: Texts.
            top_n: Maximum number of results.
            instruct: What is asked of a document, for models that are told.
            truncate_prompt_tokens: As for `score`.
            use_tqdm: Show a progress bar.

        Raises:
            RequestError: As for `score`.
        """
        names = ("query", "documents")
        query, documents = typed(query, str, "query"), texts(documents, "documents")
        check_number("top_n", top_n, 0, MAX_TOKENS, is_whole=True)
        typed(instruct, str | None, "instruct")
        found = self._compared((query, documents), names, truncate_prompt_tokens, True, use_tqdm, instruct)
        return [
            Ranked(index=at, relevance_score=found[at].score, document=documents[at])
            for at in ranked([one.score for one in found], top_n)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool = True,
        use_tqdm: bool = True,
    ) -> list[Classification]:
        """Score the model's labels for each prompt, as `/v1/classify` does.

        Args:
            prompts: Text, token ids, or mappings with `prompt` or `prompt_token_ids`, one or many.
            use_activation: False: numbers as the model gives them.
            use_tqdm: Show a progress bar.

        Raises:
            RequestError: A prompt is empty or longer than the context, or the model scores no labels.
        """
        text = self._processor
        text.tasks.check("classify")
        typed(use_activation, bool, "use_activation")
        ids = prompt_ids(prompts, lambda one: text.encode_text(one, "prompt"))
        many = [self._requests.pooled(index, one, self.info.pool).submit for index, one in enumerate(ids)]
        made = []
        for submit, delta in zip(many, self._last(many, "Classifying", use_tqdm=use_tqdm), strict=True):
            label, probs = classified(text.reranker, PairResult(pooled_of(delta)), is_plain=not use_activation)
            tokens = tuple(submit.prompt_ids)
            made.append(
                Classification(label=label, probs=probs, prompt_token_ids=tokens, cached_tokens=delta.cached_tokens)
            )
        return made

    def _compared(
        self,
        given: tuple[str | Sequence[str], str | Sequence[str]],
        names: tuple[str, str],
        truncate: int | None,
        use_activation: bool,
        use_tqdm: bool,
        instruct: str | None = None,
    ) -> list[Score]:
        """Score pairs of texts."""
        text = self._processor
        text.tasks.check("score")
        check_number("truncate_prompt_tokens", truncate, -1, MAX_TOKENS, is_whole=True)
        typed(use_activation, bool, "use_activation")
        firsts, seconds = (texts(one, name) for one, name in zip(given, names, strict=True))
        check_numbers(firsts, seconds, names)
        made = read_pairs(text, firsts, seconds, names, most=most_tokens(truncate, text), instruction=instruct)
        pool, params = asked_for(text, self.info)
        many = [self._requests.compared(index, one, pool, params).submit for index, one in enumerate(made)]
        deltas = self._last(many, "Scoring", use_tqdm=use_tqdm)
        answers = [PairResult(delta.pooled, (delta.logprobs or (None,))[-1]) for delta in deltas]
        scores = scores_of(text, answers, num_first=len(firsts), is_plain=not use_activation)
        return [
            Score(
                score=score,
                prompt_token_ids=tuple(i for at in places for i in made[at].ids),
                cached_tokens=sum(deltas[at].cached_tokens for at in places),
            )
            for score, places in zip(scores, places_of(text, len(firsts), len(seconds)), strict=True)
        ]

    def _last(self, submits: Sequence[messages.Submit], what: str, *, use_tqdm: bool) -> list[messages.TokenDelta]:
        """Run requests of one step each.

        Raises:
            RequestError: The engine gave one up.
        """

        async def one(submit: messages.Submit) -> messages.TokenDelta:
            async with aclosing(self._client.submit(submit)) as stream:
                delta = [delta async for delta in stream][-1]
            if delta.finish is not None and delta.finish.reason == "abort":
                raise RequestError(delta.finish.message or "the engine gave the request up")
            return delta

        return self._call(_together([one(submit) for submit in submits], what, use_tqdm=use_tqdm))

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
        separate_reasoning: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[GeneratedReply]:
        """Answer conversations through the chat template.

        Args:
            conversations: One list of messages, or several.
            params: As for `generate`.
            tools: As OpenAI writes them, for all conversations.
            tool_choice: `auto`, `none`, `required`, or OpenAI's object that names a function.
            parallel_tool_calls: False keeps the first call only.
            documents: Passed to the template.
            add_generation_prompt: Append the assistant's header; by default unless a message is continued.
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
        self._processor.tasks.check("generate")
        chats = self._requests.conversations(
            messages_of(conversations),
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            reasoning_effort=reasoning_effort,
            chat_template_kwargs=chat_template_kwargs,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            separate_reasoning=separate_reasoning,
        )
        jobs = [
            job
            for index, (chat, one) in enumerate(zip(chats, self._requests.each(params, len(chats)), strict=True))
            for job in self._requests.answered(index, chat, one)
        ]
        replies = self._call(self._run(jobs, use_tqdm=use_tqdm))
        return replies if parallel_tool_calls else [replace(r, tool_calls=r.tool_calls[:1]) for r in replies]

    def _continued(self, prompts: Sequence[str], params: SamplingParams) -> list[GeneratedReply]:
        return list(self.generate(prompts, params, use_tqdm=False))

    def _answered(self, conversations: Sequence[Sequence[Message]], params: SamplingParams) -> list[GeneratedReply]:
        return self.chat(conversations, params, use_tqdm=False)

    def _pieces(self, prompt: str | Sequence[Message], params: SamplingParams) -> Iterator[str]:
        if isinstance(prompt, str):
            jobs = self._requests.continued(0, self._encode(prompt), params)
        else:
            [chat] = self._requests.conversations(messages_of([prompt]))
            jobs = self._requests.answered(0, chat, params)
        [job] = jobs
        return pieces_of(self._loop, self._deltas(job.submit), job.output)

    def flush_cache(self) -> None:
        """Forget all cached prefixes."""
        self._call(self._client.control("flush_cache"))

    def close(self) -> None:
        """Stop the engine and free the model. Safe to call twice."""
        self._stop(wait=True)

    def _stop(self, *, wait: bool) -> None:
        if self._thread.is_alive():
            self._processor.grammar.close()
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

    async def _run(self, jobs: list[OfflineRequest], *, use_tqdm: bool) -> list[GeneratedReply]:
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

    async def _one(self, job: OfflineRequest) -> GeneratedReply:
        logprobs: list[messages.TokenLogprob] = []
        prompt_logprobs: list[messages.TokenLogprob] | None = None
        cached, option = 0, None
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
                cached, option, left_out = delta.cached_tokens, delta.grammar_option, delta.grammar_ignored
                if job.output.finish is not None:
                    break
        output, finish = job.output, job.output.finish
        grammar = None
        if job.route is not None and option is not None and finish is not None:
            outcome = outcome_of(output, option, left_out)
            grammar = await asyncio.to_thread(self._processor.grammar.report, job.route, outcome)
        message = finish.message if finish is not None else None
        if message is not None:
            message = await asyncio.to_thread(explained, job.route, code, message)
        return GeneratedReply(
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

        async def report_failure(task: asyncio.Task[T]) -> T:
            result = await task
            bar.update()  # what it raises ends the call: in a callback it would only be logged
            return result

        try:
            return list(await asyncio.gather(*map(report_failure, tasks)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _are_params(params: Any) -> bool:
    """Whether `params` are sampling parameters, and no output type of Outlines'."""
    many = params if isinstance(params, (list, tuple)) else [params]
    return all(each is None or isinstance(each, SamplingParams) for each in many)
