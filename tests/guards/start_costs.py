"""What a start imports, in processes of its own: modules of the product, all modules, and memory."""

from __future__ import annotations

import json
import subprocess
import sys

STARTS = {
    "import dovetail": "import dovetail",
    "dovetail version": "from dovetail_server.cli import main; main(['--version'])",
    "settings of serve": "from dovetail_server.cli.serve import settings_from; settings_from([])",
    "server, text tools ready": (
        "from dovetail.demo import MODEL_DIR; from dovetail.plugins import Registry, make_plan\n"
        "from dovetail.processing.processor import Processor\n"
        "from dovetail_server.settings.serve import ServeSettings\n"
        "import dovetail_server.start.app, dovetail_server.start.run\n"
        "plan = make_plan(Registry.scan(), reasoning_parser='qwen3', tool_parser='hermes')\n"
        "from dovetail.runtime.checkpoint.folder import ModelFolder\n"
        "Processor.load(ServeSettings(model_path=str(MODEL_DIR)), plan, ModelFolder(MODEL_DIR, weights=False))"
    ),
    "auto for the parsers": (
        "from dovetail.demo import MODEL_DIR; from dovetail.plugins import Registry\n"
        "from dovetail.text.detection.detect import detect\n"
        "from dovetail.checkpoint.tokenizer_files import TokenizerFiles\n"
        "detect(Registry.scan(), TokenizerFiles.read(MODEL_DIR))"
    ),
    "engine of the demo model": (
        "from dovetail.demo import MODEL_DIR; from dovetail_testing.engine import make_core\nmake_core(MODEL_DIR)"
    ),
}
COUNT = """
import json, sys
names = set(sys.modules)
own = [name for name in names if name.partition(".")[0].startswith("dovetail")]
with open("/proc/self/status") as status:
    rss = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
print(json.dumps({"own modules": len(own), "modules": len(names), "MiB": rss >> 10}))
"""


def measure() -> dict[str, dict[str, float]]:
    """Return what each start imports."""
    found = {}
    for name, code in STARTS.items():
        done = subprocess.run([sys.executable, "-c", code + COUNT], capture_output=True, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found
