"""Reading a model's tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from dovetail.checkpoint.tokenizer_files import TokenizerFiles
from dovetail.contracts.errors import ModelError, RequestError
from dovetail.text.tokenizer.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path: Path, byte_level: Tokenizer) -> Path:
    byte_level._backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": "from config"})
    return tmp_path


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize("text", ["", "the fox", " two  spaces ", "élève 中文 🎉\n\n", "<think>x</think>"])
def test_text_round_trips(byte_level: Tokenizer, byte_fallback: Tokenizer, text: str) -> None:
    """Encoding and decoding give the text back, with both kinds of vocabulary."""
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_loading_imports_neither_torch_nor_transformers(folder: Path) -> None:
    """A folder with tokenizer.json is read, and a chat rendered, by the tokenizers library and Jinja alone."""
    code = (
        "import sys; from pathlib import Path; from dovetail.text.tokenizer.tokenizer import Tokenizer;"
        "import dovetail.text.parsing.stream, dovetail.text.chat.template;"
        "t = Tokenizer.load(Path(sys.argv[1]));"
        "dovetail.text.chat.template.ChatTemplate.load(t.files).render([{'role': 'user', 'content': 'x'}]);"
        "bad = {'torch', 'transformers', 'numpy'} & set(sys.modules); sys.exit(', '.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_eos_ids_come_from_generation_config_then_config_and_the_tokenizer(folder: Path) -> None:
    """An int or a list is accepted, and the tokenizer's own eos_token is always among the ids."""
    own = Tokenizer.load(folder).added_tokens["<|im_end|>"]
    assert Tokenizer.load(folder).eos_token_ids == (own,)
    write(folder / "config.json", {"text_config": {"eos_token_id": 3}})
    assert Tokenizer.load(folder).eos_token_ids == (3, own)
    write(folder / "config.json", {"eos_token_id": 5})
    assert Tokenizer.load(folder).eos_token_ids == (5, own)
    write(folder / "generation_config.json", {"eos_token_id": [7, own, 7]})
    assert Tokenizer.load(folder).eos_token_ids == (7, own)


def test_sampling_defaults_are_those_that_are_set(folder: Path) -> None:
    """Only finite numbers count; do_sample false means greedy."""
    assert Tokenizer.load(folder).default_sampling == {}
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None, "repetition_penalty": 1.1}
    write(folder / "generation_config.json", {"do_sample": True, **values})
    assert Tokenizer.load(folder).default_sampling == {key: value for key, value in values.items() if value}
    write(folder / "generation_config.json", {"do_sample": False, **values})
    assert Tokenizer.load(folder).default_sampling == {"temperature": 0.0, "repetition_penalty": 1.1}


def test_template_files_win_over_the_configuration(folder: Path) -> None:
    """Templates are found in every place where they are kept."""
    assert Tokenizer.load(folder).files.chat_templates == {"default": "from config"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write(folder / "tokenizer_config.json", {"chat_template": named})
    assert Tokenizer.load(folder).files.chat_templates == {"default": "a", "tool_use": "b"}
    write(folder / "chat_template.jinja", "from file")
    write(folder / "additional_chat_templates" / "rag.jinja", "c")
    assert Tokenizer.load(folder).files.chat_templates == {"default": "from file", "tool_use": "b", "rag": "c"}


def test_special_tokens_are_named_and_skipped(folder: Path) -> None:
    """Special tokens come from both files; tokens that only the configuration calls special are skipped too."""
    write(folder / "special_tokens_map.json", {"bos_token": {"content": "<|im_start|>"}, "pad_token": None})
    write(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "additional_special_tokens": ["<think>"]})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    ids = tokenizer.encode("<think>x</think><|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x</think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think>x</think><|im_end|>"


def test_written_text_has_no_added_token(byte_level: Tokenizer) -> None:
    """What a model may have written is tokenized as text where it spells a marker, also a marker within another."""
    markers = [text for text in byte_level.added_tokens if len(text) > 2]
    assert markers
    first, last = markers[0], markers[-1]
    for text in (first, f"a{first}{last}b", f"{first[:1]}{first}{first[:-1]}", "plain"):
        ids = byte_level.encode_written(text)
        assert not set(byte_level.added_tokens.values()) & set(ids)
        assert byte_level.decode(ids, skip_special_tokens=True) == text


def test_tokens_that_only_the_configuration_lists_are_added(folder: Path) -> None:
    """An entry of added_tokens_decoder gets its id if that is the next one, and is left out otherwise."""
    size = Tokenizer.load(folder).vocab_size
    entries = {str(size): {"content": "<new>", "special": True}, str(size + 9): {"content": "<far>"}}
    write(folder / "tokenizer_config.json", {"added_tokens_decoder": entries})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.added_tokens["<new>"] == size
    assert size in tokenizer.special_ids
    assert "<far>" not in tokenizer.added_tokens
    assert tokenizer.vocab_size == size + 1


def test_thousands_of_tokens_that_the_configuration_lists_are_added_at_once(folder: Path) -> None:
    """Each call looks at all that were added before: one by one, 4,000 took 8 s, and 8 MB of them hours."""
    size = Tokenizer.load(folder).vocab_size
    entries = {str(size + i): {"content": f"<new{i}>"} for i in range(4000)}
    write(folder / "tokenizer_config.json", {"added_tokens_decoder": {**entries, str(size + 4000): {"content": ""}}})
    began = time.process_time()
    tokenizer = Tokenizer.load(folder)
    assert time.process_time() - began < 1
    assert (tokenizer.added_tokens["<new3999>"], tokenizer.vocab_size) == (size + 3999, size + 4000)


def test_bos_follows_add_bos_token(folder: Path) -> None:
    """`add_bos_token` decides whether raw text gets a BOS token; text that spells one keeps it."""
    for add, expected in ((None, False), (False, False), (True, True)):
        write(folder / "tokenizer_config.json", {"bos_token": "<|im_start|>", "add_bos_token": add})
        tokenizer = Tokenizer.load(folder)
        bos = tokenizer.added_tokens["<|im_start|>"]
        assert (tokenizer.encode("x", add_special_tokens=True)[0] == bos) is expected
        assert tokenizer.encode("x", add_special_tokens=False)[0] != bos
        assert tokenizer.encode("<|im_start|>x", add_special_tokens=True).count(bos) == 1


def test_token_bytes_are_exact(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    """Each token's bytes concatenate to the text's; added tokens keep their text; unknown ids are empty."""
    text = " élève 中文 🎉\t"
    for tokenizer, prefix in ((byte_level, ""), (byte_fallback, " ")):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == (prefix + text).encode()
    assert byte_level.token_bytes(byte_level.added_tokens["<｜end｜>"]) == "<｜end｜>".encode()
    assert byte_level.token_bytes(byte_level.vocab_size + 5) == b""
    assert byte_level.token_bytes(-1) == byte_level.token_bytes(1 << 40) == b""
    assert byte_fallback.token_text(3 + 0xE4) == "\ufffd"


@pytest.mark.parametrize(("text", "what"), [("a\ud800b", "surrogate"), ("a\0b", "NUL")])
def test_text_that_is_not_unicode_is_the_requests_fault(byte_level: Tokenizer, text: str, what: str) -> None:
    """Lone surrogates and NUL raise a RequestError that says where."""
    with pytest.raises(RequestError, match=f"{what}.*position 1"):
        byte_level.encode(text, add_special_tokens=True)


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    """The message says what is missing and what to do, without importing transformers."""
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing.*--tokenizer-path"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer_config.json", "{", "cannot be read as JSON"),
        ("tokenizer_config.json", [1], "a JSON object is expected"),
        ("tokenizer_config.json", {"chat_template": [{"name": "x"}]}, "chat_template"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template"),
    ],
)
def test_broken_files_are_named(folder: Path, name: str, value: Any, message: str) -> None:
    """A file that cannot be read is a ModelError naming it."""
    write(folder / name, value)
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(folder)


def test_older_formats_are_converted(tmp_path: Path, byte_level: Tokenizer) -> None:
    """A folder with vocab.json and merges.txt loads through transformers."""
    backend = tokenizers.Tokenizer.from_str(byte_level._backend.to_str())
    backend.model.save(str(tmp_path))
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    write(tmp_path / "config.json", {"model_type": "gpt2"})
    tokenizer = Tokenizer.load(tmp_path)
    text = "the élève 中文"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True) == text


def test_merges_are_not_made_up(tmp_path: Path) -> None:
    """A vocabulary without its merges is refused; transformers would make some up, and cut text otherwise."""
    write(tmp_path / "vocab.json", {"a": 0, "b": 1, "ab": 2})
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    with pytest.raises(ModelError, match=r"merges\.txt.*--tokenizer-path"):
        Tokenizer.load(tmp_path)


def test_merges_longer_than_every_token_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In the older form, too, the library would panic, and print it."""
    write(tmp_path / "vocab.json", {"a": 0, "b": 1})
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    with pytest.raises(ModelError, match=r"^\S*merges\.txt: the merge \('a', 'b'\) [^\n]*$"):
        Tokenizer.load(tmp_path)
    assert not capfd.readouterr().err


def test_decoders_of_other_families_are_read() -> None:
    """Word pieces and Metaspace vocabularies decode as the library does."""
    pieces = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    pieces.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    spaced = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁play": 0, "ing": 1, "▁a": 2}, unk_token="ing"))
    spaced.decoder = tokenizers.decoders.Metaspace()
    for backend, ids in ((pieces, [1, 2, 1]), (spaced, [0, 1, 2])):
        assert Tokenizer(backend, TokenizerFiles()).decode(ids, skip_special_tokens=True) == backend.decode(ids)
