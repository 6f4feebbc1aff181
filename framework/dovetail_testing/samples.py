"""What a plugin's author states: outputs and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.contracts.grammar import GrammarSpec, SupportLevel


@dataclass(frozen=True, slots=True)
class Sample:
    """An output of a model, and the reply that a client must receive for it.

    Args:
        text: The output, markers included.
        reasoning: The reasoning, None where there is none.
        content: The answer, None where there is none.
        tool_calls: Pairs of name and arguments, the arguments as the JSON text that the client receives.
        prompt_tail: What the chat template appended to the prompt (such as `<think>` and a newline); None: nothing is
            known of the prompt, and the format's `initial` state counts.
    """

    text: str
    reasoning: str | None = None
    content: str | None = None
    tool_calls: Sequence[tuple[str, str]] = ()
    prompt_tail: str | None = None


@dataclass(frozen=True, slots=True)
class GrammarSample:
    """A grammar, and texts that it accepts and rejects.

    Args:
        spec: The grammar.
        accepts: Texts that match it as a whole.
        rejects: Texts that do not.
        support: What `supports` must answer; None: any honest answer.
    """

    spec: GrammarSpec
    accepts: Sequence[str] = ()
    rejects: Sequence[str] = field(default=())
    support: SupportLevel | None = None
