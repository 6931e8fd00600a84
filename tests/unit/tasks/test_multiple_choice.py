"""Likelihoods of choices are those of transformers' own model, one choice at a time."""

import dataclasses
import logging
import math

import datasets
import pytest
import torch
import transformers
from datasets import ClassLabel, Features, List, Value

from ravan_flwr.data.other_examples import load_questions
from ravan_flwr.specs import DataSpec, QuestionSpec
from ravan_flwr.tasks import multiple_choice
from ravan_flwr.tasks.multiple_choice import questions_of
from testing.tiny import WORDS, save_speaker, texts

LETTERED = QuestionSpec(
    columns=(("question", "question"), ("answer", "answer")),
    prompt="{question}\n{choices}\nAnswer:",
)
TEXTUAL = dataclasses.replace(LETTERED, prompt="{question} ")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def of(kind):
        if kind not in made:
            where = tmp_path_factory.mktemp("models") / kind
            made[kind] = save_speaker(kind, where, texts(40), initializer_range=0.5)
        return made[kind]

    return of


def network_of(where):
    return transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()


def rows(number=12, answers=None):
    """Questions with two to five choices of one word or several."""
    choices = [[" ".join(WORDS[n + k : n + 1 + 2 * k]) for k in range(2 + n % 4)]
               for n in range(number)]  # fmt: skip
    return datasets.Dataset.from_dict(
        {
            "question": texts(number, seed=7),
            "choice 0": choices,
            "answer": answers or [n % len(some) for n, some in enumerate(choices)],
        }
    )


def read(examples, where, spec=LETTERED, most=128, overlong="cut"):
    reader = transformers.AutoTokenizer.from_pretrained(where)
    return questions_of(examples, spec, reader, most, overlong)


def one_by_one(network, reader, row, spec):
    """Write each choice after its question, and add up what the model gives its tokens."""
    listed = [f"{letter}. {one}" for letter, one in zip("ABCDE", row["choice 0"], strict=False)]
    told = list("ABCDE"[: len(listed)]) if spec is LETTERED else row["choice 0"]
    prompt = row["question"] + ("\n" + "\n".join(listed) + "\nAnswer:" if spec is LETTERED else "")
    given, found = reader(prompt).input_ids, []
    for choice in told:
        ids = reader(f"{prompt} {choice}").input_ids
        assert ids[: len(given)] == given
        with torch.no_grad():
            logs = network(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(len(given), len(ids))
        found.append(sum(float(logs[place - 1, ids[place]]) for place in places))
    return found, [len(choice) for choice in told]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen2"])
@pytest.mark.parametrize("spec", [LETTERED, TEXTUAL], ids=["letters", "texts"])
def test_likelihoods_are_those_of_one_choice_at_a_time(kind, spec, folder, monkeypatch):
    network, examples = network_of(folder(kind)), rows()
    reader = transformers.AutoTokenizer.from_pretrained(folder(kind))
    questions = read(examples, folder(kind), spec)
    expected = [one_by_one(network, reader, row, spec) for row in examples]
    with torch.inference_mode():
        found = questions.likelihoods(network, CPU)
        for got, (sums, _) in zip(found, expected, strict=True):
            assert got == pytest.approx(sums, rel=1e-4, abs=1e-4)
        right = [row["answer"] for row in examples]
        for score in ("sum", "characters"):
            questions.score = score
            norms = [[1] * len(n) if score == "sum" else n for _, n in expected]
            best = [
                max(range(len(sums)), key=lambda k: sums[k] / by[k])
                for (sums, _), by in zip(expected, norms, strict=True)
            ]
            share = sum(map(int.__eq__, best, right)) / len(right)
            assert questions.accuracy(network, CPU) == share
            assert 0 < share < 1
        monkeypatch.setattr(multiple_choice, "TOKENS", 40)  # other batches, the same numbers
        for got, before in zip(questions.likelihoods(network, CPU), found, strict=True):
            assert got == pytest.approx(before, rel=1e-4, abs=1e-4)


def test_letters_of_one_token_share_a_text(folder):
    questions = read(rows(), folder("llama"))
    assert len(multiple_choice._texts(questions.questions)) == len(questions)


@pytest.mark.parametrize(
    ("answers", "feature"),
    [
        ([2, 0, 1], Value("int64")),
        (["C", "a", " B"], Value("string")),
        (["2", "0", "1"], Value("string")),
        (["red wine", "no", "beer"], Value("string")),
        ([2.0, 0.0, 1.0], Value("float64")),
        ([2, 0, 1], ClassLabel(names=["A", "B", "C"])),
        ([0, 1, 2], ClassLabel(names=["c", "a", "b"])),
    ],
)
def test_answers_are_numbers_letters_or_texts(answers, feature, folder):
    examples = datasets.Dataset.from_dict(
        {
            "question": ["ka ne"] * 3,
            "choice 0": [["milk", "beer", "red wine"], ["no", "yes"], ["wine", "beer"]],
            "answer": answers,
        },
        features=Features(
            {"question": Value("string"), "choice 0": List(Value("string")), "answer": feature}
        ),
    )
    assert [one.right for one in read(examples, folder("llama")).questions] == [2, 0, 1]


def test_choices_of_several_columns_and_those_of_every_question(folder):
    examples = datasets.Dataset.from_dict(
        {"question": ["ka", "lo"], "answer": ["yes", "maybe"], "choice 0": ["a", "b"],
         "choice 1": ["c", None]}
    )  # fmt: skip
    always = dataclasses.replace(TEXTUAL, choices=(), always=("yes", "no", "maybe"))
    assert [one.right for one in read(examples, folder("llama"), always).questions] == [0, 2]
    columns = dataclasses.replace(LETTERED, choices=("x", "y"))
    examples = examples.remove_columns("answer").add_column("answer", [1, 0])
    (one,) = read(examples, folder("llama"), columns).questions
    assert (one.right, len(one.choices)) == (1, 2)


BAD = [
    (["a"], 0, "it has less than two choices"),
    (None, 0, "its choices are no list"),
    (["a", "b"], 2, "its answer is out of range"),
    (["a", "b"], -1, "its answer is out of range"),
    (["a", "b"], None, "its answer is missing"),
    (["a", " "], 0, "one of its choices is empty"),
    (["a", None], 0, "one of its choices is empty"),
    (["a"] * 27, 0, "it has more than 26 choices"),
]


def test_what_cannot_be_scored_is_named_and_counted(folder, caplog):
    good = (["a", "b"], 0, "")
    examples = datasets.Dataset.from_dict(
        {
            "question": ["ka"] * (len(BAD) + 1) + [None],
            "choice 0": [choices for choices, *_ in [good, *BAD, good]],
            "answer": [answer for _, answer, _ in [good, *BAD, good]],
        }
    )
    with caplog.at_level(logging.WARNING):
        assert len(read(examples, folder("llama"))) == 1
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("questions: 9 of 10 are left out: 2: its answer is out of range: no")
    assert "(example 4, 5)" in told
    for *_, reason in BAD:
        assert reason in told
    assert "its question is missing" in told
    with pytest.raises(ValueError, match="questions: none of 9 can be asked: 2: its answer is out"):
        read(examples.select(range(1, 10)), folder("llama"))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("C", "out of range"),
        ("99", "out of range"),
        ("perhaps", "none of its choices, no letter and no number"),
        ("B", "the text of one choice and the letter of another"),
        (" ", "missing"),
        ("1234", "none of its choices"),
    ],
)
def test_an_answer_that_is_none_is_refused(answer, told, folder):
    examples = datasets.Dataset.from_dict(
        {"question": ["ka"], "choice 0": [["B", "A"]], "answer": [answer]}
    )
    with pytest.raises(ValueError, match=told):
        read(examples, folder("llama"))


@pytest.mark.parametrize("value", [True, 0.5, [0], {"a": 1}])
def test_an_answer_of_another_kind_is_refused(value, folder):
    examples = datasets.Dataset.from_dict(
        {"question": ["ka"], "choice 0": [["x", "y"]], "answer": [value]}
    )
    with pytest.raises(ValueError, match="its answer is a "):
        read(examples, folder("llama"))


def test_texts_that_are_too_long_are_cut_from_the_front_or_dropped(folder, caplog):
    examples = datasets.Dataset.from_dict(
        {
            "question": ["so " * 60 + "ka ne", "ka ne", "ka"],
            "choice 0": [["mi", "tu ra vi"], ["mi", "tu"], ["mi", "tu " * 60]],
            "answer": [0, 1, 0],
        }
    )
    with caplog.at_level(logging.WARNING):
        long, short = read(examples, folder("llama"), TEXTUAL, 24).questions
    assert [len(long.prompt) + max(map(len, long.choices)), long.right] == [24, 0]
    assert long.prompt[-1] == short.prompt[-1]
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "1: one of its choices alone has more tokens than max-length (example 3)" in told
    assert "questions: 1 of 3 have more tokens than max-length = 24 and are cut" in told
    dropped = read(examples, folder("llama"), TEXTUAL, 24, "drop")
    assert dropped.questions == [short]


def test_a_model_that_has_diverged_gives_no_number(folder):
    network = network_of(folder("llama"))
    with torch.no_grad():
        next(network.parameters()).fill_(math.nan)
    with torch.inference_mode():
        assert math.isnan(read(rows(), folder("llama")).accuracy(network, CPU))


def test_questions_lie_beside_the_data_or_elsewhere(tmp_path):
    data = DataSpec("hub", str(tmp_path), questions=LETTERED)
    rows(4).rename_column("choice 0", "choices").to_json(tmp_path / "train.jsonl")
    assert len(load_questions(data)) == 4
    rows(3).rename_column("choice 0", "choices").to_json(tmp_path / "test.jsonl")
    found = load_questions(data)
    assert len(found) == 3
    assert set(found.column_names) == {"question", "choice 0", "answer"}
    lone = dataclasses.replace(LETTERED, name=str(tmp_path / "train.jsonl"))
    assert len(load_questions(dataclasses.replace(data, questions=lone))) == 4
    for changes, told in (
        ({"split": "dev"}, "found no split 'dev', expected it; .* such as test"),
        ({"choices": ("options",)}, "expected 'options' or 'choice 0' among them"),
        ({"name": "no/such"}, "no/such"),
    ):
        spec = dataclasses.replace(LETTERED, **changes)
        with pytest.raises(ValueError, match=told):
            load_questions(dataclasses.replace(data, questions=spec))
