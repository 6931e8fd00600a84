"""Documents refer to existing links, headings, pictures, files, and tests."""

import re
import tomllib

import pytest

import ravan_flwr
from ravan_flwr import strategies
from scripts import check_words
from tests import ROOT
from tests.support.printed import PAGES, text_of

FOLDERS = ("docs", "benchmarks/results")
LINK = re.compile(
    r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)|(?:href|src)=\"([^\"]+)\"|^\[[^]]+\]: (\S+)", re.M
)


def headings(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def links(page):
    """Yield the targets of a page's links in this repository: path and anchor."""
    for target in map("".join, LINK.findall(text_of(page))):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page):
    for path, anchor in links(page):
        assert path.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in headings(path), f"{page.name} links to {path}#{anchor}"


@pytest.mark.parametrize(
    "link", ["[x](other.md#no-heading)", "![x](none.png)", '<a href="none.md">', "[x]: none.md"]
)
def test_a_link_without_a_target_is_found(link, tmp_path):
    (tmp_path / "other.md").write_text("# One heading\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text("# Page\n[x](#page) [x](other.md#one-heading) [x](https://host/none.md)\n")
    test_links_have_targets(page)
    page.write_text(f"{page.read_text()}{link}\n")
    with pytest.raises(AssertionError, match="page.md links to"):
        test_links_have_targets(page)


NAMING = ("ravan_flwr", "scripts", "benchmarks", "deploy", "conf", "examples")


def test_pages_named_in_code_exist():
    files = [path for folder in NAMING for path in ROOT.glob(f"{folder}/**/*") if path.is_file()]
    files += [ROOT / name for name in ("Makefile", "Dockerfile", "pyproject.toml", "mkdocs.yml")]
    kinds = (".py", ".yaml", ".toml", ".yml", ".service", ".conf", ".example", "")
    named = {
        (page, path.name)
        for path in files if path.suffix in kinds
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
    }  # fmt: skip
    assert len(named) > 20
    assert not {(page, name) for page, name in named if not (ROOT / page).is_file()}


def test_every_page_and_picture_is_linked():
    linked = {path for page in PAGES for path, _ in links(page)}
    kinds = ("md", "png", "svg")
    found = {path for x in FOLDERS for kind in kinds for path in ROOT.glob(f"{x}/**/*.{kind}")}
    assert not found - linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_named_in_documents_exist(page):
    tests = list(ROOT.glob("tests/**/*.py"))
    functions = "".join(path.read_text(encoding="utf-8") for path in tests)
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"\btest_\w+\.py\b", text):
        assert name in {path.name for path in tests}, f"{page.name} names {name}"
    written = {f"conf/{name}.yaml" for name in re.findall(r"ravan-flwr new (\w+)", text)}
    written.add("conf/mine.yaml")
    for path in re.findall(r"\b(?:tests|scripts|benchmarks|conf)/[\w/-]+\.\w+\b", text):
        assert path in written or (ROOT / path).is_file(), f"{page.name} names {path}"
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in functions, f"{page.name} names {name}"


@pytest.mark.parametrize(
    ("place", "statement"),
    [
        ("docs/methods.md", "Fed-SB's own code trains no such round"),
        ("docs/methods.md", "squared, as implementations have it"),
        ("docs/methods.md", "The public code's default is lambda = 1.5"),
        ("docs/methods.md", "There is no LoRA dropout"),
        ("docs/methods.md", "weights by examples"),
        ("docs/paper.md", '"Total Epochs (per round) 1"'),
        ("ravan_flwr/methods/fed_sb.py", "-eta sign(sum of"),
        ("ravan_flwr/methods/lora_fair.py", "squared as implementations have it"),
        ("ravan_flwr/methods/fedrot_lora.py", "reflections included"),
    ],
)
def test_deviations_from_a_methods_source_are_documented(place, statement):
    assert statement in (ROOT / place).read_text()


def test_the_page_of_the_interface_names_all_public_names():
    page = (ROOT / "docs" / "api.md").read_text()
    for package in (ravan_flwr, strategies):
        (row,) = re.findall(rf"^\| `{package.__name__}` \|(.*)", page, re.MULTILINE)
        assert sorted(re.findall("`(.*?)`", row)) == sorted(package.__all__)


def test_documents_and_comments_use_the_fields_words():
    assert not check_words.wrong()


def test_words_to_replace_are_found(tmp_path):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("RAVAN is ahead.\n\n```\nIt is behind.\n```\nA `room` and a roster.\n")
    made = "<!-- study -->\n| classifier only | 1 |\n<!-- end of study -->\n"
    (tmp_path / "docs" / "tables.md").write_text(made)
    (tmp_path / "ravan_flwr").mkdir()
    code = 'told = "nobody"\ndef f():\n    """Rooms.\n\n    Tell whom.\n    """  # it goes on'
    (tmp_path / "ravan_flwr" / "module.py").write_text(code)
    found = check_words.wrong(tmp_path)
    assert [line.split(", write")[0] for line in found] == [
        "docs/page.md:1: 'is ahead'",
        "docs/page.md:6: 'roster'",
        "docs/tables.md:2: 'classifier only'",
        "ravan_flwr/module.py:5: 'whom'",
        "ravan_flwr/module.py:5: 'Tell'",
        "ravan_flwr/module.py:6: 'goes on'",
    ]


def test_the_badges_are_those_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges = re.findall(r"<text[^>]*>(.*?)</text>", (ROOT / "docs" / "badges.svg").read_text())
    shown = dict(zip(badges[::2], badges[1::2], strict=True))
    assert shown["Python"] == project["requires-python"].removeprefix(">=") + "+"
    (flower,) = (name for name in project["dependencies"] if name.startswith("flwr["))
    (oldest, below) = re.findall(r"1\.(\d+)", flower)
    assert shown["Flower"] == f"1.{oldest} to 1.{int(below) - 1}"
    assert f"license: {shown['license']}\n" in (ROOT / "CITATION.cff").read_text()
