"""How many threads tokenize, and where they are made."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dovetail_server.reading.threads import MOST, num_threads, set_threads

FORKED = """
import os
from pathlib import Path
from dovetail.demo import MODEL_DIR
from dovetail_server.reading.threads import set_threads
from dovetail.text.tokenizer.tokenizer import Tokenizer

tokenizer = Tokenizer.load(MODEL_DIR)
text = "Some words, and 1000 more.\\n" * 2000
whole = tokenizer.encode(text, add_special_tokens=False)
before = len(os.listdir("/proc/self/task"))
if not os.fork():
    set_threads(3)
    found = tokenizer.encode(text, add_special_tokens=False)
    print(before, len(os.listdir("/proc/self/task")), found == whole, flush=True)
    os._exit(0)
os.wait()
"""


def test_threads_are_as_many_as_cores_within_a_bound() -> None:
    """Where nobody says how many."""
    assert num_threads({}) == min(MOST, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({"RAYON_NUM_THREADS": "3"}, 3),
        ({"RAYON_NUM_THREADS": "30", "TOKENIZERS_PARALLELISM": "true"}, 30),
        ({"RAYON_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": "False"}, 1),
    ],
)
def test_what_the_environment_says_counts(environment: dict[str, str], number: int) -> None:
    """The library's own variables."""
    assert num_threads(environment) == number
    set_threads(number, environment)
    assert num_threads(environment) == number


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")
def test_a_copy_has_threads_where_its_template_has_none() -> None:
    """A copy of a process without threads makes its own, and has the tokens that the process had."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", FORKED], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.split() == ["1", "4", "True"], ran.stdout + ran.stderr
