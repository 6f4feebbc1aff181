"""Say what pip is about to download, with its size: `python downloads.py` and the arguments of `pip install`.

pip resolves them by the packages' metadata; whoever serves their files is asked for the sizes. What lies on this
machine is not counted. pip's own error and its exit code are this program's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter

LARGEST = 6
"""Packages that are named, the largest."""
ADVICE = (
    "Without an NVIDIA GPU most of this is not needed: TORCH_INDEX=URL, with PyTorch's own index of CPU builds as URL, "
    "has make take its CPU build."
)


def wanted(arguments: list[str]) -> dict[str, str]:
    """Return the addresses of the files that `pip install` would take from elsewhere, by package."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dry-run", "--report", "-", *arguments], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    found = {item["metadata"]["name"]: item["download_info"]["url"] for item in json.loads(done.stdout)["install"]}
    return {name: url for name, url in found.items() if not url.startswith("file:")}


def size(url: str) -> int | None:
    """Return the size of a file in bytes, None where its server does not tell."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=30) as reply:
            return int(reply.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None


def told(sizes: dict[str, int | None]) -> str:
    """Return the text for packages and the sizes of their files."""
    known = sorted(((name, num) for name, num in sizes.items() if num is not None), key=itemgetter(1), reverse=True)
    total = sum(num for _, num in known) / 1e6
    largest = ", ".join(f"{name} {num / 1e6:,.0f}" for name, num in known[:LARGEST])
    unknown = len(sizes) - len(known)
    text = f"To download: {total:,.0f} MB for {_packages(len(sizes))}, less what is in pip's cache; in MB: {largest}"
    text += ", …" if len(known) > LARGEST else ""
    text += f"; {_packages(unknown)} of unknown size" if unknown else ""
    return f"{text}\n{ADVICE}" if any(name.startswith("nvidia-") for name in sizes) else text


def _packages(number: int) -> str:
    return f"{number} package{'s' if number != 1 else ''}"


def main() -> int:
    """Ask, and tell."""
    files = wanted(sys.argv[1:])
    with ThreadPoolExecutor(16) as pool:
        sizes = dict(zip(files, pool.map(size, files.values()), strict=True))
    print(told(sizes) if sizes else "To download: nothing", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
