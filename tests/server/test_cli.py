"""The command line: flags, their sources, mistakes, and what gets imported."""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from server_tiny import NO_TENSORS, write_model

from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.demo import MODEL_DIR
from dovetail.processing.plan import plan_plugins
from dovetail.processing.prepare import check_model
from dovetail_server.cli import main as dovetail
from dovetail_server.cli import options, serve
from dovetail_server.cli.options import GROUPS, METAVARS, build_parser, has_flag, load_settings, metavar_of, parse_flags
from dovetail_server.compat.flags import TABLE
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start import preflight

FLAGS = """
admin-api-key allow-origins allowed-hosts allowed-origins api-key apis body-cpu-limit body-processes body-timeout
device-ids devices enable-expert-parallel ep ep-size expert-parallel expert-parallel-size
admin-api-key default-chat-template-kwargs device-memory-utilization enable-force-include-usage fastapi-root-path
max-num-queued-reqs max-num-queued-tokens override-generation-config preferred-sampling-params root-path
scheduling-policy shutdown-timeout sse-keep-alive-interval ssl-certfile ssl-keyfile ssl-keyfile-password
stream-response-default-include-usage
batch-invariant enable-deterministic-inference
attention-backend block-size chat-template chunked-prefill-size config context-length database-url
decode-log-interval device disable-access-log disable-compile-ahead disable-cuda-graph disable-overlap-schedule
disable-playground disable-radix-cache disable-uvicorn-access-log wait-for-kernels
closed-probes open-metrics resume-key download-dir revision
model-impl
drain-grace drain-timeout dtype engine-hang-timeout engine-restart-window max-engine-restarts
enable-log-requests enforce-eager file-storage-path
decode-attention-backend prefill-attention-backend gpu-memory-utilization
grammar-backend grammar-cache-bytes grammar-compile-timeout guided-decoding-backend header-timeout help host
keep-alive-timeout kernels load-format log-format log-level log-requests log-slow-requests profile-dir
keys-file isolate-prefix-cache
max-tokens-beyond model-aliases unservable-tools unknown-fields
max-batch-lines max-batch-requests max-body-bytes max-connections max-connections-per-address
logits-processors max-image-patches max-logprobs max-file-bytes max-model-len max-num-batched-tokens max-num-seqs
max-prefill-tokens max-prompt-bytes max-queued-bytes max-queued-requests max-queued-tokens
max-running-requests max-storage-bytes max-total-tokens
max-stored-responses max-stored-response-bytes stored-response-ttl
allowed-local-media-path allowed-media-domains image-cache-bytes limit-mm-per-prompt max-image-patches processor
state-dtype mamba-ssm-dtype mamba-ssm-cache-dtype state-copies fold-replies
kv-cache-dtype metrics-style min-body-rate min-free-disk-bytes mem-fraction-static model model-path num-threads
page-size plugin plugin-allow plugin-deny plugin-file plugin-timeout quantization plugins-dir plugins-locked port
data-parallel-size dp dp-size tensor-parallel-size tp tp-size
random-seed reasoning-parser refuse-validate-only sampling-defaults schedule-policy seed served-model-name speculator
compact-json constrained-json-disable-any-whitespace stream-interval stream-keep-alive stream-write-timeout
strict-schema task timeout-keep-alive tokenizer tokenizer-path tool-call-parser tool-parser websocket-idle-timeout
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in __import__("os").environ if name.startswith("DOVETAIL_")]:
        monkeypatch.delenv(name)


def settings(*argv: str) -> ServeSettings:
    flags = parse_flags(argv)
    assert isinstance(flags, dict)
    return load_settings(flags)


def error(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_flag_is_deliberate() -> None:
    """The accepted flags are exactly these, so that a new one is a decision."""
    names = {name[2:] for action in build_parser(True)._actions for name in action.option_strings if name[:2] == "--"}
    names = {name for name in names if not (name.startswith("no-") and name[3:] in names)}  # of every switch
    assert names == set(FLAGS.split())


def test_every_flag_is_in_one_group_and_its_metavar_says_the_unit() -> None:
    """Of the help: a new setting needs a group, and no group or metavar names a setting that is gone."""
    shown = [name for name, field in ServeSettings.model_fields.items() if has_flag(field)]
    grouped = [name for names in GROUPS.values() for name in names.split()]
    assert sorted(grouped) == sorted(shown)
    assert {name for names in METAVARS.values() for name in names.split()} <= set(shown)
    for suffix, unit in (("_bytes", "BYTES"), ("_timeout", "SECONDS"), ("_tokens", "TOKENS")):
        assert [name for name in shown if name.endswith(suffix) and metavar_of(name) != unit] == []


def test_common_help_is_short_and_full_help_is_complete() -> None:
    """Plain help shows about 25 options and says how to see the rest, which `--help=all` shows."""
    plain, full = parse_flags(["--help"]), parse_flags(["--help=all"])
    assert isinstance(plain, str)
    assert isinstance(full, str)
    assert 18 <= plain.count("\n  --") <= 28
    assert "--help=all" in plain
    assert "--max-prompt-bytes" not in plain
    names = [name for name, field in ServeSettings.model_fields.items() if has_flag(field)]
    assert [name for name in names if f"--{name.replace('_', '-')}" not in full] == []


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Precedence is flags, environment, `--config`, defaults."""
    file = tmp_path / "config.yaml"
    file.write_text("port: 1\nhost: 0.0.0.0\nmax-model-len: 4k\nlog_level: debug\n")
    monkeypatch.setenv("DOVETAIL_PORT", "2")
    monkeypatch.setenv("DOVETAIL_HOST", "127.0.0.2")
    monkeypatch.setenv("DOVETAIL_SERVED_MODEL_NAME", "a,b")
    found = settings("--config", str(file), "--port", "3")
    assert (found.port, found.host, found.context_length, found.log_level) == (3, "127.0.0.2", 4096, "debug")
    assert found.served_model_name == ["a", "b"]
    assert found.dtype == "auto"


def test_peers_names_and_spellings_are_accepted() -> None:
    """vLLM's aliases, underscores, `32k`, several served names and `deepseek_r1` mean what their users expect."""
    found = settings("m", "--max-model-len=32k", "--max_num_seqs", "4", "--served-model-name", "a", "b,c")
    assert (found.model_path, found.context_length, found.max_running_requests) == ("m", 32768, 4)
    assert found.served_model_name == ["a", "b", "c"]
    assert settings("--reasoning-parser", "deepseek_r1").reasoning_parser == "deepseek-r1"
    assert settings("--reasoning-parser", "none").reasoning_parser is None
    settings("--enable-auto-tool-choice", "--enable-cache-report")


def test_help_without_descriptions_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """An install of compiled files alone has no docstrings to describe settings with: help and start say so."""
    assert "Python sources" not in parse_flags(["--help"])
    monkeypatch.setattr(inspect, "getsource", Mock(side_effect=OSError))
    monkeypatch.setattr(inspect, "getsourcefile", lambda of: "/not/there.py")
    monkeypatch.setattr(options, "descriptions", options.descriptions.__wrapped__)
    assert "without its Python sources" in " ".join(str(parse_flags(["--help"])).split())
    assert any("without its Python sources" in note for note in load_settings({}).auto_notes)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--prot", "1"], ["--prot", "did you mean --port"]),
        (["--zzzzzz"], ["--zzzzzz", "--help=all"]),
        (["--port", "99999"], ["--port '99999'", "give a whole number from 0 to 65,535"]),
        (["--port", "x"], ["--port 'x': give a whole number from 0 to 65,535"]),
        (["--context-length", "0"], ["--context-length '0': give a whole number of 1 or more"]),
        (["--dp", "0"], ["--data-parallel-size '0': give a whole number from 1 to 256"]),
        (["--mem-fraction-static", "1"], ["--mem-fraction-static '1': give a number above 0 and below 1"]),
        (["--max-logprobs", "2.5"], ["--max-logprobs '2.5': give a whole number from -1 to 1,048,576"]),
        (["--port"], ["--port", "expected one argument"]),
        (["--dtype", "int8"], ["--dtype 'int8'", "bfloat16"]),
        (["--drain-timeout", "nan"], ["--drain-timeout 'nan'", "give a number from 0 to 86,400"]),
        (["a", "b"], ["one model path", "'b'"]),
        (["a", "--model", "b"], ["--model", "same setting"]),
        (["--model", "a", "--model-path", "b"], ["--model", "--model-path", "same setting"]),
        (["--max-num-seqs", "1", "--max-running-requests", "2"], ["same setting"]),
        (["--pp-size", "2"], ["--pp-size", "--data-parallel-size"]),
        (["--gpu-memory-utilization=1.5"], ["--gpu-memory-utilization '1.5'", "give a number above 0 and 1 at most"]),
        (["--api-key", ""], ["--api-key: is empty"]),  # the server asked for no key
        (["--api-key", " , "], ["--api-key: is empty"]),
        (["--served-model-name", ""], ["--served-model-name ['']: is empty"]),
        (["--allowed-hosts", ""], ["--allowed-hosts ['']: is empty"]),
        (["--config", "/nope.yaml"], ["--config '/nope.yaml'", "No such file"]),
    ],
)
def test_a_bad_flag_gets_one_line_with_the_fix(argv: list[str], parts: list[str]) -> None:
    """The message names the flag, what was given and what is possible."""
    message = error(*argv)
    assert all(part in message for part in parts), message


def test_no_flag_is_both_a_setting_and_a_peers() -> None:
    """What a settings class gains leaves the table."""
    assert not set(FLAGS.split()) & set(TABLE)


def test_bad_environment_and_file_are_named_as_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error says whether a flag, a variable or the file is at fault."""
    file = tmp_path / "config.yaml"
    file.write_text("prot: 1\n")
    assert "'prot' in the configuration file" in error("--config", str(file))
    assert "'port'" in error("--config", str(file))
    file.write_text("port: [1]\n")
    assert "'port' in the configuration file" in error("--config", str(file))
    file.write_text("{port: 1")
    assert "not valid YAML" in error("--config", str(file))
    file.write_text("model: a\nmodel_path: b\n")
    assert "another name" in error("--config", str(file))
    monkeypatch.setenv("DOVETAIL_PORT", "many")
    assert "environment variable DOVETAIL_PORT 'many'" in error()
    monkeypatch.delenv("DOVETAIL_PORT")
    monkeypatch.setenv("DOVETAIL_PROT", "1")
    assert "did you mean DOVETAIL_PORT" in error()


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = serve.main(list(argv))
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    return code, lines[0]


def test_startup_mistakes_exit_2_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad path, config, checkpoint, architecture, plugin or file is one line with cause and fix, exit code 2."""
    monkeypatch.setenv("DOVETAIL_PORT", "0")  # what weights show comes behind it, and somebody may have the usual one
    good = write_model(tmp_path / "good")
    (good / "model.safetensors").write_bytes(NO_TENSORS)
    odd = write_model(tmp_path / "odd", architectures=["NopeForCausalLM"])
    (odd / "model.safetensors").write_bytes(NO_TENSORS)
    pickled = write_model(tmp_path / "pickled")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    empty = write_model(tmp_path / "empty")
    broken = write_model(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    nameless = write_model(tmp_path / "nameless")
    (nameless / "config.json").write_text(json.dumps({}))
    (tmp_path / "bare").mkdir()
    cases = {
        (str(tmp_path / "missing"),): ["missing", "no such folder"],
        (str(tmp_path / "bare"),): ["config.json"],
        (str(good / "config.json"),): ["is a file"],
        (str(broken),): ["config.json cannot be read"],
        (str(nameless),): ["no architecture"],
        (str(odd),): ["NopeForCausalLM", "transformers", "no model of the type"],
        (str(pickled),): ["pytorch_model.bin", "refused", "save_pretrained"],
        (str(empty),): ["no *.safetensors", "--load-format dummy"],
        (str(good), "--reasoning-parser", "qwen"): ["'qwen'", "installed"],
        (str(good), "--tool-call-parser", "hermess"): ["hermess", "hermes"],
        (str(good), "--attention-backend", "flashy"): ["flashy", "torch_native"],
        (str(good), "--plugin", "nope"): ["nope"],
        (str(good), "--chat-template", "/nope.jinja"): ["--chat-template", "no such file"],
        (str(MODEL_DIR), "--host", "nowhere.invalid"): ["--host 'nowhere.invalid'"],
        (str(good), "--tokenizer-path", "/nope"): ["--tokenizer-path"],
        ("--served-model-name", "x", str(good)): ["put the model path first"],
    }
    for argv, parts in cases.items():
        code, line = run(capsys, *argv)
        assert code == 2, line
        assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("flag", "name", "said"),
    [
        ("--attention-backend", "fa3", "it runs on cuda, not on cpu; choose another"),
        ("--decode-attention-backend", "triton", "it runs on cuda, not on cpu; choose another"),
        ("--quantization", "awq", "it reads awq, and this checkpoint is plain; leave --quantization out"),
    ],
)
def test_what_metadata_rules_out_starts_no_process(tmp_path: Path, flag: str, name: str, said: str) -> None:
    """What cannot serve on a machine without CUDA, or not this checkpoint, is refused at once, in the first process."""
    good = write_model(tmp_path / "good")
    (good / "model.safetensors").write_bytes(NO_TENSORS)
    watched = (
        "import sys, time\n"
        "starts = []\n"
        "events = ('subprocess.Popen', 'os.fork', 'os.forkpty', 'os.posix_spawn', 'os.exec')\n"
        "sys.addaudithook(lambda event, args: starts.append(event) if event in events else None)\n"
        "from dovetail_server.cli import serve\n"
        "code = serve.main(sys.argv[1:])\n"
        "print(code, len(starts), 'torch' in sys.modules, time.process_time() < 2)\n"
    )
    command = [sys.executable, "-c", watched, str(good), "--port", "0", flag, name]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 0 False True\n", done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert f"{flag} '{name}': " in done.stderr
    assert said in done.stderr


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The port is taken before anything heavy starts, and a taken one is reported with the fix."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, line = run(capsys, str(MODEL_DIR), "--port", str(port))
    assert code == 2
    assert f"--port {port}: already in use" in line


def test_commands_are_found_and_unknown_ones_get_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """`dovetail` lists commands, `version` prints, an unknown command exits with 2."""
    assert dovetail(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert dovetail(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dovetail ")
    assert dovetail(["srve"]) == 2
    assert "did you mean 'serve'" in capsys.readouterr().err


def test_demo_brings_its_name_and_parsers_unless_given() -> None:
    """Without a model the demo is served, its parsers found as for any model; what the user gave stays."""
    found = preflight.with_model(settings())
    assert found.served_model_name == ["dovetail-demo"]
    assert (found.reasoning_parser, found.tool_call_parser) == ("auto", "auto")
    found, _, plan = plan_plugins(found, check_model(found))
    assert (found.reasoning_parser, found.tool_call_parser) == ("qwen3", "hermes")
    assert {"qwen3", "hermes"} <= {planned.name for planned in plan.plugins}
    assert [line.split(" (")[0] for line in found.auto_notes] == ["Reasoning parser: qwen3", "Tool-call parser: hermes"]
    found = preflight.with_model(settings("--reasoning-parser", "none", "--served-model-name", "x"))
    assert (found.served_model_name, found.reasoning_parser) == (["x"], None)


def test_a_model_whose_tokenizer_fails_at_the_start_is_the_users_to_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody has sent a request then: it is told as any other fault of a file, in one line."""

    def fail(settings: ServeSettings) -> int:
        raise RequestError("the model's tokenizer failed: Missing [UNK]\nserve with another", status=500)

    monkeypatch.setattr(serve, "serve", fail)
    assert serve.main([]) == 2
    assert capsys.readouterr().err == (
        "dovetail serve: error: the model's tokenizer failed: Missing [UNK] serve with another\n"
    )


@pytest.mark.parametrize(
    ("argv", "heavy"),
    [
        (["--help"], {"torch", "fastapi", "pydantic", "uvicorn", "transformers", "yaml"}),
        (["serve", "--help"], {"torch", "fastapi", "uvicorn", "transformers", "tokenizers", "rich"}),
        (["serve", "/nope"], {"torch", "fastapi", "uvicorn", "transformers", "tokenizers"}),
        (["srve"], {"torch", "pydantic"}),
    ],
)
def test_light_commands_import_nothing_heavy(argv: list[str], heavy: set[str]) -> None:
    """Help and mistakes come before the web framework and torch."""
    code = f"import sys; from dovetail_server.cli import main; main({argv!r}); print('MODULES', *sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(out.split("MODULES ")[1].split())
    assert not loaded & heavy


def test_the_api_process_does_not_import_torch() -> None:
    """Everything the HTTP process runs is importable without torch, and without what only a database needs."""
    heavy = {"torch", "transformers", "numpy", "sqlalchemy", "alembic"}
    ours = ", ".join(f"dovetail_server.start.{name}" for name in ("app", "run", "lifecycle"))
    code = f"import sys, dovetail_server.supervision.engine_process, {ours}; print(*{heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "\n"
