"""What the author of a speculator implements: `Speculator`, and what it sees of requests.

```python
class Echo(Speculator):
    def draft(self, requests):
        return [list(request.ids[-request.most_drafts :]) for request in requests]
```

The class is named in the entry-point group `dovetail.speculators.v1`. The engine calls it on its own thread; it runs on
the host and needs no tensors. It is called before a step that is to verify what it guesses, and now and then, so that
what is said next tells the engine what its guesses are worth.

What it guesses is verified by the step that would compute one token anyway: at every place a token is drawn as without
drafts, and a draft that is not that token ends what the request gets from the step. So a wrong guess costs time, and
never changes what a request says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from dovetail.contracts.options import Configurable


class DraftRequest(Protocol):
    """What a speculator sees of a request that decodes. It reads, sets `memo`, and keeps nothing else of it."""

    memo: object
    """The speculator's own, None at first; it is there in the next step again, and gone with the request."""

    @property
    def ids(self) -> Sequence[int]:
        """Its prompt and what it has said. It only ever grows at its end, by a token or several; not to be changed."""
        ...

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        ...

    @property
    def most_drafts(self) -> int:
        """Drafts that are of use at most, 1 or more: what follows is dropped."""
        ...


class Speculator(Configurable, ABC):
    """Guesses what requests will say next."""

    @abstractmethod
    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """Return for each request the token ids that may follow, the next one first; nothing where there is no guess.

        The device may wait meanwhile, so its time delays every request: for a long request, 0.1 ms is much.

        Args:
            requests: Some of those that decode and can use drafts, in any order. Not every token of a request has its
                call, and a step may verify none of what is returned, or only the first of it.

        Returns:
            As many sequences as requests, in their order. Each is used up to its first id that ends its request or is
            not in the vocabulary. Where this raises or returns another number, the step does without drafts, and the
            log names the plugin.
        """
