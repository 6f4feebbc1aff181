"""Take the pictures of the playground that the README shows: a conversation with the demo model, light and dark.

Run `.venv/bin/python docs/pictures/playground.py` after `make setup`; it needs the distribution's Chromium.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from dovetail.utils import launch_server_cmd, terminate_process, wait_for_server

FOLDER = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell")
SCHEMES = {"light": "playground.png", "dark": "playground-dark.png"}
LAST_SETTINGS = """localStorage.setItem("dovetail-settings", JSON.stringify({
  thinking: "high", temperature: 0,
  tools: JSON.stringify([{type: "function", function: {name: "get_weather", description: "The weather in a city",
    parameters: {type: "object", properties: {city: {type: "string"}}, required: ["city"]}}}], null, 2)
}))"""


def ask(page: Page, text: str) -> None:
    """Send a message, wait for the end of the reply, and unfold its reasoning."""
    page.fill("#composer", text)
    page.keyboard.press("Enter")
    page.locator(".asked", has_text=text).wait_for()
    page.locator(".reply .figures").nth(page.locator(".asked").count() - 1).wait_for()
    page.locator(".reply").last.locator(".reasoning summary").click()


def take(page: Page, base: str, path: Path) -> None:
    """Hold the conversation in a new window and save what it shows."""
    page.add_init_script(LAST_SETTINGS)
    page.goto(base)
    page.wait_for_selector(".idea:not([disabled])")
    ask(page, "9.11 and 9.8, which is greater?")
    ask(page, "What is the weather in Paris?")
    page.mouse.move(0, 0)
    page.screenshot(path=path)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def main() -> None:
    """Start the server of the demo model, take both pictures, and stop it."""
    server, port = launch_server_cmd("dovetail serve")
    try:
        wait_for_server(f"http://localhost:{port}")
        program = next(filter(None, map(shutil.which, BROWSERS)), None)
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        with sync_playwright() as driver, driver.chromium.launch(executable_path=program, args=flags) as browser:
            for scheme, name in SCHEMES.items():
                size = {"width": 1180, "height": 760}
                take(browser.new_page(viewport=size, color_scheme=scheme), f"http://localhost:{port}", FOLDER / name)
    finally:
        terminate_process(server)


if __name__ == "__main__":
    main()
