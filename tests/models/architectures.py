"""Tiny configurations of the causal architectures of transformers that `families.py` does not have, by `model_type`."""

from __future__ import annotations

from typing import Any

import transformers
from families import DECODERS, DEEPSEEK, DELTA, FEW, LATENT, MAMBA, MOE, SIZES
from packaging.version import Version

LEFT_OUT = object()
"""In place of a value of `SIZES` that a config does not take."""
VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
    **{"patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
    **{"projector_input_dim": 32, "projector_output_dim": 32},
}
EXPERTS: dict[str, Any] = {**MOE, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4}
GROUPS = {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
ENCODED: dict[str, Any] = {
    **{"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_layers": 1},
    **{"encoder_ffn_dim": 96, "encoder_attention_heads": 4},
}
TURNS = ["sliding_attention", "full_attention"] * 2
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
PADDED = {"is_decoder": True, "pad_token_id": 1, "max_position_embeddings": 300}
SEEING = {
    **{"gemma3": "gemma3_text", "llama4": "llama4_text", "qwen3_5": "qwen3_5_text"},
    **{"qwen3_5_moe": "qwen3_5_moe_text", "got_ocr2": ""},
}
"""Models that take images, and of what kind their text part is."""
KNOWN_ELSEWHERE = "bert bert-generation electra ernie megatron-bert rembert roc_bert roformer big_bird xmod"

CHANGES: dict[str, dict[str, Any]] = {
    **{kind: {"is_decoder": True} for kind in KNOWN_ELSEWHERE.split()},
    **dict.fromkeys(("camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta"), PADDED),
    **dict.fromkeys(("blenderbot", "plbart", "whisper"), ENCODED),
    **dict.fromkeys(("axk1", "axk2", "sarvam_mla"), DEEPSEEK),
    **dict.fromkeys(("kolibri1", "hy_v4", "inkling_text"), EXPERTS),
    "bailing_hybrid": {**DEEPSEEK, "num_hidden_layers": 4},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8, "n_head": 4, "n_embd": 64, "n_layer": 2, "n_positions": 256},
    "cohere_compass_text": {"num_hidden_layers": 4, "layer_types": TURNS}
    | {"rope_parameters": {"full_attention": PLAIN_ROPE, "sliding_attention": PLAIN_ROPE}},
    "dbrx": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}
    | {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}}
    | {"ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}},
    "dots1": {**EXPERTS, **GROUPS},
    "dots3_note_text": {**EXPERTS, "num_key_value_heads": 4},
    "falcon": {"head_dim": LEFT_OUT, "multi_query": False, "num_kv_heads": 4, "alibi": False},
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": TURNS, "num_kv_shared_layers": 2, "sliding_window": 24}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 131, "laurel_rank": 8}
    | {"activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8, "n_head": 4, "n_embd": 64, "n_layer": 2},
    "hrm_text": {"num_layers_per_stack": 1},
    **{kind: {**EXPERTS, "unpadded_vocab_size": 131} for kind in ("inkling2_text", "inkling2_loop_text")},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
    | {"mamba_d_state": 8, "mamba_dt_rank": 4},
    "kimi_linear": {**DEEPSEEK, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
    | {"linear_num_heads": 4, "linear_head_dim": 16},
    "lfm3": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "sliding_attention"]}
    | {"sliding_window": 24},
    "minimax": {**FEW, "layer_types": ["full_attention"] * 2},
    "modernbert-decoder": {"pad_token_id": 0},
    "mpt": {"n_layers": 2, "n_heads": 4, "d_model": 64, "max_seq_len": 256},
    "openai-gpt": {"n_positions": 512},
    "prophetnet": {"num_hidden_layers": LEFT_OUT, "num_decoder_layers": 2, "num_encoder_layers": 1}
    | {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
    "qwen4_exp_text": {**MOE, **DELTA, "shared_expert_intermediate_size": 48},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "xglm": {"num_layers": 2, "attention_heads": 4, "d_model": 64, "ffn_dim": 96},
    "xlnet": {"max_position_embeddings": LEFT_OUT, "n_layer": 2, "n_head": 4, "d_model": 64, "d_inner": 96},
    "youtu": LATENT,
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8}
    | {"mamba_dt_rank": 4, "n_mamba_heads": 2, "num_key_value_heads": 4, "attention_head_dim": 32},
    **{
        kind: {"text_config": {**SIZES, **DECODERS.get(text, {})}, "vision_config": VISION}
        for kind, text in SEEING.items()
    },
}
"""Changes of `SIZES`, beside those of `families.DECODERS`."""

MASKS, BEHIND, INDEXED = "it changes attention masks itself", "its tokens see what is behind", "indexed_attention"
OWN_LIST, STATES = "it chooses its attention from a list of its own", "a cache of recurrent states alone"
NOTHING, BY_ITSELF = "look back in a way that is known here", "transformers itself cannot compute a prompt"
REASONS: dict[str, str] = {
    BEHIND: "bart bigbird_pegasus blenderbot blenderbot-small marian mbart pegasus plbart",
    MASKS: "big_bird bloom doge gpt_neox_japanese megatron-bert mpt mvp rembert roformer trocr xglm",
    INDEXED: "axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4",
    "heavily_compressed_attention": "deepseek_v4",
    "hybrid_sliding": "inkling2_loop_text inkling2_text inkling_text",
    OWN_LIST: "falcon gpt_neo",
    STATES: "bailing_hybrid falcon_mamba mamba mamba2",
    NOTHING: "cpmant openai-gpt recurrent_gemma reformer rwkv",
    BY_ITSELF: "prophetnet xlm xlnet xlstm xmod",
    "a prompt in two pieces": "jamba zamba",
    "looks back twice": "diffllama",
    "reads on the host": "jetmoe",
    "keeps its state in another way": "zaya",
    "num_hidden_layers": "dory hrm_text moshi",
}
REFUSED = {kind: reason for reason, kinds in REASONS.items() for kind in kinds.split()}
"""What cannot be served, and a part of the reason that is given."""
if Version(transformers.__version__) < Version("5.24"):  # they go through its attention interface since
    REFUSED |= {"codegen": MASKS, "gptj": OWN_LIST}
NOT_BUILT = """
blt dots3_note emu3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant git mllama
moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal qwen4_exp qwen4_exp_text
"""
UNBUILT = frozenset(NOT_BUILT.split())
"""What is not built here: towers of millions of parameters, packages that are absent, configs within configs."""
SECOND: dict[str, Any] = {
    **{"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "use_bias": True, "hidden_act": "gelu"},
    **{"num_key_value_heads": 1, "sliding_window": 20, "norm_topk_prob": True},
}
"""The second configuration: what of this a config has."""
