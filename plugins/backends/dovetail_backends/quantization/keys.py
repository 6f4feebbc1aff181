"""Which keys of a `quantization_config` a class knows: users are told of the others, which are left out."""

from __future__ import annotations

PLAIN_MODULES = "ignore ignored_layers modules_to_not_convert exclude_modules"
"""Name modules that are not quantised, as the types of their tensors show."""
TUNING = """
act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset
do_fuse exllama_config fuse_max_seq_len lm_head max_input_length meta model_file_base_name model_name_or_path
model_seqlen module_name_preceding_first_block modules_in_block_to_quantize modules_to_fuse mse offload_to_disk
pack_dtype pad_token_id static_groups tokenizer true_sequential use_cuda_fp16 use_exllama
"""
"""Of GPTQ's and AWQ's tools: how weights were found, and what computes with them."""


def known(*words: str) -> frozenset[str]:
    """Return keys that texts name."""
    return frozenset(" ".join(words).split())
