"""What images cost a server and its model: first tokens, images a second, text streams beside them, second turns.

    python tests/benchmarks/image_serving.py --config DIR --device cuda     # a folder with config.json, weights or none
    python tests/benchmarks/image_serving.py --smoke                        # a tiny model on the CPU, seconds

The model has the shape of DIR's configuration, such as Qwen2.5-VL-7B's, and random weights; its tokenizer has one token
for a byte. Requests go over HTTP and ask for one token, so that their time is that to the first one. Each image and
text is new, but for second turns. Loss: how much less text streams get while image requests are computed, and while
requests of as many text tokens are. Prints one line of JSON for each measurement.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))  # writes a tokenizer and a template

import requests
from PIL import Image
from seeing_server import write_seeing_model

SMALL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config": {
        "model_type": "qwen2_5_vl_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
        "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
    "vision_config": {
        "model_type": "qwen2_5_vl", "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
        "out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 56, "patch_size": 14, "in_channels": 3,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "silu",
    },
}  # fmt: skip


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a folder without weights: a configuration, and what reads text and images."""
    write_seeing_model(folder)
    image = json.loads((folder / "config.json").read_text())["image_token_id"]
    ids = {"image_token_id": image, "vision_start_token_id": image - 2, "vision_end_token_id": image - 1}
    made = {**config, **ids, "video_token_id": image + 1, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(made))
    sizes = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16384, "patch_size": 14, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps({**sizes, "temporal_patch_size": 2}))
    return folder


class Server:
    """`dovetail serve` of a random model, in a process."""

    def __init__(self, folder: Path, device: str, flags: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "dovetail_server", "serve", str(folder), "--port", str(port)]
        command += ["--served-model-name", "m", "--device", device, "--load-format", "dummy", "--log-level", "warning"]
        command += ["--disable-access-log", "--disable-playground", *flags]
        self.process = subprocess.Popen(command)

    def wait(self) -> None:
        """Wait until it serves, however long its start takes."""
        while self.process.poll() is None:
            try:
                if requests.get(f"{self.base}/readyz", timeout=10).status_code == 200:
                    return
            except requests.RequestException:
                time.sleep(0.3)
        raise SystemExit("the server ended")

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()

    def ask(self, messages: list[dict[str, Any]]) -> tuple[float, dict[str, Any]]:
        """Ask for one token; returns the seconds that took, and the usage."""
        body = {"model": "m", "messages": messages, "max_tokens": 1, "ignore_eos": True}
        began = time.perf_counter()
        reply = requests.post(f"{self.base}/v1/chat/completions", json=body, timeout=600)
        took = time.perf_counter() - began
        if reply.status_code != 200:
            raise RuntimeError(reply.text)
        return took, reply.json()["usage"]

    def num_encoded(self) -> int:
        """Return how many images the tower has encoded."""
        lines = requests.get(f"{self.base}/metrics", timeout=60).text.splitlines()
        found = [line for line in lines if line.startswith("dovetail_encoded_images_total")]
        return int(float(found[0].split()[-1])) if found else 0


class Streams:
    """Text streams that go on and on; counts their tokens."""

    def __init__(self, server: Server, num: int) -> None:
        self._server, self._ends = server, threading.Event()
        self.counts = [0] * num
        self._threads = [threading.Thread(target=self._run, args=(at,), daemon=True) for at in range(num)]
        for thread in self._threads:
            thread.start()
        while min(self.counts) < 8:
            time.sleep(0.05)

    def _run(self, at: int) -> None:
        body = {"model": "m", "prompt": f"stream {at}", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        found = requests.post(f"{self._server.base}/tokenize", json={"prompt": "abcdefgh"}, timeout=60).json()
        # Most tokens of random weights have no text here, and wait for one that has.
        body |= {"return_token_ids": True, "logit_bias": dict.fromkeys(map(str, found["tokens"]), 100)}
        while not self._ends.is_set():
            with requests.post(f"{self._server.base}/v1/completions", json=body, stream=True, timeout=600) as reply:
                for line in reply.iter_lines():
                    if line.startswith(b"data: {"):
                        self.counts[at] += sum(len(one["token_ids"]) for one in json.loads(line[6:])["choices"])
                    if self._ends.is_set():
                        return

    def rate(self, during: Callable[[], Any]) -> tuple[float, float]:
        """Return their tokens a second while something is done, and the seconds that took."""
        before, began = sum(self.counts), time.perf_counter()
        during()
        took = time.perf_counter() - began
        return (sum(self.counts) - before) / took, took

    def close(self) -> None:
        """End them."""
        self._ends.set()
        for thread in self._threads:
            thread.join()


class Content:
    """Images and texts, each of which is new, of as many tokens."""

    def __init__(self, side: int, seed: int) -> None:
        self._side, self._rng = side, random.Random(seed)
        self.num_tokens = 0

    def image(self) -> list[dict[str, Any]]:
        """Return a conversation with an image: a JPEG of noise on a grid, as a screenshot compresses."""
        small = Image.frombytes("RGB", (64, 64), self._rng.randbytes(64 * 64 * 3))
        file = io.BytesIO()
        small.resize((self._side, self._side)).save(file, "JPEG", quality=85)
        url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]

    def text(self) -> list[dict[str, Any]]:
        """Return a conversation of as many tokens: each letter is one."""
        return [{"role": "user", "content": "".join(self._rng.choices("abcdefgh", k=self.num_tokens))}]


def measure(server: Server, given: argparse.Namespace) -> None:
    """Measure all, and print it."""
    content = Content(given.side, given.seed)
    _, usage = server.ask(content.image())
    content.num_tokens = usage["prompt_tokens_details"]["image_tokens"]
    for _ in range(3):  # kernels and graphs of these sizes
        server.ask(content.text())
        server.ask(content.image())

    def together(make: Callable[[], Any], num: int) -> list[float]:
        made = [make() for _ in range(num)]
        with ThreadPoolExecutor(num) as pool:
            return [took for took, _ in pool.map(server.ask, made)]

    def print_line(what: str, **found: Any) -> None:
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}
        print(json.dumps({"what": what, **rounded}), flush=True)

    times = [(server.ask(content.text())[0], server.ask(content.image())[0]) for _ in range(given.rounds)]
    text_s, image_s = (statistics.median(column) for column in zip(*times, strict=True))
    beyond = statistics.median(image - text for text, image in times)
    print_line("first token", tokens=content.num_tokens, text_s=text_s, image_s=image_s, beyond_s=beyond)

    made = [content.image() for _ in range(given.at_once)]
    began = time.perf_counter()
    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(server.ask, made))
    print_line("at once", images=given.at_once, images_per_s=given.at_once / (time.perf_counter() - began))

    streams = Streams(server, given.streams)
    try:
        alone, _ = streams.rate(lambda: time.sleep(given.alone_s))
        for name, make in (("text", content.text), ("image", content.image)):
            rate, took = streams.rate(lambda make=make: together(make, given.beside))  # type: ignore[misc]
            print_line(
                f"streams beside {name}s", streams=given.streams, requests=given.beside, alone_per_s=alone,
                beside_per_s=rate, loss=1 - rate / alone, seconds=took,
            )  # fmt: skip
    finally:
        streams.close()

    first = content.image()
    known = server.ask(first)[1]["prompt_tokens"]
    before = server.num_encoded()
    more = [{"role": "assistant", "content": "It is a cat."}, {"role": "user", "content": "Are you sure?"}]
    took, usage = server.ask([*first, *more])
    cached = usage["prompt_tokens_details"].get("cached_tokens", 0)
    runs = server.num_encoded() - before
    print_line("second turn", seconds=took, first_turn=known, hit_share=cached / known, tower_runs=runs)


def main() -> int:
    """Serve, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a folder with config.json")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--side", type=int, default=1024, help="pixels of an image's side")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--beside", type=int, default=64, help="requests beside the streams")
    parser.add_argument("--alone-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    given, flags = parser.parse_known_args()
    if given.smoke:
        given.device, given.side, given.rounds, given.alone_s = "cpu", 112, 2, 0.5
        given.at_once, given.streams, given.beside = 2, 2, 3
    elif given.config is None:
        parser.error("give --config DIR, or --smoke")
    config = SMALL if given.smoke else json.loads((given.config / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        server = Server(write_model(Path(folder) / "model", config), given.device, flags)
        try:
            server.wait()
            measure(server, given)
        finally:
            server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
