"""The demo checkpoint: the same bytes every time, a whole model, and a tokenizer with GLM's tokens."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from glmjax.checkpoint import load_checkpoint
from glmjax.demo import ADDED_TOKENS, VISIBLE_TOKENS, VOCAB_SIZE, build_demo, demo_config
from glmjax.errors import CheckpointError
from glmjax.params import num_bytes


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo(tmp_path_factory.mktemp("demo") / "demo")


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo / "tokenizer.json"))


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_same_seed_same_bytes_in_another_process(demo, tmp_path):
    code = "import sys; from glmjax.demo import build_demo; build_demo(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "again")], check=True)
    assert digests(tmp_path / "again") == digests(demo)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(demo, tmp_path):
    first, other = digests(demo), digests(build_demo(tmp_path / "other", seed=1))
    assert first.keys() == other.keys()
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_existing_folder_is_kept(demo):
    before = digests(demo)
    with pytest.raises(CheckpointError, match="exists"):
        build_demo(demo)
    assert digests(demo) == before


def test_a_whole_model_of_a_few_megabytes(demo):
    config, params = load_checkpoint(demo, "bfloat16")
    assert config == demo_config()
    assert 10e6 < num_bytes(params) < 20e6
    assert config.indexer_types == ("full", "full", "full", "shared", "shared", "shared", "full", "shared")
    assert config.max_position_embeddings == 8192
    assert params.mtp is not None
    assert params.moe.gate_up.shape[0] == 6
    assert np.isfinite(np.asarray(params.head, np.float32)).all()


def test_every_id_has_a_token(tokenizer):
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))


def test_added_tokens_follow_the_base_in_glms_order(tokenizer):
    first = VOCAB_SIZE - len(ADDED_TOKENS)
    assert [tokenizer.token_to_id(token) for token in ADDED_TOKENS] == list(range(first, VOCAB_SIZE))
    # The distances are those of GLM-5's own ids (spec/model.md 5.1).
    glm = {
        "<|endoftext|>": 154820,
        "<|observation|>": 154829,
        "<think>": 154841,
        "/nothink": 154851,
        "<|video|>": 154855,
    }
    base = tokenizer.token_to_id("<|endoftext|>")
    assert {token: tokenizer.token_to_id(token) - base for token in glm} == {t: i - 154820 for t, i in glm.items()}


def test_tags_stay_visible_and_roles_do_not(tokenizer):
    special = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert {token for token, hidden in special.items() if not hidden} == VISIBLE_TOKENS
    assert len(VISIBLE_TOKENS) == 10
    ids = tokenizer.encode("<|user|>a<think>b</think><tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>").ids
    assert tokenizer.decode(ids) == "a<think>b</think><tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>"
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<|user|>a")


@pytest.mark.parametrize(
    "text", ["Hello, world!", "  two\n\n\tlines ", "naïve café 東京 🙂", "x = 12345;", "", "\x00\x7f"]
)
def test_any_text_survives(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(i < VOCAB_SIZE - len(ADDED_TOKENS) for i in ids)


def test_common_words_take_few_tokens(tokenizer):
    assert len(tokenizer.encode(" the weather in the city").ids) <= 8


def test_configs_agree(demo, tokenizer):
    config = json.loads((demo / "config.json").read_text())
    ends = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    assert config["eos_token_id"] == ends
    assert json.loads((demo / "generation_config.json").read_text())["eos_token_id"] == ends
    words = json.loads((demo / "tokenizer_config.json").read_text())
    assert words["eos_token"] == words["pad_token"] == "<|endoftext|>"
    assert config["pad_token_id"] == ends[0]
    assert {int(i): t["content"] for i, t in words["added_tokens_decoder"].items()} == {
        tokenizer.token_to_id(token): token for token in ADDED_TOKENS
    }
