"""`dovetail hash-key`: what `--keys-file` has in place of a key."""

from __future__ import annotations

import getpass
import secrets
import sys

from pydantic import SecretStr

from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.exits import exit_code
from dovetail_server.settings.types import check_keys
from dovetail_server.tenants.keys_file import key_hash

USAGE = """usage: dovetail hash-key [--new]

Read an API key from standard input, where no other user sees it, and print the line `hash: …` for --keys-file.

  --new                     make a key: it is printed first, and nowhere else kept
"""


def main(argv: list[str]) -> int:
    """Print the hash. Exit code 2 for a key that no client could send."""
    if any(arg in {"-h", "--help"} for arg in argv):
        print(USAGE, end="")
        return 0
    return exit_code("hash-key", lambda: write(argv))


def write(argv: list[str]) -> int:
    """Print the hash of a key.

    Raises:
        ConfigError: It is no key, or an argument is unknown.
    """
    if argv not in ([], ["--new"]):
        raise ConfigError("takes no argument but --new: the key comes from standard input, where nobody else sees it")
    if argv:
        key = f"sk-{secrets.token_urlsafe(32)}"
        print(f"key:  {key}")
    else:
        key = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline(4096).rstrip("\r\n")
    try:
        check_keys([SecretStr(key)])
    except ValueError as error:
        raise ConfigError(str(error)) from None
    print(f"hash: sha256:{key_hash(key)}")
    return 0
