"""Convert the examples of a language model to texts. An example is one of two:

- `messages`: a conversation, which the tokenizer's chat template renders;
- a prompt, made of any columns, and an answer column. Prompt and answer are concatenated as they
  are, between the tokenizer's beginning token, if it has one, and its end token. If the column
  `prompt` has messages, they are rendered as a conversation too.

A chat template is a Jinja program in a model's folder, or in the preset. transformers runs it in
Jinja's sandbox: it computes a text, and has no access to files or Python.
Where a turn begins and ends is found from two renderings:

    prompt      the messages before the turn, with the opening of an answer: the model's input
    answered    the messages up to and including the turn

The turn is what `answered` has beyond `prompt`. It is learned if the whole text begins with
`answered`. A template may render earlier turns differently from the last one, for example without
reasoning or with the system message moved. Such a turn is input of the model, but not learned.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from string import Formatter
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from ravan_flwr.data.rows import UnreadableError, check_text

ASSISTANT = "assistant"
MAX_MESSAGES = 1_000  # the template renders a conversation again for each of its turns
Message = dict[str, str]


@dataclass(frozen=True)
class AnnotatedText:
    """A text with the spans of its answers, as (start, end) in characters."""

    text: str
    answers: tuple[tuple[int, int], ...] = ()
    unlearned: int = 0  # answers without a certain span
    plain: bool = True  # not rendered by a template: the tokenizer adds its beginning token


def check_messages(value: Any) -> list[Message]:
    """Return a checked conversation: a list of messages, each with a role and a text as content.

    An assistant's message may have no content, for example if it calls a tool.
    """
    if not isinstance(value, list) or not value:
        raise UnreadableError("its messages are no list of role and content")
    if len(value) > MAX_MESSAGES:
        raise UnreadableError(f"its conversation has more than {MAX_MESSAGES:,} messages")
    checked = []
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UnreadableError("one of its messages is no role with a content")
        role, content = message["role"], message.get("content")
        if role == ASSISTANT and content in (None, ""):
            checked.append({"role": role, "content": ""})
            continue
        checked.append({"role": role, "content": check_text(f"message of {role}", content)})
    return checked


def conversation(reader: Any, messages: Sequence[Message]) -> AnnotatedText:
    """Render a conversation up to its last answer; UnreadableError if no answer can be learned."""
    turns = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not turns:
        raise UnreadableError("its conversation has no message of the assistant")
    turns = [n for n in turns if messages[n]["content"].strip()]
    if not turns:
        raise UnreadableError("its answer is empty")
    messages = messages[: turns[-1] + 1]  # messages after the last answer are not learned
    text = render(reader, messages)
    spans = [answer_span(reader, messages, turn, text) for turn in turns]
    answers = tuple(span for span in spans if span is not None)
    if any(end > start for (_, end), (start, _) in pairwise(answers)) or not answers:
        raise UnreadableError("the chat template's text does not show where its answers are")
    return AnnotatedText(text, answers, len(spans) - len(answers), plain=False)


def answer_span(
    reader: Any, messages: Sequence[Message], turn: int, text: str
) -> tuple[int, int] | None:
    """Return the span of a turn in the whole text; None if the text renders it differently."""
    if not turn:  # no message comes before it
        return None
    try:
        before = render(reader, messages[:turn])
        prompt = render(reader, messages[:turn], opening=True)
        answered = text if turn == len(messages) - 1 else render(reader, messages[: turn + 1])
    except UnreadableError:  # the template rejects a part, for example if roles must alternate
        return None
    start = len(commonprefix([prompt, answered]))  # noqa: RUF071 (by characters is intended)
    if start < len(before) or not text.startswith(answered) or start == len(answered):
        return None
    return start, len(answered)


def question(reader: Any, messages: Sequence[Message]) -> AnnotatedText:
    """Render the model's input for a prediction: the messages before the final answer, if any."""
    prompt = [*messages]
    while prompt and prompt[-1]["role"] == ASSISTANT:
        prompt.pop()
    if not prompt:
        raise UnreadableError("its conversation asks for nothing")
    return AnnotatedText(render(reader, prompt, opening=True), plain=False)


def render(reader: Any, messages: Sequence[Message], *, opening: bool = False) -> str:
    """Render messages by the chat template, followed by the opening of an answer if asked for."""
    if not messages:
        return ""
    try:
        text: str = reader.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=opening
        )
    except TemplateSyntaxError as error:
        raise ValueError(
            f"chat template: line {error.lineno}: {error.message}; expected a template of Jinja; "
            "correct chat-template in the preset's data, or the model's"
        ) from None
    except TemplateError as error:
        raise UnreadableError(f"the chat template refuses it: {error}") from None
    except Exception as error:  # noqa: BLE001 (a template may raise any exception)
        reason = f"{type(error).__name__}: {error}"
        raise UnreadableError(f"the chat template cannot write it: {reason}") from None
    return text


def end_of_turn(reader: Any) -> str:
    """Return the text that the template writes after an answer; "" if it cannot be found."""
    if not reader.chat_template:
        return ""
    answer = {"role": ASSISTANT, "content": "An answer."}
    try:
        text = render(reader, [{"role": "user", "content": "Hi"}, answer])
    except UnreadableError:
        return ""
    return text.rpartition(answer["content"])[2] if answer["content"] in text else ""


Row = Mapping[str, Any]  # an example's values by role


class PromptFormat:
    """Convert examples to texts; UnreadableError for an invalid example.

    Without prompts the column `messages_role` has whole conversations. Otherwise an answer follows
    a prompt: the first whose columns all have text. Both are used as they are, or rendered by the
    chat template if the column `prompt` has messages.
    """

    def __init__(self, reader: Any, prompts: Sequence[str], messages_role: str) -> None:
        self.reader, self.messages_role = reader, messages_role
        parsed = {prompt: [*Formatter().parse(prompt)] for prompt in prompts}
        # Each prompt, and the roles in its braces.
        self.prompts = [
            (prompt, [role for _, role, *_ in fields if role]) for prompt, fields in parsed.items()
        ]

    @property
    def may_have_messages(self) -> bool:
        """Return whether an example may be a conversation, or begin with one."""
        return not self.prompts or any({*roles} == {"prompt"} for _, roles in self.prompts)

    def check(self) -> None:
        """Raise ValueError if all examples are conversations, and there is no chat template."""
        if not self.prompts:
            check_template(self.reader)

    def question(self, row: Row) -> AnnotatedText:
        """Return the text before the answer."""
        messages = self._prompt_messages(row)
        return (
            AnnotatedText(self._filled(row))
            if messages is None
            else question(self.reader, messages)
        )

    def answered(self, row: Row, role: str) -> AnnotatedText:
        """Return the text of an example with the answer of column `role`.

        Of a conversation, only the last answer is marked.
        """
        if self.prompts and self._prompt_messages(row) is None:
            prompt = self._filled(row)
            text = prompt + check_text(role, row[role])
            return AnnotatedText(text, ((len(prompt), len(text)),))
        *context, answer = messages = self._messages(row, role)
        if not context:
            raise UnreadableError("its conversation asks for nothing")
        if answer["role"] != ASSISTANT:
            raise UnreadableError(f"its {role} is not one message of the assistant after the rest")
        if not answer["content"].strip():
            raise UnreadableError(f"its {role} answer is empty")
        text = render(self.reader, messages)
        span = answer_span(self.reader, messages, len(context), text)
        if span is None:
            raise UnreadableError("the chat template's text does not show where its answers are")
        return AnnotatedText(text, (span,), plain=False)

    def checked(self, role: str, value: Any) -> Any:
        """Return a checked value of an example."""
        if value is None and not self.prompts:
            raise UnreadableError(f"its {role} is missing")
        if isinstance(value, list) or not self.prompts:
            return check_messages(value)
        is_optional = any(role not in roles for _, roles in self.prompts)
        return "" if is_optional and value in (None, "") else check_text(role, value)

    def _prompt_messages(self, row: Row) -> list[Message] | None:
        """Return the messages of a conversation or of a prompt; None if the prompt is a text."""
        if not self.prompts:
            return check_messages(row[self.messages_role])
        if not isinstance(row.get("prompt"), list):
            return None
        if not self.may_have_messages:
            raise UnreadableError("its prompt has messages, where each text has other columns too")
        check_template(self.reader)
        return check_messages(row["prompt"])

    def _messages(self, row: Row, role: str) -> list[Message]:
        """Return the messages of a conversation with the answer of column `role`."""
        if not self.prompts:
            return check_messages(row[role] if role in row else row[self.messages_role])
        answer = row[role]
        if not isinstance(answer, list):
            answer = [{"role": ASSISTANT, "content": check_text(role, answer)}]
        answers = check_messages(answer)
        if len(answers) > 1:
            raise UnreadableError(f"its {role} is not one message of the assistant after the rest")
        return [*check_messages(row["prompt"]), *answers]

    def _filled(self, row: Row) -> str:
        def has_texts(roles: Sequence[str]) -> bool:
            return all(isinstance(row[role], str) and row[role].strip() for role in roles)

        fitting = (pair for pair in self.prompts if has_texts(pair[1]))
        # `check_text` reports what the last one lacks.
        prompt, roles = next(fitting, self.prompts[-1])
        return prompt.format(**{role: check_text(role, row[role]) for role in roles})


def check_template(reader: Any) -> None:
    """Raise ValueError if the tokenizer has no chat template, or an invalid one."""
    if not reader.chat_template:
        raise ValueError(
            "the data have conversations, but the model's tokenizer has no chat template; "
            "expected one, which writes a conversation as a text; choose an instruction-tuned "
            "model, write chat-template into the preset's data (`new --chat-template FILE`), "
            "or give prompts and answers as texts"
        )
    with suppress(UnreadableError):  # a valid template may reject this conversation
        render(reader, [{"role": "user", "content": "Hi"}])
