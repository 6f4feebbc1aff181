"""A program in SGLang's frontend language; prints what came out as JSON. Run with sglang on the path."""

from __future__ import annotations

import json
import sys
from typing import Any

import sglang as sgl
from sglang.lang.chat_template import get_chat_template


@sgl.function  # type: ignore[untyped-decorator]
def ask(s: Any, city: str) -> None:
    s += sgl.user(f"What is the capital of {city}?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))


@sgl.function  # type: ignore[untyped-decorator]
def choose(s: Any) -> None:
    s += "The capital of France is"
    s += sgl.select("pick", choices=[" Rome", " Paris", " Berlin"])


@sgl.function  # type: ignore[untyped-decorator]
def fork(s: Any) -> None:
    s += "The capital of France is Paris. "
    forks = s.fork(2)
    forks[0] += "The capital of Italy is" + sgl.gen("x", max_tokens=3, temperature=0)
    forks[1] += "The capital of Japan is" + sgl.gen("x", max_tokens=3, temperature=0)
    forks.join()
    s += "Then:" + forks[0]["x"] + forks[1]["x"]


@sgl.function  # type: ignore[untyped-decorator]
def number(s: Any) -> None:
    s += "A number: " + sgl.gen("n", max_tokens=8, regex="[0-9]{3}", temperature=0)


def main() -> None:
    backend = sgl.RuntimeEndpoint(sys.argv[1])
    backend.chat_template = get_chat_template("chatml")  # the frontend does not know the demo model's by its name
    sgl.set_default_backend(backend)
    found = {
        "gen": ask.run(city="France")["answer"],
        "select": choose.run()["pick"],
        "fork": fork.run().text(),
        "regex": number.run()["n"],
        "batch": [s["answer"] for s in ask.run_batch([{"city": c} for c in ("France", "Italy")], num_threads=2)],
        "stream": "".join(ask.run(city="France", stream=True).text_iter("answer")),
    }
    backend.flush_cache()
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
