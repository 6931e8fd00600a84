"""Load the multiple-choice questions that a language model is scored on."""

import datasets

from ravan_flwr.data.other_examples import other_examples
from ravan_flwr.specs import DataSpec, QuestionSpec


def load_questions(data: DataSpec) -> datasets.Dataset:
    """Load the questions of a data set, or those that lie elsewhere, columns by role."""
    spec = data.questions
    assert spec is not None
    elsewhere = DataSpec(
        source="hub",
        name=spec.name or data.name,
        subset=spec.subset if spec.name else spec.subset or data.subset,
        revision=spec.revision if spec.name else data.revision,
        tests=(("test", spec.split or "test"),),
        columns=(*spec.columns, *zip(roles_of_choices(spec), spec.choices, strict=True)),
        partition_by="",
    )
    found, splits = other_examples(elsewhere)
    if spec.split and splits != spec.split:
        raise ValueError(
            f"data.questions {elsewhere.name}: found no split {spec.split!r}, expected it; "
            f"correct data.questions.split, such as {splits}"
        )
    return found


def roles_of_choices(spec: QuestionSpec) -> list[str]:
    """Name the columns of the choices by role."""
    return [f"choice {number}" for number in range(len(spec.choices))]
