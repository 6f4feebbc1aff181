"""What the author of a logits processor implements: `LogitsProcessor`, and the rows that it is given.

```python
class Calm(LogitsProcessor):
    Params = CalmParams  # a pydantic model: what a request may say

    def __init__(self, vocab_size, num_rows, device):
        self.factor = torch.ones(num_rows, device=device)

    def admit(self, row, params, ids, num_prompt):
        self.factor[row] = params.factor

    def apply(self, logits, batch):
        logits *= self.factor[batch.rows][:, None]
```

The class is named in the entry-point group `dovetail.logits_processors.v1` and served where `--logits-processors` names
it. A request asks for it with `"logits_processors": {"calm": {"factor": 0.5}}`; requests that do not cost nothing.

The HTTP server loads the class for its `Params`, so the module imports torch where it is used and not at its top.
Letters used in shapes: K rows of a step that ask for the processor, V vocabulary size, S device rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.contracts.options import Configurable

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """The rows of a step that ask for a processor.

    Attributes:
        rows: `[K]` int64 on the device, their device rows: `0 … S - 1`, each once.
        positions: `[K]` int64 on the device, the place of each row's next token among those that it generates.
    """

    rows: Tensor
    positions: Tensor


class LogitsProcessor(Configurable, ABC):
    """Changes the logits of the requests that ask for it, all rows of a step at once, on the device.

    What it keeps of a request it keeps by device row: a row is a request's from `admit` until the next `admit` or
    `release`. A request that was retracted, or goes on in another engine, is admitted again with all that it has said.
    """

    Params: ClassVar[type[Any]]
    """What a request may say: a pydantic model or a dataclass. Unknown names and wrong types are refused with 400."""

    capturable: ClassVar[bool] = False
    """`apply` and `drawn` read no tensor's values on the host, so that a graph can record them; the kit looks. If not,
    each step with a row that asks for it waits for the device, which the log says at the start."""

    @abstractmethod
    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        """Keep what is needed: `num_rows` is S."""

    @abstractmethod
    def admit(self, row: int, params: Any, ids: Sequence[int], num_prompt: int) -> None:
        """Note that a request takes a row.

        Args:
            row: The device row.
            params: An instance of `Params`.
            ids: Its tokens so far: the prompt, and behind it what it has said.
            num_prompt: How many of them are the prompt.
        """

    def release(self, row: int) -> None:
        """Note that a request has left its row, which `admit` took. What is raised is logged."""
        return

    @abstractmethod
    def apply(self, logits: Tensor, batch: LogitsRows) -> None:
        """Change logits in place; `-inf` forbids a token.

        They are the model's own, before grammar masks, penalties, bias and temperature. Where a processor leaves no
        token that a grammar or a minimum length allows, that step does without it.

        Args:
            logits: `[K, V]` float32, contiguous.
            batch: The rows.

        Raises:
            Exception: Any: the step is tried again without some of its requests, until the one that fails ends.
        """

    def drawn(self, batch: LogitsRows, ids: Tensor) -> None:
        """Note the tokens sampled for some rows, `[K]` int64 on the device. Called after each `apply`."""
        return
