"""Environment variables of SGLang and vLLM: those that a user relies on are refused, the rest changes nothing here."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.contracts.errors import ConfigError

HUB = "models by name come from a Hugging Face hub (HF_ENDPOINT); fetch this one into a folder and give it"
RELIED_ON = {
    "VLLM_API_KEY": "set DOVETAIL_API_KEY, or give --api-key: without, this server would be open",
    "VLLM_USE_MODELSCOPE": HUB,
    "SGLANG_USE_MODELSCOPE": HUB,
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "see --dtype float32: it makes logits independent of the load",
    "VLLM_BATCH_INVARIANT": "see --dtype float32: it makes logits independent of the load",
}
"""Variables whose purpose a server without them would miss in silence, and what to do instead."""
OFF = ("", "0", "false", "no", "off")


def check(environment: Mapping[str, str], *, has_keys: bool) -> tuple[str, ...]:
    """Return what is to be said of the peers' variables that are set.

    Args:
        environment: The process's.
        has_keys: Whether the server asks for a key.

    Raises:
        ConfigError: One is set that a user relies on.
    """
    for name, why in RELIED_ON.items():
        is_set = environment.get(name, "").lower() not in OFF
        if is_set and not (name == "VLLM_API_KEY" and has_keys):
            raise ConfigError(f"environment variable {name} is not supported: {why}")
    idle = [name for name in environment if name.startswith(("SGLANG_", "SGL_", "VLLM_")) and name not in RELIED_ON]
    if not idle:
        return ()
    return (f"Environment variables of SGLang or vLLM change nothing here: {', '.join(sorted(idle))}.",)
