"""Compares this project's tokenizer with two libraries that read the same tokenizer files."""

import json
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import sentencepiece
import tokenizers as fast_library
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llm_serving.engine.token_table import decode_rule
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.engine.tokenizer_files import find_vocabulary
from llm_serving.errors import CheckpointError, RequestError
from support.small_tokenizers import open_tokenizer, sentencepiece_model, tokenizer_config, write_sentencepiece_folder

fast = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
mixed_text = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=8), st.sampled_from(["<|user|>", "</s>", " fox"])
    ),
    max_size=6,
).map("".join)


@given(text=mixed_text)
@fast
def test_both_files_of_one_model_give_the_same_tokens(tokenizers, text):
    assert tokenizers["sentencepiece"].encode(text) == tokenizers["llama2"].encode(text)
    assert tokenizers["tiny_llama_sentencepiece"].encode(text) == tokenizers["tiny_llama"].encode(text)


@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
@example(text="<|user|>")
@fast
def test_decoding_agrees_with_the_libraries(tokenizers, folder, text):
    for kind in ("llama2", "byte_level"):
        library = fast_library.Tokenizer.from_file(str(folder / kind / "tokenizer.json"))
        library.no_truncation()
        ids = tokenizers[kind].encode(text)
        for skip in (True, False):
            assert tokenizers[kind].decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(sentencepiece_model())
    ids = processor.encode(text)
    # The SentencePiece library does not know special tokens. It skips none and treats their spelling as ordinary text.
    assert tokenizers["sentencepiece"].decode(ids, skip_special_tokens=False) == processor.decode(ids)


@pytest.mark.parametrize("kind", ["tiny_llama", "tiny_llama_sentencepiece"])
def test_other_threads_run_while_a_long_text_is_encoded(tokenizers, kind):
    """The tokenizer releases the interpreter lock.

    Otherwise no other thread could run until the end of the encoding.
    """
    text, began, ended, turns = "\U00012000\U0001f3f4\u200d" * 40_000, threading.Event(), threading.Event(), 0

    def encode():
        began.set()
        for _ in range(1 if kind == "tiny_llama" else 4):
            tokenizers[kind].encode(text)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    began.wait()
    while not ended.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 20


def test_a_template_with_an_undefined_token_is_refused(tokenizers, folder, tmp_path):
    shutil.copytree(folder / "llama2", tmp_path / "damaged")
    file = tmp_path / "damaged" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="cannot encode a text"):
        open_tokenizer(file)


def test_special_tokens(tokenizers):
    for kind in ("llama2", "sentencepiece"):
        tokenizer = tokenizers[kind]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
        assert tokenizer.special_token_ids == frozenset(range(6))
        assert tokenizer.encode("<|user|>fox</s>", add_special_tokens=False)[0] == 4
        assert tokenizer.encode("")[0] == 1
        assert tokenizer.vocab_size == 360
    assert (tokenizers["byte_level"].bos_token_id, tokenizers["byte_level"].eos_token_ids) == (0, (1,))


def test_truncation_in_the_file_is_ignored(tokenizers):
    assert len(tokenizers["llama2"].encode("hello the fox " * 10)) > 30


def test_longest_token_bounds_the_length_of_a_text(tokenizers):
    tokenizer = tokenizers["byte_level"]
    assert tokenizer.max_piece_chars == max(len(tokenizer.piece(i)) for i in range(tokenizer.vocab_size))


def test_without_the_legacy_flag_only_the_start_gets_a_word_mark(tmp_path):
    ids = {}
    for legacy in (True, False):
        tokenizer = open_tokenizer(write_sentencepiece_folder(tmp_path / str(legacy), legacy=legacy))
        ids[legacy] = [tokenizer.piece(i) for i in tokenizer.encode("fox<|user|>fox")]
        assert [tokenizer.piece(i) for i in tokenizer.encode("<|user|>fox")][:2] == ["<s>", "<|user|>"]
    assert ids[True] == ["<s>", "\u2581fox", "<|user|>", "\u2581fox"]
    assert ids[False][:3] == ["<s>", "\u2581fox", "<|user|>"]
    assert "".join(ids[False][3:]) == "fox"


def test_flags_for_first_and_last_token(tmp_path):
    tokenizer = open_tokenizer(write_sentencepiece_folder(tmp_path, add_bos_token=False, add_eos_token=True))
    assert tokenizer.encode("fox")[0] != 1
    assert tokenizer.encode("fox")[-1] == 2
    assert 2 not in tokenizer.encode("fox", add_special_tokens=False)


def test_tokens_added_beyond_the_model(tmp_path):
    added = tokenizer_config()["added_tokens_decoder"]
    added["360"] = {"content": "<extra>", "special": False, "rstrip": True}
    tokenizer = open_tokenizer(write_sentencepiece_folder(tmp_path, added_tokens_decoder=added))
    assert tokenizer.vocab_size == 361
    assert tokenizer.encode("<extra>   fox", add_special_tokens=False)[0] == 360
    assert tokenizer.decode(tokenizer.encode("fox<extra>   fox")) == "fox<extra> fox"


def test_tokens_only_the_settings_list_are_added_to_a_tokenizer_json(folder, tmp_path):
    shutil.copytree(folder / "byte_level", tmp_path / "copy")
    size = open_tokenizer(tmp_path / "copy" / "tokenizer.json").vocab_size
    settings_file = tmp_path / "copy" / "tokenizer_config.json"
    added = {str(size): {"content": "<new>", "special": True}}
    settings_file.write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = open_tokenizer(tmp_path / "copy" / "tokenizer.json")
    assert tokenizer.encode("<new>") == [size]
    assert size in tokenizer.special_token_ids
    settings_file.write_text(json.dumps({"added_tokens_decoder": {str(size + 5): {"content": "<new>"}}}))
    with pytest.raises(CheckpointError, match=rf"'<new>' has id {size + 5}, but tokenizer.json gives it {size}"):
        open_tokenizer(tmp_path / "copy" / "tokenizer.json")


def test_tokenizer_json_is_preferred_and_a_type_may_choose_sentencepiece(folder, tmp_path):
    shutil.copy(folder / "llama2" / "tokenizer.json", tmp_path)
    assert find_vocabulary(tmp_path).name == "tokenizer.json"
    with pytest.raises(CheckpointError, match=r"holds no tokenizer.model, so"):
        find_vocabulary(tmp_path, "LlamaTokenizer")
    shutil.copy(folder / "sentencepiece" / "tokenizer.model", tmp_path)
    assert find_vocabulary(tmp_path, "LlamaTokenizer").name == "tokenizer.model"
    assert find_vocabulary(tmp_path / "tokenizer.model").name == "tokenizer.model"


def test_the_config_names_file_and_end_tokens(folder):
    config = SimpleNamespace(
        tokenizer_file=str(folder / "llama2" / "tokenizer.json"),
        tokenizer=SimpleNamespace(type="LlamaTokenizerFast"),
        end_token_ids=(5, 2),
        draft=None,
    )
    assert load_tokenizer(config).eos_token_ids == (5, 2)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no tokenizer.json and no tokenizer.model and no vocab.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json: not a valid tokenizer.json"),
        ({"tokenizer.model": "x"}, "tokenizer.model: not a valid sentencepiece model"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, "must hold a JSON object, not list"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{"}, "tokenizer_config.json: not valid JSON"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": '{"chat_template": 5}'}, "chat_template = 5: must be text"),
        (
            {"tokenizer.json": "{}", "tokenizer_config.json": '{"chat_template": [{"name": "x"}]}'},
            "must hold name and template",
        ),
        (
            {"tokenizer.json": "{}", "tokenizer_config.json": '{"added_tokens_decoder": {"a": {"content": "b"}}}'},
            "under a token id",
        ),
        ({"tokenizer.json": "{}", "added_tokens.json": '{"a": "b"}'}, "must map a text to a token id"),
    ],
)
def test_bad_files_are_named(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        open_tokenizer(find_vocabulary(tmp_path))


def test_an_added_token_that_contradicts_the_model_is_refused(tmp_path):
    added = {"7": {"content": "<wrong>", "special": True}}
    with pytest.raises(CheckpointError, match=r"'<wrong>' has id 7, which is '<0x01>' in tokenizer.model"):
        open_tokenizer(write_sentencepiece_folder(tmp_path, added_tokens_decoder=added))


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (None, "has no decoder"),
        ({"type": "WordPiece", "prefix": "##"}, "decoder 'WordPiece'"),
        ({"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]}, "'Strip'"),
        (
            {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}]},
            "'Replace'",
        ),
    ],
)
def test_decoders_that_are_no_concatenation_are_refused(decoder, message):
    with pytest.raises(CheckpointError, match=message):
        decode_rule(decoder, "tokenizer.json")


def test_metaspace_takes_the_mark_off_the_first_token(tmp_path):
    from tokenizers import decoders, models

    tokenizer = fast_library.Tokenizer(models.BPE(vocab={"\u2581a": 0, "\u2581\u2581": 1, "b": 2}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = open_tokenizer(tmp_path / "tokenizer.json")
    for ids in ([0, 0], [1, 0, 2], [2, 0], []):
        assert ours.decode(ids) == tokenizer.decode(ids)


def test_a_model_without_template_is_an_error(tokenizers):
    assert tokenizers["byte_level"].chat_template.is_missing
    with pytest.raises(RequestError, match="no chat template") as error:
        tokenizers["byte_level"].chat_template.render([{"role": "user", "content": "hi"}])
    assert (error.value.code, error.value.param) == ("no_chat_template", "messages")


def test_a_conversation_is_encoded(tokenizers):
    tokenizer = tokenizers["llama2"]
    text = tokenizer.chat_template.render([{"role": "user", "content": "fox"}])
    assert text == "<s><|user|>fox</s><|assistant|>"
    assert tokenizer.encode(text, add_special_tokens=False)[:2] == [1, 4]
    text = tokenizer.chat_template.render([{"role": "user", "content": "fox"}], add_generation_prompt=False)
    assert text[-4:] == "</s>"


def test_the_jinja_file_goes_before_the_settings(tmp_path):
    vocabulary = write_sentencepiece_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages | length }}")
    assert open_tokenizer(vocabulary).chat_template.render([{}, {}]) == "file: 2"


def test_named_templates(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert open_tokenizer(write_sentencepiece_folder(tmp_path, chat_template=named)).chat_template.render([]) == "plain"


def test_a_sentencepiece_vocabulary_must_be_utf8(tmp_path):
    vocabulary = write_sentencepiece_folder(tmp_path)
    content = vocabulary.read_bytes()
    place = content.index("\u2581".encode())
    vocabulary.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: a piece of the vocabulary is not UTF-8"):
        open_tokenizer(vocabulary)
