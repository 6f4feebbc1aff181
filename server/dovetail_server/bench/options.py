"""What `dovetail bench serve` is asked for. Imports nothing that a help text does not need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail_server.bench.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the command was asked for, checked."""

    workloads: Sequence[Workload]
    seed: int
    suite: str | None = None
    """Whose workloads these are; None: one workload of the options."""
    base_url: str | None = None
    model_path: Path | None = None
    serve_flags: Sequence[str] = ()
    model: str | None = None
    endpoint: str = "completions"
    sends_text: bool = True
    """Random prompts are text, not token ids."""
    temperature: float = 0.0
    ignore_eos: bool = True
    dataset: Path | None = None
    tokenizer: Path | None = None
    bandwidth: float | None = None
    """Bytes a second; measured if None."""
    workers: int | None = None
    timeout_s: float = 600.0
    start_timeout_s: float = 600.0
    api_key: str | None = None
    json: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
