"""The presets agree with the public data sets (facts in tests/support/published)."""

from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, Image, List, Value

from ravan_flwr.config.presets import preset_names, read_preset
from ravan_flwr.config.run_config import read_config
from ravan_flwr.data.examples import label_numbers, load_splits
from ravan_flwr.data.hub import every_split, hub_errors
from ravan_flwr.data.rows import read_rows
from ravan_flwr.specs import Scalar
from tests.support.tiny import DATA, PUBLISHED, features, published, save_data

TEXT = Value("string")
TALK = List({"content": TEXT, "role": TEXT})
# role -> types that a task can read in its column
READABLE = {
    "image": (Image(),),
    "answers": (List(TEXT), TEXT),
    "chosen": (TEXT, TALK),
    "rejected": (TEXT, TALK),
}  # all others: texts


def data_of(preset, glue_task):
    return read_config({"preset": preset} | ({"glue-task": glue_task} if glue_task else {})).data


def test_every_data_set_of_the_hub_has_recorded_facts():
    expected = set()
    for name in preset_names():
        preset = read_preset(name)
        if preset.data.source == "hub" and not Path(preset.data.name).is_absolute():
            expected |= {(name, task) for task in preset.glue_tasks or ("",)}
    assert expected == set(DATA)
    assert {name for name, _ in DATA.values()} == {path.stem for path in PUBLISHED.glob("*.yaml")}


@pytest.mark.parametrize("name", sorted({name for name, _ in DATA.values()}))
def test_facts_name_their_sources_and_existing_splits(name):
    facts = published(name)
    assert facts["read"]
    assert all(set(place) == {"host", "repository", "file", "commit"} for place in facts["read"])
    splits = {split for subset in facts["subsets"].values() for split in subset["splits"]}
    assert set(facts.get("unlabelled", [])) <= splits


@pytest.mark.parametrize(("preset", "glue_task"), DATA)
def test_a_preset_names_existing_splits(preset, glue_task):
    data, (name, subset) = data_of(preset, glue_task), DATA[preset, glue_task]
    facts = published(name)
    assert data.name == facts["repository"]
    # A repository without a subset name has one subset.
    assert data.subset == subset if data.subset else len(facts["subsets"]) == 1
    existing = set(facts["subsets"][subset]["splits"])
    splits = {data.train, *dict(data.tests).values()}
    if existing == {"train"}:  # the test split is taken from the training examples
        splits -= {"test"}
    assert splits <= existing
    assert not splits & set(facts.get("unlabelled", []))


@pytest.mark.parametrize(("preset", "glue_task"), DATA)
def test_a_presets_columns_exist_with_types_that_its_task_reads(preset, glue_task):
    data, of = data_of(preset, glue_task), features(*DATA[preset, glue_task])
    for role, column in data.columns:
        assert column in of, role
        if role != "label":
            assert of[column] in READABLE.get(role, (TEXT,)), role
    config = read_config({"preset": preset})
    assert config.partition == "iid" or data.partition_by in {*dict(data.columns), *of}


@pytest.mark.parametrize(("preset", "glue_task"), DATA)
def test_a_presets_labels_are_the_names_of_the_classes_in_order(preset, glue_task):
    data, (name, subset) = data_of(preset, glue_task), DATA[preset, glue_task]
    column = data.column("label")
    if not column:
        assert not data.labels
        return
    kind = features(name, subset)[column]
    if isinstance(kind, ClassLabel):
        names = kind.names
    else:
        assert kind == TEXT
        names = published(name)["names"][column]["texts"]
    assert list(data.labels) == names


def test_the_labels_of_newsgroups_fit_into_the_target():
    data, facts = data_of("newsgroups-t5", ""), published("newsgroups")
    names = facts["names"]["label_text"]["texts"]
    assert len(facts["tokens"]) == len(names)
    assert max(facts["tokens"]) <= data.target_length
    # A bound for any other vocabulary: a token a byte, one for the end, one for the start.
    assert max(len(name.encode()) for name in names) + 2 <= data.target_length


def test_known_class_names_are_used_whatever_their_numbers(tmp_path, caplog):
    save_data("glue-llama", tmp_path, "sst2")  # with class names in another order
    classes = ClassLabel(names=["positive", "negative"])
    schema = Features({"sentence": TEXT, "label": classes, "idx": Value("int32")})
    rows = {"sentence": ["a b"] * 4, "label": [0, 1, 1, 0], "idx": [0, 1, 2, 3]}
    for path in tmp_path.rglob("*.parquet"):
        Dataset.from_dict(rows, features=schema).to_parquet(path)
    settings: dict[str, Scalar] = {"preset": "glue-llama", "data": str(tmp_path)}
    splits = load_splits(read_config(settings).data)
    labels = data_of("glue-llama", "sst2").labels
    assert label_numbers(splits["train"], labels, "train").tolist() == [1, 0, 0, 1]
    assert not caplog.records


@pytest.mark.parametrize("blank", ["", "\n", " \t\n\n"])
def test_csv_with_more_fields_than_its_header_is_refused(blank, tmp_path):
    (tmp_path / "train.csv").write_text(f"text,label\n{blank}Hello, world,a\nbye, moon,b\n")
    with pytest.raises(ValueError, match="first row has 3 fields, expected 2 as in the header"):
        every_split(str(tmp_path), "", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\ufefftext;label\nHello, world;a\n", "separated by ';', expected ','"),
        ("\ufefftext\tlabel\nHello, world\ta\n", r"separated by '\\t', expected ','"),
        # Which of the two would be read, and which would be written beside the answers?
        ("text,label,text\ngood,a,bad\n", r"\['text'\] more than once"),
    ],
)
def test_csv_with_other_separators_or_a_column_twice_is_refused(text, message, tmp_path):
    file = tmp_path / "train.csv"
    file.write_text(text, encoding="utf-8")
    for read in (
        lambda: every_split(str(tmp_path), "", ""),
        lambda: [*read_rows(file, {"text": "text"})],
    ):
        with pytest.raises(ValueError, match=message):
            read()


@pytest.mark.parametrize("name", ["csv", "text", "imagefolder"])
def test_names_of_kinds_of_files_are_no_data(name, tmp_path, monkeypatch):
    """`datasets` reads all files of that kind below the folder in which it runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("text,label\nhello,1\n")
    with pytest.raises(ValueError, match="got the name of a kind of file"):
        every_split(name, "", "")


def test_data_without_an_example_raise_our_message():
    error = pytest.raises(ValueError, match="data folder: got no example, expected some")
    with error, hub_errors("data", "folder"):
        raise ValueError('Instruction "train" corresponds to no data!')
