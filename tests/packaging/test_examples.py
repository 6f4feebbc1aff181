"""The built wheel in a clean environment, beside plugins of every kind: the examples, and what `plugin new` writes."""

from __future__ import annotations

import json
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from clean_env import EXAMPLES, ROOT, SMALLEST, CleanEnv, chat, serving
from safetensors.torch import load_file

import dovetail
from dovetail.base.distribution import DISTRIBUTION
from dovetail.demo import MODEL_DIR
from dovetail.plugins import KINDS
from dovetail_server.http.shown import HIDDEN

pytestmark = pytest.mark.install
COMPUTING = ("model", "attention_backend", "quantization")

NEW = {kind: f"new-{kind.replace('_', '-')}" for kind in KINDS if kind != "model"} | {"model": "MinistralForCausalLM"}
OLMO = {
    "architectures": ["OlmoForCausalLM"],
    "model_type": "olmo",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
TWO_WIDTHS = {
    **OLMO,
    "architectures": ["TwoWidthsForCausalLM"],
    "model_type": "two_widths",
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
LATENT = {
    **{key: value for key, value in OLMO.items() if key != "num_key_value_heads"},
    "architectures": ["LatentForCausalLM"],
    "model_type": "latent",
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
RECURRENT = {
    **OLMO,
    "architectures": ["RecurrentForCausalLM"],
    "model_type": "recurrent",
    "head_dim": 8,
    "full_attn_idxs": [1],
    "conv_L_cache": 3,
    "chunk_size": 8,
}


def states(base: str) -> dict[tuple[str, str], str]:
    listed = requests.get(f"{base}/v1/plugins", timeout=60).json()["data"]
    return {(item["kind"], item["name"]): item["state"] for item in listed}


def test_there_is_an_example_of_every_kind_and_each_is_small() -> None:
    """Each kind has a package, whose module has fewer than 150 lines."""
    groups = {kind.entry_point_group for kind in KINDS.values()}
    found = {group for path in EXAMPLES for group in groups if f'"{group}"' in (path / "pyproject.toml").read_text()}
    assert found == groups
    for module in (module for path in EXAMPLES for module in path.glob("dovetail_*.py")):
        assert len(module.read_text(encoding="utf-8").splitlines()) < 150, module


def test_what_needs_a_reference_of_its_own_names_it() -> None:
    """So that `dovetail plugin check` and `validate` compare with it, where transformers has no such model."""
    found = [path for path in EXAMPLES if list(path.glob("*_reference.py"))]
    assert len(found) == 3
    for path in found:
        (reference,) = path.glob("*_reference.py")
        project = tomllib.loads((path / "pyproject.toml").read_text("utf-8"))
        (target,) = project["project"]["entry-points"]["dovetail.conformance"].values()
        module, _, name = target.partition(":")
        assert f"class {name}(ModelConformance):" in (path / f"{module}.py").read_text("utf-8")
        assert {f"{module}.py", reference.name} < set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["include"])


@pytest.mark.full
def test_examples_pass_the_kit(with_examples: CleanEnv) -> None:
    """Each example's own tests, the conformance kit among them, pass against what is installed."""
    tests = list(map(str, (with_examples.folder / "src").glob("*/test_*.py")))
    assert len(tests) == len(EXAMPLES)
    out = with_examples.run(str(with_examples.bin / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert " passed" in out


@pytest.mark.full
def test_doctor_finds_nothing_wrong(with_examples: CleanEnv) -> None:
    """With every example installed, `dovetail plugin doctor` loads them all and has nothing to say."""
    assert "no problems" in with_examples.run(str(with_examples.bin / "dovetail"), "plugin", "doctor")


@pytest.mark.full
def test_examples_serve_together(with_examples: CleanEnv) -> None:
    """One server uses the examples' parsers, backends and hooks with their options, and answers right."""
    flags = ["--reasoning-parser", "acme-r2", "--tool-call-parser", "call-tools", "--attention-backend", "blockwise"]
    flags += ["--blockwise.block", "32", "--plugin", "desk", "--desk.keep", "1", "--grammar-backend", "choice"]
    flags += ["--apis", "openai,ollama"]
    with serving(with_examples, *flags) as base:
        for _ in range(2):
            assert "Paris" in chat(base, temperature=0, max_tokens=24)["choices"][0]["message"]["content"]
        # An observer hears of a request's end a moment after its client does.
        for _ in range(200):
            stats = requests.get(f"{base}/x/desk/stats", timeout=60).json()
            if stats["ended"] == 2:
                break
            time.sleep(0.05)
        assert (stats["started"], stats["ended"], len(stats["last"])) == (2, 2, 1)
        forced = chat(base, temperature=0, structured_outputs={"choice": ["Madrid or so", "Lisbon"]})
        assert forced["choices"][0]["message"]["content"] in {"Madrid or so", "Lisbon"}
        asked = {"model": "dovetail-demo", "prompt": "The capital of France is", "raw": True, "stream": False}
        assert "Paris" in requests.post(f"{base}/api/generate", json=asked, timeout=60).json()["response"]
        assert requests.post(f"{base}/generate", json={"text": "a"}, timeout=60).status_code == 404
        found = states(base)
        used = [("api", "ollama"), ("reasoning_parser", "acme-r2"), ("tool_parser", "call-tools")]
        for key in [*used, ("attention_backend", "blockwise"), ("grammar_backend", "choice"), ("hooks", "desk")]:
            assert found[key] == "active", key
        assert found["reasoning_parser", "qwen3"] == "found"
        given = requests.get(f"{base}/get_server_info", timeout=60).json()["plugins"]
        assert given["desk"]["keep"] == "1"
        assert given["blockwise"] == {"block": HIDDEN}  # the engine's, of which the server does not know what is secret


@pytest.mark.full
def test_an_examples_calls_are_enforced(with_examples: CleanEnv) -> None:
    """Calls in a stranger's format obey the tool's schema, sampled as they are, and are read back typed."""
    properties = {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 2, "maximum": 4}}
    parameters = {"type": "object", "properties": properties, "required": ["city", "days"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters, "strict": True}}]
    with serving(with_examples, "--tool-call-parser", "ledger", "--grammar-backend", "llguidance") as base:
        for seed in range(4):
            reply = chat(
                base, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=1.5, seed=seed
            )
            [call] = reply["choices"][0]["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert call["function"]["name"] == "get_weather"
            assert arguments["city"] in {"Paris", "Rome"}
            assert arguments["days"] in {2, 3, 4}


@pytest.mark.full
@pytest.mark.parametrize("config", [OLMO, TWO_WIDTHS, LATENT, RECURRENT], ids=lambda config: config["model_type"])
def test_the_models_examples_serve(config: dict[str, Any], with_examples: CleanEnv) -> None:
    """A server runs the architectures of the examples, with random weights."""
    model = with_examples.folder / config["model_type"]
    model.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / file).write_bytes((MODEL_DIR / file).read_bytes())
    (model / "config.json").write_text(json.dumps(config))
    with serving(with_examples, str(model), "--load-format", "dummy") as base:
        assert chat(base, max_tokens=4)["usage"]["completion_tokens"] >= 1
        assert states(base)["model", config["architectures"][0]] == "active"


@pytest.mark.full
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["plain", "compressed"])
def test_the_format_example_serves(save: Callable[..., None], with_examples: CleanEnv, tmp_path: Path) -> None:
    """A server finds the format by the files at the path, and answers as the checkpoint that they were made from."""
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / file).write_bytes((MODEL_DIR / file).read_bytes())
    tensors = load_file(MODEL_DIR / "model.safetensors")
    save(tmp_path / "model.npz", **{name: tensor.float().numpy() for name, tensor in tensors.items()})
    with serving(with_examples, str(tmp_path)) as base:
        assert "Paris" in chat(base, temperature=0, max_tokens=24)["choices"][0]["message"]["content"]
        assert states(base)["checkpoint", "npz"] == "active"


@pytest.mark.full
def test_the_device_example_serves(with_examples: CleanEnv) -> None:
    """A start takes the device that is named, whose copies come late, and answers as on the host."""
    with serving(with_examples, "--device", "delayed") as base:
        assert "Paris" in chat(base, temperature=0, max_tokens=24)["choices"][0]["message"]["content"]
        assert states(base)["device", "delayed"] == "active"


@pytest.mark.full
def test_a_plugin_of_every_kind_is_written_installed_and_tested(clean: CleanEnv, tmp_path: Path) -> None:
    """`dovetail plugin new` works offline from the wheel; pip installs each package and its tests pass.

    Those of kinds that compute take most of the time. They are found here, and run by the tutorials, which begin so.
    """
    folders = []
    for kind, name in NEW.items():
        folder = tmp_path / kind
        clean.run(str(clean.bin / "dovetail"), "plugin", "new", kind, name, "--dir", str(folder))
        folders.append(folder)
    clean.install(*folders)
    listing = json.loads(clean.run(str(clean.bin / "dovetail"), "plugin", "list", "--json"))["data"]
    assert set(NEW.items()) <= {(item["kind"], item["name"]) for item in listing}
    tests = [path for folder in folders for path in folder.glob("test_*.py")]
    assert len(tests) == len(NEW)
    found = (f"--deselect={kind}/" for kind in COMPUTING)
    pytest_ = [str(clean.bin / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    out = clean.run(*pytest_, *found, *map(str, tests))
    assert " passed" in out
    assert " deselected" in out


def test_wheel_holds_the_manifests(wheel: Path) -> None:
    """The built-ins' facts can be read without importing them; what else is in it `test_release.py` says."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"dovetail_parsers/dovetail-plugins.json", "dovetail_backends/dovetail-plugins.json"} <= names


def test_installed_package_is_listed(clean: CleanEnv) -> None:
    """`dovetail plugin list --json` shows the third party's parser beside the built-ins, from its own package."""
    listing = json.loads(clean.run(str(clean.bin / "dovetail"), "plugin", "list", "--json"))
    assert listing["problems"] == []
    assert {item["state"] for item in listing["data"]} == {"found"}
    assert {item["location"] for item in listing["data"]} == {str(clean.site)}
    found = {(item["kind"], item["name"]): item for item in listing["data"]}
    acme = found["reasoning_parser", "acme-r2"]
    assert (acme["distribution"], acme["version"], acme["api"]) == ("dovetail-acme-parser", "1.0.0", 1)
    assert found["reasoning_parser", "qwen3"]["distribution"] == DISTRIBUTION
    assert found["attention_backend", "torch_native"]["aliases"] == ["sdpa", "torch-sdpa"]


def test_installed_package_is_accepted_by_name(clean: CleanEnv) -> None:
    """The name resolves, enters the plan, and loads in the server's role, with no change to Dovetail."""
    out = clean.python(
        "import sys",
        "from dovetail.plugins import PluginPlan, Registry, load, make_plan",
        "plan = make_plan(Registry.scan(), reasoning_parser='Acme_R2', device='cpu')",
        "plan = PluginPlan.decode(plan.encode())",
        "print(load(plan, 'api').get('reasoning_parser', 'acme-r2').__name__)",
        "print(load(plan, 'engine').all('reasoning_parser'), 'torch' in sys.modules)",
    )
    assert out == "AcmeR2\n[] False\n"


def test_example_is_small() -> None:
    """A reasoning parser in a package of its own takes at most 40 lines, pyproject and manifest included."""
    files = (SMALLEST / "pyproject.toml", *(SMALLEST / "dovetail_acme_parser").glob("*.*"))
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 40


def test_removed_entry_point_is_not_installed(clean: CleanEnv, tmp_path: Path) -> None:
    """With a built-in's line gone from the installed metadata, its name is refused and the rest is offered."""
    (metadata,) = clean.site.glob("dovetail_llm-*.dist-info/entry_points.txt")
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    flags = ("--model-path", str(tmp_path), "--load-format", "dummy", "--reasoning-parser", "qwen3")
    before = metadata.read_text()
    metadata.write_text("\n".join(line for line in before.splitlines() if not line.startswith("qwen3 =")))
    try:
        out = clean.run(str(clean.bin / "dovetail"), "serve", *flags, code=2)
    finally:
        metadata.write_text(before)
    assert "--reasoning-parser 'qwen3': not installed; installed: acme-r2, " in out
    assert ", deepseek-r1, " in out
    assert "Traceback" not in out


def test_the_installed_wheel_serves(clean: CleanEnv) -> None:
    """What `make release` does on every Python, on this one: plugins, playground and a streamed reply."""
    shown = clean.run(str(clean.bin / "python"), str(ROOT / "tests/packaging/smoke.py"))
    assert f"dovetail {dovetail.__version__}" in shown
    assert "Paris" in shown.splitlines()[-1]
