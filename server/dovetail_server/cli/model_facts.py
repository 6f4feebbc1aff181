"""What the server would make of a model folder, and why: for `dovetail info`. Loads no weights and no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.contracts.cache import Recurrent
from dovetail.contracts.config import ModelConfig
from dovetail.contracts.device import DeviceView, is_interpreted
from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.contracts.kernels import OPS, Ask, Claim, make_ask
from dovetail.contracts.reasoning import ParserRequest, ReasoningParser
from dovetail.demo import MODEL_DIR
from dovetail.plugins import Registry
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import PluginPlan, as_planned
from dovetail.processing.embeddings import Embedder
from dovetail.processing.oddities import usable_defaults
from dovetail.processing.plugin_settings import PluginSettings
from dovetail.processing.prepare import StartPreparation, examine
from dovetail.processing.reranker import knows_roles, says_so
from dovetail.processing.tasks import Tasks
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.hub import with_folders
from dovetail.runtime.checkpoint.weight_files import is_bare, weight_files
from dovetail.runtime.device.devices import check_device, likely_device
from dovetail.runtime.kernels.records import PREFIX, records, shown
from dovetail.runtime.memory.estimates import group_token_bytes, tower_bytes
from dovetail.runtime.memory.plan import context_len, image_patches
from dovetail.sdk.checkpoint import dense_numel
from dovetail.sdk.config import ITEM_BYTES
from dovetail.sdk.formats.output import make_parser
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.detection.candidates import DERIVED
from dovetail.text.detection.detect import LABELS, detect
from dovetail.text.parsing.fitted import bound_reasoning
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_server.start.folder_facts import model_config, read_as, tokenizer_of
from dovetail_testing.parsers import BytesTokenizer

DUMMY = "dummy"
KINDS = {"reasoning_parser": "reasoning parser", "tool_parser": "tool-call parser"}
"""Of parsers, with what they are called in the table."""
OR = " or "
"""Between kernel sets of which a start measures which is faster."""
SHOWN = 3
"""How many parsers of each kind are listed."""


def info(
    model: str | None,
    tokenizer_path: str | None = None,
    chat_template: str | None = None,
    impl: str = "auto",
    load_format: str = "auto",
) -> dict[str, Any]:
    """Collect the facts; what `dovetail serve` would refuse the model for stands in `refused`.

    Raises:
        ConfigError: Too little of the folder can be read to show anything.
    """
    if model is None:
        model = str(MODEL_DIR)
    given = {"model_path": model, "tokenizer_path": tokenizer_path, "chat_template": chat_template, "model_impl": impl}
    # Of a hub's model everything but the weights is fetched.
    unread = with_folders(PluginSettings.model_validate({**given, "load_format": DUMMY}))
    lacks, text = lack_of_weights(unread.folder), load_format != DUMMY
    settings = unread.model_copy(update={"load_format": load_format})
    if lacks and unread.model_path != model:
        settings = unread
    examined = examine_model(settings, text=text)
    folder = ModelFolder(unread.folder, unread.tokenizer_folder, weights=False)
    try:
        config, num_bytes = folder.config, folder.num_bytes
    except (ConfigError, RequestError) as error:
        raise examined.refused or error from None
    try:
        texts, source = texts_of(folder, chat_template)
    except (ConfigError, RequestError) as error:
        examined = examined._replace(refused=examined.refused or error)
        texts, source = no_texts(str(error)), ""
    shown = examine_model(unread, text=text) if lacks and examined.refused else examined
    length = config.get("max_position_embeddings")
    if length is None and shown.config is not None:  # models that see have it in an inner object
        length = shown.config.max_position_embeddings
    return {
        "model": model,
        "architecture": named_first(config.get("architectures")),
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "context_length": length,
        "weights_bytes": num_bytes,
        "weights_lack": lacks,
        **served_as(shown, folder, source),
        "refused": None if examined.refused is None else str(examined.refused),
        "tokenizer": tokenizer_facts(shown),
        "sampling_defaults": {} if shown.tokenizer is None else usable_defaults(shown.tokenizer),
        **texts,
    }


class ExaminedModel(NamedTuple):
    """What came of looking at a folder as a start does.

    Attributes:
        found: The plugins; None where there are none.
        config: The model's facts; None: not known.
        tokenizer: The model's; None: there is none.
        lost: Why there is no tokenizer.
        refused: Why `dovetail serve` would refuse it; None: it would not.
    """

    found: StartPreparation[Any] | None
    config: ModelConfig | None
    tokenizer: Tokenizer | None
    lost: Exception | None
    refused: Exception | None


def examine_model(settings: PluginSettings, *, text: bool) -> ExaminedModel:
    """Look at a folder as a start does, with (`text`) or without a tokenizer that has to be there."""
    found = config = tokenizer = lost = None
    refused: Exception | None = None
    try:
        found = examine(settings, text=text)
        config = model_config(found.model, found.registry.resolve("model", found.plan.of_kind("model")[0].qualified))
        config = config if found.plan.of_kind("processor") else config.text_only
        read_as(
            found, config, config.dtype, "cpu" if check_device(found.registry, settings.device) == "cpu" else "cuda"
        )
    except (ConfigError, RequestError) as error:
        refused = error
    try:
        folder = ModelFolder(settings.folder, settings.tokenizer_folder, weights=False)
        tokenizer = tokenizer_of(folder, config)
    except (ConfigError, RequestError) as error:
        lost = error
        refused = refused or (error if text else None)
    return ExaminedModel(found, config, tokenizer, lost, refused)


def lack_of_weights(folder: Path) -> str | None:
    """Say what is missing where a folder has nothing that is, or was meant to be, weights; None: it has."""
    if is_bare(folder):
        try:
            weight_files(folder)
        except ConfigError as error:
            return str(error)
    return None


UNSERVED: dict[str, Any] = {"served_by": None, "num_params": None, "vocab_size": None}
UNSERVED |= {"tasks": [], "cache": [], "images": None, "kernels": {}, "kernels_measured": {}, "kernel_sets": []}


def served_as(examined: ExaminedModel, model: ModelFolder, template: str) -> dict[str, Any]:
    """Say which plugin serves the model, what it is for, and what it keeps of a token; or that none does."""
    facts = examined.config
    if examined.refused is not None or examined.found is None or facts is None:
        return UNSERVED
    item = ITEM_BYTES[facts.dtype]
    cache = [
        {
            "group": group.name,
            "layers": len(group.layers),
            "bytes": group_token_bytes(group, item),
            "per": "request" if isinstance(group.reach, Recurrent) else "token",
        }
        for group in facts.cache_groups
        if group.layers
    ]
    answers = says_so(model) or knows_roles(template)
    embeds = Embedder.of_folder(model, facts.pool).is_declared and not answers
    tasks = list(Tasks.of(facts, None, embeds=embeds, answers=answers).possible)
    sizes = {"num_params": dense_numel(facts), "vocab_size": facts.vocab_size}
    plan = examined.found.plan
    served_by, kernels = plan.of_kind("model")[0].qualified, kernels_of(plan, facts)
    figures = figures_of(plan, facts.dtype, kernels)
    found = {
        "served_by": served_by,
        **sizes,
        "tasks": tasks,
        "cache": cache,
        "images": images_of(examined.found, facts),
    }
    sets = kernel_sets(examined.found.registry, facts)
    return {**found, "kernels": kernels, "kernels_measured": figures, "kernel_sets": sets}


def images_of(found: StartPreparation[Any], facts: ModelConfig) -> dict[str, int] | None:
    """Say how large an image may be, and what encoding it takes; None: the model is served for text only."""
    if facts.vision is None or not found.plan.of_kind("processor"):
        return None
    most = image_patches(found.settings, facts, context_len(found.settings, facts))
    return {
        "max_patches": most,
        "max_tokens": most // facts.vision.patches_per_token,
        "tower_bytes": tower_bytes(facts.vision, ITEM_BYTES[facts.dtype], most),
    }


def kernels_of(plan: PluginPlan, facts: ModelConfig) -> dict[str, str]:
    """Say which kernel set would serve which operation at widths of the model; sets answer without a device."""
    kind = likely_device(plan).kind
    sets = [(planned, import_planned(planned)()) for planned in plan.of_kind("kernels")]
    served = {}
    for ask in asks_of(kind, facts):
        claims = [each for each, one in sets if kind in one.devices and isinstance(one.serves(ask), Claim)]
        conflicts = [each.name for each in claims if not each.requested]
        name = OR.join(conflicts) if len(conflicts) == len(claims) > 1 else claims[0].name if claims else "plain"
        served[ask.op] = name
    return served


def asks_of(kind: str, facts: ModelConfig) -> Iterator[Ask]:
    """Yield the question for each operation on a kind of device, at widths of the model.

    What depends on forms of packed weights, on routing, on a mixer's heads, or on several ranks, a running
    server says.
    """
    view = DeviceView(kind, is_interpreted=is_interpreted())
    hidden, dim = facts.hidden_size, facts.layers[0].qk_dim if facts.layers else facts.hidden_size
    widths = dict.fromkeys("HNKRF", hidden) | {"D": dim, "V": facts.vocab_size}
    options = {"act": "silu_and_mul", "dtype": facts.dtype}
    for op, row in OPS.items():
        if row.over_ranks or not options.keys() >= set(row.options) or not widths.keys() >= set(row.dims):
            continue
        dims = {letter: widths[letter] for letter in row.dims} | ({"F": 1} if op == "rotations" else {})
        yield make_ask(op, view, facts.dtype, dims, {name: options[name] for name in row.options})


def kernel_sets(registry: Registry, facts: ModelConfig) -> list[dict[str, Any]]:
    """List every installed kernel set, also one that this start would not ask, with what it claims of the model."""
    found = []
    for record in registry.of_kind("kernels"):
        claims: dict[str, list[str]] = {}
        reason = "" if record.usable else record.reason
        try:
            made: Any = import_planned(as_planned(record))() if record.usable else None
            for kind in sorted(made.devices) if made else ():
                claims[kind] = [ask.op for ask in asks_of(kind, facts) if isinstance(made.serves(ask), Claim)]
        except Exception as error:  # a stranger's class, which nobody has chosen: the others are listed all the same
            reason = f"{type(error).__name__}: {error}"
        package = {"package": record.distribution, "version": record.version}
        found.append({"name": record.name, **package, "claims": claims, "reason": " ".join(reason.split())})
    return found


def figures_of(plan: PluginPlan, dtype: str, kernels: Mapping[str, str]) -> dict[str, str]:
    """Return what earlier starts have measured of operations that several sets serve, by operation with its widths."""
    if not any(OR in name for name in kernels.values()):
        return {}
    sets = [planned.name for planned in plan.of_kind("kernels")]
    return dict(kept(records(likely_device(plan).compiler()), sets, dtype))


def kept(folder: Path, sets: Iterable[str], dtype: str) -> Iterator[tuple[str, str]]:
    """Yield each operation that was measured here among some of these sets, with its widths, and the figures."""
    for file in sorted(folder.glob(f"{PREFIX}*.json")):
        try:
            found = json.loads(file.read_text())
            if set(found["sets"]) <= set(sets) and found["dtype"] == dtype:
                yield f"{found['operation']} on {found['device']}", shown(found["rows"], found["times"])
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            continue  # a start that reads it measures again


def named_first(names: Any) -> str | None:
    """Return the first of the architectures that a configuration names, in a line, whatever stands there."""
    first = names[0] if isinstance(names, list) and names else names or None
    return None if first is None else " ".join(str(first).split())


def no_texts(reason: str) -> dict[str, Any]:
    """Return what `texts_of` does where nothing can be read."""
    template: dict[str, Any] = {"from": None, "names": [], "content_format": None, "thinking": {}}
    unknown: dict[str, Any] = {"name": None, "why": reason, "scores": []}
    return {"chat_template": template, "read_off_the_template": {}, **dict.fromkeys(KINDS, unknown)}


def texts_of(folder: ModelFolder, chat_template: str | None) -> tuple[dict[str, Any], str]:
    """Say what is known of template and parsers; and return the template's source.

    Raises:
        ConfigError: A file cannot be read, or the template has a syntax error.
    """
    template = ChatTemplate.load(folder.texts, chat_template)
    found = detect(Registry.scan(), folder.texts, chat_template)
    facts: dict[str, Any] = {
        "chat_template": {
            "from": template.origin if template.source else None,
            "names": sorted(folder.texts.chat_templates),
            "content_format": template.content_format if template.source else None,
            "thinking": thinking_states(template, found["reasoning_parser"].name),
        },
        "read_off_the_template": read_off(template),
    }
    for kind, one in found.items():
        scores = [{"name": s.name, "score": s.score, "reads_back": s.reads_back} for s in one.scores]
        facts[kind] = {"name": one.name, "why": one.why, "scores": scores}
    return facts, template.source


def read_off(template: ChatTemplate) -> dict[str, str]:
    """Say what the parsers of no format of their own read off a template, by label."""
    registry, lines = Registry.scan(), {}
    for kind in LABELS:
        lines.update(import_planned(as_planned(registry.resolve(kind, DERIVED)))().described(template))
    return lines


def tokenizer_facts(examined: ExaminedModel) -> dict[str, Any]:
    """Say how many tokens there are and which end a reply, or why the tokenizer cannot be read."""
    tokenizer = examined.tokenizer
    if tokenizer is None:
        return {"refused": str(examined.lost), "num_tokens": None, "ends": {}}
    ends = {str(token_id): tokenizer.token_text(token_id) for token_id in tokenizer.eos_token_ids}
    return {"refused": None, "num_tokens": tokenizer.vocab_size, "ends": ends}


SWITCHES: dict[str, dict[str, Any]] = {
    "no switch": {},
    "thinking on": {"enable_thinking": True, "thinking": True},
    "thinking off": {"enable_thinking": False, "thinking": False},
}
STATES = {"in": "thinks at once", "out": "does not think", "open": "may think"}


def thinking_states(template: Any, reasoning_parser: str | None) -> dict[str, str]:
    """Say what the generation prompt leaves for each switch; empty without a template or a parser."""
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
        f"served by          {facts['served_by'] or 'nobody: ' + str(facts['refused'])}",
        f"weights            {facts['weights_lack'] or f'{size:,.1f} MiB in files'}",
    ]
    lines += [
        f"cache              {group['group']}: {group['layers']} layers, {group['bytes']:,} bytes a {group['per']}"
        for group in facts["cache"]
    ]
    if facts["served_by"] is not None and not facts["cache"]:
        lines.append("cache              nothing is kept: prompts are computed whole")
    if images := facts["images"]:
        shown = f"up to {images['max_patches']:,} patches, {images['max_tokens']:,} tokens"
        lines.append(f"images             {shown}; the tower takes up to {images['tower_bytes'] / 2**20:,.0f} MiB")
    if served := facts["kernels"]:
        by_set = {name: [op for op in served if served[op] == name] for name in dict.fromkeys(served.values())}
        lines += [f"kernels            {name}: {', '.join(ops)}" for name, ops in by_set.items()]
        lines += [f"  measured         {place}: {figures}" for place, figures in facts["kernels_measured"].items()]
        lines += sets_table(facts["kernel_sets"])
    if facts["tasks"]:
        lines.append(f"for                {', '.join(facts['tasks'])}")
    lines.append(f"tokenizer          {describe_tokenizer(facts['tokenizer'])}")
    lines.append(f"chat template      {describe_template(template)}")
    lines += [f"  {label:<17}{state}" for label, state in template["thinking"].items()]
    if facts["sampling_defaults"]:
        lines.append("sampling defaults  " + ", ".join(f"{k} {v}" for k, v in facts["sampling_defaults"].items()))
    for kind, label in KINDS.items():
        one = facts[kind]
        lines.append(f"{label}   {one['name'] or 'none'}: {one['why']}")
        lines += [f"  {s['score']:.2f}  {s['name']}" for s in one["scores"][:SHOWN]]
    if derived := facts["read_off_the_template"]:
        lines.append("read off the template")
        lines += [f"  {label:<17}{text}" for label, text in derived.items()]
    return "\n".join(lines)


def sets_table(sets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each device of each installed kernel set."""
    yield "kernel sets        installed, with what each claims at widths of the model, packed weights aside"
    rows = []
    for one in sets:
        package = f"{one['package']} {one['version']}"
        rows += [(one["name"], package, kind, ", ".join(ops) or "nothing") for kind, ops in one["claims"].items()]
        if one["reason"]:
            rows.append((one["name"], package, "-", one["reason"]))
    widths = [max(len(row[at]) for row in rows) for at in range(3)] if rows else []
    for *cells, last in rows:
        yield "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), last])


def describe_tokenizer(tokenizer: dict[str, Any]) -> str:
    """Say in one line how many tokens there are, and what ends a reply."""
    if tokenizer["refused"] is not None:
        return f"none: {tokenizer['refused']}"
    ends = ", ".join(f"{text or 'a token without text'} ({token_id})" for token_id, text in tokenizer["ends"].items())
    return (
        f"{tokenizer['num_tokens']:,} tokens; a reply ends at {ends or 'none of them: set eos_token_id in config.json'}"
    )


def describe_template(template: dict[str, Any]) -> str:
    """Say in one line where the template comes from."""
    if template["from"] is None:
        return "none"
    names = f" ({', '.join(template['names'])})" if len(template["names"]) > 1 else ""
    return f"from {template['from']}{names}, content as {template['content_format']}"
