"""Ask a server for the numbers in held-out images: other fonts, sizes and places than those of the training.

Start `dovetail serve demo:digits`, then run `python -m demo_training.digits.evaluate`, from `tests`.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import requests
from PIL import Image

from demo_training.digits.dialogue import QUESTIONS
from demo_training.digits.fonts import HELD_OUT, families
from demo_training.digits.pictures import draw, number, shape


@dataclass(frozen=True)
class Case:
    """An image, the package of its font, a question, and the number."""

    image: Image.Image
    package: str
    question: str
    number: str


@dataclass(frozen=True)
class Mistake:
    """A reply that is not the number."""

    index: int
    package: str
    question: str
    number: str
    reply: str


def cases(fonts: Path, num: int, seed: int) -> Iterator[Case]:
    """Yield held-out images of 60 to 800 pixels a side; families, questions and lengths of numbers are as likely."""
    rng = np.random.default_rng(seed)
    packages = list(zip(HELD_OUT, families(HELD_OUT, fonts), strict=True))
    for _ in range(num):
        package, files = packages[int(rng.integers(len(packages)))]
        text = number(rng)
        yield Case(draw(rng, text, [files], shape(rng, 60, 800)), package, str(rng.choice(QUESTIONS)), text)


def ask(url: str, image: Image.Image, question: str) -> str:
    """Return the server's reply, at temperature 0."""
    file = io.BytesIO()
    image.save(file, "PNG")
    source = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": source}}, {"type": "text", "text": question}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 32}
    reply = requests.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    reply.raise_for_status()
    said: str = reply.json()["choices"][0]["message"]["content"]
    return said


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Evaluate the model that reads numbers in images.")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--fonts", type=Path, default=Path("/usr/share/fonts"), help="folder with the fonts' files")
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=49)
    parser.add_argument("--json", type=Path, help="a file for the counts and the mistakes")
    options = parser.parse_args()
    drawn = list(cases(options.fonts, options.num, options.seed))
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda case: ask(options.url, case.image, case.question), drawn))
    asked, wrong = Counter(case.package for case in drawn), Counter[str]()
    mistakes = []
    for index, (case, reply) in enumerate(zip(drawn, replies, strict=True)):
        if reply != case.number:
            wrong[case.package] += 1
            mistakes.append(Mistake(index, case.package, case.question, case.number, reply))
    right = len(drawn) - len(mistakes)
    for package, count in sorted(asked.items()):
        print(f"{package}: {count - wrong[package]} of {count}")
    print(f"{right} of {len(drawn)} images read right ({right / len(drawn):.1%})")
    if options.json:
        found = {"asked": len(drawn), "right": right, "mistakes": [asdict(each) for each in mistakes]}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
