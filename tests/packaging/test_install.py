"""The built wheel beside a third party's, in a clean environment outside the source tree."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import requests
from clean_env import CleanEnv, build_wheel, free_port

from dovetail.demo import MODEL_DIR
from dovetail.utils import wait_for_server

pytestmark = pytest.mark.install

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/dovetail-acme-parser"


TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Dovetail's wheel and the example's."""
    target = tmp_path_factory.mktemp("wheels")
    return build_wheel(ROOT, target), build_wheel(EXAMPLE, target)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, wheels: tuple[Path, Path]) -> CleanEnv:
    """An environment with both wheels installed by pip."""
    env = CleanEnv(tmp_path_factory.mktemp("clean"))
    env.install(*wheels)
    return env


def test_wheel_holds_the_packages_and_nothing_else(wheels: tuple[Path, Path]) -> None:
    """The wheel has our six packages with their manifests and type markers, and no test, script or document."""
    names = zipfile.ZipFile(wheels[0]).namelist()
    tops = {name.partition("/")[0] for name in names}
    packages = {"dovetail", "dovetail_server", "dovetail_models", "dovetail_parsers", "dovetail_backends"}
    assert {top for top in tops if not top.endswith(".dist-info")} == {*packages, "dovetail_grammar"}
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert {"dovetail_parsers/dovetail-plugins.json", "dovetail_backends/dovetail-plugins.json"} <= set(names)


def test_installed_package_is_listed(clean: CleanEnv) -> None:
    """`dovetail plugin list --json` shows the third party's parser beside the built-ins, from its own package."""
    listing = json.loads(clean.run(str(clean.bin / "dovetail"), "plugin", "list", "--json"))
    assert listing["problems"] == []
    assert {item["state"] for item in listing["data"]} == {"found"}
    assert {item["location"] for item in listing["data"]} == {str(clean.site)}
    found = {(item["kind"], item["name"]): item for item in listing["data"]}
    acme = found["reasoning_parser", "acme-r2"]
    assert (acme["distribution"], acme["version"], acme["api"]) == ("dovetail-acme-parser", "1.0.0", 1)
    assert found["reasoning_parser", "qwen3"]["distribution"] == "dovetail"
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


def test_server_runs_with_the_installed_parser(clean: CleanEnv) -> None:
    """`dovetail serve --reasoning-parser acme-r2` starts, shows the plugin as in use, and answers a chat."""
    model = clean.folder / "model"
    model.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / file).write_bytes((MODEL_DIR / file).read_bytes())
    (model / "config.json").write_text(json.dumps(TINY))
    port = free_port()
    flags = ("--load-format", "dummy", "--reasoning-parser", "acme-r2", "--port", str(port))
    command = [str(clean.bin / "dovetail"), "serve", "--model-path", str(model), *flags]
    with (clean.folder / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=clean.folder, env=clean.env, stdout=log, stderr=log)
    try:
        wait_for_server(f"http://127.0.0.1:{port}", timeout=120)
        listed = requests.get(f"http://127.0.0.1:{port}/v1/plugins", timeout=10).json()["data"]
        states = {(item["kind"], item["name"]): item["state"] for item in listed}
        assert states["reasoning_parser", "qwen3"] == "found"
        assert states["reasoning_parser", "acme-r2"] in {"selected", "loaded", "active"}
        body = {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        body["model"] = requests.get(f"http://127.0.0.1:{port}/v1/models", timeout=10).json()["data"][0]["id"]
        reply = requests.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
    finally:
        server.terminate()
        code = server.wait(60)
        print((clean.folder / "log").read_text())
    assert code == 0


def test_example_passes_its_own_tests(clean: CleanEnv) -> None:
    """The example's tests pass against the installed packages."""
    test = clean.folder / "test_acme.py"
    test.write_text((EXAMPLE / "test_acme.py").read_text(encoding="utf-8"), encoding="utf-8")
    assert " passed" in clean.run(str(clean.bin / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test))


def test_example_is_small() -> None:
    """A reasoning parser in a package of its own takes at most 40 lines, pyproject included."""
    files = (EXAMPLE / "pyproject.toml", EXAMPLE / "dovetail_acme_parser.py")
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 40


def test_removed_entry_point_is_not_installed(tmp_path: Path, wheels: tuple[Path, Path]) -> None:
    """With a built-in's line gone from the installed metadata, its name is refused and the rest is offered."""
    env = CleanEnv(tmp_path)
    env.install(*wheels)
    (metadata,) = env.site.glob("dovetail-*.dist-info/entry_points.txt")
    lines = metadata.read_text().splitlines()
    metadata.write_text("\n".join(line for line in lines if not line.startswith("qwen3 =")))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    flags = ("--model-path", str(model), "--load-format", "dummy", "--reasoning-parser", "qwen3")
    out = env.run(str(env.bin / "dovetail"), "serve", *flags, code=2)
    assert "--reasoning-parser 'qwen3': not installed; installed: acme-r2, deepseek-r1, " in out
    assert "Traceback" not in out
