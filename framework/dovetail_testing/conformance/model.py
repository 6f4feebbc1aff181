"""What every model architecture must do: agree with transformers, and account for every weight."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dovetail.contracts.config import ModelConfig
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext
from dovetail.runtime.batch_invariance import claims
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.weight_match import RuleFinder
from dovetail.runtime.checkpoint.weights import model_layers
from dovetail.runtime.hf_config import read_config
from dovetail.sdk.layers.plain import PLAIN
from dovetail_testing.checks import as_failure, check, fail, raised, shown
from dovetail_testing.conformance.base import Conformance
from dovetail_testing.conformance.model_diagnosis import explain, outputs_of, reference_model
from dovetail_testing.conformance.model_runtime import CPU, NoAttention, Running, TinyEngine, decode_syncs, load_model
from dovetail_testing.models import make_model

# Whether what a model makes of a token has the same bits whatever is computed with it, where it claims so.

LENGTHS = (1, 9, 40, 70)
CUTS = ((0, 1, 17, 70), (0, 33, 34, 70), (0, 69, 70))


class ModelInvarianceChecks(Conformance):
    """What `ModelPlugin.batch_invariant` promises, with `BuildContext.batch_invariant` set."""

    def test_batch_invariance(self, checkpoints: list[Path]) -> None:
        """Where the class claims it, logits have the same bits for a token alone, in any chunk, beside any others.

        Attention answers with the queries, so that the layers between are what is compared.
        """
        if not claims(self.plugin()):
            pytest.skip("the class claims no batch invariance")
        for folder in checkpoints:
            engine = TinyEngine(self.plugin(), folder, batch_invariant=True)
            engine.attention = NoAttention(engine.config, engine.pool, CPU)
            prompts = [[(7 * i + 3 * n) % 190 for i in range(n)] for n in LENGTHS]
            together = engine.prefill_logits(prompts)
            for prompt, want in zip(prompts, together, strict=True):
                check(
                    torch.equal(engine.prefill_logits([prompt])[0], want),
                    f"not batch invariant: a prompt of {len(prompt)} tokens has other logits alone",
                )
            for what, first, got in chunks_of(engine, prompts[-1], prompts[1]):
                same = torch.equal(got, together[-1][first : first + len(got)])
                check(same, f"not batch invariant: tokens {first} to {first + len(got)} have other logits {what}")


def chunks_of(engine: TinyEngine, prompt: list[int], other: list[int]) -> Iterator[tuple[str, int, Any]]:
    """Yield the logits of chunks of a prompt, alone and behind another request's decode row, with where they begin."""
    for cuts in CUTS:
        alone, beside, neighbour = (Running(list(ids), row) for row, ids in enumerate((prompt, prompt, other)))
        engine.step((), [(neighbour, len(other))])
        for first, end in itertools.pairwise(cuts):
            yield "in a chunk", first, engine.step((), [(alone, end - first)])
            neighbour.ids.append(9)
            yield "in a chunk beside others", first, engine.step([neighbour], [(beside, end - first)])[1:]


BASE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
SWITCHES: dict[str, dict[str, Any]] = {
    "use_sliding_window": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "sliding_window": {"sliding_window": 8},
    "attn_logit_softcapping": {"attn_logit_softcapping": 1.5},
    "partial_rotary_factor": {"rope_parameters": {**BASE["rope_parameters"], "partial_rotary_factor": 0.5}},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
}
"""What is tried besides `configs` where transformers' config of the architecture has the field."""
PROMPTS = [[(7 * i + 3) % 190 for i in range(n)] for n in (1, 9, 40)]
TOLERANCE = 1e-3


class ModelConformance(ModelInvarianceChecks):
    """What every model architecture must do.

    Attributes:
        architecture: The class of transformers to compare with; None: the name under which the plugin is registered.
        configs: Changes of the tiny configuration; every one is compared with transformers, and so are windows, soft
            caps, partly rotated heads and biases where transformers' config has fields for them and the plugin does
            not refuse them.
    """

    kind = "model"
    architecture: ClassVar[str | None] = None
    configs: ClassVar[Sequence[Mapping[str, Any]]] = (
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}},
    )

    def make_checkpoint(self, folder: Path, **changes: Any) -> Path:
        """Write a tiny random checkpoint; override it for an architecture that transformers does not have."""
        if not hasattr(transformers(), self._architecture()):
            fail(
                f"transformers has no {self._architecture()} to compare with: override make_checkpoint and "
                "reference_logits with a reference of your own, or set `architecture` to a class that computes the same"
            )
        return make_model(folder, self._architecture(), **{**BASE, **changes})

    def reference_logits(self, folder: Path, ids: Sequence[int]) -> Tensor:
        """Return the right logits `[T, V]`; override it together with `make_checkpoint`.

        Of a model without an output head, the hidden states `[T, H]`; of a classifier, the scores `[1, N]`.
        """
        logits: Tensor = _reference(folder, tuple(ids))
        return logits

    def _architecture(self) -> str:
        return self.architecture or str(self.name or self.plugin().architectures[0]).rpartition(":")[2]

    def _switches(self) -> list[Mapping[str, Any]]:
        """Return what transformers' config of the architecture has of `SWITCHES`, besides `configs`."""
        model_class = getattr(transformers(), self._architecture(), None)
        if model_class is None or type(self).make_checkpoint is not ModelConformance.make_checkpoint:
            return []
        fields = model_class.config_class().to_dict()
        fields = {**fields, **(fields.get("rope_parameters") or {})}  # transformers 5 keeps partial_rotary_factor there
        if "rope_parameters" in fields:
            fields["partial_rotary_factor"] = None  # most ignore it, which a plugin has to do then, too
        found = {name: changes for name, changes in SWITCHES.items() if name in fields}
        if "use_sliding_window" in found:
            found.pop("sliding_window", None)
        return [changes for changes in found.values() if changes not in self.configs]

    def _refuses(self, folder: Path) -> bool:
        """Whether the plugin says that it does not serve a config: that is right, too."""
        try:
            ModelFolder(folder, weights=False).model_config(self.plugin().config_from_hf)
        except ModelError:
            return True
        return False

    _folders: ClassVar[list[Path]]
    _tried: ClassVar[list[Mapping[str, Any]]]

    @pytest.fixture
    def checkpoints(self, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
        """One checkpoint per configuration, written once per class."""
        cls = type(self)
        if "_folders" not in vars(cls):
            root = tmp_path_factory.mktemp("model")
            own = () if self.configs is ModelConformance.configs else self.configs
            made = [(changes, self.make_checkpoint(root / str(i), **changes)) for i, changes in enumerate(own or [{}])]
            for changes in (*(() if own else self.configs[1:]), *self._switches()):
                folder = self._made_if_possible(root / str(len(made)), changes)
                if folder is not None and (changes in self.configs or not self._refuses(folder)):
                    made.append((changes, folder))
            cls._tried, cls._folders = [changes for changes, _ in made], [folder for _, folder in made]
        return cls._folders

    def _made_if_possible(self, folder: Path, changes: Mapping[str, Any]) -> Path | None:
        """Return a checkpoint of the kit's own choice, None where transformers has no such model.

        Its Phi-3, for one, takes no linear rope.
        """
        try:
            return self.make_checkpoint(folder, **changes)
        except Exception:  # transformers' own check of the config, of several types; the plain one is not tried so
            return None

    # The standard tests.

    def test_architectures_hold_the_name(self) -> None:
        """`architectures` lists the architecture that the plugin is registered under, or all."""
        listed = list(getattr(self.plugin(), "architectures", ()))
        right = self._architecture() in listed or "*" in listed
        check(right, f"architectures = {listed} does not hold {self._architecture()!r}")

    def test_config_is_translated(self, checkpoints: list[Path]) -> None:
        """`config_from_hf` gives the sizes that `config.json` states."""
        for folder in checkpoints:
            hf = read_config(folder)
            config = self._config(hf)
            names = {"vocab_size": "vocab_size", "hidden_size": "hidden_size"}
            if not any(spec.state for spec in config.layers):  # a hybrid's layer may keep two things, or nothing
                names["num_layers"] = "num_hidden_layers"
            stated = [(own, getattr(config, own), theirs) for own, theirs in names.items()]
            for spec in config.layers:
                if not spec.state:
                    stated += [("num_qo_heads", spec.num_qo_heads, "num_attention_heads")]
                if not spec.state and spec.mixer == "kv":
                    stated += [("num_kv_heads", spec.num_kv_heads, "num_key_value_heads")]
            for own, got, theirs in stated:
                if theirs in hf:
                    want = hf[theirs]
                    check(got == want, f"config_from_hf: {own} is {got}, and config.json says {theirs} {want}")

    def test_config_errors_are_typed(self, checkpoints: list[Path]) -> None:
        """A key that is missing from `config.json` is a ModelError that names it."""
        hf = read_config(checkpoints[0])
        attends = not all(spec.state for spec in self._config(hf).layers)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            if key not in hf or (key == "num_attention_heads" and not attends):
                continue
            try:
                self.plugin().config_from_hf({name: value for name, value in hf.items() if name != key})
            except ModelError as error:
                check(key in str(error), f"config.json without {key!r}: the error does not name it: {error}")
            except Exception as error:  # a stranger's class; the message says what it did
                fail(f"config.json without {key!r}: a bare {raised(error)} instead of a ModelError that names the key")
            else:
                fail(f"config.json without {key!r} is accepted")

    def test_all_weights_are_consumed(self, checkpoints: list[Path]) -> None:
        """Every tensor of the checkpoint is loaded or rightly not needed, and every parameter is filled."""
        for folder in checkpoints:
            config, model = self._load(folder)
            empty = [name for name, param in model.named_parameters() if bool(param.isnan().any())]
            check(not empty, f"parameters that no weight fills: {', '.join(empty)}")
            for name in _dropped(model, self.plugin().weight_map(config), folder):
                needed = self._is_needed(folder, name)
                check(not needed, f"it forgets the weight {name!r}: weight_map drops it, and the output depends on it")

    def test_missing_weights_are_named(self, checkpoints: list[Path], tmp_path: Path) -> None:
        """A checkpoint without one of the tensors that are needed is refused."""
        config, model = self._load(checkpoints[0])
        dropped = _dropped(model, self.plugin().weight_map(config), checkpoints[0])
        unneeded = {name for name in dropped if not self._is_needed(checkpoints[0], name)}
        for name in _one_of_each({n: t for n, t in _tensors(checkpoints[0]).items() if n not in unneeded}):
            tensors = {key: value for key, value in _tensors(checkpoints[0]).items() if key != name}
            _rewrite(checkpoints[0], tmp_path, tensors)
            try:
                load_model(self.plugin(), tmp_path)
            except ModelError as error:
                check("missing" in str(error), f"without weight {name!r} the error does not say so: {error}")
            else:
                fail(f"a checkpoint without weight {name!r} loads: its parameter is not part of a dovetail layer")

    def test_unexpected_weights_are_named(self, checkpoints: list[Path], tmp_path: Path) -> None:
        """A checkpoint with a tensor that the architecture does not know is refused with its name."""
        for name in ("model.layers.0.self_attn.unknown_proj.weight", "model.other_tower.patch.weight", "other.weight"):
            _rewrite(checkpoints[0], tmp_path, {**_tensors(checkpoints[0]), name: torch.zeros(3)})
            try:
                load_model(self.plugin(), tmp_path)
            except ModelError as error:
                check(name in str(error), f"the unexpected weight {name!r} is not named: {error}")
            else:
                fail(f"the unexpected weight {name!r} is swallowed: a rule of weight_map is too wide")

    def test_logits_equal_transformers(self, checkpoints: list[Path]) -> None:
        """Prompts in one batch get the logits that transformers computes for each alone, in every configuration."""
        for folder, changes in zip(checkpoints, self._tried, strict=True):
            _, model = self._load(folder)
            engine = TinyEngine(self.plugin(), folder)
            got = engine.prefill_logits(PROMPTS)
            want = [self.reference_logits(folder, prompt) for prompt in PROMPTS]
            errors = [_errors(*pair) for pair in zip(got, want, strict=True)]
            if max(float(error.max()) for error in errors) > TOLERANCE:
                why = explain(model, _tensors(folder), folder, errors, got, PROMPTS, TOLERANCE)
                fail(f"logits differ from transformers with {dict(changes) or 'the plain configuration'}: {why}")

    def test_greedy_in_a_mixed_batch(self, checkpoints: list[Path]) -> None:
        """Prompts prefilled in chunks beside others' decode steps get transformers' greedy tokens."""
        self._generates(checkpoints)
        prompts = [[(11 * i + 5 * n) % 190 for i in range(n)] for n in (1, 6, 23, 50)]
        for folder in checkpoints[:2]:
            engine = TinyEngine(self.plugin(), folder)
            got = engine.greedy(prompts, num_new=6, chunk=7)
            for prompt, tokens in zip(prompts, got, strict=True):
                want = self._greedy(folder, prompt, tokens)
                check(tokens == want, f"greedy tokens differ in a mixed batch with chunked prefill: a prompt of "
                      f"{len(prompt)} tokens gives {tokens}, transformers {want}")  # fmt: skip

    def test_a_copied_state_is_gone_on_from(self, checkpoints: list[Path]) -> None:
        """Where layers are recurrent, a request that begins with a copy of their state goes on as if it had made it."""
        engines = [(folder, TinyEngine(self.plugin(), folder)) for folder in checkpoints]
        if all(engine.states is None for _, engine in engines):
            pytest.skip("no layer is recurrent")
        for folder, engine in engines:
            want = self.reference_logits(folder, PROMPTS[2])
            for length, got in engine.resumed_logits(PROMPTS[2]).items() if engine.states else ():
                error = float(_errors(got, want[length:]).max())
                check(
                    error <= TOLERANCE,
                    f"behind {length} tokens of another request, whose states were copied there, logits are wrong "
                    f"(relative error {error:.2g}): a layer keeps what is no tensor of its LayerSpec's state",
                )

    def test_no_host_sync_in_decode(self, checkpoints: list[Path]) -> None:
        """A decode step reads nothing back to the host: it can be recorded into a graph."""
        self._generates(checkpoints)
        for folder in checkpoints[:1]:
            calls = "; ".join(dict.fromkeys(decode_syncs(self.plugin(), folder)))
            check(not calls, f"host sync in a decode step, which no graph can record: {calls}")

    def test_builds_in_the_dtype_asked_for(self, checkpoints: list[Path]) -> None:
        """Parameters are made on the device and in the dtype of the context; vectors may be float32."""
        config = self._config(read_config(checkpoints[0]))
        for dtype in (torch.float32, torch.bfloat16):
            model: Any = self.plugin().build(config, BuildContext(device=CPU, dtype=dtype, factory=PLAIN))
            for name, param in model.named_parameters():
                is_wide = param.dim() == 1 and param.dtype == torch.float32  # as norms that add one to their weights
                right = (param.dtype == dtype or is_wide) and param.device.type == "cpu"
                check(right, f"parameter {name} is {param.dtype} on {param.device}, asked for {dtype} on cpu")

    # Helpers.

    def _config(self, hf: Mapping[str, Any]) -> ModelConfig:
        config = self.plugin().config_from_hf(hf)
        check(isinstance(config, ModelConfig), f"config_from_hf returns {shown(config)}, not a ModelConfig")
        result: ModelConfig = config
        return result

    def _generates(self, checkpoints: list[Path]) -> None:
        """Skip a test of decode steps where there are none."""
        if not self._config(read_config(checkpoints[0])).generates:
            pytest.skip("the model has no output head")

    def _load(self, folder: Path) -> tuple[ModelConfig, Any]:
        with as_failure(ModelError, "the checkpoint that transformers writes is refused: "):
            return load_model(self.plugin(), folder)

    def _is_needed(self, folder: Path, name: str) -> bool:
        """Whether transformers' output depends on a weight."""
        model = _transformers_model(folder)
        param = dict(model.named_parameters()).get(name)
        if param is None:
            return False
        before = self.reference_logits(folder, PROMPTS[1])
        kept = param.data.clone()
        param.data.normal_()
        changed = bool((_logits(model, PROMPTS[1]) - before).abs().max() > 1e-6)
        param.data.copy_(kept)
        return changed

    def _greedy(self, folder: Path, prompt: list[int], tokens: list[int]) -> list[int]:
        """Transformers' choice behind each prefix of the tokens found; equal exactly where all of them are."""
        logits = self.reference_logits(folder, [*prompt, *tokens[:-1]])
        return [int(row.argmax()) for row in logits[len(prompt) - 1 :]]


def _errors(got: Tensor, want: Tensor) -> Tensor:
    error: Tensor = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
    return error.nan_to_num(nan=float("inf"))


@cache
def _transformers_model(folder: Path) -> Any:
    """Load the reference; its plain attention computes soft caps and sinks, which the others leave out."""
    return reference_model(folder)


def transformers() -> Any:
    """Import transformers, which takes seconds."""
    return import_module("transformers")


@torch.inference_mode()
def _logits(model: Any, ids: Sequence[int]) -> Tensor:
    return outputs_of(model, ids)


@cache
def _reference(folder: Path, ids: tuple[int, ...]) -> Tensor:
    logits: Tensor = _logits(_transformers_model(folder), ids)
    return logits


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return tensors


def _rewrite(folder: Path, target: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write another checkpoint with the same config."""
    from safetensors.torch import save_file

    (target / "config.json").write_text((folder / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")


def _one_of_each(names: Mapping[str, Tensor]) -> list[str]:
    """Return one name of each kind of weight, layers counted as one."""
    return list({re.sub(r"\.\d+\.", ".N.", name): name for name in sorted(names)}.values())


def _dropped(model: Any, rules: Sequence[Any], folder: Path) -> list[str]:
    """Return the checkpoint's tensors that the rules know and do not load."""
    finder = RuleFinder(model_layers(model), rules)
    return [name for name in _tensors(folder) if (found := finder.find(name)) is not None and not found.target]
