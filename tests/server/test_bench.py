from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_command import run_bench

from dovetail.contracts.device import Device
from dovetail.contracts.errors import ConfigError
from dovetail.demo import MODEL_DIR
from dovetail.messages import EngineInfo
from dovetail_backends.devices.cuda import CudaDevice
from dovetail_server.bench.drive import Seen, num_workers
from dovetail_server.bench.jobs import Record
from dovetail_server.bench.latency import LatencyOptions, Round, check_room
from dovetail_server.bench.prompts import PromptVocabulary, RandomIds, RandomText, read_dataset
from dovetail_server.bench.results import results_of
from dovetail_server.bench.roofline import Bandwidth, ModelFacts, Roofline, facts_of
from dovetail_server.bench.serve import CacheLook, ServeStart
from dovetail_server.bench.stream import StreamScan
from dovetail_server.bench.target import BenchTarget
from dovetail_server.bench.wire import PATHS, UsageCounts
from dovetail_server.bench.workloads import SUITES, Workload, sampling_text
from dovetail_server.cli import bench_serve
from dovetail_server.cli.bench_grammar import PARTS
from dovetail_server.cli.option_tables import BenchParser
from dovetail_server.settings.serve import ServeSettings

Harness = Any
pytestmark = pytest.mark.usefixtures("light_servers")
STANDARD, USER = SUITES["standard"], SUITES["user"]
LOAD = Workload(name="load", num_prompts=4, concurrency=2, input_len=(8, 8), output_len=(4, 4))
UNKNOWN = Roofline(facts=None, bandwidth=None, unknown="nobody knows")


def event(text: str, tokens: int | None, finish: str | None = None, space: str = "") -> bytes:
    """One event of a completion stream, with `tokens` so far in its usage."""
    usage = f',"usage":{{"prompt_tokens":{space}3,"completion_tokens":{space}{tokens}}}' if tokens is not None else ""
    reason = json.dumps(finish)
    choice = f'{{"index":0,"text":{json.dumps(text)},"finish_reason":{space}{reason}}}'
    return f'data: {{"choices":{space}[{choice}]{usage}}}\n\n'.encode()


def ends(tokens: int) -> bytes:
    """The last events of a stream."""
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 2}}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"


def scan_all(data: bytes, cuts: list[int], *, counts: bool = True) -> StreamScan:
    """Feed a stream cut at some places, all at different times."""
    scan = StreamScan(counts_events=counts)
    for now, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(data)], strict=True), 1):
        if start < stop:
            scan.feed(data[start:stop], float(now))
    return scan


@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize("newline", [b"\n\n", b"\r\n\r\n"])
def test_a_stream_is_counted_the_same_however_it_is_cut(space: str, newline: bytes) -> None:
    """Tokens and events come out exactly, with several tokens in an event and any cut of the bytes."""
    data = event("a", 1, space=space) + event('"finish_reason":null}\n\n', 4, space=space) + event("c", 6, space=space)
    data = (data + event("", 6, "length", space) + ends(6)).replace(b"\n\n", newline)
    rng = random.Random(0)
    for _ in range(200):
        scan = scan_all(data, sorted(rng.sample(range(1, len(data)), rng.randrange(6))))
        assert scan.close() is None
        assert scan.counts == UsageCounts(3, 6, 2)
        assert scan.num_events == 3
        assert scan.tokens_at_first + sum(scan.gap_tokens) == 6
    one_by_one = scan_all(data, list(range(1, len(data))))
    assert (one_by_one.tokens_at_first, one_by_one.gap_tokens) == (1, [3, 2])


def test_the_role_and_the_usage_are_no_tokens() -> None:
    """A chat's first token is its first content, and its last is not the usage that comes after."""
    chat = [
        b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"delta":{"reasoning_content":"x"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"y"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
        ends(2),
    ]
    scan = StreamScan(counts_events=False)
    for now, data in enumerate(chat, 1):
        scan.feed(data, float(now))
    assert (scan.first, scan.last, scan.num_events, scan.close()) == (2.0, 4.0, 2, None)


def test_native_events_carry_their_counts() -> None:
    """`/generate` streams the reply so far; its counts are the tokens."""
    scan = StreamScan(counts_events=True)
    for n in range(1, 4):
        reason = {"type": "length"} if n == 3 else None
        meta = {"finish_reason": reason, "prompt_tokens": 5, "completion_tokens": 2 * n, "cached_tokens": 1}
        scan.feed(b"data: " + json.dumps({"text": "x" * n, "meta_info": meta}).encode() + b"\n\n", float(n))
    scan.feed(b"data: [DONE]\n\n", 4.0)
    assert (scan.close(), scan.counts, scan.tokens_at_first) == (None, UsageCounts(5, 6, 1), 2)
    assert (scan.gap_tokens, scan.last) == ([2, 2], 3.0)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (event("a", 1) + b'event: error\ndata: {"error":{"message":"boom"}}\n\ndata: [DONE]\n\n', "boom"),
        (event("a", None) + b'data: {"object":"error","message":"bang"}\n\n', "bang"),
        (event("a", None), "ended without usage"),
        (event("a", None) + b"data: [DONE]\n\n", "reports no usage"),
        (b"data: {oops\n\n", "no JSON object"),
        (ends(2), "without a token"),
    ],
)
def test_a_broken_stream_says_why(data: bytes, part: str) -> None:
    """A stream that failed, or that cannot be counted, is not taken for a good one."""
    assert part in str(scan_all(data, []).close())


def test_figures_come_from_the_clients_records() -> None:
    """Rates count good requests only, inter-token times weigh tokens, and several tokens in an event share its gap."""
    records = [
        Record(index=0, start=10.0, first=11.0, last=14.0, end=14.0, prompt_tokens=8, completion_tokens=4,
               num_events=2, tokens_at_first=1, gaps=[3.0], gap_tokens=[3]),
        Record(index=1, start=10.0, first=12.0, last=15.0, end=15.0, prompt_tokens=8, completion_tokens=4,
               num_events=4, tokens_at_first=1, gaps=[1.0, 1.0, 1.0], gap_tokens=[1, 1, 1]),
        Record(index=2, start=12.0, end=20.0, error="HTTP 429: full"),
    ]  # fmt: skip
    facts = ModelFacts(name="x", dtype="bfloat16", weight_bytes=1000, caches=((5, None), (5, 4)), vocab_size=10)
    floor = Roofline(facts=facts, bandwidth=Bandwidth(bytes_per_s=1000.0, origin="test"))
    found = results_of(LOAD, Seen(records, 1, 0.1), floor, [4, 5, 4])
    assert (found.num_ok, found.num_failed, found.failures) == (2, 1, {"HTTP 429: full": 1})
    assert (found.duration_s, found.output_tok_s, found.requests_s) == (10.0, 0.8, 0.2)
    assert found.itl_ms == {"p50": 1000.0, "p99": 1000.0}
    assert found.gap_ms is not None
    assert found.gap_ms["p99"] > 2900
    assert found.decode_tok_s == pytest.approx(1.0)
    assert found.tokens_per_event == pytest.approx(8 / 6)
    assert found.num_short == 1
    step = (1000 + 2 * (10 * 5 + 4 * 5)) / 1000  # ten tokens of context in one layer, a window of four in the other
    assert found.floor_tok_s == pytest.approx(2 / step)
    assert found.of_floor == pytest.approx(0.8 * step / 2)


def test_what_is_not_known_stays_unknown() -> None:
    """Without facts of the model there is no floor, and requests that all failed have no rates."""
    records = [Record(index=0, start=1.0, end=2.0, error="no")]
    found = results_of(LOAD, Seen(records, 1, 0.0), UNKNOWN, [4])
    assert (found.num_ok, found.of_floor, found.ttft_ms, found.output_tok_s) == (0, None, None, 0.0)
    assert "config.json" in str(facts_of(Path(__file__).parent))


def test_random_prompts_are_exact_seeded_and_share_their_prefix() -> None:
    """Lengths are as asked for, ids avoid the ends of the vocabulary, and another seed shares nothing."""
    load = Workload(name="x", num_prompts=5, concurrency=1, input_len=(3, 9), output_len=(2, 4), shared_prefix_len=20)
    source = RandomIds(PromptVocabulary.of_size(100, "test"), "1")
    drawn = list(source.draw(load, 5))
    assert drawn == list(source.draw(load, 5))
    ids = [prompt for prompt, _ in drawn if isinstance(prompt, list)]
    assert len({tuple(prompt[:20]) for prompt in ids}) == 1
    assert {len(prompt) - 20 for prompt in ids} <= set(range(3, 10))
    assert all(10 <= i < 90 for prompt in ids for i in prompt if isinstance(i, int))
    other = next(iter(RandomIds(PromptVocabulary.of_size(100, "test"), "2").draw(load, 1)))[0]
    assert other[:20] != ids[0][:20]


def test_prompts_of_text_can_be_read(folder: Path) -> None:
    """Text is made of tokens that are characters: no NUL, which servers refuse, and no half of a character."""
    vocabulary = PromptVocabulary.of_folder(folder, readable=True)
    load = Workload(name="x", num_prompts=20, concurrency=1, input_len=(50, 50), output_len=(2, 2))
    texts = [text for text, _ in RandomText(RandomIds(vocabulary, "1")).draw(load, 20)]
    assert all(isinstance(text, str) and text.isprintable() and len(text) == 50 for text in texts)


def test_the_standard_suite_is_the_one_that_servers_are_compared_by() -> None:
    """Requests, places and lengths of the suite do not change unnoticed: figures would not compare any more."""
    found = {w.name: (w.num_prompts, w.concurrency, w.input_len, w.output_len, w.shared_prefix_len) for w in STANDARD}
    assert found == {
        "single": (5, 1, (36, 36), (512, 512), 0),
        "c16": (64, 16, (512, 512), (256, 256), 0),
        "c64": (256, 64, (512, 512), (256, 256), 0),
        "c256": (1024, 256, (512, 512), (256, 256), 0),
        "prefix": (256, 64, (32, 32), (64, 64), 2048),
        "many": (5000, 512, (30, 50), (128, 128), 0),
        "long": (3, 1, (16000, 16000), (8, 8), 0),
    }
    assert [w.name for w in STANDARD if not w.stream] == ["many"]


def test_the_user_suite_compares_with_workloads_it_has() -> None:
    """Whatever is compared has the same lengths and streams as what it is compared with."""
    by_name = {workload.name: workload for workload in USER}
    assert len(by_name) == len(USER)
    compared = [workload for workload in USER if workload.beside is not None]
    assert len(compared) == 11
    for workload in compared:
        other = by_name[workload.beside or ""]
        assert (workload.input_len, workload.output_len) == (other.input_len, other.output_len)
        assert (workload.concurrency, workload.num_prompts) == (other.concurrency, other.num_prompts)
    assert by_name["first"].num_warmup == 0


@pytest.mark.full
def test_the_user_suite_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests are taken as they are: penalties, log probabilities, a schema and a tool; shares are told."""
    file = tmp_path / "out.json"
    short = {"num_prompts": 1, "warmup": 0, "input_len": (16, 16), "output_len": (12, 12)}
    monkeypatch.setenv("DOVETAIL_GRAMMAR_BACKEND", "llguidance")
    monkeypatch.setitem(bench_serve.SUITES, "user", tuple(replace(workload, **short) for workload in USER))  # type: ignore[index]
    names = ["greedy-1", "usual-1", "penalties-1", "logprobs-1", "schema-1", "tools-1"]
    argv = ["serve", "--model-path", str(MODEL_DIR), "--suite", "user", "--only", ",".join(names), "--bandwidth", "10"]
    code, out, err = run_bench(capsys, *argv, "--json", str(file))
    assert code == 0, err
    found = json.loads(file.read_text())["workloads"]
    assert [each["workload"]["name"] for each in found] == names
    assert [each["completion_tokens"] for each in found] == [12] * 6
    assert "of the output tok/s of greedy-1" in out
    assert "chat, prompts: text" in out
    assert "sampling: greedy (greedy-1)" in out
    assert "sampling: temperature 0.7, top-p 0.9, frequency penalty 0.5, presence penalty 0.5" in out
    assert "cached" in out
    assert "tok/" in out


def test_sampling_is_told_with_what_the_server_adds() -> None:
    """Fields of the requests, then the model's own of what they leave open; draws mean nothing to greedy replies."""
    defaults = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    by_name = {workload.name: workload for workload in USER}
    told = {
        name: sampling_text(by_name[name], 0.0, defaults) for name in ("greedy-1", "usual-1", "schema-1", "tools-1")
    }
    own = "repetition_penalty 1.1 of the model's own"
    usual = "temperature 0.7, top-p 0.9"
    assert told == {
        "greedy-1": f"greedy, {own}",
        "usual-1": f"{usual}, {own}, top-k 20 of the model's own",
        "schema-1": f"{usual}, a JSON schema, {own}, top-k 20 of the model's own",
        "tools-1": f"{usual}, a tool that must be called, {own}, top-k 20 of the model's own",
    }
    assert sampling_text(by_name["greedy-1"], 1.0, {}) == "temperature 1"


def test_a_kernel_cache_is_empty_full_or_lacks_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told of what it held before the start, and of what was compiled since."""
    monkeypatch.setattr("dovetail_server.bench.serve.best", lambda found: CudaDevice)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    empty = CacheLook.now()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.cubin").write_bytes(b"1")
    assert (empty.state(), empty.num_new) == ("empty", 1)
    full = CacheLook.now()
    assert (full.state(), full.num_new) == ("full", 0)
    (tmp_path / "a" / "y.cubin").write_bytes(b"1")
    assert full.state() == "1 kernels there, 1 missing"
    monkeypatch.setattr("dovetail_server.bench.serve.best", lambda found: Device)
    assert CacheLook.now().state() == "empty"
    start = ServeStart(ready_s=1.0, first_answer_s=2.0, ready_at=0.0, cache=full)
    served = BenchTarget(base_url="http://127.0.0.1:1", model="m", kind="dovetail", is_local=True)
    assert start.kernel_cache(replace(served, device="cuda")) == "1 kernels there, 1 missing"
    assert start.kernel_cache(replace(served, device="cpu")) is None


def test_client_processes_follow_the_load() -> None:
    """One request at a time needs one process; more than that many places are never split further."""
    assert num_workers(1, None) == 1
    assert num_workers(4, 9) == 4
    assert 1 <= num_workers(512, None) <= 8


def test_lines_of_a_file_are_checked(tmp_path: Path) -> None:
    """A file gives prompts with lengths of their own, and a bad line is named."""
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "a", "output_len": 3}\n\n{"prompt": [1, 2]}\n')
    assert read_dataset(file, "completions") == [("a", 3), ([1, 2], None)]
    for endpoint, line in (("chat", '{"prompt": [1]}'), ("completions", '{"messages": []}'), ("chat", "{"),
                           ("chat", '{"prompt": "a", "output_len": 0}')):  # fmt: skip
        file.write_text('{"prompt": "a"}\n' + line)
        with pytest.raises(ConfigError, match="line 2"):
            read_dataset(file, endpoint)


@pytest.mark.parametrize("endpoint", ["chat", "generate", pytest.param("completions", marks=pytest.mark.full)])
def test_our_server_can_be_driven_by_every_endpoint(
    endpoint: str, harness: Harness, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each endpoint's tokens are counted exactly, by two client processes, with failures none."""
    file = tmp_path / "out.json"
    argv = ["serve", "--base-url", harness.base + "/v1/", "--endpoint", endpoint, "--num-prompts", "6", "--json"]
    argv += [str(file), "--concurrency", "2", "--input-len", "5:9", "--output-len", "12", "--no-ignore-eos"]
    code, out, _ = run_bench(capsys, *argv, "--tokenizer", str(folder), "--workers", "2", "--bandwidth", "100")
    assert code == 0, out
    report = json.loads(file.read_text())
    found = report["workloads"][0]
    per_reply = found["completion_tokens"] / 6
    assert (found["num_ok"], found["num_failed"], found["client_workers"]) == (6, 0, 2)
    assert per_reply == 12
    assert found["ttft_ms"]["p50"] > 0
    assert report["server"]["kind"] == "dovetail"
    assert "floor: unknown" in out
    if endpoint != "chat":
        assert 6 * 5 <= found["prompt_tokens"] <= 6 * 9


def test_failures_are_counted_with_their_reasons(
    harness: Harness, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests that the server refuses are in the table with the server's words, and the exit code is 1."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + json.dumps({"prompt": [10**6]}) + "\n")
    argv = ("serve", "--base-url", harness.base, "--num-prompts", "4", "--concurrency", "1", "--dataset", str(file))
    code, out, _ = run_bench(capsys, *argv, "--output-len", "3", "--no-stream", "--warmup", "0", "--no-ignore-eos")
    assert code == 1
    assert "2 times: HTTP 400" in out


def test_requests_come_at_a_rate(harness: Harness, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a rate, requests are sent when it says, whatever is still running."""
    file = tmp_path / "out.json"
    argv = ["serve", "--base-url", harness.base, "--num-prompts", "10", "--request-rate", "20", "--input-len", "4"]
    code, _, err = run_bench(capsys, *argv, "--output-len", "5", "--no-ignore-eos", "--seed", "3", "--json", str(file))
    assert code == 0, err
    found = json.loads(file.read_text())["workloads"][0]
    assert found["num_ok"] == 10
    assert 0.2 < found["duration_s"] < 5


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["serv"], "did you mean 'serve'"),
        (["serve"], "--base-url"),
        (["serve", "--nim-prompts", "3"], "did you mean --num-prompts"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--num-prompts", "0"], "at least 1"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--input-len", "9:3"], "30:50"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--request-rate", "nan"], "above 0"),
        (["serve", "--base-url", "http://127.0.0.1:9"], "nothing answers there"),
        (["serve", "--base-url", "localhost"], "expected an address"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--suite", "standard", "--only", "c17"], "c16"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--suite", "standard", "--input-len", "3"], "set by --suite"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--only", "c16"], "--suite"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--suite", "user", "--endpoint", "generate"], "conversations"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--endpoint", "chat", "--prompts", "ids"], "--prompts ids"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--dataset", "x", "--prompts", "text"], "leave out --prompts"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--json", "/nowhere/x"], "--json"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--dataset", "/nowhere"], "--dataset"),
        (["serve", "--base-url", "http://127.0.0.1:9", "--", "--dtype", "auto"], "--base-url"),
        (["serve", "--model-path", str(MODEL_DIR), "--", "--port", "1"], "--port"),
        (["serve", "--model-path", "/nowhere"], "no folder"),
        (["latency", "--batch-size", "1,0"], "at least 1"),
        (["latency", "--port", "1"], "no option of the engine"),
        (["latency", "--load-fromat", "dummy"], "did you mean --load-format"),
        (["latency", "--top-p", "2"], "at most 1"),
        (["throughput", "--dataset", "x", "--input-len", "3"], "leave out --input-len"),
        (["throughput", "--dataset", "/nowhere"], "--dataset"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the user can fix is one line on standard error, with exit code 2."""
    code, out, err = run_bench(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert part in err


def test_the_table_of_options_names_what_there_is() -> None:
    """Choices stand in `bench.json` as words: they are the endpoints, the suites and the parts that the code has."""
    choices = {action.dest: action.choices for action in BenchParser("serve")._actions}
    assert (choices["endpoint"], choices["suite"]) == (list(PATHS), list(SUITES))
    assert BenchParser("grammar").get_default("parts").split(",") == list(PARTS)


@pytest.mark.parametrize(
    ("pace", "concurrency", "request_rate"),
    [([], 16, None), (["--concurrency", "3"], 3, None), (["--request-rate", "2"], None, 2.0),
     (["--request-rate", "inf"], 9, None)],
)  # fmt: skip
def test_the_pace_is_a_number_in_flight_or_a_rate(
    pace: list[str], concurrency: int | None, request_rate: float | None
) -> None:
    """Requests follow each other, come at a rate, or all at once."""
    args = BenchParser("serve").read(["--base-url", "http://x", "--num-prompts", "9", *pace])
    load = bench_serve.workload_from(args)
    assert (load.num_prompts, load.concurrency, load.request_rate) == (9, concurrency, request_rate)


def test_a_model_that_is_not_served_is_named(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    """The served names are in the message."""
    code, _, err = run_bench(capsys, "serve", "--base-url", harness.base, "--model", "huge")
    assert code == 2
    assert "tiny, tiny-too" in err


def test_help_loads_no_torch() -> None:
    """The help of the benchmarks imports neither torch nor the HTTP client."""
    code = (
        "import sys; from dovetail_server.cli import main\n"
        "try: main(['bench', 'serve', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'aiohttp', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--suite" in done.stdout


def test_a_server_is_started_measured_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a model folder alone, our own server is measured from its start to its first answer, floor included."""
    file = tmp_path / "out.json"
    argv = ["serve", "--model-path", str(MODEL_DIR), "--num-prompts", "4", "--concurrency", "2", "--input-len", "6"]
    argv += ["--output-len", "8", "--bandwidth", "10", "--json", str(file), "--prompts", "ids"]
    argv += ["--", "--max-total-tokens", "4096"]
    code, out, err = run_bench(capsys, *argv)
    assert code == 0, err
    report = json.loads(file.read_text())
    found = report["workloads"][0]
    assert (found["prompt_tokens"], found["completion_tokens"], found["num_short"]) == (24, 32, 0)
    assert 0 < found["of_floor"] < 1
    assert 0 < report["start"]["ready_s"] < report["start"]["first_answer_s"]
    assert report["server"]["engine"]["max_total_tokens"] == 4096
    assert "to the first answer" in out
    assert "prompts: token ids" in out
    assert "sampling: greedy (load)" in out
    assert "kernel cache: none needed on this device" in out
    assert report["start"]["kernel_cache"] is None
    assert (report["server"]["device"], report["server"]["num_devices"]) == ("cpu", 1)
    assert report["options"]["suite"] is None
    assert (found["sampling"], found["cached_tokens"]) == ("greedy", 0)
    assert 0 < found["since_ready_s"] < 60
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(report["server"]["base_url"].rsplit(":", 1)[1])))


def test_a_server_that_does_not_start_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's own message is the benchmark's."""
    code, _, err = run_bench(capsys, "serve", "--model-path", str(tmp_path))
    assert code == 2
    assert "no config.json" in err


def test_latency_is_measured_by_batch_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each batch size gets a row whose steps are slower than the floor."""
    file = tmp_path / "out.json"
    argv = ["latency", "--batch-size", "1,3", "--input-len", "5", "--output-len", "12", "--rounds", "2"]
    code, out, err = run_bench(capsys, *argv, "--bandwidth", "10", "--json", str(file), "--max-total-tokens", "2k")
    assert code == 0, err
    report = json.loads(file.read_text())
    rows = report["rows"]
    assert [row["batch_size"] for row in rows] == [1, 3]
    for row in rows:
        assert 0 < row["floor_ms"] < row["decode_ms"]
        assert row["decode_tok_s"] == pytest.approx(1000 * row["batch_size"] / row["decode_ms"])
        assert row["prefill_ms"] >= row["first_ms"] > 0
    assert report["engine"]["max_total_tokens"] == 2048
    assert "of floor" in out


def test_a_batch_that_cannot_run_at_once_is_refused() -> None:
    """The message names what is too small, before anything is measured."""
    info = EngineInfo(
        architecture="X", dtype="bfloat16", device="cpu", vocab_size=100, hidden_size=8, context_len=64,
        max_total_tokens=128, max_running_requests=8, page_size=16, attention_backend="x", weight_bytes=1,
        kv_bytes=1, load_s=0.0,
    )  # fmt: skip
    common: dict[str, Any] = {"rounds": 1, "seed": 1, "temperature": 0.0, "top_p": 1.0, "bandwidth": None, "json": None}
    for sizes, input_len, output_len, part in (
        ([1, 9], 5, 5, "--max-running-requests"), ([1], 60, 5, "context"), ([8], 16, 1, "--max-total-tokens"),
    ):  # fmt: skip
        options = LatencyOptions(
            settings=ServeSettings(), batch_sizes=sizes, input_len=input_len, output_len=output_len, **common
        )
        with pytest.raises(ConfigError, match=part):
            check_room(info, options)
    check_room(info, replace(options, output_len=0))  # all of the cache


def test_offline_throughput_counts_every_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All requests of the batch API are answered in full and counted."""
    file = tmp_path / "out.json"
    argv = ["throughput", "--num-prompts", "5", "--input-len", "3:6", "--output-len", "7", "--shared-prefix-len", "32"]
    code, _, err = run_bench(capsys, *argv, "--bandwidth", "10", "--json", str(file), "--max-total-tokens", "2k")
    assert code == 0, err
    report = json.loads(file.read_text())
    assert (report["num_requests"], report["completion_tokens"]) == (5, 35)
    assert 5 * 35 <= report["prompt_tokens"] <= 5 * 38
    assert report["cached_tokens"] == 4 * 32
    assert 0 < report["of_floor"] < 1


def test_a_round_measures_steps_in_which_all_decode() -> None:
    """Steps count from the last first token to the first end, whatever each stream had by then."""
    early = [(1.0, 1), (2.0, 1), (3.0, 2), (4.0, 1)]
    late = [(2.0, 1), (3.0, 2), (4.0, 1), (9.0, 1)]
    found = Round([early, late])
    assert (found.firsts, found.total_s) == ([1.0, 2.0], 9.0)
    assert found.decode_step_s == pytest.approx((4.0 - 2.0) / 3)
    assert Round([[(1.0, 1)]]).decode_step_s is None


def test_a_missing_package_is_named_with_its_extra() -> None:
    """Without aiohttp, the message says what to install."""
    code = (
        "import sys; sys.modules['aiohttp'] = None; from dovetail_server.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", code, "bench", "serve", "--base-url", "http://127.0.0.1:9"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'dovetail-llm[bench]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("argv", "part"), [(["version"], "dovetail 0"), (["--help"], "usage: dovetail serve")])
def test_the_package_can_be_run(argv: list[str], part: str) -> None:
    """`python -m dovetail_server` takes every command, and serves if it is given none."""
    done = subprocess.run([sys.executable, "-m", "dovetail_server", *argv], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(part)
