"""Write the examples of a language model, in the two forms that they have.

- `messages`: a conversation, which the tokenizer's chat template writes;
- a prompt, made of any columns, and the column `completion`. They stand side by side as they are,
  between the tokenizer's token for the beginning, if it has one, and that for the end.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from ravan_flwr.data.rows import UnreadableError
from ravan_flwr.data.values import text_of
from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks.conversation import (
    ASSISTANT,
    Written,
    conversation,
    end_of_turn,
    messages_of,
    question,
    render,
)
from ravan_flwr.tasks.extensions import Sample

Row = Mapping[str, Any]  # an example's values by role


class Form(ABC):
    """Write an example as a text; UnreadableError for one that cannot be written."""

    @abstractmethod
    def check(self) -> None:
        """Refuse a tokenizer that cannot write this form."""

    @abstractmethod
    def whole(self, row: Row) -> Written:
        """Write an example with its answers."""

    @abstractmethod
    def question(self, row: Row) -> Written:
        """Write what is before the answer."""

    @abstractmethod
    def sample(self, row: Row) -> Sample:
        """Say what is asked last, what is right, and what the model is given of it."""

    @abstractmethod
    def checked(self, role: str, value: Any) -> Any:
        """Check one value of an example that is to be answered."""

    def end(self) -> str:
        """Say what stands after an answer, beside the token for the end; "" if nothing does."""
        return ""


class Conversations(Form):
    """Read the column `messages`."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def check(self) -> None:
        if not self.reader.chat_template:
            raise ValueError(
                "data.columns has messages, but the model's tokenizer has no chat template; "
                "expected one, which writes a conversation as a text; choose an instruction-tuned "
                "model, write chat-template into the preset's data (`new --chat-template FILE`), "
                "or give prompt and completion"
            )
        try:
            render(self.reader, [{"role": "user", "content": "Hi"}])
        except UnreadableError:  # it wants more than that; whether it is a template is known now
            return

    def whole(self, row: Row) -> Written:
        return conversation(self.reader, messages_of(row["messages"]))

    def question(self, row: Row) -> Written:
        return question(self.reader, messages_of(row["messages"]))

    def sample(self, row: Row) -> Sample:
        messages = messages_of(row["messages"])
        while messages and not (messages[-1]["role"] == ASSISTANT and messages[-1]["content"]):
            messages.pop()
        if len(messages) < 2:
            raise UnreadableError("its conversation has no question and answer")
        *given, right = messages
        return Sample(given[-1]["content"], right["content"], {"messages": given})

    def checked(self, role: str, value: Any) -> Any:
        return messages_of(value)

    def end(self) -> str:
        return end_of_turn(self.reader)


class Completions(Form):
    """Fill a prompt: the first all of whose columns have some text."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.prompts = [(prompt, roles_in(prompt)) for prompt in prompts]

    def check(self) -> None:
        """Any tokenizer will do."""

    def whole(self, row: Row) -> Written:
        prompt = self._filled(row)
        text = prompt + text_of("completion", row["completion"])
        return Written(text, ((len(prompt), len(text)),))

    def question(self, row: Row) -> Written:
        return Written(self._filled(row))

    def sample(self, row: Row) -> Sample:
        given = {role: row[role] for _, roles in self.prompts for role in roles}
        return Sample(self._filled(row), text_of("completion", row["completion"]), given)

    def _filled(self, row: Row) -> str:
        def whole(roles: Sequence[str]) -> bool:
            return all(isinstance(row[role], str) and row[role].strip() for role in roles)

        fitting = (pair for pair in self.prompts if whole(pair[1]))
        prompt, roles = next(fitting, self.prompts[-1])  # of the last, what is missing is reported
        return prompt.format(**{role: text_of(role, row[role]) for role in roles})

    def checked(self, role: str, value: Any) -> Any:
        sometimes = any(role not in roles for _, roles in self.prompts)
        return "" if sometimes and value in (None, "") else text_of(role, value)


def form_of(data: DataSpec, reader: Any) -> Form:
    """Choose the form of a data set."""
    return Conversations(reader) if data.column("messages") else Completions(data.prompts)


def roles_in(prompt: str) -> list[str]:
    """List what stands in braces."""
    return [field for _, field, *_ in Formatter().parse(prompt) if field]
