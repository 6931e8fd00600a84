"""Summarise a data set: the roles of its columns, its splits and classes."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import datasets

from ravan_flwr.config.presets import parse_location
from ravan_flwr.data.examples import find_labels, load_splits
from ravan_flwr.data.hub import every_split
from ravan_flwr.data.rows import list_some, quoted
from ravan_flwr.specs import DataSpec

# The roles of an example's columns: the first form counts of which the data have all columns.
FORMS = (
    ("messages",),
    ("prompt", "chosen", "rejected"),
    ("chosen", "rejected"),
    ("prompt", "completion"),
    ("image", "label"),
    ("text", "text-pair", "label"),
    ("text", "label"),
)
TESTS = ("test", "validation")  # names of a test split; the first that exists is used


@dataclass(frozen=True)
class DataSummary:
    """A data set's specification, and its splits with columns named by role."""

    spec: DataSpec
    train: datasets.Dataset
    test: datasets.Dataset
    test_from_train: bool  # there is no test split, so a part of `train` is the test
    unused: list[str]  # columns without a role


def summarise_data(
    location: str, subset: str, names: Mapping[str, str], chat_template: str = ""
) -> DataSummary:
    """Load a data set and return its summary; `names` has columns by role, named by the user."""
    name, revision = parse_location("data", location)
    if Path(name).is_dir():  # the preset is used from other folders, too
        name = str(Path(name).resolve())
    where = f"data {location}"
    splits = every_split(name, subset, revision)
    if "train" not in splits:
        raise ValueError(
            f"{where}: got the splits {', '.join(splits)}, expected one that is called train; "
            "rename the file or the folder that clients are to train on to train"
        )
    columns = find_columns(splits["train"], names, where)
    test = _test_split(splits, columns.get("label"))
    for split in filter(None, ("train", test)):
        _check_complete(splits[split], columns, f"{where}, {split}")
    spec = DataSpec(
        "hub",
        name,
        subset=subset,
        revision=revision,
        tests=(("test", test or "test"),),
        columns=tuple(columns.items()),
        prompts=("{prompt}",) if "prompt" in columns else (),
        chat_template=chat_template,
    )
    used = load_splits(spec)
    if "label" in columns:
        spec = dataclasses.replace(spec, labels=find_labels(used, where))
    unused = sorted({*splits["train"].column_names} - {*columns.values()})
    return DataSummary(spec, used["train"], used["test"], not test, unused)


def find_columns(
    examples: datasets.Dataset, names: Mapping[str, str], where: str
) -> dict[str, str]:
    """Return the column of each role: the one that the user names, or the one of that name."""
    features = examples.features
    for column in names.values():
        if column not in features:
            raise ValueError(
                f"{where}: found no column {column!r}, expected one of {quoted(features)}; name it"
            )
    for form in FORMS:
        columns = {role: names.get(role, role) for role in form}
        if names.keys() - columns.keys() or len(features.keys() & columns.values()) < len(form):
            continue
        texts = {r for r, name in columns.items() if isinstance(features[name], datasets.Value)}
        if "prompt" in texts and "chosen" in columns.keys() - texts:
            continue  # the prompt is in the conversations, too
        if "rejected" in texts and "prompt" not in columns:
            raise ValueError(
                f"{where}: chosen and rejected are texts, and there is no column prompt, expected "
                "one, or whole conversations in both; rename a column, or correct the data"
            )
        if "image" in texts:
            if "image" not in names:
                continue
            raise ValueError(
                f"{where}: column {columns['image']!r} has no images but "
                f"{features[columns['image']]}, expected images; put the files into a folder for "
                "each class"
            )
        return columns
    fitting = next((form for form in reversed(FORMS) if names.keys() <= {*form}), names)
    columns = {role: names.get(role, role) for role in fitting}
    if missing := [role for role, column in columns.items() if column not in features]:
        options = ", ".join(f"--{role} NAME" for role in missing)
        others = (
            "; images are sorted into a folder for each class; a language model has messages, "
            "prompt and completion, or chosen and rejected; for others write the preset by hand "
            "(docs/language-models.md)"
        )
        raise ValueError(
            f"{where}: no column {quoted(missing)}: {options} names it, of the columns "
            f"{quoted(features)}{'' if names else others}"
        )
    given = ", ".join(f"--{role} {column}" for role, column in columns.items())
    raise ValueError(
        f"{where}: got {given}, expected no column twice, and no image beside a text; correct one"
    )


def _test_split(splits: datasets.DatasetDict, label: str | None) -> str:
    """Return the server's test split, the first usual name with published labels; "" for none."""
    names = [name for name in TESTS if name in splits]
    labelled = [n for n in names if label is None or _has_values(splits[n], label)]
    return next(iter([*labelled, *names]), "")


def _has_values(examples: datasets.Dataset, column: str) -> bool:
    values = examples[column] if column in examples.column_names else []
    return any(value not in (None, -1) for value in values)


def _check_complete(examples: datasets.Dataset, columns: Mapping[str, str], where: str) -> None:
    """Raise ValueError, with the rows, for examples without a text or a label."""
    found = {}
    for role in (role for role in columns if role in ("text", "text-pair", "label")):
        numbered = isinstance(examples.features[columns[role]], datasets.ClassLabel)
        empty = (None, -1) if numbered else (None, "")
        values = enumerate(examples[columns[role]], 1)
        if missing := [row for row, value in values if value in empty]:
            of_all = f"{len(missing)} of {len(examples)} examples have nothing in column"
            found[role] = f"{of_all} {columns[role]!r} (row {list_some(missing)})"
    if found:
        raise ValueError(
            f"{where}: {', '.join(found.values())}, expected a {' and a '.join(found)} in each; "
            f"remove these rows{', or leave out a split without labels' * ('label' in found)}"
        )
