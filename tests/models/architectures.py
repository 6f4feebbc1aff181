"""Tiny configurations of the causal architectures of transformers that `families.py` does not have, by `model_type`."""

from __future__ import annotations

from typing import Any

from families import DECODERS, DEEPSEEK, DELTA, FEW, INDEXER, LATENT, MOE, SIZES

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

ASIDE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
PART = {**ASIDE, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 131}
BYTES = {**PART, "hidden_size_global": 64, "cross_attn_k": 2}
NOTE: dict[str, Any] = {
    **{**DEEPSEEK, **GROUPS, **INDEXER, "head_dim": 24, "sliding_window": 24, "per_layer_config": {}},
    **{"layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"]},
    **{"mlp_layer_types": ["dense", "sparse", "sparse"], "shared_experts_intermediate_size": 32},
}
ADAPTED = {"adapter_in_dim": 32, "adapter_out_dim": 64}
HEARING = {**ASIDE, "adapter_input_size": 32, "adapter_out_dim": 64, "num_key_value_heads": 2, "head_dim": 16}
HEARING |= {"downsample_hidden_size": 8, "conv_output_size": 128}
QWEN4: dict[str, Any] = {
    **{**MOE, **DELTA, "shared_expert_intermediate_size": 48, "hc_lowrank": 8, "indexer_head_dim": 16},
    **{"layer_types": ["linear_attention"] * 3 + ["indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1},
    **{"indexer_budget": 256, "indexer_compress_ratio": 4},
}
MUSIC: dict[str, Any] = {
    "text_encoder": {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    "audio_encoder": {"model_type": "encodec", "num_filters": 4, "hidden_size": 16, "codebook_dim": 16},
    "decoder": {**ASIDE, "vocab_size": 131, "hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 96},
}
PER_LAYER = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
ASSISTANT = {**SIZES, "num_hidden_layers": 4, "num_kv_shared_layers": 4, "pad_token_id": 0}

CHANGES: dict[str, dict[str, Any]] = {
    **{kind: {"is_decoder": True} for kind in KNOWN_ELSEWHERE.split()},
    **dict.fromkeys(("camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta"), PADDED),
    **dict.fromkeys(("blenderbot", "plbart", "whisper"), ENCODED),
    **dict.fromkeys(("axk1", "axk2", "sarvam_mla"), DEEPSEEK),
    **dict.fromkeys(("kolibri1", "hy_v4", "inkling_text"), EXPERTS),
    "codegen": {"rotary_dim": 8, "n_head": 4, "n_embd": 64, "n_layer": 2, "n_positions": 256},
    "cohere_compass_text": {"num_hidden_layers": 4, "layer_types": TURNS}
    | {"rope_parameters": {"full_attention": PLAIN_ROPE, "sliding_attention": PLAIN_ROPE}},
    "dbrx": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}
    | {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}}
    | {"ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}},
    "dots1": {**EXPERTS, **GROUPS},
    "falcon": {"head_dim": LEFT_OUT, "multi_query": False, "num_kv_heads": 4, "alibi": False},
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": TURNS, "num_kv_shared_layers": 2, "sliding_window": 24}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 131, "laurel_rank": 8}
    | {"activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8, "n_head": 4, "n_embd": 64, "n_layer": 2},
    "hrm_text": {"num_layers_per_stack": 1},
    **{kind: {**EXPERTS, "unpadded_vocab_size": 131} for kind in ("inkling2_text", "inkling2_loop_text")},
    "lfm3": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "sliding_attention"]}
    | {"sliding_window": 24},
    "minimax": {**FEW, "layer_types": ["full_attention"] * 2},
    "modernbert-decoder": {"pad_token_id": 0},
    "mpt": {"n_layers": 2, "n_heads": 4, "d_model": 64, "max_seq_len": 256},
    "openai-gpt": {"n_positions": 512},
    "prophetnet": {"num_hidden_layers": LEFT_OUT, "num_decoder_layers": 2, "num_encoder_layers": 1}
    | {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "xglm": {"num_layers": 2, "attention_heads": 4, "d_model": 64, "ffn_dim": 96},
    "xlnet": {"max_position_embeddings": LEFT_OUT, "n_layer": 2, "n_head": 4, "d_model": 64, "d_inner": 96},
    "youtu": LATENT,
    "blt": {"patcher_config": PART, "encoder_config": BYTES, "decoder_config": BYTES, "global_config": PART}
    | {"encoder_hash_byte_group_vocab": 50, "vocab_size": 131, "max_position_embeddings": 256},
    "dots3_note_text": NOTE,
    "dots3_note": {"text_config": {**SIZES, **NOTE}, "audio_config": HEARING}
    | {"vision_config": {**ASIDE, "mlp_layer_types": ["dense"], "per_layer_config": {}, **ADAPTED}},
    "emu3": {"text_config": {**SIZES, "pad_token_id": 0}}
    | {"vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": []}},
    "gemma4": {"text_config": {**SIZES, **DECODERS["gemma4_text"], "pad_token_id": 0}},
    "gemma4_unified": {
        "text_config": {**SIZES, "num_hidden_layers": 6, "sliding_window": 24, "pad_token_id": 0}
        | {"per_layer_config": {"5": {"head_dim": 32}}}
    },
    "gemma4_assistant": {
        "text_config": {**ASSISTANT, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
        "backbone_hidden_size": 64,
    },
    "gemma4_unified_assistant": {"text_config": ASSISTANT, "backbone_hidden_size": 64},
    "git": {"vision_config": VISION},
    "mllama": {"text_config": {**SIZES, "num_hidden_layers": 4, "cross_attention_layers": [1], "pad_token_id": 0}}
    | {"vision_config": {**ASIDE, "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 64}}
    | {"image_size": 28, "intermediate_layers_indices": [0]},
    "gemma3n": {"text_config": {**SIZES, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "pad_token_id": 0}},
    "moss_transcribe_diarize": {"text_config": SIZES, "audio_config": {**ASIDE, "max_source_positions": 100}},
    **dict.fromkeys(("musicgen", "musicgen_melody"), MUSIC),
    "phi4_multimodal": {"vision_config": {**ASIDE, "num_hidden_layers": 2, "image_size": 28, "crop_size": 28}}
    | {"audio_config": {**ASIDE, "num_blocks": 1, "ext_pw_out_channel": 32, "nemo_conv_channels": 32}},
    "qwen4_exp": {"text_config": {**SIZES, **QWEN4}, "vision_config": {**VISION, "num_position_embeddings": 16}},
    "qwen4_exp_text": QWEN4,
    "zamba2": {
        "initializer_range": 0.08
    },  # of 0.2, transformers' own float32 is 3e-4 from its float64, see test_precision
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8}
    | {"mamba_dt_rank": 4, "n_mamba_heads": 2, "num_key_value_heads": 4, "attention_head_dim": 32},
    **{
        kind: {"text_config": {**SIZES, **DECODERS.get(text, {})}, "vision_config": VISION}
        for kind, text in SEEING.items()
    },
}
"""Changes of `SIZES`, beside those of `families.DECODERS`."""

BARE = frozenset({"gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"})
"""What transformers itself cannot build here from its config: their folders hold a config and a tensor."""
WHOLE = BARE | {
    *("blt", "dots3_note", "emu3", "gemma4", "gemma4_unified", "mllama", "moss_transcribe_diarize", "qwen4_exp"),
}
"""What takes no `SIZES` beside its parts."""
SECOND: dict[str, Any] = {
    **{"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "use_bias": True, "hidden_act": "gelu"},
    **{"num_key_value_heads": 1, "sliding_window": 20, "norm_topk_prob": True},
}
"""The second configuration: what of this a config has."""
