"""Write the examples of a language model, in the two forms that they have.

- `messages`: a conversation, which the tokenizer's chat template writes;
- a prompt, made of any columns, and the column of an answer. They stand side by side as they are,
  between the tokenizer's token for the beginning, if it has one, and that for the end; or they are
  a conversation, too, where the column `prompt` has messages.

A chat template is a program of Jinja in a model's folder, or in the preset. transformers runs it in
Jinja's sandbox: it computes a text, and reaches neither files nor Python; its steps are counted.
How the text is built, turn by turn, shows where a turn begins and ends:

    asked       the messages before the turn, with the opening of an answer: what a model is given
    answered    the messages up to the turn and with it

The turn is what `answered` has beyond `asked`. It is learned where `answered` begins the whole
text. A template may write earlier turns otherwise than the last one (leave out what was thought
aloud, move the system's message): such a turn is read by the model, but not learned.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from string import Formatter
from types import FrameType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from ravan_flwr.data.rows import UnreadableError, text_of

ASSISTANT = "assistant"
MOST_MESSAGES = 1_000  # the template writes a conversation anew for each of its turns
Message = dict[str, str]
MOST = 1_000_000  # lines of a template that run; ten messages take some hundred
_FILE = "<template>"  # as Jinja names what it compiles


@dataclass(frozen=True)
class Written:
    """Hold a text, and which parts of it are answers, as (start, end) by characters."""

    text: str
    answers: tuple[tuple[int, int], ...] = ()
    unlearned: int = 0  # answers whose place in the text is not certain
    plain: bool = True  # no template has written it: the tokenizer adds its first token


def messages_of(value: Any) -> list[Message]:
    """Check a conversation: a list of messages, each with a role and a text as content.

    An assistant's message may have no content, as one that calls a tool.
    """
    if not isinstance(value, list) or not value:
        raise UnreadableError("its messages are no list of role and content")
    if len(value) > MOST_MESSAGES:
        raise UnreadableError(f"its conversation has more than {MOST_MESSAGES:,} messages")
    checked = []
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UnreadableError("one of its messages is no role with a content")
        role, content = message["role"], message.get("content")
        if role == ASSISTANT and content in (None, ""):
            checked.append({"role": role, "content": ""})
            continue
        checked.append({"role": role, "content": text_of(f"message of {role}", content)})
    return checked


def conversation(reader: Any, messages: Sequence[Message]) -> Written:
    """Write a whole conversation; ValueError if it has no answer to learn."""
    turns = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not turns:
        raise UnreadableError("its conversation has no message of the assistant")
    turns = [n for n in turns if messages[n]["content"].strip()]
    if not turns:
        raise UnreadableError("its answer is empty")
    messages = messages[: turns[-1] + 1]  # what comes after the last answer teaches nothing
    text = render(reader, messages)
    spans = [answer_in(reader, messages, turn, text) for turn in turns]
    answers = tuple(span for span in spans if span is not None)
    if any(end > start for (_, end), (start, _) in pairwise(answers)) or not answers:
        raise UnreadableError("the chat template's text does not show where its answers are")
    return Written(text, answers, len(spans) - len(answers), plain=False)


def answer_in(
    reader: Any, messages: Sequence[Message], turn: int, text: str
) -> tuple[int, int] | None:
    """Find one turn in the whole text; None if the text does not have it as the model writes it."""
    if not turn:  # nobody has asked
        return None
    try:
        before = render(reader, messages[:turn])
        prompt = render(reader, messages[:turn], opening=True)
        answered = text if turn == len(messages) - 1 else render(reader, messages[: turn + 1])
    except UnreadableError:  # a part alone is refused: roles that must alternate, say
        return None
    start = len(commonprefix([prompt, answered]))  # noqa: RUF071 (it is to)
    if start < len(before) or not text.startswith(answered) or start == len(answered):
        return None
    return start, len(answered)


def question(reader: Any, messages: Sequence[Message]) -> Written:
    """Write what a model is given to answer: the messages before a last one of the assistant."""
    prompt = [*messages]
    while prompt and prompt[-1]["role"] == ASSISTANT:
        prompt.pop()
    if not prompt:
        raise UnreadableError("its conversation asks for nothing")
    return Written(render(reader, prompt, opening=True), plain=False)


def render(reader: Any, messages: Sequence[Message], *, opening: bool = False) -> str:
    """Write messages by the template, with the opening of an answer if that comes next."""
    if not messages:
        return ""
    try:
        with counted():
            text: str = reader.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=opening,
            )
    except EndlessError:
        raise ValueError(
            f"chat template: it takes more than {MOST:,} steps for a conversation of "
            f"{len(messages)}, expected a template that ends; correct chat-template in the "
            "preset's data, or choose another model"
        ) from None
    except TemplateSyntaxError as error:
        raise ValueError(
            f"chat template: line {error.lineno}: {error.message}; expected a template of Jinja; "
            "correct chat-template in the preset's data, or the model's"
        ) from None
    except TemplateError as error:
        raise UnreadableError(f"the chat template refuses it: {error}") from None
    except MemoryError as error:
        raise ValueError(
            f"chat template: memory ran out while it wrote a conversation of {len(messages)}; "
            "correct chat-template in the preset's data, or choose another model; if it is as it "
            "should be, end other programs"
        ) from error
    except Exception as error:  # noqa: BLE001 (a template computes what it likes)
        reason = f"{type(error).__name__}: {error}"
        raise UnreadableError(f"the chat template cannot write it: {reason}") from None
    return text


def end_of_turn(reader: Any) -> str:
    """Find what the template writes after an answer; "" if that cannot be told."""
    if not reader.chat_template:
        return ""
    answer = {"role": ASSISTANT, "content": "An answer."}
    try:
        text = render(reader, [{"role": "user", "content": "Hi"}, answer])
    except UnreadableError:
        return ""
    return text.rpartition(answer["content"])[2] if answer["content"] in text else ""


class EndlessError(Exception):
    """Say that a template has taken more steps than any conversation needs."""


@contextmanager
def counted() -> Iterator[None]:
    """Raise `EndlessError` in a template that runs meanwhile, once it has taken too many steps.

    Jinja's sandbox bounds a range, but not loops within loops. The count of lines is the same on
    every machine, as a limit of seconds would not be. One line may still compute for long.
    """
    taken = 0

    def line(_frame: FrameType, _event: str, _value: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken > MOST:
            raise EndlessError
        return line

    def call(frame: FrameType, _event: str, _value: Any) -> Any:
        return line if frame.f_code.co_filename == _FILE else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


Row = Mapping[str, Any]  # an example's values by role


class Form:
    """Write examples as texts; UnreadableError for one that cannot be written.

    Without prompts the column `talk` has whole conversations. Else an answer stands behind a
    prompt, the first all of whose columns have some text: both as they are, or by the chat template
    where the column `prompt` has messages.
    """

    def __init__(self, reader: Any, prompts: Sequence[str], talk: str) -> None:
        self.reader, self.talk = reader, talk
        self.prompts = [(prompt, roles_in(prompt)) for prompt in prompts]

    @property
    def may_talk(self) -> bool:
        """Tell whether an example may be a conversation, or begin with one."""
        return not self.prompts or any({*roles} == {"prompt"} for _, roles in self.prompts)

    def check(self) -> None:
        """Refuse a tokenizer that cannot write conversations, if there are only these."""
        if not self.prompts:
            check_template(self.reader)

    def question(self, row: Row) -> Written:
        """Write what is before the answer."""
        messages = self._prompt_messages(row)
        return Written(self._filled(row)) if messages is None else question(self.reader, messages)

    def answered(self, row: Row, role: str) -> Written:
        """Write an example with the answer of that column; of a conversation, its last one."""
        if self.prompts and self._prompt_messages(row) is None:
            prompt = self._filled(row)
            text = prompt + text_of(role, row[role])
            return Written(text, ((len(prompt), len(text)),))
        *context, answer = messages = self._messages(row, role)
        if not context:
            raise UnreadableError("its conversation asks for nothing")
        if answer["role"] != ASSISTANT:
            raise UnreadableError(f"its {role} is not one message of the assistant after the rest")
        if not answer["content"].strip():
            raise UnreadableError(f"its {role} answer is empty")
        text = render(self.reader, messages)
        span = answer_in(self.reader, messages, len(context), text)
        if span is None:
            raise UnreadableError("the chat template's text does not show where its answers are")
        return Written(text, (span,), plain=False)

    def checked(self, role: str, value: Any) -> Any:
        """Check a value of an example."""
        if value is None and not self.prompts:
            raise UnreadableError(f"its {role} is missing")
        if isinstance(value, list) or not self.prompts:
            return messages_of(value)
        sometimes = any(role not in roles for _, roles in self.prompts)
        return "" if sometimes and value in (None, "") else text_of(role, value)

    def _prompt_messages(self, row: Row) -> list[Message] | None:
        """List the messages of a conversation, or of a prompt; None where there is a text."""
        if not self.prompts:
            return messages_of(row[self.talk])
        if not isinstance(row.get("prompt"), list):
            return None
        if not self.may_talk:
            raise UnreadableError("its prompt has messages, where each text has other columns too")
        check_template(self.reader)
        return messages_of(row["prompt"])

    def _messages(self, row: Row, role: str) -> list[Message]:
        """List the messages of a conversation with the answer of that column."""
        if not self.prompts:
            return messages_of(row[role] if role in row else row[self.talk])
        answer = row[role]
        if not isinstance(answer, list):
            answer = [{"role": ASSISTANT, "content": text_of(role, answer)}]
        answers = messages_of(answer)
        if len(answers) > 1:
            raise UnreadableError(f"its {role} is not one message of the assistant after the rest")
        return [*messages_of(row["prompt"]), *answers]

    def _filled(self, row: Row) -> str:
        def has_texts(roles: Sequence[str]) -> bool:
            return all(isinstance(row[role], str) and row[role].strip() for role in roles)

        fitting = (pair for pair in self.prompts if has_texts(pair[1]))
        prompt, roles = next(fitting, self.prompts[-1])  # of the last, what is missing is reported
        return prompt.format(**{role: text_of(role, row[role]) for role in roles})


def check_template(reader: Any) -> None:
    """Refuse a tokenizer that cannot write conversations."""
    if not reader.chat_template:
        raise ValueError(
            "the data have conversations, but the model's tokenizer has no chat template; "
            "expected one, which writes a conversation as a text; choose an instruction-tuned "
            "model, write chat-template into the preset's data (`new --chat-template FILE`), "
            "or give prompts and answers as texts"
        )
    with suppress(UnreadableError):  # it wants more than that; that it is a template is known now
        render(reader, [{"role": "user", "content": "Hi"}])


def roles_in(prompt: str) -> list[str]:
    """List what stands in braces."""
    return [field for _, field, *_ in Formatter().parse(prompt) if field]
