"""Folders as people have them: each loads, or is told as what it is before a process starts."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.demo import MODEL_DIR
from dovetail.processing.plugin_settings import PluginSettings
from dovetail.processing.prepare import check_model
from dovetail.text.tokenizer.ends import end_ids
from dovetail.text.tokenizer.tokenizer import Tokenizer
from dovetail_models.qwen3 import Qwen3
from dovetail_server.cli import main as dovetail
from dovetail_server.cli.model_facts import info

WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 15215104\n"
READ: dict[str, Any] = {name: json.loads((MODEL_DIR / name).read_text()) for name in (CONFIG, TOKENIZER_CONFIG)}
_RAW = (MODEL_DIR / WHOLE).read_bytes()
_START = 8 + struct.unpack("<Q", _RAW[:8])[0]
HEAD, BODY = json.loads(_RAW[8:_START]), _RAW[_START:]
NAMES = sorted(HEAD.keys() - {"__metadata__"})
PAGE = b"<!DOCTYPE html><html><body>Sign in to continue</body></html>"
Edit = Callable[[Path], object]


def put(name: str, value: Any) -> Edit:
    """Write a file in place of what is there."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return lambda folder: replaced(folder, name).write_bytes(data)


def drop(*names: str) -> Edit:
    """Remove files."""
    return lambda folder: [replaced(folder, name) for name in names]


def link(name: str, target: str) -> Edit:
    """Link a file to where nothing is."""
    return lambda folder: replaced(folder, name).symlink_to(target)


def in_place(name: str, make: Callable[[Path], object]) -> Edit:
    """Make something in a file's place."""
    return lambda folder: make(replaced(folder, name))


def shard(names: Collection[str]) -> bytes:
    """Return a file of some of the weights."""
    head, pieces, length = {}, [], 0
    for name in names:
        begin, end = HEAD[name]["data_offsets"]
        head[name] = {**HEAD[name], "data_offsets": [length, length + end - begin]}
        pieces.append(BODY[begin:end])
        length += end - begin
    described = json.dumps(head).encode()
    return b"".join((struct.pack("<Q", len(described)), described, *pieces))


def both(*edits: Edit) -> Edit:
    """Make several changes."""
    return lambda folder: [edit(folder) for edit in edits]


def changed(name: str, **values: Any) -> Edit:
    """Change keys of a JSON file."""
    return put(name, {**READ[name], **values})


def replaced(folder: Path, name: str) -> Path:
    """Make room for a file."""
    (folder / name).unlink(missing_ok=True)
    return folder / name


def prefixed(*names: str) -> dict[str, str]:
    """Return an index that names files."""
    return dict(zip(("model.norm.weight", "model.embed_tokens.weight"), names, strict=False))


def snapshot(folder: Path) -> None:
    """Put a model where a hub's cache has it."""
    (folder / "snapshots/abc").mkdir(parents=True)
    (folder / "snapshots/abc" / CONFIG).write_text("{}")


SHARD = "model-00001-of-00002.safetensors"
ADAPTER = put("adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "acme/base"})
OTHER = "model-00002-of-00002.safetensors"
OVERLAP = both(drop(WHOLE), put(SHARD, shard(NAMES[:40])), put(OTHER, shard(NAMES[38:])))
TOLD_APART = put(INDEX, {"weight_map": dict.fromkeys(NAMES[:38], SHARD) | dict.fromkeys(NAMES[38:], OTHER)})
STALE = put(INDEX, {"weight_map": prefixed(SHARD, "model-00002-of-00002.safetensors")})
ALL = (WHOLE, INDEX, CONFIG, TOKENIZER, TOKENIZER_CONFIG, "generation_config.json", "chat_template.jinja")
LOADS: dict[str, tuple[Edit, str]] = {
    "as it is": (lambda folder: None, ""),
    "BOM": (put(CONFIG, b"\xef\xbb\xbf" + json.dumps(READ[CONFIG]).encode()), ""),
    "UTF-16": (put(CONFIG, json.dumps(READ[CONFIG]).encode("utf-16")), ""),
    "stale index beside a whole file": (
        STALE,
        r"index\.json names files that are not there .*: model\.safetensors is rea",
    ),
    "index of the whole file": (put(INDEX, {"weight_map": prefixed(WHOLE, WHOLE)}), ""),
    "pickled weights beside": (put("pytorch_model.bin", b"PK"), ""),
    "an adapter beside a model": (both(ADAPTER, put("adapter_model.safetensors", POINTER)), ""),
    "GGUF beside safetensors": (put("model-Q4_K_M.gguf", POINTER), ""),
    "two templates": (put("chat_template.jinja", b"{{ messages[0].content }}"), ""),
    "several ends": (put("generation_config.json", {"eos_token_id": [4087, 1]}), ""),
    "null end": (changed(CONFIG, eos_token_id=None), ""),
    "another dtype's name": (changed(CONFIG, torch_dtype="bfloat16"), ""),
    "quantisation none": (changed(CONFIG, quantization_config={"quant_method": None}), ""),
    "no generation_config": (drop("generation_config.json"), ""),
    "tensors in two shards, told apart by the index": (both(OVERLAP, TOLD_APART), ""),
    "a name in other letters": (put("Model.safetensors", POINTER), ""),
    "weights of one file by their maker's name": (both(drop(WHOLE), put("consolidated.safetensors", shard(NAMES))), ""),
    "a default of sampling that is none": (
        put("generation_config.json", {"temperature": "hot", "eos_token_id": 4089}),
        "temperature is 'hot', not a number: it is left out",
    ),
    "README and others": (both(put("README.md", POINTER), put("training_args.bin", b"PK"), put("x.txt", b"")), ""),
}
NO_GENERATION = drop("generation_config.json")
ODD: dict[str, tuple[Edit, str]] = {
    "true for an end, beside a right one": (
        changed(CONFIG, eos_token_id=True),
        r"config\.json: eos_token_id is True; give the number of a token.* as another file says 4089, 4087",
    ),
    "text for an end, beside a right one": (
        changed(CONFIG, eos_token_id="4089"),
        "eos_token_id is '4089'; give the numb",
    ),
    "-1 for an end": (
        both(NO_GENERATION, changed(CONFIG, eos_token_id=-1)),
        "eos_token_id is -1; -1 is no token: it is",
    ),
    "an end that is no token": (
        both(NO_GENERATION, changed(CONFIG, eos_token_id=999_999)),
        "eos_token_id 999999: the model has tokens up to 4,095, no reply ends at it; correct the file",
    ),
    "an eos_token that is not in the vocabulary": (
        changed(TOKENIZER_CONFIG, eos_token="<nope>"),
        "The tokenizer's eos_token, '<nope>', is not in its vocabulary: it is left out",
    ),
    "no end at all": (
        both(NO_GENERATION, changed(CONFIG, eos_token_id=None), changed(TOKENIZER_CONFIG, eos_token=None)),
        r"No token ends a reply: replies run on to max_tokens\. Set eos_token_id in config\.json",
    ),
    "a default of sampling beyond its bounds": (
        put("generation_config.json", {"temperature": -3, "eos_token_id": 4089}),
        "temperature is -3; it must be from 0 to 100: it is left out",
    ),
    "the same tensors in another file": (
        put("model-extra.safetensors", shard(NAMES[:1])),
        r"model\.safetensors is read, and model-extra\.safetensors beside it is not; remove what is too much",
    ),
}
TOLD: dict[str, tuple[Edit, str]] = {
    "pointer for weights": (
        put(WHOLE, POINTER),
        r"model\.safetensors: is a Git LFS pointer.*git lfs pull.*hf download",
    ),
    "pointer for the tokenizer": (put(TOKENIZER, POINTER), r"tokenizer\.json: is a Git LFS pointer"),
    "pointer for a configuration": (put(CONFIG, POINTER), r"config\.json: is a Git LFS pointer"),
    "pointer for a template": (put("chat_template.jinja", POINTER), r"chat_template\.jinja: is a Git LFS pointer"),
    "pointer for GGUF": (both(drop(WHOLE), put("a.gguf", POINTER)), r"a\.gguf: is a Git LFS pointer"),
    "empty weights": (put(WHOLE, b""), r"model\.safetensors: is empty; download it again"),
    "empty configuration": (put(CONFIG, b""), r"config\.json: is empty"),
    "empty tokenizer": (put(TOKENIZER, b""), r"tokenizer\.json: is empty"),
    "a header that lies": (
        put(WHOLE, struct.pack("<Q", 1 << 40) + b"{}"),
        "broken safetensors file .*; download it again",
    ),
    "adapter alone": (both(drop(CONFIG, WHOLE), ADAPTER), r"an adapter \(LoRA\) of acme/base, not a model; .*merge"),
    "adapter with its base's configuration": (
        both(drop(WHOLE), ADAPTER, put("adapter_model.safetensors", POINTER)),
        r"an adapter \(LoRA\) of acme/base",
    ),
    "stale index alone": (both(drop(WHOLE), STALE), "names files that are not there: model-00001-of-00002.*download"),
    "index outside": (put(INDEX, {"weight_map": {"a": "../b.safetensors"}}), "only files in the folder are read"),
    "index of a tensor that is not there": (
        put(INDEX, {"weight_map": {"a.weight": WHOLE}}),
        r"their files lack: a\.weig",
    ),
    "pickled weights alone": (
        both(drop(WHOLE), put("pytorch_model.bin", b"PK")),
        "only pickled weights.*save_pretrained",
    ),
    "no weights": (drop(WHOLE), r"no \*\.safetensors; finish the download, or use --load-format dummy"),
    "a link to nothing for weights": (
        link(WHOLE, "../../blobs/0a1b"),
        r"model\.safetensors: is a link to a file that is no",
    ),
    "a link to nothing for a configuration": (
        link(CONFIG, "../../blobs/2"),
        r"config\.json: is a link to a file that is not",
    ),
    "text for an end": (
        both(drop("generation_config.json"), changed(CONFIG, eos_token_id="</s>")),
        r"eos_token_id is '</s>'; give the number.*tokenizer_config",
    ),
    "text among ends": (
        put("generation_config.json", {"eos_token_id": [1, "2"]}),
        r"generation_config\.json: eos_token_id",
    ),
    "no architecture": (changed(CONFIG, architectures=None), "names no architecture; add for example"),
    "more layers than weights": (changed(CONFIG, num_hidden_layers=9, layer_types=None), "the weights are of 8 layers"),
    "a list for a configuration": (put(CONFIG, [1]), "a JSON object is expected, not list"),
    # One thing in place of each file: whatever a file is named, the same is asked of it.
    **{f"a pipe for {name}": (in_place(name, os.mkfifo), "is a pipe or device, not a file") for name in ALL[::3]},
    **{f"a folder for {name}": (in_place(name, Path.mkdir), "is a folder, not a file") for name in ALL[1::3]},
    **{f"a loop for {name}": (link(name, name), "is a link to a file that is not there") for name in ALL[2::3]},
    "a page of HTML for weights": (put(WHOLE, PAGE), r"model\.safetensors: is a page of HTML.*logged in"),
    "a page of HTML for a configuration": (put(CONFIG, PAGE), r"config\.json: is a page of HTML"),
    "not a number": (
        changed(CONFIG, rms_norm_eps=float("nan")),
        r"rms_norm_eps is not a number \(NaN\); correct the file",
    ),
    "an empty object": (put(CONFIG, {}), "names no architecture; add for example"),
    "a configuration of 9 MB": (changed(CONFIG, x="a" * 9_000_000), r"at most 8,388,608 are read"),
    "a configuration of 5,000 levels": (put(CONFIG, b'{"a":' * 5000 + b"1" + b"}" * 5000), "cannot be read as JSON"),
    "Latin-1": (put(CONFIG, b'{"n": "\xe9"}'), "cannot be read as text in UTF-8"),
    "a missing shard": (
        both(drop(WHOLE), put(SHARD, shard(NAMES[:38])), TOLD_APART),
        "names files that are not there: model-00002",
    ),
    "a shard without an index": (both(drop(WHOLE), put(SHARD, shard(NAMES[:38]))), "the weights are of"),
    "tensors in two shards": (OVERLAP, "stands in model-00001.* and in model-00002.*; remove the file that is too"),
    "a file cut short": (put(WHOLE, _RAW[:-1000]), r"broken safetensors file .*; download it again"),
    "GGUF by another name": (put(WHOLE, b"GGUF" + bytes(100)), "broken safetensors file"),
    "a list for generation": (put("generation_config.json", [1]), "a JSON object is expected, not list"),
    "an index without names": (put(INDEX, {}), "it has no 'weight_map' of file names"),
    "index of pickles alone": (
        both(drop(WHOLE), put("pytorch_model.bin.index.json", {"weight_map": {}})),
        r"no \*\.safetensors; finish the download",
    ),
    **{
        f"{name} of other tensors": (changed(CONFIG, **changes), f"the weights do not fit the model; {message}")
        for name, changes, message in (
            (
                "a hidden size",
                {"hidden_size": 512},
                r"wrong shape or type: model\.embed_tokens\.weight \[4096, 256\] in",
            ),
            ("a vocabulary", {"vocab_size": 5000}, r"wrong shape or type: model\.embed_tokens\.weight .*\[5000, 256\]"),
            ("heads", {"num_attention_heads": 4}, r"wrong shape or type: model\.layers\.0\.self_attn\.o_proj\.weight"),
            ("an MLP", {"intermediate_size": 8}, r"wrong shape or type: model\.layers\.0\.mlp\.down_proj\.weight"),
            ("layers", {"num_hidden_layers": 6, "layer_types": None}, r"unexpected: model\.layers\.6\.input_layernorm"),
            ("a head", {"tie_word_embeddings": False}, r"missing: lm_head\.weight; does config\.json belong"),
            ("biases", {"attention_bias": True}, r"missing: model\.layers\.0\.self_attn\.k_proj\.bias"),
        )
    },
    "text for a switch": (
        changed(CONFIG, tie_word_embeddings="true"),
        "'true' is text; write true or false, without quot",
    ),
    "heads that do not divide": (
        changed(CONFIG, num_key_value_heads=3),
        "8 query heads cannot share 3 key and value hea",
    ),
    "a key that nobody serves": (changed(CONFIG, clip_qkv=8.0), "clip_qkv = 8.0: this changes what the model computes"),
    "an architecture in no list": (
        changed(CONFIG, architectures="Qwen3ForCausalLM"),
        r'architectures is \'Qwen3ForCausalLM\'; write a list: "architectures": \["Qwen3ForCausalLM"\]',
    ),
    "an architecture of two lines": (changed(CONFIG, architectures=["Qwen3\nForCausalLM"]), "which is no class's name"),
    "a configuration of 100,000 levels": (put(CONFIG, b"[" * 100_000), "it is nested too deeply; download it again"),
    "a hub's cache": (
        both(drop(CONFIG), snapshot),
        r"no config\.json; give '.*/snapshots/abc', which holds one$",
    ),
    "no tokenizer": (
        drop(TOKENIZER),
        r"tokenizer\.json is missing, and no tokenizer\.model, vocab\.json.*--tokenizer-path",
    ),
    "a list for a tokenizer": (
        put(TOKENIZER, []),
        r"tokenizer\.json: is no tokenizer: a JSON object is expected; downlo",
    ),
    "half a tokenizer": (
        put(TOKENIZER, b'{"model": {'),
        r"tokenizer\.json cannot be read as JSON: .*; download it again",
    ),
    "a tokenizer without a model": (
        put(TOKENIZER, {}),
        r"tokenizer\.json: is no tokenizer: it has no `model`; download it again",
    ),
    "tiktoken's file": (
        both(drop(TOKENIZER), put("qwen.tiktoken", b"AA== 0")),
        r"qwen\.tiktoken alone does not say how text is cut; copy it there, or name a folder",
    ),
    "Mistral's file": (
        both(drop(TOKENIZER), put("tekken.json", {"vocab": []})),
        r"tekken\.json: needs the package mistral-common; run: pip install mistral-common, or name a folder",
    ),
    "a vocabulary without its class": (
        both(drop(TOKENIZER), put("vocab.json", {"a": 0}), put("merges.txt", b"#version: 0.2")),
        r"vocab\.json alone does not say how text is cut: tokenizer_class in .* is 'PreTrainedTokenizerFast', which is",
    ),
    "half a template": (
        put("chat_template.jinja", b"{% for m in messages %}{{ m.content "),
        r"chat template, line 1: unexpected end of template.*; correct it, or give another with --chat-template",
    ),
    "half a file for generation": (
        put("generation_config.json", b"{"),
        "cannot be read as JSON: .*; correct it, or downl",
    ),
    "several GGUF files": (
        both(drop(WHOLE), put("a.gguf", POINTER), put("b.gguf", POINTER)),
        "several GGUF files; give one",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in MODEL_DIR.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


@pytest.mark.parametrize("name", LOADS)
def test_it_loads(name: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Checked, translated, tokenizer and ends read; what is odd is warned of once, and nothing else is."""
    edit, warned = LOADS[name]
    edit(folder)
    model = check_model(PluginSettings(model_path=str(folder), device="cpu"))
    assert model.model_config(Qwen3.config_from_hf).num_layers == 8
    assert set(end_ids(TokenizerFiles.read(folder, folder))) == set(Tokenizer.load(folder).eos_token_ids) != set()
    assert len(caplog.records) == bool(warned)
    assert re.search(warned, caplog.text)
    assert said_by_info(folder) is None


@pytest.mark.parametrize("name", TOLD)
def test_it_is_told_as_what_it_is(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`serve` exits with 2 and says what to do, and `info` or `plan` in turn the same line; no process was started."""
    edit, message = TOLD[name]
    edit(folder)
    told = said_by("serve", folder, capsys)
    assert re.search(message, told)
    assert said_by(("info", "plan")[list(TOLD).index(name) % 2], folder, capsys) == told


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_is_told_once(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `info` and `plan`, in the same sentence; it is served."""
    edit, message = ODD[name]
    edit(folder)
    for command in ("info", "plan"):
        caplog.clear()
        assert said_by(command, folder, capsys) == ""
        assert len(caplog.records) == 1
        assert re.search(message, caplog.text)


def said_by(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command; return why it refuses a folder, "" if it does not. A server would go on, and is not run then."""
    flags = [] if command == "info" else ["--device", "cpu", *(["--port", "0"] if command == "serve" else [])]
    code = dovetail([command, str(folder), *flags])
    error = capsys.readouterr().err.strip()
    start = f"dovetail {command}: error: "
    if code == 0:
        assert start not in error
        return ""
    assert code == 2
    lines = [line for line in error.splitlines() if line.startswith(start)]
    assert lines == error.splitlines()[-1:]
    return lines[0].removeprefix(start)


def said_by_info(folder: Path) -> str | None:
    """Return why `dovetail info` says that a folder cannot be served."""
    refused: str | None = info(str(folder))["refused"]
    return refused
