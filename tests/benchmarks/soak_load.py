"""What `soak.py` does to a server: each function is one client's visit, and says what was wrong with the answers."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import requests
from batches import start_batch
from disconnects import Client

MODEL = "dovetail-demo"
WAIT_S = 1200
"""What an answer may take at most. On a seventh of a processor, beside prompts that fill whole steps, 96 tokens that
are not streamed took more than 300 s."""
NUM_LINES = 20
"""Of a batch: few, because beside interactive requests only one runs at a time."""
NUM_SCHEMAS = 40
LONG, AT_ONCE = 400, 8
"""Tokens of a prompt that fills the cache, and how many of these come at once."""
GONE = {409, 429, 503}
"""What a client may be told to try again for, while the engine is restarted or the queue is full."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
HOSTILE: list[tuple[str, bytes]] = [
    ("/v1/completions", json.dumps({"model": MODEL, "prompt": [{}] * 4000 + [1]}).encode()),
    ("/v1/chat/completions", json.dumps({"model": MODEL, "messages": [{"role": "nobody"}] * 2000}).encode()),
    ("/v1/chat/completions", b"[" * 50_000),
    ("/v1/chat/completions", b'{"model": "\xff"}'),
    ("/v1/completions", json.dumps({"model": MODEL, "prompt": "x", "logit_bias": {"999999999": 1}}).encode()),
    ("/v1/completions", json.dumps({"model": MODEL, "prompt": "x", "n": 10**9}).encode()),
    ("/v1/responses", json.dumps({"model": MODEL, "input": [{"type": "wrong"}] * 500}).encode()),
    ("/v1/messages", json.dumps({"model": MODEL, "max_tokens": -1, "messages": []}).encode()),
    ("/generate", json.dumps({"text": "x", "sampling_params": {"regex": "(" * 100}}).encode()),
    ("/v1/files", b"no form at all"),
]


class Visit:
    """One client, which begins a visit each `every_s` seconds. `problems` is what should not have happened."""

    def __init__(self, base: str, port: int, seed: int, every_s: float = 0.0) -> None:
        self.base = base
        self.every_s = every_s
        self.port = port
        self.chance = random.Random(seed)
        self.http = requests.Session()
        self.problems: list[str] = []
        self.done: Counter[str] = Counter()
        self.longest: dict[str, float] = {}
        self.told_to_wait = 0
        self.probe_text: str | None = None

    def wrong(self, text: str) -> None:
        """Note what should not have happened, with the time, by which it is found in the server's log."""
        self.problems.append(f"{time.strftime('%H:%M:%S')} {text}")

    def send(self, path: str, body: object, *, stream: bool = False) -> requests.Response | None:
        """Send a good request; None where it is to be tried later."""
        reply = self.http.post(self.base + path, json=body, stream=stream, timeout=WAIT_S)
        if reply.status_code in GONE:
            self.told_to_wait += 1
            time.sleep(0.1)
            return None
        if reply.status_code != 200:
            self.wrong(f"{path}: {reply.status_code} {reply.text[:200]}")
            return None
        return reply

    def chat(self, **changes: object) -> dict[str, object]:
        number = self.chance.randrange(1000)
        messages = [{"role": "user", "content": f"What is {number} plus {number % 7}?"}]
        return {"model": MODEL, "messages": messages, "max_tokens": self.chance.choice([4, 32, 96]), **changes}

    def events(self, path: str, body: object) -> Iterator[str]:
        reply = self.send(path, body, stream=True)
        if reply is not None:
            with reply:
                yield from (text for text in reply.iter_lines(decode_unicode=True) if text.startswith("data: "))

    def follow(self, path: str, body: object, end: str) -> None:
        """Read a stream, and see that it ends as it should."""
        last = None
        for last in self.events(path, body):
            if '"error":{' in last:
                self.wrong(f"{path}: {last[:200]}")
        if last is not None and end not in last:
            self.wrong(f"{path}: a stream ended with {last[:200]}")

    def stream(self) -> None:
        self.follow("/v1/chat/completions", self.chat(stream=True, n=self.chance.choice([1, 1, 2])), "[DONE]")

    def stop_string(self) -> None:
        """With an identifier that others use at the same time."""
        body = self.chat(stream=True, stop=[self.chance.choice("aeiou0123")], rid=str(self.chance.randrange(3)))
        self.follow("/v1/chat/completions", body, "[DONE]")

    def tool(self) -> None:
        """With a tool that all have, or one that nobody has had before."""
        parameters = {"type": "object", "properties": {f"p{self.chance.randrange(1 << 40)}": {"type": "string"}}}
        function = {"name": f"f{self.chance.randrange(1 << 40)}", "parameters": parameters}
        new = [{"type": "function", "function": function}]
        tools, choice = self.chance.choice([TOOLS, new]), self.chance.choice(["auto", "required"])
        self.send("/v1/chat/completions", self.chat(tools=tools, tool_choice=choice))

    def pattern(self) -> None:
        """Ask for a regex that nobody has asked for before."""
        parameters = {"regex": f"n{self.chance.randrange(1 << 40)}[a-z]{{1,{self.chance.randrange(2, 20)}}}"}
        self.send("/generate", {"text": "1 2 3", "sampling_params": {**parameters, "max_new_tokens": 32}})

    def grammar(self, number: int | None = None) -> None:
        """Ask for a schema: mostly one that nobody has asked for before, of any length."""
        is_new = number is None and self.chance.random() < 0.8
        high = self.chance.randrange(1 << 40 if is_new else NUM_SCHEMAS) if number is None else number
        names = [f"n{high}", *(f"n{high}x{at}" for at in range(self.chance.randrange(30) if is_new else 0))]
        kinds = [{"type": self.chance.choice(["integer", "string", "boolean"])} for _ in names[1:]]
        properties = dict(zip(names, [{"type": "integer"}, *kinds], strict=True))
        schema = {"type": "object", "properties": properties, "required": names[:1]}
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        self.send("/v1/chat/completions", self.chat(response_format=wanted))

    def response(self) -> None:
        in_background = self.chance.random() < 0.3
        body = {"model": MODEL, "input": "What is 1 plus 2?", "max_output_tokens": 24, "background": in_background}
        reply = self.send("/v1/responses", body)
        if reply is not None:
            path = f"{self.base}/v1/responses/{reply.json()['id']}"
            if self.http.delete(path, timeout=WAIT_S).status_code not in {200, *GONE}:
                self.wrong("a stored response could not be deleted")

    def message(self) -> None:
        body = {"model": MODEL, "max_tokens": 24, "messages": [{"role": "user", "content": "What is 3 plus 4?"}]}
        self.follow("/v1/messages", {**body, "stream": True}, "message_stop")

    def upload(self) -> None:
        data = self.chance.randbytes(self.chance.choice([100, 100_000, 3_000_000]))
        files = {"file": ("a.bin", data)}
        reply = self.http.post(self.base + "/v1/files", files=files, data={"purpose": "user_data"}, timeout=WAIT_S)
        if reply.status_code != 200:
            self.wrong(f"upload: {reply.status_code} {reply.text[:200]}")
            return
        path = f"{self.base}/v1/files/{reply.json()['id']}"
        if self.http.get(path + "/content", timeout=WAIT_S).content != data:
            self.wrong("an upload came back changed")
        self.http.delete(path, timeout=WAIT_S)

    def hostile(self) -> None:
        path, body = self.chance.choice(HOSTILE)
        kind = {"content-type": "application/json"}
        reply = self.http.post(self.base + path, data=body, headers=kind, timeout=WAIT_S)
        if not 400 <= reply.status_code < 500 and reply.status_code != 503:
            self.wrong(f"hostile {path}: {reply.status_code} {reply.text[:200]}")

    def leave(self) -> None:
        """Go away at a random stage, with an identifier that others use at the same time."""
        client = Client(self.port, self.chance, str(self.chance.randrange(3)))
        client.socket.settimeout(1.0)
        deadline = time.monotonic() + self.chance.random()
        try:
            while time.monotonic() < deadline and client.stage in ("later", "reply") and client.read():
                pass
        except TimeoutError:
            pass
        client.socket.close()

    def garbage(self) -> None:
        """Speak something else than HTTP."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as wire:
            wire.sendall(self.chance.randbytes(200) + b"\r\n\r\n")

    def probe(self) -> None:
        """A greedy request says the same whatever its neighbours do."""
        reply = self.send(
            "/v1/completions", {"model": MODEL, "prompt": "1 2 3", "max_tokens": 16, "temperature": 0, "stop": None}
        )
        if reply is not None:
            text = reply.json()["choices"][0]["text"]
            if self.probe_text not in (None, text):
                self.wrong(f"a greedy request said {text!r}, before {self.probe_text!r}")
            self.probe_text = text

    def fill(self, num_tokens: int) -> None:
        """Have an engine touch what it may ever hold: all pages of its pool, full steps, every grammar.

        Memory that was reserved counts from its first use, which would look like growth whenever it came.
        """
        prompts = [[self.chance.randrange(300, 1500) for _ in range(LONG)] for _ in range(num_tokens // LONG + 1)]
        helpers = [Visit(self.base, self.port, self.chance.randrange(1 << 30)) for _ in range(AT_ONCE)]

        def help_fill(at: int) -> None:
            for ids in prompts[at::AT_ONCE]:
                helpers[at]._one("prompt that fills", lambda ids=ids: helpers[at].insist(ids))  # type: ignore[misc]
            for number in range(at, NUM_SCHEMAS, AT_ONCE):
                helpers[at]._one("grammar", lambda number=number: helpers[at].grammar(number))  # type: ignore[misc]

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(help_fill, range(AT_ONCE)))
        for helper in helpers:
            helper.http.close()
            self.problems += helper.problems
            self.done += helper.done
            self.took(helper.longest)
            self.told_to_wait += helper.told_to_wait

    def insist(self, ids: list[int]) -> None:
        """Send a prompt again until it is taken."""
        body = {"model": MODEL, "prompt": ids, "max_tokens": 8, "ignore_eos": True}
        deadline = time.monotonic() + WAIT_S
        while self.send("/v1/completions", body) is None and not self.problems and time.monotonic() < deadline:
            pass

    def batch(self) -> None:
        """A whole batch: every id once."""
        batch_id = start_batch(self.base, NUM_LINES, 4)
        deadline = time.monotonic() + 4 * WAIT_S
        while (found := self.http.get(f"{self.base}/v1/batches/{batch_id}", timeout=WAIT_S).json())["status"] in (
            *("validating", "in_progress", "finalizing"),
        ):
            if time.monotonic() > deadline:
                self.wrong(f"a batch did not end: {found}")
                return
            time.sleep(0.5)
        seen: Counter[str] = Counter()
        for file_id in filter(None, (found.get("output_file_id"), found.get("error_file_id"))):
            text = self.http.get(f"{self.base}/v1/files/{file_id}/content", timeout=WAIT_S).text
            seen.update(json.loads(line)["custom_id"] for line in text.splitlines())
        if found["status"] != "completed" or seen != Counter(f"t{i}" for i in range(NUM_LINES)):
            self.wrong(f"a batch ended as {found['status']} with {len(seen)} ids, {found['request_counts']}")
        for file_id in filter(None, (found.get("output_file_id"), found.get("error_file_id"), found["input_file_id"])):
            self.http.delete(f"{self.base}/v1/files/{file_id}", timeout=WAIT_S)

    @property
    def kinds(self) -> dict[str, tuple[Callable[[], None], int]]:
        """By name what there is, and how often."""
        return {
            "stream": (self.stream, 6),
            "stop string, shared rid": (self.stop_string, 6),
            "tools": (self.tool, 2),
            "grammar": (self.grammar, 3),
            "regex": (self.pattern, 1),
            "response": (self.response, 3),
            "message": (self.message, 2),
            "upload": (self.upload, 1),
            "hostile body": (self.hostile, 3),
            "garbage": (self.garbage, 1),
            "left early": (self.leave, 6),
            "greedy probe": (self.probe, 2),
        }

    def run_until(self, end: float) -> None:
        """Visit again and again."""
        weights = [weight for _, weight in self.kinds.values()]
        for _ in self.turns(end):
            name = self.chance.choices(list(self.kinds), weights)[0]
            self._one(name, self.kinds[name][0])

    def turns(self, end: float) -> Iterator[None]:
        """Yield when the next visit is due, until `end`; visits that took longer are not made up for."""
        due = time.monotonic()
        while due < end:
            yield
            due = max(due + self.every_s, now := time.monotonic())
            time.sleep(due - now)

    def batches_until(self, end: float) -> None:
        """Run batches, one after the other."""
        for _ in self.turns(end):
            self._one(f"batch of {NUM_LINES}", self.batch)

    def took(self, seconds: Mapping[str, float]) -> None:
        """Note what visits took, by name."""
        for name, longest in seconds.items():
            self.longest[name] = max(longest, self.longest.get(name, 0.0))

    def _one(self, name: str, visit: Callable[[], None]) -> None:
        began = time.monotonic()
        try:
            visit()
        except (requests.RequestException, OSError, KeyError, ValueError) as error:
            self.wrong(f"{name}: {type(error).__name__}: {error}"[:300])
            time.sleep(0.2)
        self.done[name] += 1
        self.took({name: time.monotonic() - began})
