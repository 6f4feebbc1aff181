"""Who may bring plugins: deny list, allow list, lock file; and files that are not what was installed."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest

from dovetail.contracts.errors import PluginError
from dovetail.demo import MODEL_DIR
from dovetail.plugins import Registry
from dovetail.plugins.lock import changed_files, check_files, read_lock
from dovetail.processing.plan import plan_plugins
from dovetail_server.cli import plugin, serve
from dovetail_server.cli.options import load_settings, parse_flags
from dovetail_server.cli.plugin.lock import make_lock
from dovetail_testing.folder import unread_model
from dovetail_testing.site import FakeSite

PARSERS = "dovetail.reasoning_parsers.v1"


def install(site: FakeSite, name: str = "acme", version: str = "1.0", source: str = "A = 1\n") -> Path:
    """Install a distribution with a RECORD."""
    info = site.add(name, version, {PARSERS: {f"{name}-r2": f"{name}:A"}}, {f"{name}.py": source})
    digest = base64.urlsafe_b64encode(hashlib.sha256(source.encode()).digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"{name}.py,sha256={digest},{len(source)}\n{info.name}/RECORD,,\n")
    return info


def lock_file(site: FakeSite, tmp_path: Path) -> Path:
    path = tmp_path / "test.lock"
    path.write_text(json.dumps(make_lock(Registry.scan(path=[str(site.root)]))))
    return path


def refusal(site: FakeSite, name: str = "acme-r2", **rules: object) -> str:
    registry = Registry.scan(path=[str(site.root)], **rules)  # type: ignore[arg-type]
    with pytest.raises(PluginError) as caught:
        registry.resolve("reasoning_parser", name)
    return str(caught.value)


def test_deny_and_allow_lists(site: FakeSite) -> None:
    """Denied packages are blocked, and with an allow list all others; the reason names the list."""
    install(site)
    install(site, "zeta")
    prefix = "--reasoning-parser 'acme-r2': installed but not usable: acme 1.0 is blocked: "
    assert refusal(site, deny=["acme"]) == prefix + "on the deny list; take acme off it to use it"
    assert refusal(site, allow=["zeta"]) == prefix + "not on the allow list; add acme to --plugin-allow to use it"
    allowed = Registry.scan(path=[str(site.root)], allow=["acme:acme-r2"])
    assert allowed.resolve("reasoning_parser", "acme-r2").distribution == "acme"
    assert Registry.scan(allow=["zeta"]).resolve("reasoning_parser", "qwen3").builtin


def test_rules_hold_for_what_hooks_register(site: FakeSite) -> None:
    """A name that a registration hook adds is blocked like any other."""
    registry = Registry.scan(path=[str(site.root)], deny=["acme:late"])
    registry.add("reasoning_parser", "late", "acme:A", distribution="acme", version="1.0")
    with pytest.raises(PluginError, match=r"acme 1\.0 is blocked: on the deny list"):
        registry.resolve("reasoning_parser", "late")


def test_a_lock_lets_through_exactly_what_was_locked(site: FakeSite, tmp_path: Path) -> None:
    """The same install passes; another version, changed files and a new package are refused with the fix."""
    install(site)
    path = lock_file(site, tmp_path)
    lock = read_lock(path)
    assert Registry.scan(path=[str(site.root)], lock=lock).resolve("reasoning_parser", "acme-r2").usable
    install(site, "zeta")
    assert refusal(site, "zeta-r2", lock=lock).endswith(
        "zeta 1.0 is blocked: not in the lock file test.lock; check it and run dovetail plugin lock"
    )
    info = install(site, source="A = 2\n")
    assert refusal(site, lock=lock).endswith(
        "its files are not those of the lock file test.lock; reinstall it, or run dovetail plugin lock"
    )
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: acme\nVersion: 1.1\n")
    assert refusal(site, lock=lock).endswith(
        "the lock file test.lock has version 1.0; install that, or run dovetail plugin lock"
    )


def test_files_are_compared_with_the_record(site: FakeSite) -> None:
    """A file that was edited after the installation is named."""
    install(site)
    assert changed_files("acme") == []
    check_files({"acme"})
    (site.root / "acme.py").write_text("A = 3\n")
    assert changed_files("acme") == ["acme.py"]
    with pytest.raises(PluginError, match=r"--plugins-locked: acme: acme\.py differs from what was installed"):
        check_files({"acme"})
    (site.root / "acme.py").unlink()
    assert changed_files("acme") == ["acme.py"]


@pytest.mark.parametrize("text", ["", "[]", '{"lock": 2, "distributions": []}', '{"lock": 1, "distributions": [1]}'])
def test_a_bad_lock_file_is_refused(tmp_path: Path, text: str) -> None:
    """What is no lock file is an error that says how to write one."""
    path = tmp_path / "bad.lock"
    path.write_text(text)
    with pytest.raises(PluginError, match=r"bad\.lock': not a lock file \(.*\); write it with dovetail plugin lock"):
        read_lock(path)
    with pytest.raises(PluginError, match="No such file or directory; write it with dovetail plugin lock"):
        read_lock(tmp_path / "gone")


def test_the_command_writes_what_the_server_reads(
    site: FakeSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dovetail plugin lock` names each package with version and hash, built-ins included."""
    install(site)
    path = tmp_path / "out.lock"
    assert plugin.main(["lock", "--output", str(path)]) == 0
    assert "acme 1.0" in capsys.readouterr().out
    data = json.loads(path.read_text())
    (acme,) = [entry for entry in data["distributions"] if entry["name"] == "acme"]
    assert acme["plugins"] == ["reasoning_parser:acme-r2"]
    assert acme["record"].startswith("sha256:")
    assert read_lock(path)("acme", "1.0") is None
    assert plugin.main(["lock", "--output", str(tmp_path / "no" / "where")]) == 2
    assert "error: --output" in capsys.readouterr().err


def test_a_locked_server_takes_nothing_else(site: FakeSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--plugins-locked` passes what is as locked; an edited file and an unknown package end with exit code 2."""
    source = "from dovetail.contracts import FormatSpec, ReasoningParser\n\nclass A(ReasoningParser):\n"
    source += "    def spec(self, tokenizer, template, request):\n        return FormatSpec()\n"
    install(site, source=source)
    flags = [str(MODEL_DIR), "--reasoning-parser", "acme-r2", "--plugins-locked", str(tmp_path / "locked")]
    assert plugin.main(["lock", "--output", str(tmp_path / "locked")]) == 0
    given = parse_flags(flags)
    assert isinstance(given, dict)
    assert plan_plugins(load_settings(given), unread_model())[2].of_kind("reasoning_parser")[0].name == "acme-r2"
    (site.root / "acme.py").write_text(source + "\n")
    assert serve.main(flags) == 2
    assert "--plugins-locked: acme: acme.py differs from what was installed; reinstall acme" in capsys.readouterr().err
    install(site, "zeta", source=source)
    flags[2] = "zeta-r2"
    assert serve.main(flags) == 2
    assert "zeta 1.0 is blocked: not in the lock file locked" in capsys.readouterr().err
