"""Made-up requests that an engine serves before it is ready.

Kernels are compiled and graphs captured by then, but torch loads its own kernels when they are first launched, and
host code has its first run, too: the first request with penalties or log probabilities took a tenth of a second longer
on an H200. So each way of sampling is gone through once, alone and with the others.
"""

from __future__ import annotations

import logging

from dovetail.engine import stats_log
from dovetail.engine.core import EngineCore
from dovetail.messages import SamplerParams, Submit

PROMPT_LEN, NUM_NEW = 40, 3
PARAMS = (
    SamplerParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True),
    SamplerParams(max_tokens=NUM_NEW, temperature=0.7, top_p=0.9, ignore_eos=True),
    SamplerParams(max_tokens=NUM_NEW, temperature=0.7, top_p=0.8, top_k=20, frequency_penalty=0.1, ignore_eos=True),
    SamplerParams(max_tokens=NUM_NEW, temperature=0.0, logit_bias={0: 1.0}, min_tokens=2, ignore_eos=True),
    SamplerParams(max_tokens=NUM_NEW, temperature=0.0, logprobs=2, prompt_logprobs=0, ignore_eos=True),
)
SALT = "first requests"


def serve_first(core: EngineCore) -> None:
    """Serve the requests; nothing of them stays. What they raise, a real one would have met."""
    length = min(PROMPT_LEN, core.info.context_len - NUM_NEW, core.pages.num_available * core.pages.page_size // 8)
    if length < 1:
        return
    log = logging.getLogger(stats_log.__name__)
    was_disabled, log.disabled = log.disabled, True
    try:
        for batch in (*((params,) for params in PARAMS), PARAMS):
            for i, params in enumerate(batch):
                ids = [(7 * i + at) % core.info.vocab_size for at in range(length)]
                core.handle(Submit(rid="", handle=-1 - i, prompt_ids=ids, params=params, cache_salt=SALT))
            while core.has_work:
                core.step()
    finally:
        log.disabled = was_disabled
    core.pages.flush()
    core.stats_log = stats_log.StatsLog(core.settings.decode_log_interval)
