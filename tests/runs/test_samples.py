"""What a model writes at each evaluation: in a file, in the report, on the live page."""

import json
import shutil
import threading
from typing import Any

import pytest

from ravan_flwr import predict, simulate
from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import read_config
from ravan_flwr.reports.dashboard import LivePage, make_server
from ravan_flwr.reports.report import write_report
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.samples import MOST, SAMPLES, first_and_last, samples_file
from ravan_flwr.specs import Scalar
from testing.tiny import save_data, save_model
from tests.browser import CHROMIUM, Browser
from tests.docstrings import as_completion, as_messages, docstrings, lines, preset
from tests.hostile_texts import HOSTILE

in_a_browser = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")


def written(run):
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A run on prompts and completions, among its test examples hostile ones and a long one."""
    folder = tmp_path_factory.mktemp("spoken")
    settings = preset(folder, **{"evaluate-samples": 9, "report": True})
    hostile = [as_completion(text, text) for text in HOSTILE if "\ud800" not in text]
    rows = [*hostile, as_completion("long", "so " * 2000)]
    (folder / "data" / "test.jsonl").write_text(lines([*rows, {"prompt": "x", "completion": ""}]))
    return simulate(settings, 2), settings, folder


def test_the_same_examples_are_answered_before_training_and_after_each_evaluation(spoken, tmp_path):
    run, settings, folder = spoken
    told = written(run.run_dir)
    assert [(line["round"], line["example"]) for line in told] == [
        (number, example) for number in (0, 1, 2) for example in range(8)
    ]
    by_round = [told[:8], told[8:16], told[16:]]
    asked = [[(line["instruction"], line["expected"]) for line in lines] for lines in by_round]
    assert asked[0] == asked[1] == asked[2]
    test = [json.loads(line) for line in (folder / "data" / "test.jsonl").read_text().splitlines()][
        :-1
    ]
    assert {one for one, _ in asked[0]} == {row["prompt"] for row in test}
    assert max(len(line["expected"]) for line in told) == MOST
    answered = [[line["answer"] for line in lines] for lines in by_round]
    assert answered[0] != answered[2]  # a person sees the model change
    questions = tmp_path / "q.jsonl"
    questions.write_text(lines({"prompt": line["instruction"]} for line in by_round[2]))
    predict(run.run_dir, questions, tmp_path / "a.jsonl")
    answers = [json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert answered[2] == answers
    assert read_config(own_preset(settings)).evaluate_samples == 9


@pytest.mark.usefixtures("undrawn")
def test_the_report_shows_them_and_runs_nothing(spoken, tmp_path):
    run, *_ = spoken
    page = (run.run_dir / "report" / "index.html").read_text()
    assert "What the model writes" in page
    assert "before training" in page
    assert "after round 2" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "<img" not in page
    bare = shutil.copytree(run.run_dir, tmp_path / "bare")
    (bare / "samples.jsonl").unlink()
    assert "What the model writes" not in write_report([bare], tmp_path / "r").read_text()
    for text in ("{}\n", "[1]\n", '{"round": 1.5}\n', "x\n"):
        (bare / "samples.jsonl").write_text(text)
        with pytest.raises(ValueError, match=r"samples.jsonl: line 1 is damaged .*take it away"):
            write_report([bare], tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()  # it is told before anything is drawn
    (bare / "samples.jsonl").write_text(json.dumps(written(run.run_dir)[0]))  # cut off
    write_report([bare], tmp_path / "r")


def test_a_run_that_goes_back_writes_its_rounds_again(spoken, tmp_path):
    run, settings, _ = spoken
    copy = shutil.copytree(run.run_dir, tmp_path / "copy")
    before = written(copy)
    again = settings | {"evaluate-samples": 2, "num-rounds": 2, "resume": f"{copy}@1"}
    simulate(again | {"report": False}, 2)
    after = written(copy)
    assert after == before + before[16:18]  # the later lines count, and are the same here
    lines = samples_file(copy).read()
    shown = first_and_last(lines, RunDirectory(copy).read_rounds()[:1])  # a line that lies ahead
    assert [when for when, _ in shown[0]["rows"][1:]] == ["before training", "after round 1"]


def test_the_live_page_shows_the_last_answers(spoken):
    run, *_ = spoken
    page = LivePage(run.run_dir).get().decode()
    assert "perplexity, lowest" in page
    assert "What the model writes" in page
    assert "after round 2" in page
    assert "after round 1<" not in page
    assert page.count("<script>") == 1


def test_answers_are_read_as_they_come(spoken, tmp_path):
    whole = (spoken[0].run_dir / SAMPLES).read_bytes().splitlines(keepends=True)
    file, path = samples_file(tmp_path), tmp_path / SAMPLES
    assert file.read() == []
    path.write_bytes(b"".join(whole[:9]) + whole[9][:7])  # one is still being written
    assert len(file.read()) == 9
    with path.open("ab") as more:
        more.write(whole[9][7:] + whole[10])
    assert file.read() == [json.loads(line) for line in whole[:11]]
    RunDirectory(tmp_path).write(SAMPLES, whole[0].decode())  # the run has gone back
    assert file.read() == [json.loads(whole[0])]


@in_a_browser
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desk"])
def test_pages_of_a_language_model_are_fit_to_look_at(spoken, width, tmp_path):
    run, *_ = spoken
    with make_server(run.run_dir, 0) as server, Browser() as browser:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        report = (run.run_dir / "report" / "index.html").as_uri()
        for name, address in (
            ("live", f"http://127.0.0.1:{server.server_port}/"), ("report", report),
        ):  # fmt: skip
            browser.complaints.clear()
            browser.look_as(width=width)
            browser.go(address)
            browser.picture(tmp_path / f"{name}-{width}.png")
            assert browser.complaints == []
            assert browser.see("document.documentElement.scrollWidth") == width
            assert browser.see("document.querySelectorAll('.sample').length") == 8
            assert browser.see("document.querySelectorAll('img').length") == 0
            assert browser.see(
                "[...document.querySelectorAll('.sample, .sample p, .sample table')].every("
                "one => one.getBoundingClientRect().right <= innerWidth + 1 && "
                "one.getBoundingClientRect().height < 1400)"
            )
        server.shutdown()


def test_of_many_rounds_the_first_and_the_last_are_shown():
    told = [
        {"round": number, "example": example, "instruction": "i", "expected": "e",
         "answer": f"{number}"}
        for number in range(0, 101, 5) for example in range(30)
    ]  # fmt: skip
    rounds: Any = [{"round": number, "metrics": {"loss": 1.0}} for number in range(1, 101)]
    shown = first_and_last(told, rounds)  # type: ignore[arg-type]
    assert len(shown) == 20
    assert [text for _, text in shown[0]["rows"]] == ["e", "0", "100"]
    assert first_and_last([], rounds) == []


def test_conversations_are_asked_what_was_asked_last(tmp_path):
    settings = preset(tmp_path, as_messages, **{"evaluate-samples": 3, "num-rounds": 1})
    talk = as_messages(*docstrings()[3])["messages"]
    more = [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": "No."},
            {"role": "user", "content": "Thanks."}]  # fmt: skip
    rows = [{"messages": talk + more}, {"messages": talk[:1]}, {"messages": []}]
    (tmp_path / "data" / "test.jsonl").write_text(lines(rows))
    run = simulate(settings | {"init": "data-aware"}, 2)  # whose start is not known before round 1
    (one,) = written(run.run_dir)
    assert (one["round"], one["instruction"], one["expected"]) == (1, "And then?", "No.")


def test_a_text_to_text_model_is_read_as_well(tmp_path):
    settings: dict[str, Scalar] = {
        "preset": "mrqa-t5", "model": str(save_model("t5", tmp_path / "model")),
        "data": str(save_data("mrqa-t5", tmp_path / "data")), "max-length": 24, "lora-rank": 2,
        "num-rounds": 1, "local-steps": 1, "eval-every": 1, "report": False, "tracking": "none",
        "output-dir": str(tmp_path / "runs"), "evaluate-samples": 2,
    }  # fmt: skip
    told = written(simulate(settings, 3).run_dir)
    assert [line["round"] for line in told] == [0, 0, 1, 1]
    assert all(line["instruction"].startswith("question: what is first context: ") for line in told)
    assert all(line["expected"] in line["instruction"] for line in told)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "the task of .*digits-vit.yaml is 'vision', which writes no text, expected one of"),
        ({"preset": "glue-llama"}, "is 'text', which writes no text, expected one of text-to-la"),
        (
            {"preset": "general-nlp", "evaluate-on": "clients", "validation-share": 0.1},
            "got evaluate-on = 'clients', whose texts stay with them, expected 'server'",
        ),
        ({"preset": "code", "method": "local"}, "got evaluate-on = 'clients'"),
        ({"evaluate-samples": 51}, "expected a whole number at least 0 and at most 50"),
    ],
)
def test_who_writes_nothing_has_no_samples(changes, told):
    with pytest.raises(ValueError, match=f"evaluate-samples = .*{told}"):
        read_config({"evaluate-samples": 3} | changes)
