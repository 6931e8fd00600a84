"""Recognise the examples of a language model by their columns: conversations, or answers."""

import datasets

MESSAGES = ("messages", "conversation", "conversations", "chat", "dialog", "dialogue")
QUESTIONS = ("prompt", "question", "query")
ANSWERS = ("completion", "answer", "response", "output")
# What Alpaca's authors wrote around an instruction, with and without an input.
ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n",
)


def language_columns(examples: datasets.Dataset) -> dict[str, str]:
    """Give each role its column; none where these are no examples of a language model."""
    names = [name for name, one in examples.features.items() if _is_conversation(one)]
    for name in (*MESSAGES, *names):
        if name in names:
            return {"messages": name}
    for name, one in examples.features.items():
        if _keys(one) >= {"from", "value"}:
            raise ValueError(
                f"data.columns: column {name!r} has conversations of `from` and `value`, expected "
                "`role` and `content`, with the roles user and assistant; rename them in the data"
            )
    _refuse_other_conversations(examples)
    texts = [name for name, one in examples.features.items() if is_text(one)]
    answer = next((name for name in ANSWERS if name in texts), "")
    question = next((name for name in QUESTIONS if name in texts), "")
    if answer and "instruction" in texts:
        more = next((name for name in ("input", "context") if name in texts), "")
        columns = {"instruction": "instruction", "completion": answer}
        return columns | ({"input": more} if more else {})
    # A question with an answer may as well be a pair to classify: no other column, no doubt.
    if answer and question and (question == "prompt" or len(examples.column_names) == 2):
        return {"prompt": question, "completion": answer}
    return {}


def _refuse_other_conversations(examples: datasets.Dataset) -> None:
    """Refuse a column that is called as one of conversations, and holds something else."""
    for name in MESSAGES:
        feature = examples.features.get(name)
        first = next(iter(examples[name][:1]), None) if is_text(feature) else None
        in_quotes = isinstance(first, str) and first.lstrip().startswith(("[", "{"))
        plain = feature is None or isinstance(feature, datasets.Value | datasets.ClassLabel)
        if in_quotes or not plain:
            got = "JSON in quotes" if in_quotes else "something else in some row, at least"
            raise ValueError(
                f"data.columns: column {name!r} has {got}, expected a list of messages in each "
                'row, such as [{"role": "user", "content": "..."}, {"role": "assistant", '
                '"content": "..."}]; correct the data, or name the columns with --text and --label'
            )


def prompts_for(columns: dict[str, str]) -> tuple[str, ...]:
    """Choose what is written before an answer."""
    if "instruction" in columns:
        return ALPACA if "input" in columns else ALPACA[1:]
    return ("{prompt}",) if "prompt" in columns else ()


def is_text(feature: object) -> bool:
    """Tell whether a column has texts."""
    return isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string")


def _is_conversation(feature: object) -> bool:
    """Tell whether a column has lists of messages with a role and a content."""
    return _keys(feature) >= {"role", "content"}


def _keys(feature: object) -> set[str]:
    """List the keys of what a column has lists of; none where these are no objects."""
    inner = getattr(feature, "feature", None)
    return set(inner) if isinstance(inner, dict) else set()
