"""Check what a preset says of multiple-choice questions: `data.questions`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from ravan_flwr.config.fields import check_fields, text_field
from ravan_flwr.config.key import check_choice
from ravan_flwr.config.prompt_fields import check_braces
from ravan_flwr.specs import QuestionSpec

PROMPT = "{question}\n{choices}\nAnswer:"  # of MMLU in lm-evaluation-harness
SCORES = ("sum", "characters")
_WHERE = "data.questions."
_FIELDS = {"name", "subset", "revision", "split", "columns", "choices", "prompt", "score"}


def questions_of(content: Any, folder: Path) -> QuestionSpec | None:
    """Read the questions; None where there are none. A folder may begin at the preset's own."""
    if content is None:
        return None
    check_fields(_WHERE, content, set(), _FIELDS)
    always = _texts("choices", content.get("choices", []), least=2) if "choices" in content else ()
    columns, choices = _columns(content, fixed=bool(always))
    prompt = text_field(_WHERE, content, "prompt") or PROMPT
    _check_prompt(prompt, [role for role, _ in columns if role != "answer"])
    score = text_field(_WHERE, content, "score") or SCORES[0]
    check_choice(f"{_WHERE}score", score, SCORES)
    return QuestionSpec(
        name=_place(text_field(_WHERE, content, "name"), folder),
        subset=text_field(_WHERE, content, "subset"),
        revision=text_field(_WHERE, content, "revision"),
        split=text_field(_WHERE, content, "split"),
        columns=columns,
        choices=choices,
        always=always,
        prompt=prompt,
        score=score,
    )


def _columns(
    content: Mapping[str, Any], *, fixed: bool
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Read the columns by role, and apart from them those of the choices."""
    named = content.get("columns") or {"question": "question"}
    known = {str(role) for role in named} if isinstance(named, dict) else set()
    check_fields(f"{_WHERE}columns.", named, set(), known)
    told = {"answer": "answer", "choices": "choices"} | named
    choices = told.pop("choices")
    if fixed and "choices" in named:
        raise ValueError(
            f"{_WHERE}columns.choices: got {_WHERE}choices beside it, expected one of them: a "
            "column, or the choices that all questions have; leave one out"
        )
    if not isinstance(choices, str):
        choices = _texts("columns.choices", choices, least=2)
    for role in told:
        text_field(f"{_WHERE}columns.", told, role)
    places = () if fixed else ((choices,) if isinstance(choices, str) else choices)
    names = [*told.values(), *places]
    if len(set(names)) < len(names):
        raise ValueError(
            f"{_WHERE}columns = {named}: expected a column of its own for each role; correct it"
        )
    return tuple(told.items()), places


def _texts(field: str, value: Any, least: int) -> tuple[str, ...]:
    """Read a list of different texts."""
    good = isinstance(value, list) and all(isinstance(one, str) and one.strip() for one in value)
    if not good or len(set(value)) < max(least, len(value)):
        raise ValueError(
            f"{_WHERE}{field} = {value!r}: expected {least} different texts at least, as a list; "
            "write them in quotation marks (yes and no are truth values without)"
        )
    return tuple(value)


def _check_prompt(prompt: str, given: Sequence[str]) -> None:
    """Refuse a prompt with other things in braces than columns and choices, or without one."""
    check_braces(prompt, [*given, "choices"], field=f"{_WHERE}prompt")
    used = {field for _, field, *_ in Formatter().parse(prompt) if field}
    idle = [role for role in given if role not in used]
    if idle or not given:
        told = f"{', '.join(idle)} stands in no prompt" if idle else "there is no question"
        raise ValueError(
            f"{_WHERE}columns: {told}; expected each column but answer and choices in the prompt "
            f"{prompt!r}, in braces, and one of them at least; correct it"
        )


def _place(name: str, folder: Path) -> str:
    """Find a folder or file beside the preset; an id of the hub stays what it is."""
    if name.startswith("~"):
        return str(Path(name).expanduser())
    beside = folder / name
    here = bool(name) and (name.startswith(".") or beside.is_dir() or beside.is_file())
    return str(beside.resolve()) if here else name
