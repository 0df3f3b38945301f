"""The report in a browser: what it shows there, in which width, and that it asks for nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

from multihead import capture
from multihead.models.gpt import GPT

pytest.importorskip("matplotlib")

L, LAYERS, H = 12, 2, 3
NAMES = ("chromium", "chromium-browser", "google-chrome")
# Into a copy of the page: a policy that lets nothing in from outside, which tells of what was kept out, and a script
# that writes what it sees where --dump-dom shows it.
PROBE = """
<meta http-equiv=Content-Security-Policy
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'unsafe-inline'">
<script>
const wrong = [];
addEventListener("error", event => wrong.push(event.message || event.target.outerHTML.slice(0, 99)), true);
addEventListener("securitypolicyviolation", event => wrong.push(event.blockedURI));
addEventListener("load", () => {
  const box = element => element.getBoundingClientRect();
  document.body.dataset.seen = JSON.stringify({
    wrong, title: document.title, window: innerWidth, wide: document.documentElement.scrollWidth,
    figures: [...document.images].map(image => [image.naturalWidth, box(image).width]),
    layers: [...document.querySelectorAll("details")].map(part => part.querySelectorAll("svg image").length),
    maps: [...document.querySelectorAll("details[open] svg")].map(map => [box(map).left, box(map).right]),
    texts: [...document.querySelectorAll("details[open] svg text")].map(text => text.textContent),
    paper: getComputedStyle(document.body).backgroundColor,
  });
});
</script>
"""


class Body(HTMLParser):
    seen: dict[str, Any]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "body" and "data-seen" in dict(attrs):
            self.seen = json.loads(dict(attrs)["data-seen"])


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A function that opens a page in a window and gives what the probe saw and the screenshot's pixels."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"it opens a page, and there is none of {', '.join(NAMES)}")
    folder = tmp_path_factory.mktemp("browser")

    def opened(text: str, width: int, *options: str) -> tuple[dict[str, Any], Any]:
        from matplotlib.image import imread

        page, picture = folder / "page.html", folder / "page.png"
        page.write_text(text.replace("<head>", f"<head>{PROBE}", 1), encoding="utf-8")
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}", "--proxy-server=127.0.0.1:9", f"--window-size={width},1200",
            *options, "--dump-dom", f"--screenshot={picture}", page.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60, check=True)
        body = Body()
        body.feed(done.stdout)
        return body.seen, imread(picture)

    try:
        seen, _ = opened("<html><head></head><body><img src='http://127.0.0.1:9/x.png'></body></html>", 400)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"it opens a page, and {program} does not start here: {error}")
    assert "http://127.0.0.1:9/x.png" in seen["wrong"]  # so nothing that a page asks for is missed
    return opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("report") / "out.html"
    with torch.no_grad(), capture(model := GPT(20, 24, LAYERS, H)) as rec:
        model(torch.arange(L)[None])
    rec.report(path, tokens=["<b>", *"bcdefghijk", "中"], title="a & b")
    return path.read_text(encoding="utf-8")


def test_a_report_on_a_desktop(look: Callable[..., Any], report: str):
    seen, pixels = look(report, 1280)
    assert (seen["wrong"], seen["title"]) == ([], "a & b")
    assert seen["layers"] == [0, *[H] * LAYERS]  # the table of numbers, and the maps of each layer
    assert len(seen["figures"]) == 5
    assert all(own > 100 and shown > 100 for own, shown in seen["figures"])
    assert [text for text in seen["texts"] if text.startswith("head")] == ["head 0", "head 1", "head 2"]
    assert seen["texts"].count("<b>") == seen["texts"].count("中") == 2 * H
    assert seen["paper"] == "rgb(255, 255, 255)"
    assert pixels.shape[:2] == (1200, 1280)
    assert len(set(map(tuple, pixels[::4, ::4, :3].reshape(-1, 3).tolist()))) > 50


def test_a_report_on_a_dark_phone(look: Callable[..., Any], report: str):
    seen, pixels = look(report, 400, "--blink-settings=preferredColorScheme=0")
    assert seen["wrong"] == []
    assert seen["wide"] <= seen["window"]  # nothing sticks out
    assert all(0 <= left < right <= seen["window"] for left, right in seen["maps"])
    assert seen["paper"] == "rgb(22, 22, 22)"
    assert pixels[-1, 0, :3].max() < 0.2
