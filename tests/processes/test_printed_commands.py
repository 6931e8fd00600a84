"""Each command and each block of code in the documents is run, or a test or a reason is named.

- AS_PRINTED names the tests that read a page and run its code or commands themselves.
- Every other command is parsed by its program's own parser, and the keys, presets, studies and node
  configs in it by their readers (`test_printed_blocks_are_valid`).
- Our commands, and Python code, are run in the order of their page (`test_a_page_works`), shortened
  by SHORT. ELSEWHERE names the tests that run such a command with other settings instead, and
  NOT_HERE gives the reason why no test does.
"""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import BertConfig, BertForSequenceClassification

from ravan_flwr.cli import EXAMPLES, main
from tests import ROOT
from tests.own_models import make_bert
from tests.support.parsing import CHECKS, READERS
from tests.support.printed import BLOCKS, PAGES, commands, text_of
from tests.support.tiny import save_speaker

pytestmark = [  # `datasets` does not close the CSV files that it has read
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

# The keys are patterns of "PAGE LANGUAGE: CODE", where the code of a shell is one command.
OWN_TASK = "processes/test_your_own_task.py::test_every_command_of_the_page_works_in_its_order"
LIBRARY, EXTENDING = "unit/strategies/test_library_page.py::", "processes/test_extending.py::"
AS_PRINTED = {
    r"troubleshooting\.md bash": "unit/test_troubleshooting.py::"
    "test_a_mistake_prints_the_error_on_the_page",
    r"your-own-task\.md (bash|python)": OWN_TASK,
    r"deploy\.md bash: .*(keys ~/keys|supernode (register|list))": "processes/"
    "test_deploy_files.py::test_the_script_enrols_each_device_once_with_a_key_of_its_own",
    r"deploy\.md bash: .*git archive": "processes/test_deploy_files.py::"
    "test_the_script_installs_each_device_with_its_number",
    r"operating\.md bash": "processes/test_deploy_files.py::"
    "test_the_script_of_the_collector_counts_nodes_and_failed_runs",
    r"deploy\.md (bash|python)": "flower/test_five_machines.py::"
    "test_every_command_of_the_page_works_in_its_order",
    r"notebook\.md python": "processes/test_examples.py::test_the_notebook_runs_and_",
    r"architecture\.md python": "unit/test_layers.py::"
    "test_the_page_has_the_current_picture_and_code",
    r"extending\.md .*(lora-xs|LoRA-XS)": f"{EXTENDING}test_the_pages_method_is_a_file_and_a_row",
    r"extending\.md .*(Audio|TaskInfo)": f"{EXTENDING}test_the_pages_task_is_a_file_and_a_row",
    r"extending\.md .*ClippedMeans": "unit/methods/test_tensors.py::"
    "test_the_pages_aggregation_clips_the_change_of_each_client",
    r"extending\.md .*releases import": "unit/server/test_releases.py::"
    "test_the_release_of_the_documentation_works",
    r"library\.md python.*(Server|Client)App\(": f"{LIBRARY}"
    "test_the_server_and_the_client_of_the_page_work_together",
    r"library\.md python.*lru_cache": f"{LIBRARY}"
    "test_the_pages_model_is_loaded_once_and_its_head_is_sent",
    r"library\.md python.*federated\(make": f"{LIBRARY}"
    "test_the_pages_training_loop_answers_a_message_with_a_trained_adapter",
}
ELSEWHERE = {
    r"predict RUN --data photos": OWN_TASK,
    r"examples/compare_methods": "processes/test_examples.py::"
    "test_the_comparison_of_methods_writes_its_files",
    r"doctor |flower-.* --(host|runtime|root)|flwr (supernode|run \. edge)": "networks/"
    "test_networks.py::test_a_run_set_up_by_the_page_uses_all_devices",
    r"bash install\.sh": "processes/test_deploy_files.py::"
    "test_the_script_upgrades_the_named_devices_and_keeps_the_old_installation",
    r"secure-keys=": "flower/test_secure.py::test_both_rounds_close_with_the_remaining_clients",
    r"flower-supernode \.\.\.": "flower/test_deployment.py::test_only_registered_nodes_connect",
    r"flwr run examples/own_": "flower/test_own_app.py::test_the_example_learns_in_a_simulation",
    r"flwr run \. |--engine flower": "flower/test_flower.py::"
    "test_every_method_runs_in_flowers_runtime",
    r"ravan-flwr deliver": "unit/launch/test_delivering.py::"
    "test_it_submits_the_settings_of_the_run_without_new_rounds",
    r"simulate preset=(glue|fashion|packages|wordnet|general|finance)": "runs/test_presets.py::"
    "test_a_preset_runs_from_yaml_to_metric",
    r"plan preset=(glue|general)": "runs/test_plan.py::"
    "test_a_plan_of_a_preset_sends_no_request_to_the_hub",
}
NOT_HERE = {
    r": (git|pip|hf|sudo|docker|jupyter) ": "needs a connection, a container, or a browser",
    r": (ssh|scp|ssh-keygen|useradd|systemctl|journalctl|nginx|sqlite3) ": "changes the machine; "
    "tests/networks types those of docs/deploy.md on hosts of its own",
    r": (cat|cp|install|ln|mkdir|mv|rm|sha256sum|touch|unzip) ": "is a tool of the system",
    r": (make|python3?|pytest) ": "takes minutes; the recipe or module and its options are checked",
    r"study (conf/studies|FILE)": "takes hours; tests/runs/test_study.py reads these files",
    r"data=/path/to": "needs a large data set",
}
RULES = {"as printed": AS_PRINTED, "elsewhere": ELSEWHERE, "not here": NOT_HERE}
# Settings that replace a command's own, so that its run takes a second; `tune` only plans its runs.
SHORT = {"num-rounds": "1", "local-steps": "1", "tracking": "none"}


def rule_for(block, code):
    """Return the name of the first of RULES with a pattern of this code; "" if there is none."""
    subject = f"{block.page} {block.language}: {code} "
    for name, rules in RULES.items():
        if any(re.search(pattern, subject, re.DOTALL) for pattern in rules):
            return name
    return ""


def problem_of(check, *arguments):
    """Return the error of a check as text; "" if there is none."""
    try:
        check(*arguments)
    except SystemExit:
        return "the program's parser refuses it, as is printed above"
    except Exception as error:  # noqa: BLE001 (whatever it is, the test reports it)
        return repr(error)
    return ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning:typer")
def test_printed_blocks_are_valid(tmp_path):
    problems = {}
    for block in BLOCKS:
        for place, words in commands(block):
            rule = rule_for(block, " ".join(words))
            if not rule and words[0] != "ravan-flwr":
                problems[place] = (
                    "no test runs this program; name one in ELSEWHERE of tests/processes/"
                    "test_printed_commands.py, or the reason in NOT_HERE"
                )
            elif rule != "as printed" and words[0] in CHECKS:
                problems[place] = problem_of(CHECKS[words[0]], words)
        if block.language in READERS:
            if rule_for(block, block.text) != "as printed":
                problems[block.place] = problem_of(READERS[block.language], block.text, tmp_path)
        elif block.language not in ("", "bash", "sh", "text", "bibtex", "diff"):
            problems[block.place] = f"no test reads {block.language}; add a reader to READERS"
    found = [f"{place}: {problem}" for place, problem in problems.items() if problem]
    assert not found, "\n".join(found)
    # There are no other blocks.
    assert sum(page.read_text(encoding="utf-8").count("```") for page in PAGES) == 2 * len(BLOCKS)


# What replaces a word in capitals that a parser refuses.
NAMES = {"COMMAND": "plan", "NAME": "fedit", "RUN_ID": "1", "NODE_ID": "1"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:typer")
def test_commands_in_sentences_are_valid():
    problems = {}
    for page in PAGES:
        if page.name in ("CHANGELOG.md", "troubleshooting.md"):
            continue  # they name earlier commands and mistakes
        for span in re.findall(r"`([^`\n]+)`", text_of(page)):
            words = shlex.split(span) if span.split()[0] in CHECKS and "..." not in span else []
            words = [
                re.sub("[A-Z_]+$", lambda found: NAMES.get(found[0], found[0]), x) for x in words
            ]
            if words[:1] == ["ravan-flwr"] and len(words) == 2:
                assert words[1] in (*EXAMPLES, "--help"), f"{page.name}: {span}"
            elif len(words) > 2 or (len(words) == 2 and words[0] == "make"):
                problems[f"{page.name}: {span}"] = problem_of(CHECKS[words[0]], words)
    found = [f"{place}: {problem}" for place, problem in problems.items() if problem]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_each_rule_is_used_and_its_test_exists(rules):
    subjects = [f"{block.page} {block.language}: {block.text} " for block in BLOCKS]
    for block in BLOCKS:
        for _, words in commands(block):
            subjects.append(f"{block.page} {block.language}: {' '.join(words)} ")
    for pattern, test in rules.items():
        assert any(re.search(pattern, subject, re.DOTALL) for subject in subjects), pattern
        if rules is not NOT_HERE:
            file, _, name = test.partition("::")
            source = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert f"\ndef {name}" in source, test
            if rules is AS_PRINTED:  # then the test reads the page
                assert pattern.partition("\\")[0] + ".md" in source, test


# Running.


DIGITS_RUNS = ("20261121-090000-digits-vit-ravan-seed0", "1-hetlora-seed0", "FIRST", "SECOND")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a folder with a model, texts, a preset for them, and runs of it and of the digits."""
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
            main(shortened(["ravan-flwr", "simulate", f"preset={preset}", f"output-dir={name}"]))
        next(path.glob("mine/*")).rename("RUN")
        for name in DIGITS_RUNS:
            shutil.copytree(next(path.glob("digits/*")), path / "runs" / name)
    return path


def prepare(page: str, names: dict[str, Any]) -> None:
    """Make what a page expects beside the prepared folder, which is the working directory."""
    texts = [block.text for block in BLOCKS if block.page == page]
    for text in texts:
        if "\ntables:" not in text:
            continue
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
        (line,) = (text for text in texts if text.startswith('{"messages"'))
        Path("chat").mkdir()
        for name in ("chat/train.jsonl", "more.jsonl", "questions.jsonl"):
            Path(name).write_text(line * 40)


def shortened(words: list[str]) -> list[str]:
    """Return the arguments of a command that takes seconds and stays in the working directory."""
    if words[1] == "tune":
        return [*(word for word in words[1:] if word != "--dry-run"), "--dry-run"]
    if words[1] == "simulate":
        resumes = any(word.startswith("resume=") for word in words)
        settings = {"num-rounds": "2"} if resumes else SHORT
        words = [word for word in words if word.partition("=")[0] not in settings]
        words += [f"{key}={value}" for key, value in settings.items()]
    return [re.sub("^/|(?<==)/", "", word) for word in words[1:]]


def steps(page):
    """Return the place and the words, or the code, of all that runs here, in the page's order."""
    found: list[tuple[str, Any]] = []
    for block in BLOCKS:
        if block.page != page:
            continue
        for place, words in commands(block):
            if words[0] == "ravan-flwr" and not rule_for(block, " ".join(words)):
                found.append((place, words))
        if block.language == "python" and not rule_for(block, block.text):
            found.append((block.place, block.text))
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
        if isinstance(step, str):
            exec(compile(step, place, "exec"), names)
            continue
        words = [
            x for word in shortened(step) for x in sorted(map(str, Path().glob(word))) or [word]
        ]
        shutil.rmtree("DIR", ignore_errors=True)  # several commands make it
        problem = problem_of(main, words)
        assert not problem or words == ["--version"], f"{place}: {problem}: {capsys.readouterr()}"
        if words[0] == "simulate":  # RUN is the last one from here on
            *_, last = sorted(Path("runs").glob("2*"), key=os.path.getmtime)
            for name in ("RUN", "runs/RUN"):
                shutil.rmtree(name, ignore_errors=True)
                shutil.copytree(last, name)
