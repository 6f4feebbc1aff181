"""What compiles the kernels of a device before requests wait for them; `Device.compiler` names the class.

It compiles whatever an engine launches, also kernels of an attention backend or of somebody's model. An engine makes
one object, and where that does not know its kernels, runs what will launch them inside of `collecting`:

```python
ahead = compiler(fingerprint)
if not ahead.is_known:
    for rehearse in rehearsals:
        with ahead.collecting():
            rehearse()
    num, num_failed = ahead.compile()
ahead.close()
```

Importing a module with such a class imports no torch. A process that it starts should begin with `ASIDE`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

ASIDE = (sys.executable, "-m", "dovetail.base.aside")
"""Command of a process beside the engine, followed by the name that its log lines have and `module:function`."""


class AheadCompiler(ABC):
    """Compiles the kernels of one engine. What it does not compile is compiled at first use."""

    @classmethod
    @abstractmethod
    def folder(cls) -> Path:
        """Return where compiled kernels are kept for other processes; it need not exist."""

    @classmethod
    @abstractmethod
    def kept(cls) -> dict[str, int]:
        """Return the kernels that are kept: their files' names below `folder`, and the bytes of each."""

    @classmethod
    def wake(cls) -> None:
        """Begin, without waiting, what takes long before something can be compiled.

        Called once in an engine's process, while torch is being imported. What fails here fails again later.
        """

    @classmethod
    def release(cls) -> None:
        """End what `wake` began and nobody needed."""

    @classmethod
    @abstractmethod
    def report_late(cls, report: Callable[[str, float], None]) -> None:
        """From now on, tell of each kernel that this process compiles its name, and the seconds that it took."""

    @abstractmethod
    def __init__(self, fingerprint: str) -> None:
        """Look up whether the kernels of such an engine were compiled, and begin to prepare for the work if not.

        Args:
            fingerprint: Equal for engines that launch the same on the same device. What else decides, such as the
                compiler's own version, is for this class to add.

        Raises:
            OSError: What compiles cannot be started.
        """

    @property
    @abstractmethod
    def is_known(self) -> bool:
        """Whether all kernels of such an engine are compiled."""

    @abstractmethod
    def collecting(self) -> AbstractContextManager[None]:
        """Collect what would be launched inside, on the current device, and launch none of it.

        What the code inside computes is meaningless; tensors that existed before may be written.
        """

    @abstractmethod
    def compile(self) -> tuple[int, int]:
        """Compile what was collected, with a progress bar; note that it is done if nothing failed.

        Returns:
            How many kernels there are, and how many of them were not compiled.
        """

    @abstractmethod
    def close(self) -> None:
        """End what was begun. Safe to call twice."""
