"""Every error Dovetail raises on purpose, in one tree.

```
DovetailError
├── ConfigError            a flag, a setting, a model folder or a plugin is wrong; the command line exits with code 2
│   ├── ModelError         config.json, weights or tokenizer cannot be used
│   └── PluginError        a plugin is unknown, incompatible or broken
├── RequestError           one request is wrong (HTTP 4xx); carries `param` and `code`
├── UnsupportedError       a component was asked for something outside its declared capabilities
└── EngineError            the engine failed or is gone
    └── EngineDeadError    no further request can succeed
```

A message says what was given, what is possible and what to do.
"""

from __future__ import annotations

MAX_CHARS = 3000
"""Of a message: the names of all architectures fit. Values of files and requests that it repeats have any length."""


def brief(text: str) -> str:
    """Return a text of at most `MAX_CHARS` characters and a note: what is given begins it, what to do ends it."""
    left_out = len(text) - MAX_CHARS
    if left_out <= 0:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]} [… {left_out:,} characters …] {text[-half:]}"


def described(error: BaseException) -> str:
    """Return an exception's type and text in a line, with the notes that it got on its way."""
    text = said(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def said(error: BaseException) -> str:
    """Return an exception's text in a line, with the notes that it got on its way: for a user, who needs no type."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    try:
        text = " ".join(str(error).split())
    except Exception:  # of a stranger's class
        text = "its text cannot be had"
    return text + (f" ({notes})" if notes else "")


class DovetailError(Exception):
    """Base of all errors raised on purpose. A message is never long, whatever it repeats."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(brief(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(DovetailError):
    """A flag, setting, file or plugin is wrong. The command line prints it on one line and exits with code 2."""


class ModelError(ConfigError):
    """A model folder cannot be served: config, weights or tokenizer."""


class PluginError(ConfigError):
    """A plugin that was asked for is unknown, incompatible or broken."""


class RequestError(DovetailError):
    """One request is wrong. The server turns it into an OpenAI error body; neighbours are not affected.

    Args:
        message: What was given, what is possible, what to do.
        param: Name of the field at fault, as the client wrote it.
        code: Stable machine-readable code (`context_length_exceeded`, `model_not_found`, …).
        status: HTTP status: 4xx, or 500 for a request that ends the engine and would again.

    Raises:
        ValueError: The status is none of an error, and could not be sent as one.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        if not 400 <= status <= 599:
            raise ValueError(f"a request is refused with status {status}; possible: 400 to 599")
        self.message = str(self)
        self.param = None if param is None else brief(param)
        self.code = code
        self.status = status


class UnsupportedError(DovetailError):
    """A component was asked for something outside its declared capabilities."""


class EngineError(DovetailError):
    """The engine could not do what was asked."""


class EngineDeadError(EngineError):
    """The engine process is gone; no further request can succeed until it is restarted."""
