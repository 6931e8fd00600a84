"""Check what a preset says of prompts, and of what a language model learns."""

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from ravan_flwr.config.fields import check_fields, text_field
from ravan_flwr.config.key import check_choice
from ravan_flwr.tasks import TaskInfo

OF_LANGUAGE_MODELS = ("chat-template", "overlong", "loss-on", "questions")
_CHOICES = {"overlong": ("cut", "drop"), "loss-on": ("answers", "all")}


def prompt_of(content: Mapping[str, Any], kind: TaskInfo) -> str:
    """Read the prompt, in which the names of columns may stand in braces."""
    prompt = text_field("data.", content, "prompt")
    if prompt and not kind.prompt:
        raise ValueError("data.prompt: the model of this task takes no prompt; leave it out")
    given = [role for role in kind.roles if role not in ("label", "answers")]
    check_braces(prompt or kind.prompt, given, needed=bool(prompt))
    return prompt or kind.prompt


def check_braces(
    prompt: str, given: Sequence[str], *, needed: bool = True, field: str = "data.prompt"
) -> None:
    """Refuse a prompt with other things in braces than columns, or with none at all."""
    try:
        prompt.format(**dict.fromkeys(given, ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        known = ", ".join(f"{{{role}}}" for role in given)
        raise ValueError(
            f"{field} = {prompt!r}: {type(error).__name__}: {error}; expected braces around "
            f"{known} alone; write others twice"
        ) from None
    if needed and not any(role in given for _, role, *_ in Formatter().parse(prompt)):
        raise ValueError(
            f"{field} = {prompt!r}: it has no example in it, expected {{{given[0]}}} somewhere"
        )


def language_of(content: Mapping[str, Any], kind: TaskInfo) -> dict[str, Any]:
    """Read what a language model learns: the fields of `DataSpec` that are its own."""
    if not kind.is_causal_lm:
        for field in OF_LANGUAGE_MODELS:
            if field in content:
                raise ValueError(f"data.{field}: only task causal has it; leave it out")
        return {}
    chosen = {}
    for field, choices in _CHOICES.items():
        chosen[field] = text_field("data.", content, field) or choices[0]
        check_choice(f"data.{field}", chosen[field], choices)
    template = text_field("data.", content, "chat-template")
    columns = content.get("columns") or {"messages": "messages"}
    talks = isinstance(columns, dict) and "messages" in columns
    if talks and "prompt" in content:
        raise ValueError(
            "data.prompt: conversations (data.columns has messages) are written by the chat "
            "template; leave it out, or name columns for a prompt and a completion"
        )
    if template and not talks:
        raise ValueError(
            "data.chat-template: it writes the column messages, which data.columns has not; leave "
            "it out"
        )
    return {
        "prompts": () if talks else _prompts(content, columns),
        "chat_template": template,
        "overlong": chosen["overlong"],
        "loss_on": chosen["loss-on"],
    }


def _prompts(content: Mapping[str, Any], columns: Any) -> tuple[str, ...]:
    """Read one prompt, or several, of which the first serves that an example has all columns of."""
    if isinstance(columns, dict) and "completion" not in columns:
        raise ValueError(
            f"data.columns = {columns}: expected messages, a column of conversations, or a prompt "
            "with the completion that is learned; write {messages: COLUMN}, or {prompt: COLUMN, "
            "completion: COLUMN}"
        )
    check_fields("data.columns.", columns, {"completion"}, set(map(str, columns)))
    told = content.get("prompt", "{prompt}")
    prompts = told if isinstance(told, list) else [told]
    if not prompts or not all(isinstance(one, str) and one for one in prompts):
        raise ValueError(
            f"data.prompt = {told!r}: expected a text, or several as a list; write them in "
            "quotation marks"
        )
    given = [str(role) for role in columns if role != "completion"]
    if not given:
        raise ValueError(
            f"data.columns = {columns}: expected a column for a prompt beside that for the "
            "completion; name one, as prompt: COLUMN"
        )
    for prompt in prompts:
        check_braces(prompt, given)
    used = {field for one in prompts for _, field, *_ in Formatter().parse(one)}
    if idle := [role for role in given if role not in used]:
        raise ValueError(
            f"data.columns: {', '.join(idle)} stands in no prompt; expected {{{idle[0]}}} in one, "
            "or another name for the column prompt; correct it"
        )
    return tuple(prompts)


def language_columns(columns: Any) -> tuple[set[str], set[str]]:
    """Say which columns there must be and may be, by role: messages, or any with a completion."""
    if not isinstance(columns, dict) or "messages" in columns:
        return {"messages"}, set()
    return {"completion"}, set(map(str, columns)) - {"completion"}
