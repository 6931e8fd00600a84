"""Find the roles of a data set's columns: image, text, label or conversation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import datasets

from ravan_flwr.tasks import TASKS

MESSAGES = ("messages", "conversation", "conversations", "chat", "dialog", "dialogue")
QUESTIONS = ("prompt", "question", "query")
PAIR = TASKS["preference"].answers  # the first is preferred
ANSWERS = ("completion", "answer", "response", "output")
# Alpaca's prompts, with and without an input.
ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n",
)


def language_columns(examples: datasets.Dataset) -> dict[str, str]:
    """Return the column of each role; empty if the examples are not for a language model."""
    names = [n for n, f in examples.features.items() if _keys(f) >= {"role", "content"}]
    if set(PAIR) <= set(examples.column_names):
        return _preferences(examples, names)
    for name in (*MESSAGES, *names):
        if name in names:
            return {"messages": name}
    for name, feature in examples.features.items():
        if _keys(feature) >= {"from", "value"}:
            raise ValueError(
                f"data.columns: column {name!r} has conversations of `from` and `value`, expected "
                "`role` and `content`, with the roles user and assistant; rename them in the data"
            )
    _refuse_other_conversations(examples)
    texts = [name for name, feature in examples.features.items() if is_text(feature)]
    answer = next((name for name in ANSWERS if name in texts), "")
    question = next((name for name in QUESTIONS if name in texts), "")
    if answer and "instruction" in texts:
        context = next((name for name in ("input", "context") if name in texts), "")
        columns = {"instruction": "instruction", "completion": answer}
        return columns | ({"input": context} if context else {})
    # With other columns, a question with an answer may also be a pair of texts to classify.
    if answer and question and (question == "prompt" or len(examples.column_names) == 2):
        return {"prompt": question, "completion": answer}
    return {}


def _preferences(examples: datasets.Dataset, conversations: Sequence[str]) -> dict[str, str]:
    """Return the columns of preferences by role, with a prompt if the answers do not contain it."""
    pair = {role: role for role in PAIR}
    named = (*QUESTIONS, "instruction")
    prompt = next((name for name in named if name in examples.column_names), "")
    first = next(iter(examples["chosen"][:1]), None) if "chosen" in conversations else None
    if first and len(first) > 1:  # it contains the prompt
        return pair
    if not prompt:
        raise ValueError(
            f"data.columns: chosen and rejected have only answers, and there is no column "
            f"{', '.join(named)}, expected one of them with the prompt, or whole conversations in "
            "both; rename a column, or correct the data"
        )
    return {"prompt": prompt} | pair


def _refuse_other_conversations(examples: datasets.Dataset) -> None:
    """Raise ValueError for a column with a name of conversations and another content."""
    for name in MESSAGES:
        feature = examples.features.get(name)
        first = next(iter(examples[name][:1]), None) if is_text(feature) else None
        in_quotes = isinstance(first, str) and first.lstrip().startswith(("[", "{"))
        simple = feature is None or isinstance(feature, datasets.Value | datasets.ClassLabel)
        if in_quotes or not simple:
            content = "JSON in quotes" if in_quotes else "another content, at least in some row"
            raise ValueError(
                f"data.columns: column {name!r} has {content}, expected a list of messages in each "
                'row, such as [{"role": "user", "content": "..."}, {"role": "assistant", '
                '"content": "..."}]; correct the data, or name the columns with --text and --label'
            )


def prompts_for(columns: dict[str, str]) -> tuple[str, ...]:
    """Return the prompts before an answer."""
    if "instruction" in columns:
        return ALPACA if "input" in columns else ALPACA[1:]
    return ("{prompt}",) if "prompt" in columns else ()


def is_text(feature: object) -> bool:
    """Return whether a column has texts."""
    return isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string")


def _keys(feature: object) -> set[str]:
    """Return the keys of the objects in a column of lists; empty for other columns."""
    inner = getattr(feature, "feature", None)
    return set(inner) if isinstance(inner, dict) else set()


LABELS = (
    "label", "labels", "target", "class", "category", "intent", "sentiment", "topic", "fine_label",
)  # fmt: skip
TEXTS = ("text", "sentence", "content", "body", "review", "document", "message", "utterance")
PAIRS = (
    ("text", "text-pair"), ("premise", "hypothesis"), ("sentence1", "sentence2"),
    ("question1", "question2"), ("question", "sentence"), ("text1", "text2"), ("text_a", "text_b"),
)  # fmt: skip

_SAMPLE = 10_000  # rows by which a column's values are judged


@dataclass(frozen=True)
class NamedColumns:
    """The columns that the user names; "" for a column to find."""

    text: str = ""
    text_pair: str = ""
    image: str = ""
    label: str = ""


def find_columns(examples: datasets.Dataset, names: NamedColumns, where: str) -> dict[str, str]:
    """Return the column of each role: `image`, or `text` and perhaps `text-pair`; and `label`.

    Examples for a language model are recognised, unless the user names a column.
    """
    if names == NamedColumns() and (columns := language_columns(examples)):
        return columns
    for option in (names.text, names.text_pair, names.image, names.label):
        if option and option not in examples.column_names:
            raise ValueError(
                f"{where}: found no column {option!r}, expected one of "
                f"{', '.join(examples.column_names)}; correct the option"
            )
    if (names.text_pair and not names.text) or (names.image and names.text):
        raise ValueError(
            f"{where}: got --text {names.text!r}, --text-pair {names.text_pair!r}, --image "
            f"{names.image!r}; expected --image alone, or --text, which --text-pair needs; correct "
            "the options"
        )
    if names.image and not isinstance(examples.features[names.image], datasets.Image):
        raise ValueError(
            f"{where}: column {names.image!r} has no images but {examples.features[names.image]}, "
            "expected images; put the files into a folder for each class"
        )
    images = [n for n, f in examples.features.items() if isinstance(f, datasets.Image)]
    if (images or names.image) and not names.text:
        image = names.image or _only(images, "image", "--image", where)
        if len(examples.column_names) == 1:
            raise ValueError(
                f"{where}: got images of one class or of none, expected a folder for each class, "
                "such as train/cat/*.png and train/dog/*.png; sort them into folders"
            )
        return {"image": image, "label": names.label or _label(examples, (image,), where)}
    texts = _texts(examples, names, where)
    return {**texts, "label": names.label or _label(examples, tuple(texts.values()), where)}


def _texts(examples: datasets.Dataset, names: NamedColumns, where: str) -> dict[str, str]:
    """Return the column of texts, or the two columns of pairs, by role."""
    if names.text:
        pair = {"text-pair": names.text_pair} if names.text_pair else {}
        return {"text": names.text, **pair}
    strings = [n for n, f in examples.features.items() if is_text(f) and n != names.label]
    for first, second in PAIRS:
        if {first, second} <= set(strings):
            return {"text": first, "text-pair": second}
    if named := [name for name in TEXTS if name in strings]:
        return {"text": named[0]}
    different = [name for name in strings if not _few_values(examples, name)]
    return {"text": _only(different or strings, "text", "--text", where)}


def _label(examples: datasets.Dataset, inputs: Sequence[str], where: str) -> str:
    """Return the column of classes: a ClassLabel, a usual name, or the only one with few values."""
    features = {name: f for name, f in examples.features.items() if name not in inputs}
    classes = [name for name, f in features.items() if isinstance(f, datasets.ClassLabel)]
    named = [name for name in LABELS if name in features]
    if classes:
        return next((name for name in named if name in classes), "") or _only(
            classes, "label", "--label", where
        )
    if named:
        return named[0]
    few = [name for name in features if _few_values(examples, name)]
    return _only(few, "label", "--label", where, features)


def _few_values(examples: datasets.Dataset, name: str) -> bool:
    """Return whether a column may hold classes: texts, integers or truth values that repeat."""
    feature = examples.features[name]
    if not isinstance(feature, datasets.Value) or feature.dtype.startswith(("float", "double")):
        return False
    values = examples[name][:_SAMPLE]
    return 1 < len(set(values)) <= max(2, len(values) // 5)


def _only(
    names: Sequence[str], role: str, option: str, where: str, among: Iterable[str] = ()
) -> str:
    """Return the only candidate; otherwise raise ValueError with the option that names a column."""
    if len(names) == 1:
        return names[0]
    text = f"several columns could be it: {', '.join(names)}" if names else "none of the columns is"
    listed = f" (of {', '.join(among)})" if among and not names else ""
    raise ValueError(
        f"{where}: {text}{'' if names else f' plainly a column of {role}s'}{listed}; name the "
        f"{role} column with {option} COLUMN"
    )
