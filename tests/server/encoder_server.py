"""Servers over real tiny encoders and rerankers, and what writes their folders; the engine is in this process."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import requests
import torch
import transformers
from server_tiny import write_model
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordPiece
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from dovetail.client.inprocess import InProcessClient
from dovetail.processing.prepare import prepare
from dovetail.processing.processor import Processor
from dovetail_server.settings.serve import ServeSettings
from dovetail_server.start import preflight
from dovetail_server.start.app import create_app
from dovetail_server.start.lifecycle import HttpServer
from dovetail_server.start.run import engine_settings
from dovetail_server.state import ServerState

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
SIZES: dict[str, Any] = {
    **{"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 66, "pad_token_id": 0, "initializer_range": 0.3},
}
MODERN = {"local_attention": 16, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}


def write_encoder(folder: Path, kind: str = "bert", task: str = "", **changes: Any) -> Any:
    """Write a random encoder with a tokenizer of letters that tells two texts apart; returns transformers' model."""
    torch.manual_seed(0)
    given = {**SIZES, **(MODERN if kind == "modernbert" else {}), **changes}
    config = transformers.CONFIG_MAPPING[kind](**given)
    auto = getattr(transformers, f"AutoModelFor{task}" if task else "AutoModel")
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(folder)
    words = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    backend = Backend(WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = Lowercase(), BertPreTokenizer()
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    names |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return model.requires_grad_(False)


def write_reranker(folder: Path, task: str = "", **said: Any) -> Any:
    """A random Qwen3-Reranker, its tokenizer one of bytes with a token for each answer."""
    write_model(folder, more=("no", "yes"))
    torch.manual_seed(0)
    sizes = {"vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0}
    config = transformers.Qwen3Config(**sizes, initializer_range=0.3, **({"num_labels": 1} if task else {}))
    auto = getattr(transformers, f"AutoModelFor{task or 'CausalLM'}")
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    return model.requires_grad_(False)


class EncoderServer:
    """A server over a folder; use it in a `with` block."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        defaults = {"served_model_name": ["tiny"], "log_level": "error", "dtype": "float32", "device": "cpu"}
        storage = tempfile.mkdtemp(prefix="storage", dir=folder)  # of its own, as a `Harness` has
        made = ServeSettings(model_path=str(folder), **{"file_storage_path": storage, **defaults, **settings})
        prepared = prepare(made)
        self.settings, self._plan, self._model = prepared.settings, prepared.plan, prepared.model
        self.engine = InProcessClient(engine_settings(self.settings), self._plan)
        self.listener = preflight.bind("127.0.0.1", 0)
        self.base = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.state = ServerState(self.settings, self.engine)
        self.server = HttpServer(create_app(self.state), self.state)
        self.http, self.error = requests.Session(), None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(120)
        if self.error is not None:
            self._thread.join(60)
            self.listener.close()
            raise self.error

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        try:
            info = await self.engine.start()
            text = Processor.load(self.settings, self._plan, self._model)
            self.state.ready_with(text.with_engine_limits(info, self.settings))
        except Exception as error:  # raised again by the test's thread
            self.error = error
            await self.engine.close()
            return
        finally:
            self._ready.set()
        await self.server.serve(sockets=[self.listener])
        await self.engine.close()

    def post(self, path: str, body: dict[str, Any]) -> requests.Response:
        return self.http.post(self.base + path, json=body, timeout=60)

    def ok(self, path: str, **body: Any) -> dict[str, Any]:
        """Send a body and return the reply, which is none of an error."""
        reply = self.post(path, body)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def __enter__(self) -> EncoderServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()
        self.server.should_exit = True
        self._thread.join(60)
        self.listener.close()
