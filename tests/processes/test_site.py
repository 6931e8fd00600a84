"""The site builds offline without a warning, and its pages load nothing from other hosts."""

import os
import re

import pytest

LOADED = r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(.*?)\"|<link\b[^>]*\bhref=\"(.*?)\"[^>]*>"


@pytest.fixture(scope="module")
def site(tmp_path_factory, python):
    folder = tmp_path_factory.mktemp("site")
    command = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = python.run(command, environment=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_pages_load_nothing_from_other_hosts(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for source in re.findall(LOADED, page.read_text(encoding="utf-8")):
            assert "//" not in "".join(source), f"{page.name} loads {source}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:", style.read_text(encoding="utf-8")), style


def test_lists_are_lists(site):
    """Those, too, that follow a paragraph without an empty line between, as GitHub allows."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"^(?:<p>)?(?:-|1\.) .*", text, re.MULTILINE), page.name


def test_the_site_has_the_generated_pages(site):
    """They are the commands' help, the docstrings of public names, and README as the first page."""
    api = (site / "api.html").read_text(encoding="utf-8")
    assert re.findall(r"usage: ravan-flwr ([a-z]+)", api)[:3] == ["simulate", "plan", "new"]
    assert "max-staleness" not in api  # the keys have a page of their own
    for name in ("simulate", "RavanConfig", "RavanStrategy", "collect_arrays"):
        assert re.search(rf"id=\"ravan_flwr\.[\w.]+\.{name}\"", api), name
    assert "make run" in (site / "index.html").read_text(encoding="utf-8")
    assert (site / "files" / "examples" / "peft_script.py").is_file()
