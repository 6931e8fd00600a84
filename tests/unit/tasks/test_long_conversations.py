"""Long conversations are written, and those of too many messages are left out."""

import datasets
import pytest
import transformers

from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks.causal import Causal
from ravan_flwr.tasks.forms import MOST_MESSAGES, messages_of, render
from tests.support.tiny import save_speaker

DATA = DataSpec("hub", "talks", columns=(("messages", "messages"),), target_length=8)
TALK = [{"role": "user", "content": "ka"}, {"role": "assistant", "content": "ne"}]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    where = save_speaker("llama", tmp_path_factory.mktemp("models") / "llama")
    settings = transformers.AutoConfig.from_pretrained(where).to_dict()
    return lambda template: Causal(
        DataSpec(**{**vars(DATA), "chat_template": template}), 64, lambda: where, lambda: settings
    )


def test_a_conversation_of_too_many_messages_is_excluded_and_counted(task, caplog):
    most = TALK * (MOST_MESSAGES // 2)
    talks = [TALK, [*most, TALK[0]], TALK * 50_000]
    with caplog.at_level("WARNING"):
        assert len(task("").encode(datasets.Dataset.from_dict({"messages": talks}))) == 1
    assert "2 of 3 are left out: 2: its conversation has more than 1,000 messages" in caplog.text
    assert len(messages_of(most)) == MOST_MESSAGES


def test_a_long_conversation_is_written(task):
    assert render(task("").reader, TALK * 1000).count("<|im_end|>") == 2000
