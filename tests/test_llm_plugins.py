"""`LLM` takes plugins as the server does: by name, file, class, with options and rules, and says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams
from dovetail.contracts import (
    FormatSpec,
    GrammarBackend,
    Markers,
    PrefixView,
    ReasoningParser,
    SchedulePolicy,
    WaitingRequest,
)
from dovetail.contracts.errors import ConfigError
from dovetail_offline.settings import read_settings

FILE = """
from dataclasses import dataclass
from dovetail.contracts import FormatSpec, Markers, ReasoningParser
from dovetail.contracts import hookimpl

@dataclass
class Options:
    end: str = "never"

class AtWord(ReasoningParser):
    Options = Options

    def spec(self, tokenizer, template, request):
        return FormatSpec(reasoning=Markers("The", self.options.end, after_start="", before_end="", after_end=""))

@hookimpl
def dovetail_process_start(ctx):
    with open(LOG, "a") as file:
        print("start", ctx.role, file=file)

@hookimpl
def dovetail_process_stop(ctx):
    with open(LOG, "a") as file:
        print("stop", ctx.role, file=file)
"""
ASKED = [{"role": "user", "content": "What is the capital of France?"}]


class ToOf(ReasoningParser):
    """Takes everything up to " of" for reasoning, if the reply begins with "The"."""

    def spec(self, tokenizer: Any, template: Any, request: Any) -> FormatSpec:
        return FormatSpec(reasoning=Markers("The", " of", after_start="", before_end="", after_end=""))


@dataclass
class Longest(SchedulePolicy):
    """Notes that it is asked."""

    seen = 0

    def order(self, waiting: Sequence[WaitingRequest], cache: PrefixView) -> Sequence[WaitingRequest]:
        type(self).seen += 1
        return sorted(waiting, key=lambda r: -r.remaining_tokens)


@pytest.fixture
def small() -> dict[str, Any]:
    """Settings of a small engine."""
    return {"max_total_tokens": 4096, "device": "cpu", "num_threads": 1, "grammar_backend": None}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A plugin file, and beside it the log that it writes."""
    path = tmp_path / "at_word.py"
    path.write_text(FILE.replace("LOG", repr(str(tmp_path / "log"))))
    return path


def answer(llm: LLM) -> tuple[str | None, str]:
    """Reasoning and content of one reply."""
    (reply,) = llm.chat(ASKED, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    return reply.reasoning, reply.text


def test_classes_in_place_of_names(small: dict[str, Any]) -> None:
    """A parser and a policy that no package registers are used as they stand."""
    with LLM(reasoning_parser=ToOf, tool_call_parser=None, schedule_policy=Longest, **small) as llm:
        reasoning, text = answer(llm)
    assert reasoning == " capital"
    assert text.startswith(" France")
    assert Longest.seen >= 1


def test_files_options_and_hooks(file: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's parser gets its options, an argument before a variable; its hooks run at start and stop."""
    monkeypatch.setenv("DOVETAIL_PLUGIN__AT_WORD__END", " of")
    common: dict[str, Any] = {"tool_call_parser": None, "plugin_file": file, **small}
    with LLM(reasoning_parser="at-word", **common) as llm:
        assert answer(llm)[0] == " capital"
    with LLM(reasoning_parser="at-word", plugin_options={"at-word": {"end": " France"}}, **common) as llm:
        assert answer(llm)[0] == " capital of"
    log = (file.parent / "log").read_text().splitlines()
    assert log == ["start api", "stop api"] * 2


class Unfinished(ReasoningParser):  # type: ignore[misc]
    """Implements nothing."""


class ForAll(GrammarBackend):
    """As it would stand in a script."""

    __module__ = "__main__"


ForAll.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def local() -> type[ReasoningParser]:
    class Local(ToOf):
        pass

    return Local


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"resoning_parser": "qwen3"}, r"LLM\(resoning_parser=…\): unknown argument; did you mean reasoning_parser\?"),
        ({"dtype": "bf17"}, r"LLM\(dtype='bf17'\): should be 'auto', 'bfloat16', 'float16' or 'float32'"),
        ({"plugin_options": {"acme": 3}}, r"plugin_options={'acme': 3}: expected {'plugin': {'option': value}}"),
        ({"reasoning_parser": "qwen-3"}, r"--reasoning-parser 'qwen-3': not installed.*did you mean qwen3"),
        ({"reasoning_parser": Longest}, r"reasoning_parser=Longest: is no subclass of dovetail.contracts.ReasoningP"),
        ({"reasoning_parser": Unfinished}, "reasoning_parser=Unfinished: does not implement spec; implement them"),
        ({"reasoning_parser": local()}, "is defined inside a function; define it at the top of a module"),
        ({"grammar_backend": ForAll}, "is defined in the script itself, and other processes load it; move it to a mod"),
        ({"plugin_file": "nothing.py"}, "nothing.py': No such file or directory; give a readable Python file"),
        ({"plugins": "acme"}, "--plugin 'acme': not installed"),
        ({"lock": "nothing.lock"}, "nothing.lock"),
        ({"config": "nothing.yaml"}, "--config 'nothing.yaml': No such file or directory"),
        ({"model": "does/not/exist/at/all"}, "does/not/exist/at/all"),
        ({"tool_call_parser": Longest}, r"tool_call_parser=Longest: is no subclass of dovetail.contracts.ToolParser"),
        ({"grammar_backend": "acme"}, "--grammar-backend 'acme': not installed"),
        ({"schedule_policy": ToOf}, r"schedule_policy=ToOf: is no subclass of dovetail.contracts.SchedulePolicy"),
        ({"logits_processors": ["acme"]}, "'acme': not installed"),
        ({"plugins_dir": "nothing"}, "nothing"),
        ({"chat_template": "nothing.jinja"}, "nothing.jinja"),
        ({"tokenizer_path": "nothing"}, "--tokenizer-path 'nothing': no such folder"),
        ({"mem_fraction_static": 0.5, "gpu_memory_utilization": 0.5}, "both size the KV cache; give one of them"),
        ({"page_size": 64, "max_total_tokens": 3}, "--max-total-tokens 3"),
        ({"plugins": [5]}, r"^LLM\(plugins=\[5\]\): expected a name or a list of names$"),
        ({"plugins": 0}, r"^LLM\(plugins=0\): expected a name"),
        ({"plugins": {"acme": {"x": 1}}}, r"^LLM\(plugins={'acme': {'x': 1}}\): expected a name"),
        ({"plugins": ToOf}, r"^LLM\(plugins=<class .*ToOf'>\): expected a name"),
        ({"deny": b"acme"}, r"^LLM\(deny=b'acme'\): expected a name"),
        ({"allow": [None]}, r"^LLM\(allow=\[None\]\): expected a name"),
        ({"plugin_file": [5]}, r"^LLM\(plugin_file=\[5\]\): expected a path or a list of paths$"),
        ({"plugins_dir": 5}, r"^LLM\(plugins_dir=5\): expected a path"),
        ({"lock": 5}, r"^LLM\(lock=5\): should be a path$"),
        ({"config": 5}, r"^LLM\(config=5\): should be the path of a YAML or TOML file$"),
        ({"model": 5}, r"^LLM\(model=5\): should be a valid string$"),
        ({"model": Path("does/not/exist")}, "does/not/exist': no such folder"),
        ({"port": 3000}, r"^LLM\(port=…\): unknown argument; known are those of `dovetail serve` that are no"),
        ({"deny": "a", "plugin_deny": "b"}, r"plugin_deny=….*deny=….*: both mean the same; give one of them$"),
        ({"model": "a", "model_path": "b"}, r"both mean the same; give one of them$"),
        ({"plugin_options": {5: {"a": 1}}}, r"^plugin_options={5: {'a': 1}}: expected {'plugin': {'option': value}}$"),
        ({"plugin_options": {"acme": {"": 1}}}, r"expected {'plugin': {'option': value}}$"),
        (
            {"plugin_options": {"acme": {"x": 1}}},
            r"^plugin_options\['acme'\]\['x'\]: plugin 'acme' is not selected; .*example with plugins=\['acme'\]$",
        ),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_is_loaded(given: dict[str, Any], said: str) -> None:
    """Each mistake is a `ConfigError` that names the argument and what to do."""
    with pytest.raises(ConfigError, match=said) as error:
        LLM(**given)
    assert "\n" not in str(error.value)


def test_rules_hold(file: Path, small: dict[str, Any]) -> None:
    """A denied plugin is not used although it is asked for."""
    with pytest.raises(ConfigError, match=r"at_word.py.*denied|deny"):
        LLM(reasoning_parser="at-word", plugin_file=[file], deny=["at_word.py"], **small)
    with pytest.raises(ConfigError, match=r"at_word.py.*allow"):
        LLM(reasoning_parser="at-word", plugin_file=[file], allow=["acme"], **small)


def test_a_folder_without_weights_is_refused_before_plugins_are_chosen(tmp_path: Path) -> None:
    """As by the server: the model is looked at first, whatever else is wrong."""
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(ConfigError, match=r"no weights|safetensors"):
        LLM(str(tmp_path), reasoning_parser="not-installed")


def test_arguments_then_environment_then_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The precedence of `dovetail serve`; what only a server has is named and left out."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "dtype: float16\npage-size: 32\nport: 3000\nplugins: {acme: {top_k: 5, deep: 1}}\nmax-num-seqs: 9\n"
    )
    monkeypatch.setenv("DOVETAIL_PAGE_SIZE", "64")
    monkeypatch.setenv("DOVETAIL_PLUGIN__ACME__TOP_K", "6")
    options = {"acme": {"deep": 2}}
    settings = read_settings({"config": config, "max_running_requests": 7, "plugin_options": options, "deny": "a,b"})
    assert (settings.dtype, settings.page_size, settings.max_running_requests) == ("float16", 64, 7)
    assert {name: option.value for name, option in settings.plugins["acme"].items()} == {"top_k": "6", "deep": 2}
    assert settings.plugin_deny == ["a", "b"]
    assert "port: LLM has no such setting" in caplog.text
