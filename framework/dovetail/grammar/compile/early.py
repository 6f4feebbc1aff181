"""Reads a tokenizer for grammars while the model loads: `EarlyTokenizer`, in the engine's process.

Reading a large one, and listing its tokens, takes a second or two of Python, in which the other threads of a process
hardly run: requests would wait for it, and so would the start. Tokens are therefore listed by a process of its own,
`python -m dovetail.grammar.compile.early FOLDER`, which writes them to its output; the tokenizer itself, which encodes,
has to be read in the engine's process, too.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec

from dovetail.contracts.grammar import Vocabulary
from dovetail.grammar.compile.vocabulary import make_vocabulary, token_bytes
from dovetail.text.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
LARGE = 1 << 20
"""Bytes of `tokenizer.json` from which another process is worth its start."""
LIST_S = 60.0
"""Longer than that, nobody waits for that process."""


class EarlyTokenizer:
    """A tokenizer that is being read."""

    def __init__(self, folder: Path, load: Callable[[], Tokenizer] | None = None, *, lists: bool = True) -> None:
        """Begin to read, in a thread.

        Args:
            folder: The tokenizer's.
            load: Loads it; None: whichever installed format reads the folder.
            lists: Another process may list the tokens: it is the tokenizer of the usual files.
        """
        self._lists = lists
        self._folder, self._load = folder, load or partial(Tokenizer.load, folder)
        self._found: Future[tuple[Tokenizer, list[bytes] | None]] = Future()
        threading.Thread(target=self._read, name="dovetail-tokenizer", daemon=True).start()

    def vocabulary(self, size: int, eos_ids: tuple[int, ...]) -> Vocabulary:
        """Wait, and make the model's vocabulary; arguments as of `make_vocabulary`, the tokenizer's ends for none.

        Raises:
            DovetailError: It cannot be read.
        """
        tokenizer, tokens = self._found.result()
        return make_vocabulary(tokenizer, size, eos_ids or tokenizer.eos_token_ids, tokens)

    def _read(self) -> None:
        try:
            listing = _listing(self._folder) if self._lists else None
            tokenizer = self._load()
            self._found.set_result((tokenizer, None if listing is None else _tokens(listing, tokenizer.vocab_size)))
        except BaseException as error:
            self._found.set_exception(error)  # whoever asks for a grammar is told


def _listing(folder: Path) -> subprocess.Popen[bytes] | None:
    """Start the process that lists tokens, if it is worth it."""
    try:
        if (folder / "tokenizer.json").stat().st_size < LARGE:
            return None
        command = [sys.executable, "-m", "dovetail.grammar.compile.early", str(folder)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as error:
        logger.debug("tokens are listed here: %s", error)
        return None


def _tokens(listing: subprocess.Popen[bytes], num: int) -> list[bytes] | None:
    """Return what the process has listed, or None where it has failed: then they are listed here."""
    try:
        data, _ = listing.communicate(timeout=LIST_S)
        tokens = msgspec.msgpack.decode(data, type=list[bytes])
    except (subprocess.TimeoutExpired, msgspec.MsgspecError, OSError) as error:
        listing.kill()
        listing.wait()
        logger.debug("tokens are listed here: %s", error)
        return None
    return tokens if len(tokens) == num else None


def main(argv: list[str]) -> int:
    """List the tokens of a folder's tokenizer."""
    sys.stdout.buffer.write(msgspec.msgpack.encode(token_bytes(Tokenizer.load(Path(argv[0])))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
