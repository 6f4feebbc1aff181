"""`dovetail info MODEL`: what the server would make of a model folder, and why. Loads no weights and no torch."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from typing import TYPE_CHECKING, Any

from dovetail.contracts.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from dovetail.plugin_settings import PluginSettings
    from dovetail.runtime.checkpoint.folder import ModelFolder
    from dovetail.text.chat.template import ChatTemplate

logger = logging.getLogger(__name__)
SHOWN = 3
"""How many parsers of each kind are listed."""


def main(argv: list[str]) -> int:
    """Run `dovetail info`.

    Args:
        argv: The arguments after `info`.

    Returns:
        The exit code; wrong arguments exit with 2 through `SystemExit`.
    """
    parser = argparse.ArgumentParser(prog="dovetail info", description="Show what the server makes of a model folder.")
    parser.add_argument("model", nargs="?", help="model directory; default: the bundled demo model")
    parser.add_argument("--model-impl", default="auto", help="as that of `dovetail serve`")
    parser.add_argument("--tokenizer-path", help="folder with the tokenizer, if it is another one")
    parser.add_argument("--chat-template", help="Jinja file or built-in name, instead of the model's own template")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    try:
        facts = info(args.model, args.tokenizer_path, args.chat_template, args.model_impl)
    except ConfigError as error:
        print(f"dovetail info: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(facts, indent=2, ensure_ascii=False) if args.json else table(facts))
    return 0


def info(
    model: str | None, tokenizer_path: str | None = None, chat_template: str | None = None, impl: str = "auto"
) -> dict[str, Any]:
    """Collect the facts.

    Raises:
        ConfigError: The folder, the tokenizer's files or the template cannot be read.
    """
    from dovetail.plugin_settings import PluginSettings
    from dovetail.plugins import Registry
    from dovetail.runtime.checkpoint.hub import with_folders
    from dovetail.runtime.checkpoint.weight_files import is_bare
    from dovetail.text.chat.template import ChatTemplate
    from dovetail.text.detection.detect import detect

    if model is None:
        from dovetail.demo import MODEL_DIR

        model = str(MODEL_DIR)
    given = {"model_path": model, "tokenizer_path": tokenizer_path, "model_impl": impl, "load_format": "dummy"}
    settings = with_folders(PluginSettings.model_validate(given))  # of a hub's model everything but the weights
    with_weights = settings.model_copy(update={"load_format": "auto"})
    read, refused = checked(with_weights)
    lacks = None
    if refused is not None and is_bare(settings.folder):  # what remains can be said without them
        (read, refused), lacks = checked(settings), str(refused)
    elif refused is None:
        settings = with_weights
    try:
        config, files = read.config, read.texts
        said = files.tokenizer_config.get("response_template")
        template = ChatTemplate.choose(files.chat_templates, files.special_tokens(), chat_template, said)
        found = detect(Registry.scan(), files, chat_template)
    except ConfigError as error:
        raise refused or error from None
    served = NOBODY | {"refused": str(refused)} if refused else served_as(settings, read, template.source)
    return {
        "model": model,
        "architecture": (config.get("architectures") or [None])[0],
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "context_length": config.get("max_position_embeddings"),
        "weights_bytes": read.num_bytes,
        "weights_lack": lacks,
        **served,
        "tokenizer": tokenizer_facts(read, served["vocab_size"]),
        "chat_template": {
            "from": template.origin if template.source else None,
            "names": sorted(files.chat_templates),
            "content_format": template.content_format if template.source else None,
            "thinking": thinking_states(template, found["reasoning_parser"].name),
        },
        "sampling_defaults": {k: files.generation_config[k] for k in sorted(SAMPLING & files.generation_config.keys())},
        **{
            kind: {
                "name": one.name,
                "why": one.why,
                "scores": [{"name": s.name, "score": s.score, "reads_back": s.reads_back} for s in one.scores],
            }
            for kind, one in found.items()
        },
        "read_off_the_template": read_off(template),
    }


def checked(settings: PluginSettings) -> tuple[ModelFolder, ConfigError | None]:
    """Return what the folder says, and why `dovetail serve` refuses it before anything starts; None: it does not."""
    from dovetail.processing.prepare import check_model
    from dovetail.runtime.checkpoint.folder import ModelFolder

    try:
        return check_model(settings), None
    except ConfigError as error:
        return ModelFolder(settings.folder, settings.tokenizer_folder, weights=False), error


NOBODY: dict[str, Any] = {"served_by": None, "refused": None, "num_params": None, "vocab_size": None}
NOBODY |= {"tasks": [], "cache": []}


def served_as(settings: PluginSettings, model: ModelFolder, template: str) -> dict[str, Any]:
    """Say which plugin serves the model, what it is for, and what it keeps of a token; or why none does."""
    from dovetail.contracts.cache import Recurrent
    from dovetail.contracts.errors import ModelError
    from dovetail.contracts.needs import unserved
    from dovetail.processing.embeddings import Embedder
    from dovetail.processing.plan import plan_plugins
    from dovetail.processing.reranker import knows_roles, says_so
    from dovetail.processing.tasks import Tasks
    from dovetail.runtime.memory.plan import group_token_bytes
    from dovetail.sdk.checkpoint import dense_numel
    from dovetail.sdk.config import ITEM_BYTES
    from dovetail_server.metrics.model_facts import config_of

    try:
        _, _, plan = plan_plugins(settings, model)
        served_by = plan.of_kind("model")[0].qualified
        facts = config_of(model, settings.model_impl)
        if (reason := unserved(facts)) is not None:
            raise ModelError(reason)
    except ConfigError as error:
        return NOBODY | {"refused": str(error)}
    item = ITEM_BYTES[facts.dtype]
    cache = [
        {
            "group": group.name,
            "layers": len(group.layers),
            "bytes": group_token_bytes(group, item),
            "per": "request" if isinstance(group.reach, Recurrent) else "token",
        }
        for group in facts.cache_groups
    ]
    answers = says_so(model) or knows_roles(template)
    embeds = Embedder.of_folder(model, facts.pool).is_declared and not answers
    tasks = list(Tasks.of(facts, None, embeds=embeds, answers=answers).possible)
    sizes = {"num_params": dense_numel(facts), "vocab_size": facts.vocab_size}
    return {"served_by": served_by, "refused": None, **sizes, "tasks": tasks, "cache": cache}


def read_off(template: ChatTemplate) -> dict[str, str]:
    """Say what the parsers of no format of their own read off a template, by label."""
    from dovetail.plugins import Registry
    from dovetail.plugins.loader import import_planned
    from dovetail.plugins.plan import as_planned
    from dovetail.text.detection.candidates import DERIVED
    from dovetail.text.detection.detect import LABELS

    registry, lines = Registry.scan(), {}
    for kind in LABELS:
        lines.update(import_planned(as_planned(registry.resolve(kind, DERIVED)))().described(template))
    return lines


def tokenizer_facts(model: ModelFolder, rows: int | None) -> dict[str, Any]:
    """Say how many tokens there are and which end a reply, or why the tokenizer cannot be read; warn of too many.

    Args:
        model: What the folder says.
        rows: Of the model's embedding; None: not known.
    """
    from dovetail.contracts.errors import ModelError
    from dovetail.processing.processor import too_many_tokens
    from dovetail.text.tokenizer.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.of_files(model.tokenizer_path, model.texts)
    except ModelError as error:
        return {"refused": str(error), "num_tokens": None, "ends": {}}
    if rows is not None and (note := too_many_tokens(tokenizer, rows)) is not None:
        logger.warning("%s", note)
    ends = {str(token_id): tokenizer.token_text(token_id) for token_id in tokenizer.eos_token_ids}
    return {"refused": None, "num_tokens": tokenizer.vocab_size, "ends": ends}


SAMPLING = frozenset(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))
SWITCHES: dict[str, dict[str, Any]] = {
    "no switch": {},
    "thinking on": {"enable_thinking": True, "thinking": True},
    "thinking off": {"enable_thinking": False, "thinking": False},
}
STATES = {"in": "thinks at once", "out": "does not think", "open": "may think"}


def thinking_states(template: Any, reasoning_parser: str | None) -> dict[str, str]:
    """Say what the generation prompt leaves for each switch; empty without a template or a parser."""
    from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
    from dovetail.plugins import Registry
    from dovetail.plugins.loader import import_planned
    from dovetail.plugins.plan import as_planned
    from dovetail.sdk.formats.output import make_parser
    from dovetail.text.detection.formats import bound_reasoning
    from dovetail_testing.parsers import BytesTokenizer

    if not template.source or reasoning_parser is None:
        return {}
    record = Registry.scan().resolve("reasoning_parser", reasoning_parser)
    plugin: ReasoningParser = bound_reasoning(import_planned(as_planned(record))(), template)
    states = {}
    for label, switches in SWITCHES.items():
        try:
            tail = template.render([{"role": "user", "content": "x"}], template_kwargs=switches).tail
        except RequestError as error:
            states[label] = f"the template refuses: {error}"
            continue
        machine = make_parser(plugin.spec(BytesTokenizer(), template, ParserRequest(template_kwargs=switches)))
        states[label] = STATES[machine.prime(tail).value]
    return states


def table(facts: dict[str, Any]) -> str:
    """Lay the facts out for reading."""
    template = facts["chat_template"]
    size = facts["weights_bytes"] / 2**20
    lines = [
        f"model              {facts['model']}",
        f"architecture       {facts['architecture']}, {facts['dtype']}, context {facts['context_length']}",
        f"served by          {facts['served_by'] or 'nobody: ' + facts['refused']}",
        f"weights            {facts['weights_lack'] or f'{size:,.1f} MiB in files'}",
    ]
    lines += [
        f"cache              {group['group']}: {group['layers']} layers, {group['bytes']:,} bytes a {group['per']}"
        for group in facts["cache"]
    ]
    if facts["served_by"] is not None and not facts["cache"]:
        lines.append("cache              nothing is kept: prompts are computed whole")
    if facts["tasks"]:
        lines.append(f"for                {', '.join(facts['tasks'])}")
    lines.append(f"tokenizer          {describe_tokenizer(facts['tokenizer'])}")
    lines.append(f"chat template      {describe_template(template)}")
    lines += [f"  {label:<17}{state}" for label, state in template["thinking"].items()]
    if facts["sampling_defaults"]:
        lines.append("sampling defaults  " + ", ".join(f"{k} {v}" for k, v in facts["sampling_defaults"].items()))
    for kind, label in (("reasoning_parser", "reasoning parser"), ("tool_parser", "tool-call parser")):
        one = facts[kind]
        lines.append(f"{label}   {one['name'] or 'none'}: {one['why']}")
        lines += [f"  {s['score']:.2f}  {s['name']}" for s in one["scores"][:SHOWN]]
    if derived := facts["read_off_the_template"]:
        lines.append("read off the template")
        lines += [f"  {label:<17}{text}" for label, text in derived.items()]
    return "\n".join(lines)


def describe_tokenizer(tokenizer: dict[str, Any]) -> str:
    """Say in one line how many tokens there are, and what ends a reply."""
    if tokenizer["refused"] is not None:
        return f"none: {tokenizer['refused']}"
    ends = ", ".join(f"{text} ({token_id})" for token_id, text in tokenizer["ends"].items())
    return (
        f"{tokenizer['num_tokens']:,} tokens; a reply ends at {ends or 'none of them: set eos_token_id in config.json'}"
    )


def describe_template(template: dict[str, Any]) -> str:
    """Say in one line where the template comes from."""
    if template["from"] is None:
        return "none"
    names = f" ({', '.join(template['names'])})" if len(template["names"]) > 1 else ""
    return f"from {template['from']}{names}, content as {template['content_format']}"
