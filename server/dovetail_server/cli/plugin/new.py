"""`dovetail plugin new KIND NAME`: the package of a new plugin, from templates in the wheel; nothing is fetched."""

from __future__ import annotations

import argparse
import keyword
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from dovetail import __version__
from dovetail.contracts.errors import PluginError
from dovetail.plugins import Registry
from dovetail.plugins.kinds import KINDS, PluginKind
from dovetail.plugins.scan import MANIFEST_FILE

USAGE = {
    "model": "MODEL_FOLDER",
    "hooks": "--plugin {name}",
}


def run(args: argparse.Namespace) -> int:
    """Write the package and say what to do next."""
    kind = check_kind(args.kind)
    values = values_for(kind, args.name)
    folder = Path(args.dir or values["distribution"])
    written = write(folder, kind, values)
    print(f"{folder}: {', '.join(written)}")
    for owner in taken_by(kind, values):
        own = f"{values['distribution']}:{args.name}"
        print(f"note: {args.name} is {owner}'s, also in the test of this package; write {own}, or choose another name")
    print(f"next: cd {folder} && python -m pip install . && python -m pytest")
    return 0


def taken_by(kind: PluginKind, values: dict[str, str]) -> list[str]:
    """Return the other distributions that have a plugin of this kind and name already."""
    records = [record for record in Registry.scan().records if record.kind == kind.name]
    owners = {record.distribution for record in records if values["name"] in (record.name, *record.facts.aliases)}
    return sorted(owners - {values["distribution"]})


def check_kind(name: str) -> PluginKind:
    """Return the kind that a user means; `reasoning-parser` is `reasoning_parser`.

    Raises:
        PluginError: There is no such kind.
    """
    key = name.replace("-", "_").lower()
    if key not in KINDS:
        raise PluginError(f"kind {name!r}: unknown; possible: {', '.join(KINDS)}")
    return KINDS[key]


def values_for(kind: PluginKind, name: str) -> dict[str, str]:
    """Return what the templates' placeholders stand for.

    Raises:
        PluginError: The name cannot be a plugin's.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise PluginError(f"name {name!r}: use letters, digits, - and _, beginning with a letter, such as acme-r2")
    words = [word for word in re.split(r"[-_]", name) if word]
    words = words[1:] if words[0].lower() == "dovetail" and len(words) > 1 else words  # the package's name begins so
    stem = "-".join(words).lower() if kind.name != "model" else re.sub(r"forcausallm$", "", name.lower())
    module = f"dovetail_{stem.replace('-', '_')}"
    class_name = "".join(word[:1].upper() + word[1:] for word in words)
    if kind.name == "model":
        class_name = re.sub(r"ForCausalLM$", "", class_name)
    if keyword.iskeyword(class_name):
        class_name += "_"
    usage = USAGE.get(kind.name, kind.usage(name)).format(name=name)
    has_facts, group = _has(f"{kind.name}.json"), '[project.entry-points."dovetail.manifest"]'
    return {
        "manifest": f'\n{group}\n{name} = "{module}_facts"\n' if has_facts else "",
        "facts": f', "{module}_facts"' if has_facts else "",
        "clues": f"- `{module}_facts/{MANIFEST_FILE}`: by which chat templates `auto` knows your models.\n"
        if has_facts
        else "",
        "name": name,
        "tag": stem,
        "module": module,
        "distribution": module.replace("_", "-"),
        "class": class_name,
        "target": "plugin" if kind.name == "hooks" else class_name,
        "group": kind.entry_point_group,
        "about": kind.about.format(name=name),
        "usage": usage,
        "kit": kind.kit.rpartition(":")[2],
        "dovetail": ".".join(__version__.split(".")[:2]),
    }


def write(folder: Path, kind: PluginKind, values: dict[str, str]) -> list[str]:
    """Fill the kind's templates into `folder`, which must be empty or absent, and return the files' names.

    Raises:
        PluginError: The folder holds something, or cannot be written.
    """
    targets = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        "ci.yml": ".github/workflows/plugin.yml",
        f"{kind.name}.py": f"{values['module']}.py",
        f"{kind.name}.test" if _has(f"{kind.name}.test") else "plugin.test": f"test_{values['module']}.py",
    }
    if _has(f"{kind.name}.json"):
        facts = f"{values['module']}_facts"
        targets |= {"facts.py": f"{facts}/__init__.py", f"{kind.name}.json": f"{facts}/{MANIFEST_FILE}"}
    try:
        if folder.exists() and any(folder.iterdir()):
            raise PluginError(f"{str(folder)!r} is not empty; give another --dir")
        folder.mkdir(parents=True, exist_ok=True)
        for template, name in targets.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(fill(template, values), encoding="utf-8")
    except OSError as error:
        raise PluginError(f"{str(folder)!r}: {error.strerror}; give another --dir") from None
    return list(targets.values())


def fill(template: str, values: dict[str, str]) -> str:
    """Return a template's text with its `{{placeholders}}` filled."""
    text = _file(template).read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], text)


def _has(template: str) -> bool:
    """Whether a kind's test says more than which plugin it is of."""
    return _file(template).is_file()


def _file(template: str) -> Traversable:
    return files("dovetail_server.cli.plugin").joinpath("templates", f"{template}.tmpl")
