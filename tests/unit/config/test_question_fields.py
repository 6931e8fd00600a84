"""What a preset may say of multiple-choice questions, and what is refused."""

import pytest
import yaml

from ravan_flwr.config.presets import PresetPath, read_preset
from ravan_flwr.config.run_config import read_config, recorded_config


def read(tmp_path, questions, task="causal"):
    data = {"name": "c/d", "questions": questions}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"task": task, "model": "a/b", "data": data}))
    return read_preset(PresetPath(path)).data.questions


def test_what_is_not_said_is_as_mmlu_has_it(tmp_path):
    spec = read(tmp_path, {"name": "cais/mmlu", "subset": "all", "split": "test"})
    assert (spec.name, spec.subset, spec.split, spec.score) == ("cais/mmlu", "all", "test", "sum")
    assert spec.columns == (("answer", "answer"), ("question", "question"))
    assert (spec.choices, spec.always) == (("choices",), ())
    assert spec.prompt == "{question}\n{choices}\nAnswer:"
    assert read(tmp_path, {}).name == ""
    assert read(tmp_path, None) is None


def test_several_columns_and_fixed_choices(tmp_path):
    columns = {"question": "question", "choices": ["opa", "opb"], "answer": "cop"}
    spec = read(tmp_path, {"columns": columns, "score": "characters"})
    assert (spec.choices, dict(spec.columns)["answer"]) == (("opa", "opb"), "cop")
    columns = {"context": "abstract", "question": "question", "answer": "final_decision"}
    prompt = "{context}\n{question}\n"
    spec = read(tmp_path, {"columns": columns, "choices": ["yes", "no"], "prompt": prompt})
    assert (spec.choices, spec.always, spec.prompt) == ((), ("yes", "no"), prompt)


def test_a_folder_or_a_file_may_lie_beside_the_preset(tmp_path):
    (tmp_path / "q").mkdir()
    (tmp_path / "q.jsonl").touch()
    assert read(tmp_path, {"name": "q"}).name == str(tmp_path / "q")
    assert read(tmp_path, {"name": "q.jsonl"}).name == str(tmp_path / "q.jsonl")
    assert read(tmp_path, {"name": "./r"}).name == str(tmp_path / "r")


@pytest.mark.parametrize(
    ("questions", "told"),
    [
        ("mmlu", "data.questions is no mapping"),
        ({"colums": {}}, "data.questions.colums is unknown: did you mean 'columns'"),
        ({"choices": [True, False]}, "choices = .*2 different texts.*truth values without"),
        ({"choices": ["yes"]}, "expected 2 different texts at least"),
        ({"choices": ["yes", "yes"]}, "expected 2 different texts at least"),
        ({"choices": "yes"}, "expected 2 different texts at least"),
        ({"choices": ["a", "b"], "columns": {"question": "q", "choices": "c"}}, "leave one out"),
        ({"columns": {"question": "q", "choices": ["c"]}}, "columns.choices = .*2 different"),
        ({"columns": {"question": "answer"}}, "expected a column of its own for each role"),
        ({"columns": {"question": 5}}, "expected a text"),
        ({"columns": ["question"]}, "data.questions.columns is no mapping"),
        ({"prompt": "{x}"}, "data.questions.prompt = '{x}': KeyError"),
        ({"prompt": "{question}{answer}"}, "KeyError: 'answer'"),
        ({"prompt": "{choices}"}, "question stands in no prompt"),
        ({"columns": {"answer": "a"}}, "KeyError: 'question'"),
        ({"columns": {"answer": "a"}, "prompt": "{choices}"}, "there is no question"),
        ({"score": "mean"}, "data.questions.score 'mean' is unknown"),
        ({"split": 3}, "data.questions.split = 3: expected a text"),
    ],
)
def test_what_cannot_be_is_refused(questions, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        read(tmp_path, questions)


def test_other_tasks_ask_nothing(tmp_path):
    with pytest.raises(ValueError, match="data.questions: only task causal has it"):
        read(tmp_path, {}, "text-to-label")


def test_what_a_run_records_is_read_again(tmp_path):
    read(tmp_path, {"columns": {"question": "q", "choices": ["a", "b"], "answer": "x"}})
    config = read_config({"preset": PresetPath(tmp_path / "mine.yaml")})
    assert recorded_config(config.as_dict(), "here") == config
