"""Runs SGLang's own serving benchmark as often as it is told, without SGLang's engine.

Three helpers that it takes from the engine stand in for themselves, for importing that takes its kernels.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import sglang  # noqa: F401  # before anything stands in
from transformers import AutoTokenizer


def stand_in(name: str, **members: Any) -> None:
    """Put a module in the place of one of the engine's, or of a library that no data set used here needs."""
    module = ModuleType(name)
    module.__path__ = []
    module.__dict__.update(members)
    sys.modules[name] = module


def address(base_url: str, host: str, port: int) -> str:
    return base_url or f"http://{host}:{port}"


stand_in("datasets", load_dataset=None)
for package in ("disaggregation", "utils"):
    stand_in(f"sglang.srt.{package}")
stand_in("sglang.srt.disaggregation.utils", FAKE_BOOTSTRAP_HOST="2.2.2.2")
stand_in("sglang.srt.utils.network", resolve_base_url=address, resolve_host_port=address)
stand_in("sglang.srt.utils.hf_transformers_utils", get_tokenizer=AutoTokenizer.from_pretrained)

from sglang.benchmark import serving  # noqa: E402

for arguments in json.loads(sys.argv[1]):
    sys.argv = ["serving", *arguments]
    serving.cli_main()
