"""`auto`: which parsers a model gets, and what is said about it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.reasoning import ParserRequest
from dovetail.demo import MODEL_DIR
from dovetail.plugins import Registry
from dovetail.plugins.loader import import_planned
from dovetail.plugins.plan import as_planned
from dovetail.sdk.formats.output import make_parser, parse_full
from dovetail.text.chat.templates import FOLDER
from dovetail.text.detection.detect import detect, resolve_parsers
from dovetail.text.parsing.stream import NoTemplate

sys.path.insert(0, str(Path(__file__).parents[1] / "parsers"))  # the table of templates

from test_round_trip import CASES, STYLES

REGISTRY = Registry.scan()
AUTO = {"reasoning_parser": "auto", "tool_parser": "auto"}


@pytest.mark.parametrize("name", CASES)
def test_every_familys_template_is_recognised(name: str, tmp_path: Path) -> None:
    """The parsers that read a template's replies are the ones that are chosen for it."""
    path = next(path for folder in (FOLDER, STYLES) if (path := folder / f"{name}.jinja").is_file())
    found = detect(REGISTRY, TokenizerFiles.read(tmp_path), str(path))
    assert found["reasoning_parser"].name == CASES[name].reasoning
    assert found["tool_parser"].name == CASES[name].tools


def test_the_demo_model_is_recognised() -> None:
    """The choice names its reason."""
    names, notes = resolve_parsers(REGISTRY, TokenizerFiles.read(MODEL_DIR), AUTO)
    assert names == {"reasoning_parser": "qwen3", "tool_parser": "hermes"}
    assert notes[0] == (
        "Reasoning parser: qwen3 (auto: it scores 1.00 for the chat template, and reads a rendered reply back; "
        "--reasoning-parser none turns it off)"
    )


def test_a_name_or_none_is_left_alone(tmp_path: Path) -> None:
    """Only `auto` is answered; a hook plugin's answer comes first."""
    files, given = TokenizerFiles.read(tmp_path), {"reasoning_parser": "kimi", "tool_parser": None}
    assert resolve_parsers(REGISTRY, files, given) == (given, [])
    names, notes = resolve_parsers(
        REGISTRY, files, AUTO, select=lambda kind, facts: "glm45" if kind == "tool_parser" else None
    )
    assert names == {"reasoning_parser": None, "tool_parser": "glm45"}
    assert "chosen by a hook plugin" in notes[0]
    assert "the model has no chat template" in notes[1]


def test_the_tokenizers_word_counts(tmp_path: Path) -> None:
    """`response_template` names a parser, or its description of replies is evidence like the template's text."""
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"response_template": "kimi_k2", "chat_template": "{{ messages }}"}))
    assert detect(REGISTRY, TokenizerFiles.read(tmp_path))["reasoning_parser"].name == "kimi-k2"
    assert "response_template" in detect(REGISTRY, TokenizerFiles.read(tmp_path))["tool_parser"].why
    described = {"response_schema": {"x-regex": "\\[TOOL_CALLS\\](?P<calls>.*)"}, "chat_template": "{{ messages }}"}
    config.write_text(json.dumps(described))
    assert detect(REGISTRY, TokenizerFiles.read(tmp_path))["tool_parser"].name == "mistral"


def test_a_template_that_nobody_knows(tmp_path: Path) -> None:
    """Nothing is guessed: none, with the reason."""
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    found = detect(REGISTRY, TokenizerFiles.read(tmp_path))
    assert {one.name for one in found.values()} == {None}
    assert found["reasoning_parser"].why == "no installed parser knows the chat template"


def test_an_unknown_family_is_tested_by_reading_back(tmp_path: Path) -> None:
    """A template without any known turn markers that prints `<think>` blocks gets a parser that reads them."""
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>"
        "\n\n{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(source)
    best = detect(REGISTRY, TokenizerFiles.read(tmp_path))["reasoning_parser"]
    assert best.name is not None
    assert best.scores[0].reads_back is True


def test_thinking_that_only_the_prompt_shows(tmp_path: Path) -> None:
    """A template that opens thinking in the prompt, and drops it from the history, gets a parser of its markers."""
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(source)
    found = detect(REGISTRY, TokenizerFiles.read(tmp_path))["reasoning_parser"]
    assert (found.name, found.scores[0].reads_back) == ("deepseek-r1", None)
    (tmp_path / "chat_template.jinja").write_text(source.replace(".split('</think>')[-1]", ""))
    assert detect(REGISTRY, TokenizerFiles.read(tmp_path))["reasoning_parser"].name == "deepseek-r1"
    (tmp_path / "chat_template.jinja").write_text(source + "{% if tools %}Calls: <TOOLCALL> </TOOLCALL>{% endif %}")
    both = detect(REGISTRY, TokenizerFiles.read(tmp_path))
    assert (both["reasoning_parser"].name, both["tool_parser"].name) == ("qwen3", "nemotron")


@pytest.mark.parametrize("begin", ["", "{{ '{# not one #}' }}{% raw %}{# nor this #}{% endraw %}\r\n"])
def test_a_comment_is_no_clue(begin: str, tmp_path: Path) -> None:
    """What a template says of other templates, or no longer does, chooses no parser."""
    from dovetail.text.chat.template import ChatTemplate

    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    source = begin + turns + "{# unlike <TOOLCALL>, [TOOL_CALLS] #}{#- <think> </think> <｜tool▁calls▁begin｜>\r\n-#}\n"
    (tmp_path / "chat_template.jinja").write_text(source)
    found = detect(REGISTRY, TokenizerFiles.read(tmp_path))
    assert {one.name for one in found.values()} == {None}
    kept = ChatTemplate({"default": source}).source
    assert ("not one" in kept, "nor this" in kept, "TOOL" in kept, "<think>" in kept) == (bool(begin),) * 2 + (
        False,
    ) * 2


TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def listed(text: str) -> str:
    return "{% if tools %}<|im_start|>system\n" + text + "<|im_end|>\n{% endif %}"


TAUGHT = {
    "lfm2": listed("List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>") + TURNS,
    "lfm2.5": listed("List of tools: [{% for t in tools %}{{ t | tojson }}{% endfor %}]") + TURNS,
    "hermes": listed("<tools>{{ tools | tojson }}</tools> Return JSON within <tool_call></tool_call>.") + TURNS,
    "phi4-mini-json": listed('Write calls as functools[{"name": "", "arguments": {}}]: {{ tools | tojson }}')
    + "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}{% if not loop.last %},{% endif %}'
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}<|assistant|>",
}
"""Templates that tell the model how to call, and show no call of a history, or in another way."""


@pytest.mark.parametrize("name", TAUGHT)
def test_what_the_prompt_teaches_counts(name: str, tmp_path: Path) -> None:
    """The family's format is taken where no call is shown."""
    (tmp_path / "chat_template.jinja").write_text(TAUGHT[name])
    assert detect(REGISTRY, TokenizerFiles.read(tmp_path))["tool_parser"].name == name.partition(".")[0]


NAMED = "Never write [TOOL_CALLS], <|python_tag|>, <minimax:tool_call> or <tool_call>. Tools: {{ tools | tojson }}"
"""What a prompt with tools says of other families."""
CALL = "{% for c in m.tool_calls or [] %}{% set f = c.function %}SHOWN{% endfor %}<|im_end|>"
SHOWN = {
    "\nAction: {{ f.name }}\nAction Input: {{ f.arguments | tojson }}": "template",
    '<call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</call>': "template",
    '\n<TOOLCALL>[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]</TOOLCALL>': "nemotron",
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}': "llama3",
    "<|use|>{{ loop.index0 }}/{{ f.name }}/{{ f.arguments | tojson }}<|end|>": None,
}
"""Calls of a history, and the parser."""


@pytest.mark.parametrize("shown", SHOWN)
def test_calls_that_are_shown_count_before_tags_that_a_prompt_names(shown: str, tmp_path: Path) -> None:
    """The history shows the model's own format; nothing else is taken where no parser reads that."""
    source = listed(NAMED) + TURNS.replace("<|im_end|>", CALL.replace("SHOWN", shown), 1)
    (tmp_path / "chat_template.jinja").write_text(source)
    assert detect(REGISTRY, TokenizerFiles.read(tmp_path))["tool_parser"].name == SHOWN[shown]


def test_an_answer_between_markers_without_thinking(tmp_path: Path) -> None:
    """Cohere's markers around an answer are dropped, also of models that do not think."""
    source = (
        "{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'user' %}<|USER_TOKEN|>{{ m.content }}{% else %}"
        "<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(source)
    found = detect(REGISTRY, TokenizerFiles.read(tmp_path))
    assert (found["reasoning_parser"].name, found["tool_parser"].name) == ("cohere-command3", None)
    plugin = import_planned(as_planned(REGISTRY.resolve("reasoning_parser", "cohere-command3")))()
    parser = make_parser(plugin.spec(None, NoTemplate(source), ParserRequest()))
    parser.prime("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>")
    assert parse_full(parser, text="Hello.<|END_RESPONSE|>").content == "Hello."


def test_headers_with_roles_are_recognised(tmp_path: Path) -> None:
    """HyperCLOVA's messages say in their role what they are."""
    source = (
        "{% for m in messages %}{% if m.reasoning_content %}<|im_start|>assistant/think\n{{ m.reasoning_content }}"
        "<|im_end|>\n{% endif %}{% if m.content %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
        "{{ '\n' if m.tool_calls or m.role != 'assistant' else '<|endofturn|>\n' }}{% endif %}{% if m.tool_calls %}"
        "<|im_start|>assistant -> tool/function_call\n[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}{% endfor %}]<|im_end|><|stop|>\n'
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(source)
    found = detect(REGISTRY, TokenizerFiles.read(tmp_path))
    assert {kind: (one.name, one.scores[0].reads_back) for kind, one in found.items()} == {
        "reasoning_parser": ("hyperclova", True),
        "tool_parser": ("hyperclova", True),
    }


def test_reading_off_the_template_is_a_plugin_as_any_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without the parser `template`, or with one that fails, what no other parser knows has none."""
    (tmp_path / "chat_template.jinja").write_text(THINKS)
    assert detect(REGISTRY, TokenizerFiles.read(tmp_path))["reasoning_parser"].name == "template"
    registry = Registry()
    assert detect(registry, TokenizerFiles.read(tmp_path))["reasoning_parser"].name is None
    registry.add("reasoning_parser", "template", "no_such_module_anywhere:Parser")
    with caplog.at_level(logging.WARNING):
        assert detect(registry, TokenizerFiles.read(tmp_path))["reasoning_parser"].name is None
    assert "auto passes over" in caplog.text


CLUES = [{"all": ["<think>", "<|im_start|>"], "score": 1.0}]
"""Those of a stranger who knows the demo model's template best."""


def test_a_broken_plugin_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stranger's parser that cannot be imported costs a warning, not the server."""
    registry = Registry.scan()
    registry.add("reasoning_parser", "broken", "no_such_module_anywhere:Parser", clues=CLUES)
    with caplog.at_level(logging.WARNING):
        assert detect(registry, TokenizerFiles.read(MODEL_DIR))["reasoning_parser"].name == "qwen3"
    assert "auto passes over" in caplog.text


@pytest.mark.parametrize("place", ["import", "spec"])
def test_a_plugin_that_hangs_is_passed_over(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger's parser that never answers costs what the time limit says, and a warning that names it."""
    module = tmp_path / f"hanging_{place}.py"
    module.write_text(
        "import time\n"
        "from dovetail.contracts import ReasoningParser\n"
        "class Parser(ReasoningParser):\n"
        "    def spec(self, tokenizer, template, request): time.sleep(600)\n"
        + ("time.sleep(600)\n" if place == "import" else "")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry.scan()
    registry.add("reasoning_parser", "hanging", f"{module.stem}:Parser", clues=CLUES)
    with caplog.at_level(logging.WARNING):
        assert detect(registry, TokenizerFiles.read(MODEL_DIR), timeout_s=0.5)["reasoning_parser"].name == "qwen3"
    assert "did not end within 0.5 s" in caplog.text


def test_what_is_not_chosen_is_not_imported() -> None:
    """For the demo model `auto` imports one parser of each kind, and their packages."""
    code = (
        "import sys\n"
        "from dovetail.demo import MODEL_DIR\n"
        "from dovetail.plugins import Registry\n"
        "from dovetail.text.detection.detect import detect\n"
        "from dovetail.checkpoint.tokenizer_files import TokenizerFiles\n"
        "detect(Registry.scan(), TokenizerFiles.read(MODEL_DIR))\n"
        "print(sorted(name for name in sys.modules if name.startswith('dovetail_parsers.') and name.count('.') > 1))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    named = ["reasoning.declared", "reasoning.think_tags", "tools.hermes"]
    assert found == f"{[f'dovetail_parsers.{name}' for name in named]}\n"


def stranger(patch: pytest.MonkeyPatch, registry: Registry, number: int, source: str, **facts: object) -> None:
    """Register a reasoning parser of `<t>` and a module that notes its import."""
    name = f"stranger{number}"
    module = ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    patch.setitem(sys.modules, name, module)
    registry.add("reasoning_parser", name, f"{name}:Parser", **facts)


STRANGER = """
from dovetail.contracts import FormatSpec, Markers, ReasoningParser
made = 0
class Parser(ReasoningParser):
    def __init__(self):
        global made
        made += 1
    def spec(self, tokenizer, template, request):
        return FormatSpec(reasoning=Markers("<t>", END))
"""
THINKS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<t>{{ m.reasoning_content }}</t>{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(("right", "chosen"), [(0, "stranger0"), (2, "stranger2"), (3, "template")])
def test_the_likeliest_are_tried_first(
    right: int, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best one that reads back is taken, and no other is made; after three that fail, `template` is."""
    registry = Registry.scan()
    for number in range(4):
        source = STRANGER.replace("END", repr("</t>" if number == right else "</x>"))
        stranger(monkeypatch, registry, number, source, clues=[{"all": ["<t>"], "score": 0.9 - number / 10}])
    (tmp_path / "chat_template.jinja").write_text(THINKS)
    found = detect(registry, TokenizerFiles.read(tmp_path))["reasoning_parser"]
    assert found.name == chosen
    made = [sys.modules[f"stranger{number}"].made for number in range(4)]
    assert [bool(number) for number in made] == [number <= min(right, 2) for number in range(4)]


def test_a_name_of_two_packages_is_chosen_by_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `auto` says can be looked up: a bare name would be ambiguous."""
    registry = Registry.scan()
    for package, end in (("pluggy", "</x>"), ("pytest", "</t>")):  # which are installed, as a parser's package is
        source = STRANGER.replace("END", repr(end))
        clues = [{"all": ["<t>"], "score": 0.9}]
        stranger(monkeypatch, registry, 0, source, distribution=package, version=version(package), clues=clues)
        monkeypatch.setitem(sys.modules, f"{package}_parser", sys.modules["stranger0"])
        registry.records[-1] = replace(registry.records[-1], target=f"{package}_parser:Parser")
    (tmp_path / "chat_template.jinja").write_text(THINKS)
    found = detect(registry, TokenizerFiles.read(tmp_path))
    assert found["reasoning_parser"].name == "pytest:stranger0"
    assert registry.resolve("reasoning_parser", "pytest:stranger0").distribution == "pytest"


def test_what_opens_thinking_is_a_clue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser without clues is tried where a template's replies, or the end of its prompt, hold its marker."""
    registry = Registry.scan()
    stranger(monkeypatch, registry, 0, STRANGER.replace("END", "'</t>'"), opens="<t>")
    (tmp_path / "chat_template.jinja").write_text(THINKS)
    found = detect(registry, TokenizerFiles.read(tmp_path))["reasoning_parser"]
    assert (found.name, [one.score for one in found.scores]) == ("stranger0", [0.5])
    prompt = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</t>')[-1] }}{% endfor %}[assistant]<t>"
    (tmp_path / "chat_template.jinja").write_text(prompt)
    assert detect(registry, TokenizerFiles.read(tmp_path))["reasoning_parser"].name == "stranger0"
    (tmp_path / "chat_template.jinja").write_text(THINKS.replace("<t>", "<u>"))
    assert detect(registry, TokenizerFiles.read(tmp_path))["reasoning_parser"].name == "template"


def test_a_parser_without_facts_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who states neither clues nor what opens its thinking is chosen by name only."""
    registry = Registry.scan()
    stranger(monkeypatch, registry, 0, STRANGER.replace("END", "'</t>'"))
    (tmp_path / "chat_template.jinja").write_text(THINKS)
    assert detect(registry, TokenizerFiles.read(tmp_path))["reasoning_parser"].name == "template"
    assert sys.modules["stranger0"].made == 0
