"""Encoders give transformers' hidden states and scores, whole prompts at a time, and keep nothing of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from encoders import ENCODERS, make_encoder
from families import config_of, perturb
from safetensors.torch import load_file, save_file

from dovetail.contracts.config import Pool
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.contracts.needs import unmet, unserved
from dovetail.messages import SamplerParams, Submit, TokenDelta
from dovetail.runtime.memory.host import rows_of
from dovetail_testing.engine import make_core, serve

PARAMS = SamplerParams(max_tokens=1)
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
LENGTHS = (5, 1, 100, 17, 64, 127, 2, 33)
STEPS: list[dict[str, Any]] = [
    {},
    {"chunked_prefill_size": 40, "max_running_requests": 3},  # several steps, and prompts longer than one should be
    {"overlap_on_cpu": True, "chunked_prefill_size": 64, "page_size": 3},
]
KINDS = pytest.mark.parametrize("kind", ENCODERS)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 130, num).tolist() for num in lengths]


def pooled(deltas: list[TokenDelta]) -> Any:
    """What one request got: a single delta, with numbers and no token."""
    [delta] = deltas
    assert delta.pooled is not None, delta
    assert (delta.ids, delta.cached_tokens, delta.finish and delta.finish.reason) == ([], 0, "stop")
    return np.frombuffer(delta.pooled, dtype=np.float32)


def run(folder: Path, many: list[list[int]], pool: Pool = "first", second: int = 0, **changes: Any) -> list[Any]:
    submits = [Submit(rid="", prompt_ids=one, params=PARAMS, pool=pool, second=second) for one in many]
    return [pooled(deltas) for deltas in serve(folder, submits, **changes)]


def states(model: Any, prompt: list[int]) -> Any:
    """Transformers' final hidden states."""
    return model(torch.tensor([prompt])).last_hidden_state[0]


@KINDS
def test_hidden_states_equal_transformers(kind: str, tmp_path: Path) -> None:
    """Every prompt of a batch of different lengths gets the numbers that transformers computes for it alone."""
    model = make_encoder(tmp_path, kind)
    want = [states(model, prompt) for prompt in prompts()]
    for changes, pool in zip(STEPS, get_args(Pool), strict=True):
        for got, hidden in zip(run(tmp_path, prompts(), pool, **changes), want, strict=True):
            chosen = {"first": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[pool]
            np.testing.assert_allclose(got, chosen.numpy(), **TOLERANCE)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"type_vocab_size": 3, "hidden_act": "gelu_new", "num_attention_heads": 2}),
    ("xlm-roberta", {"pad_token_id": 0, "type_vocab_size": 1, "hidden_act": "relu"}),
    ("mpnet", {"relative_attention_num_buckets": 40, "max_position_embeddings": 130}),
    ("modernbert", {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "local_attention": 7}),
    ("modernbert", {"global_attn_every_n_layers": 2}),
]


@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_other_configurations(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """What a family's checkpoints may say otherwise."""
    model = make_encoder(tmp_path, kind, **changes)
    many = prompts((9, 40, 128))
    for got, prompt in zip(run(tmp_path, many, "mean"), many, strict=True):
        np.testing.assert_allclose(got, states(model, prompt).mean(0).numpy(), **TOLERANCE)


@pytest.mark.parametrize("num_labels", [1, 3])
@KINDS
def test_scores_equal_transformers(kind: str, num_labels: int, tmp_path: Path) -> None:
    """A classifier's pooled states become its labels' scores, those of pairs of texts with the types that BERT has."""
    model = make_encoder(tmp_path, kind, "SequenceClassification", num_labels=num_labels)
    for second in (0, 4):
        many = prompts((9, 12, 70))
        types = {"token_type_ids": second} if kind in ("bert", "roberta", "xlm-roberta") else {}
        for got, prompt in zip(run(tmp_path, many, second=second), many, strict=True):
            given = {
                name: torch.tensor([[int(second and at >= second) for at in range(len(prompt))]]) for name in types
            }
            want = model(torch.tensor([prompt]), **given).logits[0].numpy()
            assert got.shape == (num_labels,)
            np.testing.assert_allclose(got, want, **TOLERANCE)


def test_a_classifier_may_read_the_mean(tmp_path: Path) -> None:
    """ModernBERT's config says which state its head reads, and the engine tells."""
    changes = {"classifier_pooling": "mean", "classifier_bias": True, "classifier_activation": "relu"}
    model = make_encoder(tmp_path, "modernbert", "SequenceClassification", num_labels=2, **changes)
    info = make_core(tmp_path).info
    assert (info.pool, info.num_labels, info.generates) == ("mean", 2, False)
    many = prompts((9, 40))
    for got, prompt in zip(run(tmp_path, many, info.pool), many, strict=True):
        np.testing.assert_allclose(got, model(torch.tensor([prompt])).logits[0].numpy(), **TOLERANCE)


@KINDS
def test_a_masked_language_model_is_its_encoder(kind: str, tmp_path: Path) -> None:
    """Its head is left out: many embedding models are kept in such files."""
    model = make_encoder(tmp_path, kind, "MaskedLM")
    [prompt] = prompts((20,))
    [got] = run(tmp_path, [prompt], "mean")
    np.testing.assert_allclose(got, states(model.base_model, prompt).mean(0).numpy(), **TOLERANCE)


@pytest.mark.parametrize("kind", ["roberta", "mpnet"])
def test_padding_in_a_text_is_not_counted(kind: str, tmp_path: Path) -> None:
    """A text may spell the token that pads: transformers gives it the padding's place and counts on without it."""
    model = make_encoder(tmp_path, kind)
    many = [[0, 5, 1, 1, 9, 7, 2], [1], [0, 8, 2], [0, 1, 6, 1, 2]]
    for got, prompt in zip(run(tmp_path, many, "mean"), many, strict=True):
        np.testing.assert_allclose(got, states(model, prompt).mean(0).numpy(), **TOLERANCE)


def test_older_spellings(tmp_path: Path) -> None:
    """Norms were once called `gamma` and `beta`, positions were stored, and rotations stood beside each other."""
    for kind in ("bert", "modernbert"):
        folder = tmp_path / kind
        model = make_encoder(folder, kind)
        if kind == "bert":
            tensors = load_file(folder / "model.safetensors")
            older = {
                n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): t for n, t in tensors.items()
            }
            older["embeddings.position_ids"] = torch.arange(130)[None]
            save_file(older, folder / "model.safetensors")
        path = folder / "config.json"
        config = json.loads(path.read_text("utf-8"))
        config["torch_dtype"] = config.pop("dtype")
        config["position_embedding_type"] = "absolute"
        for key in ("rope_parameters", "layer_types"):
            config.pop(key, None)
        if kind == "modernbert":
            config |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 3}
        path.write_text(json.dumps(config), "utf-8")
        [prompt] = prompts((60,))
        [got] = run(folder, [prompt], "last")
        np.testing.assert_allclose(got, states(model, prompt)[-1].numpy(), **TOLERANCE)


def test_nothing_is_cached(tmp_path: Path) -> None:
    """No page exists, none is taken, and the table of memory says so."""
    make_encoder(tmp_path, "roberta")
    core = make_core(tmp_path, max_total_tokens=None)
    runner: Any = core.executor.runner  # type: ignore[attr-defined]
    assert (core.info.kv_bytes, core.info.max_total_tokens, runner.pool.sizes) == (0, 0, ())
    plan = runner.memory_plan
    table = {name: (size, what) for name, size, what in rows_of(plan)}
    assert table["KV cache"] == ("none", "prompts are computed whole, and nothing of them is kept")
    assert (plan.kv_bytes, plan.notes, plan.as_dict()["num_tokens"]) == (0, (), 0)
    [prompt] = prompts((50,))
    for handle in (1, 2):  # the second finds nothing of the first
        core.handle(Submit(rid="", handle=handle, prompt_ids=prompt, params=PARAMS, pool="mean"))
        [delta] = core.step().deltas
        assert (delta.cached_tokens, core.stats().num_used_tokens) == (0, 0)
    assert core.pages.check_counts(core.scheduler.running)
    assert core.pages.check_ownership(core.scheduler.running)
    assert core.pages.check_counts([])
    assert core.pages.check_ownership([])
    assert not core.pages.repair([])


def test_a_prompt_is_never_cut(tmp_path: Path) -> None:
    """A step takes as many whole prompts as it is allowed tokens; a longer one is a step of its own."""
    make_encoder(tmp_path, "bert")
    core = make_core(tmp_path, chunked_prefill_size=32)
    for handle, prompt in enumerate(prompts((20, 12, 100, 30)), 1):
        core.handle(Submit(rid="", handle=handle, prompt_ids=prompt, params=PARAMS, pool="first"))
    steps = []
    while core.has_work:
        steps.append([delta.handle for delta in core.step().deltas])
    assert steps == [[1, 2], [3], [4]]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """More tokens than it has places, and generating; each request says why, and others are served."""
    make_encoder(tmp_path, "roberta")
    long, short = prompts((129, 128))
    submits = [
        Submit(rid="", prompt_ids=long, params=PARAMS, pool="first"),
        Submit(rid="", prompt_ids=short, params=PARAMS),
        Submit(rid="", prompt_ids=short, params=PARAMS, pool="first"),
    ]
    [[first], [generated], last] = serve(tmp_path, submits)
    assert "129 tokens, the context length is 128" in str(first.finish)
    assert "RobertaModel does not generate: it has no output head" in str(generated.finish)
    assert pooled(last).shape == (64,)


def test_a_backend_that_sees_one_way_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caps do not claim both directions, so the start says what is missing."""
    from dovetail_backends.torch_native import TorchNativeBackend
    from dovetail_backends.triton import TritonBackend

    make_encoder(tmp_path, "bert")
    runner: Any = make_core(tmp_path).executor.runner  # type: ignore[attr-defined]
    why = "BertModel needs attention in both directions, which it does not provide"
    assert unmet(runner.config, TritonBackend.caps) == why
    monkeypatch.setattr(TorchNativeBackend, "caps", replace(TorchNativeBackend.caps, bidirectional=False))
    with pytest.raises(ConfigError, match=rf"torch_native.*{why}"):
        make_core(tmp_path, attention_backend="torch_native")


def test_layers_of_both_kinds_are_refused(tmp_path: Path) -> None:
    """What sees ahead keeps nothing, and what does not keeps what it saw: no step serves both."""
    make_encoder(tmp_path, "bert")
    runner: Any = make_core(tmp_path).executor.runner  # type: ignore[attr-defined]
    first, *others = runner.config.layers
    mixed = replace(runner.config, layers=(replace(first, causal=True), *others))
    assert "some of its layers attend to later tokens" in str(unserved(mixed))
    with pytest.raises(ModelError, match="keeps nothing"):
        replace(first, mixer="latent", num_kv_heads=1)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """As of every model: one that is missing."""
    make_encoder(tmp_path, "mpnet")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["encoder.relative_attention_bias.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing: distance\.weight"):
        make_core(tmp_path)


DECODERS = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text"]


@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_without_a_head(kind: str, tmp_path: Path) -> None:
    """They give states and, with a matrix in the head's place, scores, of the last token; cached and in chunks."""
    many = prompts((9, 1, 100))
    for task in ("Model", "ModelForSequenceClassification"):
        folder = tmp_path / task
        config = config_of(kind, pad_token_id=0, **({"num_labels": 1} if task != "Model" else {}))
        torch.manual_seed(0)
        model = getattr(transformers, f"Auto{task}").from_config(config, attn_implementation="eager").float().eval()
        perturb(model)
        model.save_pretrained(folder)
        for got, prompt in zip(run(folder, many, "last", chunked_prefill_size=40), many, strict=True):
            with torch.no_grad():
                found = model(torch.tensor([prompt]))
            want = found.last_hidden_state[0, -1] if task == "Model" else found.logits[0]
            np.testing.assert_allclose(got, want.numpy(), **TOLERANCE)


def test_a_decoder_that_sees_both_ways(tmp_path: Path) -> None:
    """EmbeddingGemma: nothing is cached, and windows reach half as far to either side."""
    config = config_of("gemma3_text", use_bidirectional_attention=True)
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).float().save_pretrained(tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").float().eval()
    assert make_core(tmp_path).info.kv_bytes == 0
    for got, prompt in zip(run(tmp_path, prompts((40, 100)), "mean"), prompts((40, 100)), strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(got, states(model, prompt).mean(0).numpy(), **TOLERANCE)
