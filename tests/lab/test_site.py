"""The documentation site without building it: links and anchors, navigation, addresses, versions, pictures' numbers."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest

import trueup
import trueup_lab
from trueup_lab.figures.explained import SHOWN, bench_costs, bench_gains

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
REPOSITORY, SITE = "https://github.com/trueup-ml/trueup", "https://trueup-ml.github.io/trueup"
RAW = "https://raw.githubusercontent.com/trueup-ml/trueup/main"


def without_code(text: str) -> str:
    return re.sub(r"^(`{3,})[^\n]*\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    headings = re.findall(r"^#{1,3} (.+)$", without_code(path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_with_an_anchor_lead_to_a_heading(path):
    links = re.findall(r"\]\(([\w\-]*\.md)?#([^)\s]+)\)", without_code(path.read_text(encoding="utf-8")))
    broken = [(page, anchor) for page, anchor in links if anchor not in anchors(DOCS / page if page else path)]
    assert broken == []


def test_every_page_is_in_the_navigation_once():
    trees = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    named = [re.sub(r".*<(.+)>$", r"\1", line).removesuffix("?") for line in lines]
    optional = {line.removesuffix("?") for line in lines if line.endswith("?")}
    there = {path.stem for path in PAGES} - {"index"}
    assert sorted(named) == sorted(set(named))
    assert there <= set(named)
    assert set(named) - there <= optional


def test_addresses_in_the_readme_lead_to_files_and_pages_of_this_repository():
    """The readme is also shown on PyPI, where relative links lead nowhere."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    paths = []
    for link in links:
        assert link.startswith("https://"), link
        if link.startswith(f"{SITE}/"):
            paths.append(DOCS / link.removeprefix(f"{SITE}/").replace(".html", ".md"))
        elif link.startswith((REPOSITORY, RAW)):
            paths.append(ROOT / re.sub(rf"({REPOSITORY}/(blob|tree)/main|{RAW})/", "", link))
    assert len(paths) == len(links)
    assert [path for path in paths if not path.exists()] == []


def test_the_project_has_one_address():
    urls = [tomllib.loads((ROOT / p / "pyproject.toml").read_text())["project"]["urls"] for p in ("", "lab")]
    assert urls[0] == urls[1]
    assert (urls[0]["Homepage"], urls[0]["Documentation"]) == (REPOSITORY, SITE)
    named = [ROOT / "docs" / "conf.py", ROOT / "CITATION.cff", ROOT / "src" / "trueup" / "targets" / "card.py"]
    assert all(REPOSITORY in path.read_text(encoding="utf-8") for path in named)


def test_versions_agree():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {trueup_lab.__version__, cited[1], newest[1]} == {trueup.__version__}


def test_tables_of_pages_are_those_of_the_files_they_name(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    makers = load(ROOT / "benchmarks" / "page_tables.py")
    for path, tables in makers.documents().items():
        text = path.read_text(encoding="utf-8")
        for name, table in tables.items():
            assert f"<!-- {name} -->\n{table}<!-- /{name} -->" in text, f"{path.name}: run benchmarks/page_tables.py"


def test_the_picture_of_gains_shows_the_numbers_of_the_bench():
    picture = (DOCS / "pictures" / "gains.svg").read_text(encoding="utf-8")
    shown = re.search(r"<dc:description>(.*?)</dc:description>", picture, flags=re.DOTALL)
    gains = bench_gains(ROOT / "results")
    assert json.loads(html.unescape(shown[1])) == gains, "run python -m trueup_lab.figures.explained docs/pictures"
    assert len(gains) == 15
    assert all(by.keys() == SHOWN.keys() for by in gains.values())


def test_the_picture_of_costs_shows_the_numbers_of_the_timings():
    picture = (DOCS / "pictures" / "costs.svg").read_text(encoding="utf-8")
    shown = re.search(r"<dc:description>(.*?)</dc:description>", picture, flags=re.DOTALL)
    costs = bench_costs(ROOT / "results")
    assert json.loads(html.unescape(shown[1])) == costs, "run python -m trueup_lab.figures.explained docs/pictures"
    assert len(costs) >= 5


def test_code_and_arguments_in_docstrings_become_directives_and_lists():
    converted = load(DOCS / "extensions" / "docstrings.py").converted
    docstring = """Do it.

    go(now)

Then it is done.

first: what comes
    first
second, third: what follows
"""
    assert list(converted(docstring.split("\n"))) == [
        "Do it.", "", ".. code-block:: python", "", "    go(now)", "", "Then it is done.", "",
        "* **first**: what comes", "  first", "* **second, third**: what follows", "",
    ]  # fmt: skip


def test_the_help_of_a_command_keeps_its_dashes_and_angle_brackets_as_markdown():
    converted = load(DOCS / "extensions" / "docstrings.py").help_as_markdown
    assert converted("see --list;\nOUT/<set>, a|b") == "see `--list`; OUT/\\<set>, a\\|b"
    assert converted("one\nline\n\nanother") == "one line\n\nanother"


def test_broken_links_of_a_built_site_are_found(tmp_path):
    check = load(DOCS / "check_links.py").broken_links
    (tmp_path / "a.html").write_text('<a href="b.html#there">x</a><a href="https://else.where/x">y</a>')
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1><img src="a.html">')
    assert check(tmp_path) == []
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1><img src="gone.png">')
    assert sorted(check(tmp_path)) == ["a.html: b.html#there", "b.html: gone.png"]
