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
OWN_PREFIXES = (
    *("SGLANG_", "SGL_", "VLLM_", "MOONCAKE_", "FLASHINFER_", "ASCEND_", "ENABLE_ASCEND_", "DEEP_", "USE_ROCM_"),
    *("USE_TRITON_", "IS_H200", "EXA_API_KEY", "DISABLE_OPENAPI_DOC"),
)
"""How the variables begin that the peers' own engines read."""
SHARED = frozenset((
    "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CMAKE_BUILD_TYPE", "FORCE_COLOR", "HF_HUB_DISABLE_XET", "LD_LIBRARY_PATH",
    "LOCAL_RANK", "MAX_JOBS", "NO_COLOR", "NVCC_THREADS", "S3_ACCESS_KEY_ID", "S3_ENDPOINT_URL",
    "S3_SECRET_ACCESS_KEY", "VERBOSE",
))  # fmt: skip
"""Variables of others that the peers read, too; whatever reads them here goes on to."""
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
