"""The report in headless Chromium: it renders, nothing overflows, the console stays empty. Skipped without Chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

import trueup
from architectures import images, make
from trueup.report import find, page_of
from trueup.targets.decision import LEFT_ALONE, Decision, Trial

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

# Shows the page in frames of several widths, opens what is folded, and writes down what sticks out.
HARNESS = """<!doctype html><body>%s<pre id="result"></pre><script>
window.onload = () => {
  const result = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement;
    for (const folded of page.querySelectorAll("details")) folded.open = true;
    const width = root.clientWidth, out = [];
    for (const e of page.body.querySelectorAll("*")) {
      if (e.closest(".scroll") && !e.matches(".scroll")) continue;
      const box = e.getBoundingClientRect();
      if (box.right > width + 0.5 || box.left < -0.5) out.push(e.tagName + "." + e.getAttribute("class"));
    }
    const cut = [...page.querySelectorAll("svg text")].filter(t => {
      const box = t.getBoundingClientRect(), frame = t.ownerSVGElement.getBoundingClientRect();
      return box.left < frame.left - 0.5 || box.right > frame.right + 0.5 || box.bottom > frame.bottom + 0.5;
    }).map(t => t.textContent);
    const small = [...page.querySelectorAll("svg text")].map(t => t.getBoundingClientRect().height);
    result.push({width, scroll: root.scrollWidth, out, cut, smallest: Math.min(...small),
      broken: [...page.images].filter(i => !i.complete || !i.naturalWidth).length, pictures: page.images.length,
      background: getComputedStyle(page.body).backgroundColor, height: root.scrollHeight});
  }
  document.getElementById("result").textContent = JSON.stringify(result);
};
</script></body>"""


def browse(page, tmp_path, *, dark=False, widths=(360, 390, 1280)):
    """What the harness found at each width, and what the console said."""
    frames = "".join(
        f'<iframe srcdoc="{html.escape(page, quote=True)}" width="{width}" height="800" style="border:0"></iframe>'
        for width in widths
    )
    (tmp_path / "harness.html").write_text(HARNESS % frames)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"]
    if dark:
        options.append("--blink-settings=preferredColorScheme=0")
    done = subprocess.run(
        [CHROMIUM, *options, f"file://{tmp_path / 'harness.html'}"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(html.unescape(found[1])), re.findall(r"CONSOLE.*", done.stderr)


@pytest.fixture(scope="module")
def page():
    """The report with the most in it: two sets, trials, long names."""
    torch.manual_seed(0)
    model = make("mobilenet")
    targets = trueup.calibrate(model, images(60).split(20), decide=False)
    rules = (LEFT_ALONE, *(trueup.Evidence(strength=k / 100) for k in range(1, 9)))
    trials = tuple(Trial(rule, 100, 1.0, (95.0, 80.0), 3.0, 2.0) for rule in rules)
    targets = replace(targets, decision=Decision(trials))
    classes = [f"a_class_with_quite_a_long_name_{k}" for k in range(10)]
    noisy = 1e4 * (images(20, seed=4) + torch.randn(20, 3, 32, 32))  # the plots need long numbers
    found = find(model, targets, noisy, against=images(20), names=("this week", "w" * 60), rule=trueup.Evidence())
    return page_of(found, classes=classes, title="A title that is long enough to be broken on a phone: " + "x" * 80)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_renders_without_overflow_or_errors(page, tmp_path, dark):
    found, console = browse(page, tmp_path, dark=dark)
    assert console == []
    assert [frame["width"] for frame in found] == pytest.approx([360, 390, 1280], abs=20)
    for frame in found:
        assert frame["out"] == []
        assert frame["cut"] == []
        assert frame["scroll"] <= frame["width"]
        assert (frame["broken"], frame["pictures"]) == (0, 24)
        assert frame["smallest"] > 9  # pixels: text in plots stays legible
        assert frame["height"] > 1500
        assert (sum(map(int, re.findall(r"\d+", frame["background"])[:3])) < 200) == dark


def test_the_harness_notices_what_is_wrong(tmp_path):
    bad = (
        '<body style="margin:0"><p style="width:900px">wide</p><img src="data:,"><svg><text x="-9" y="9">t</text></svg>'
    )
    found, console = browse(bad + "<script>console.error('oh')</script>", tmp_path, widths=(390,))
    assert found[0]["out"] == ["P.null"]
    assert found[0]["cut"] == ["t"]
    assert found[0]["broken"] == 1
    assert any("oh" in line for line in console)
