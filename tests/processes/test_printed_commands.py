"""Each command and each block of code in the documents is run, or a test or a reason is named.

Bash reads the blocks of commands. In place of each program it records the program's words, so that
loops, comments and quotation marks mean what they mean in a shell, and nothing is started. Then

- each command is parsed by its program's own parser, and the keys, presets, studies and node
  configs in it by their readers (`test_printed_blocks_are_valid`);
- our commands and Python code are run in the order of their page (`test_a_page_works`), shortened
  by SHORT, unless a line of ELSEWHERE names the test that runs them, or of NOT_HERE the reason.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from glob import glob
from typing import Any

import pytest
import typer
import yaml
from flwr.common.config import fuse_dicts, parse_config_args
from flwr.supercore.utils import simulation_config_from_json
from transformers import BertConfig, BertForSequenceClassification

from ravan_flwr.cli import _parser, main
from ravan_flwr.config.keys import read_settings
from ravan_flwr.config.node_config import read_node
from ravan_flwr.config.preset import Preset
from ravan_flwr.config.presets import preset_names
from ravan_flwr.config.run_config import read_config
from ravan_flwr.lab.spec import read_study
from ravan_flwr.simulated_time.devices import read_devices
from tests import ROOT
from tests.own_models import make_bert
from tests.processes.test_deploy_files import PARSERS
from tests.support.tiny import save_speaker

# `datasets` does not close the CSV files that it has read.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

PLACES = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md", "tests/*.md")
PAGES = sorted({page for place in PLACES for page in ROOT.glob(place)})

# Patterns of "PAGE LANGUAGE: COMMAND OR CODE", and the test that runs it. The first one counts.
ELSEWHERE = {
    r"troubleshooting\.md bash:": "unit/test_troubleshooting.py::"
    "test_a_mistake_prints_the_error_on_the_page",
    r"your-own-task\.md (bash|python):|predict RUN --data photos": "processes/"
    "test_your_own_task.py::test_every_command_of_the_page_works_in_its_order",
    r"notebook\.md python:": "processes/test_examples.py::"
    "test_the_notebook_runs_and_draws_its_pictures",
    r"architecture\.md python:": "unit/test_layers.py::test_the_page_has_the_current_picture_and_code",
    r'extending\.md python: ("""LoRA-XS| *"lora-xs")|method=lora-xs': "processes/"
    "test_extending.py::test_the_pages_method_is_a_file_and_a_row",
    r'extending\.md python: ("""Classify spec| *"audio")': "processes/test_extending.py::"
    "test_the_pages_task_is_a_file_and_a_row",
    r'extending\.md python: """FFA-LoRA': "unit/methods/test_tensors.py::"
    "test_the_pages_aggregation_clips_the_change_of_each_client",
    r"extending\.md python: from ravan_flwr\.server": "unit/server/test_releases.py::"
    "test_the_release_of_the_documentation_works",
    r"library\.md python:.*(ServerApp|ClientApp)\(": "unit/strategies/test_library_page.py::"
    "test_the_server_and_the_client_of_the_page_work_together",
    r"library\.md python:.*lru_cache": "unit/strategies/test_library_page.py::"
    "test_the_pages_model_is_loaded_once_quietly_and_its_head_is_sent",
    r"library\.md python:.*= federated\(": "unit/strategies/test_library_page.py::"
    "test_the_pages_training_loop_answers_a_message_with_a_trained_adapter",
    r"compare_methods\.py": "processes/test_examples.py::"
    "test_the_comparison_of_methods_writes_its_files",
    r"deploy\.md bash: .*(~/keys|supernode list)": "processes/test_deploy_files.py::"
    "test_the_script_enrols_each_device_once_with_a_key_of_its_own",
    r"deploy\.md (bash|python):": "flower/test_five_machines.py::"
    "test_every_command_of_the_page_works_in_its_order",
    r"(deploy|operating)\.md : (ravan-flwr (keys ~|doctor)|flower-|flwr supernode|flwr run \. "
    r"edge.*'ravan' num-rounds=3 clients-per-round=3 output)": "networks/test_networks.py::"
    "test_a_run_set_up_by_the_page_uses_all_devices",
    r"deliver=true": "flower/test_deployment.py::"
    "test_a_node_that_was_offline_gets_the_result_later",
    r"secure-keys=": "flower/test_secure.py::test_both_rounds_close_with_the_remaining_clients",
    r"flwr run .* resume=": "networks/test_server.py::"
    "test_a_superlink_down_for_90_s_fails_the_run_which_can_be_resumed",
    r"data-path=": "flower/test_deployment.py::test_a_run_survives_the_death_of_a_node",
    r"flwr run examples/own_(app|sft|trainer)": "flower/test_own_app.py::"
    "test_the_example_learns_in_a_simulation",
    r"flwr run \. |--engine flower": "flower/test_flower.py::"
    "test_every_method_runs_in_flowers_runtime",
    r"deliver /var": "unit/launch/test_delivering.py::"
    "test_it_submits_the_settings_of_the_run_without_new_rounds",
    r"simulate preset=(glue|fashion|packages|wordnet|general|finance)": "runs/test_presets.py::"
    "test_a_preset_runs_from_yaml_to_metric",
    r"plan preset=(glue|general)": "runs/test_plan.py::"
    "test_a_plan_of_a_preset_sends_no_request_to_the_hub",
}
AS_PRINTED = ("unit/", "processes/")  # those type what the page prints, mistakes included
# The same with the reason why no test runs it. Commands of ours among them are parsed nevertheless.
NOT_HERE = {
    r": (git|pip|hf|sudo|docker|jupyter) ": "needs a connection, a container, or a browser",
    r": (ssh|scp|ssh-keygen|useradd|systemctl|journalctl|nginx|sqlite3) ": "changes the machine; "
    "tests/networks types the commands of docs/deploy.md on hosts of its own",
    r": (cat|cp|ln|mkdir|mv|rm|sha256sum|touch|unzip) ": "a tool of the system",
    r": (make|python3?|pytest) ": "takes minutes; the target or module and its options are checked",
    r"study (conf/studies|FILE)": "takes hours; the file is read",
    r"data=/path/to": "needs a large data set",
}
# Settings that replace a command's own, so that its run takes a second; `tune` only plans its runs.
SHORT = {"num-rounds": "1", "local-steps": "1", "tracking": "none"}

RECORDER = r"""exec 3>&1 1>&2
PATH=/nowhere
command_not_found_handle() { printf '%s\0' "${BASH_LINENO[0]}" "$#" "$@" >&3; }
cd() { :; }; source() { :; }; ls() { echo RUN; }; id() { echo 1; }; tail() { read -r x; echo "$x"; }
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, or the code spans of the page's text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def is_shell(self) -> bool:
        return self.language in ("", "bash", "sh")

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the place and the words of each command of a shell block."""
        text = RECORDER + re.sub(r"\.venv/bin/(?=\w)", "", self.text)
        done = subprocess.run(
            ["bash"],
            input=text.encode(),
            env={"HOME": "~"},
            capture_output=True,
            cwd=ROOT / "tests",
        )
        assert b"syntax error" not in done.stderr, (
            f"{self.page}:{self.line}: {done.stderr.decode()}"
        )
        fields = iter(done.stdout.decode().split("\0")[:-1])
        for number in fields:
            words = [next(fields) for _ in range(int(next(fields)))]
            line = self.line + int(number) - RECORDER.count("\n")
            yield f"{self.page}:{line}: {' '.join(words)}", words

    def rule(self, code: str) -> tuple[str, str]:
        """Return the test elsewhere that runs the code, and else the reason why none does."""
        subject = f"{self.page} {self.language}: {code}"
        for rules, result in ((ELSEWHERE, (1, 0)), (NOT_HERE, (0, 1))):
            for pattern, value in rules.items():
                if re.search(pattern, subject, re.DOTALL):
                    return value * result[0], value * result[1]
        return "", ""


def read_blocks() -> list[Block]:
    blocks = []
    for page in PAGES:
        name, text = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
        for found in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
            code = re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE)
            blocks.append(Block(name, text.count("\n", 0, found.start()) + 2, found[2], code))
    return blocks


BLOCKS = read_blocks()


# Parsing.


def check_settings(settings: dict[str, Any]) -> None:
    """Read settings, without files that only a reader's machine has."""
    files = ("model", "data", "resume")
    known = {key: value for key, value in settings.items() if key not in files}
    if known.get("preset", "digits-vit") not in preset_names():
        assert re.search(r"[./]|^mine$", known.pop("preset")), "expected a preset of conf/"
    read_config(known)


def check_ours(words: list[str]) -> None:
    if words[1:] in (["--version"], ["--help"]):
        return
    parsed, unknown = _parser().parse_known_args(words[1:])
    assert not [word for word in unknown if word.startswith("-")]
    if "settings" in parsed:
        settings, _ = read_settings([*parsed.settings, *unknown])
        if "file" not in parsed:
            check_settings(settings)
        elif (ROOT / parsed.file).is_file():
            read_study(ROOT / parsed.file, settings)
    if config := getattr(parsed, "node_config", None):
        read_node(parse_config_args([config]))


def check_flwr(words: list[str]) -> None:
    """Parse by Flower's own command line; compare the settings with the app's defaults."""
    from flwr.cli.app import app as cli  # importing it prints warnings

    command = typer.main.get_command(cli)
    context = command.make_context("flwr", words[1:])
    while isinstance(command, typer.core.TyperGroup):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    if "run_config_overrides" not in context.params:
        return
    folder = ROOT / str(context.params["app"]).removeprefix("/app")
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    settings = parse_config_args(context.params["run_config_overrides"])
    fuse_dicts(project["tool"]["flwr"]["app"]["config"], settings)
    if folder == ROOT:
        check_settings(settings)
    federation = parse_config_args(context.params["federation_config_overrides"])
    simulation_config_from_json({key.replace("-", "_"): x for key, x in federation.items()})


def check_flower(words: list[str]) -> None:
    parsed = PARSERS[words[0]]().parse_args([word for word in words[1:] if word != "..."])
    if config := getattr(parsed, "node_config", None):
        read_node(parse_config_args([config]))


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words[1] in targets, f"Makefile has no target {words[1]!r}"


def check_python(words: list[str]) -> None:
    """Find the module or file, and the options in its text; find the files of pytest."""
    words = ["python", "-m", *words] if words[0] == "pytest" else words
    first, *rest = words[2:] if words[1] == "-m" else words[1:]
    if first == "-c":
        ast.parse(rest[0])
    elif first == "pytest":
        assert all((ROOT / word).exists() for word in rest if word.startswith("tests"))
    elif first not in ("venv", "zipfile", "eval.py", "main.py"):  # Python's, and FlowerTune's
        name = first.removeprefix("/opt/ravan-flwr/")
        name = name.replace(".", "/") + ".py" if words[1] == "-m" else name
        source = (ROOT / name).read_text(encoding="utf-8")
        for word in rest:
            assert word[:2] != "--" or f'"{word}"' in source, f"{name} has no option {word}"


def check_pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys(), extras


CHECKS = {
    "ravan-flwr": check_ours, "flwr": check_flwr, **dict.fromkeys(PARSERS, check_flower),
    "make": check_make, "python": check_python, "python3": check_python, "pytest": check_python,
    "pip": check_pip,
}  # fmt: skip


def check_yaml(text: str, folder: Path) -> None:
    """Read a study, devices, or a preset, of which a page may print only a part."""
    content, path = yaml.safe_load(text), folder / "printed.yaml"
    path.write_text(text)
    if isinstance(content, list):
        read_devices(path, 4)
    elif "tables" in content:
        read_study(path)
    else:
        whole: dict[str, Any] = {"task": "text", "model": {"name": "m"}, "data": "d"}
        if "completion" in str(content.get("data")):
            whole["task"] = "causal"
        Preset.read(path, whole | content)


READERS = {
    "python": lambda text, folder: ast.parse(textwrap.dedent(text)), "yaml": check_yaml,
    "toml": lambda text, folder: tomllib.loads(text),
    "json": lambda text, folder: [json.loads(part) for part in re.split(r"\n(?={)", text)],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning:typer")
def test_printed_blocks_are_valid(tmp_path, capsys):
    problems = []
    for block in BLOCKS:
        steps: list[tuple[str, Any, Any]] = []
        if block.is_shell:
            for place, words in block.commands():
                test, reason = block.rule(" ".join(words) + " ")
                if not (words[0] == "ravan-flwr" or test or reason):
                    problems.append(
                        f"{place}: no test runs this program; name one in ELSEWHERE, or a reason in "
                        f"NOT_HERE of {Path(__file__).name}"
                    )
                elif words[0] in CHECKS and not test.startswith(AS_PRINTED):
                    steps.append((place, CHECKS[words[0]], [words]))
        elif block.language in READERS:
            if not block.rule(block.text)[0].startswith(AS_PRINTED):
                place = f"{block.page}:{block.line}"
                steps.append((place, READERS[block.language], [block.text, tmp_path]))
        else:
            assert block.language in ("text", "bibtex", "diff"), f"{block.page}:{block.line}"
        for place, check, arguments in steps:
            try:
                check(*arguments)
            except (Exception, SystemExit) as error:
                problems.append(f"{place}: {error!r} {capsys.readouterr().err}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("test", ELSEWHERE.values())
def test_the_tests_named_here_exist(test):
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE)


@pytest.mark.parametrize("rules", [ELSEWHERE, NOT_HERE])
def test_each_rule_is_used(rules):
    subjects = [f"{block.page} {block.language}: {block.text}" for block in BLOCKS]
    subjects += [
        f"{block.page} {block.language}: {' '.join(words)} "
        for block in BLOCKS if block.is_shell for _, words in block.commands()
    ]  # fmt: skip
    for pattern in rules:
        assert any(re.search(pattern, x, re.DOTALL) for x in subjects), f"{pattern} matches nothing"


# Running.


DIGITS_RUNS = ("20261121-090000-digits-vit-ravan-seed0", "1-hetlora-seed0", "FIRST", "SECOND")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a folder with a model, texts, a preset for them, a run of it and runs of the digits."""
    path = tmp_path_factory.mktemp("printed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        make_bert(path / "model")
        (path / "FOLDER").mkdir()
        rows = "".join(f"text {n},{'ab'[n % 2]},{n % 3}\n" for n in range(60))
        for name in ("FOLDER/train.csv", "new.csv"):
            (path / name).write_text(f"text,label,user\n{rows}")
        main(["new", "mine", "--data", "FOLDER", "--model", "model"])
        shutil.copy("conf/mine.yaml", "mine.yaml")
        for name, preset in (("mine", "conf/mine.yaml"), ("digits", "digits-vit")):
            main(
                shortened(["ravan-flwr", "simulate", f"preset={preset}", f"output-dir={name}"])[1:]
            )
        next(path.glob("mine/*")).rename("RUN")
        for name in DIGITS_RUNS:
            shutil.copytree(next(path.glob("digits/*")), path / "runs" / name)
    return path


def prepare(page: str, names: dict[str, Any]) -> None:
    """Make what a page expects beside the prepared folder, which is the working directory."""
    studies = [block.text for block in BLOCKS if block.page == page and "\ntables:" in block.text]
    for text in studies:
        study = yaml.safe_load(text)
        study["settings"] |= {"num-rounds": 1, "local-steps": 1, "eval-every": 1}
        rates = study["choose"]["learning-rate"][:2]
        study |= {"seeds": [0], "choose": {"learning-rate": rates, "seeds": [100], "extensions": 0}}
        Path("my-study.yaml").write_text(yaml.safe_dump(study))
    if page == "README.md":
        names["model"] = BertForSequenceClassification(BertConfig(num_hidden_layers=1))
    if page == "docs/language-models.md":
        shutil.rmtree("model")
        save_speaker("llama", Path("model"))
        (line,) = (x.text for x in BLOCKS if x.page == page and '{"messages"' in x.text)
        Path("chat").mkdir()
        for name in ("chat/train.jsonl", "more.jsonl", "questions.jsonl"):
            Path(name).write_text(line * 40)


def shortened(words: list[str]) -> list[str]:
    """Return a command that takes seconds: SHORT in place of its settings."""
    if words[1] == "tune" and "--dry-run" not in words:
        return [*words, "--dry-run"]
    if words[1] != "simulate":
        return words
    keys = [key for key in SHORT if not (key == "local-steps" and "resume=" in " ".join(words))]
    kept = [word for word in words if word.partition("=")[0] not in keys]
    rounds = {"num-rounds": "2"} if "local-steps" not in keys else {}
    return kept + [f"{key}={(SHORT | rounds)[key]}" for key in keys]


def steps(page: str) -> list[tuple[str, Any]]:
    """Return the place and the words, or the code, of all that runs here, in the page's order."""
    found: list[tuple[str, Any]] = []
    for block in BLOCKS:
        if block.page != page:
            continue
        if block.is_shell:
            ours = [step for step in block.commands() if step[1][0] == "ravan-flwr"]
            found += [step for step in ours if not any(block.rule(" ".join(step[1]) + " "))]
        elif block.language == "python" and not any(block.rule(block.text)):
            found.append((f"{page}:{block.line}", block.text))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("untimed", "without_charts")
@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if steps(block.page)}))
def test_a_page_works(page, prepared, tmp_path, monkeypatch, capsys, python):
    folder = tmp_path / "page"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "executable", python.executable)
    names: dict[str, Any] = {"__name__": "page"}
    prepare(page, names)
    for place, step in steps(page):
        try:
            if isinstance(step, str):
                exec(compile(step, place, "exec"), names)
                continue
            words = [x for word in shortened(step) for x in sorted(glob(word)) or [word]]
            sys.stdout.write(f"{words}\n")
            shutil.rmtree("DIR", ignore_errors=True)  # three commands in turn make it
            main(words[1:])
        except SystemExit as end:
            assert not end.code, f"{place}: {capsys.readouterr().err}"
        if step[1] == "simulate":  # which RUN means from here on
            last = max(Path("runs").glob("2*"), key=os.path.getmtime)
            for name in ("RUN", "runs/RUN"):
                shutil.rmtree(name, ignore_errors=True)
                shutil.copytree(last, name)
