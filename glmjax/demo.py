"""The demo checkpoint: a small random GLM-5 with a tokenizer, made on the spot, to try the whole system on a laptop.

It has every part of the real model (index groups that share, experts, the MTP layer) and the real widths of the KV
cache (latent 512, rotary 64, index key 128), so that all cache formats run.  What it says means nothing.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from glmjax.checkpoint import MAX_SHARD_BYTES
from glmjax.config import GLMConfig, index_share
from glmjax.hf_write import write_hf, write_json
from glmjax.params import random_params
from glmjax.staging import staged_folder

VOCAB_SIZE = 768

# GLM-5's added tokens in its own order (spec/model.md 5.1); here they follow the smaller base vocabulary.
ADDED_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
# Left in the text by skip_special_tokens, because parsers and readers look for them.
VISIBLE_TOKENS = frozenset(
    f"<{slash}{name}>"
    for name in ("think", "tool_call", "tool_response", "arg_key", "arg_value")
    for slash in ("", "/")
)
END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")

# How GLM cuts text before merging: contractions, words, runs of three digits, punctuation, line ends, blanks.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_demo(path: str | Path, seed: int = 0, *, overwrite: bool = False) -> Path:
    """Writes the demo checkpoint in Hugging Face format, the same bytes for the same seed; returns its path."""
    tokenizer = demo_tokenizer()
    config = demo_config()
    with staged_folder(path, overwrite=overwrite) as folder:
        params = random_params(config, jnp.float32, seed=seed)
        write_hf(config, params, folder, jnp.dtype(jnp.bfloat16), MAX_SHARD_BYTES)
        tokenizer.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", _tokenizer_config(config, tokenizer))
    return Path(path)


def demo_config() -> GLMConfig:
    """8 layers of width 256, 16 experts, index groups {0} {1} {2..5} {6, 7}, top-k 64; 17 MB in bfloat16."""
    ends = tuple(VOCAB_SIZE - len(ADDED_TOKENS) + ADDED_TOKENS.index(token) for token in END_TOKENS)
    return GLMConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=64,
        indexer_types=index_share(8, freq=4, offset=3),
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        first_k_dense_replace=3,
        intermediate_size=512,
        moe_intermediate_size=32,
        max_position_embeddings=8192,
        eos_token_ids=ends,
        pad_token_id=ends[0],
    )


def demo_tokenizer() -> Tokenizer:
    """Byte-level BPE over ``_TEXT``: 256 bytes, merges up to the size of the vocabulary, then GLM's added tokens."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=t not in VISIBLE_TOKENS) for t in ADDED_TOKENS])
    return tokenizer


def _tokenizer_config(config: GLMConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token not in VISIBLE_TOKENS,
            }
            for token in ADDED_TOKENS
        },
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": config.max_position_embeddings,
    }


_TEXT = """\
A language model reads a text as a row of tokens and gives, for every place in the row, a guess at the token that
comes next. To serve one is to keep many of these rows moving at the same time. Each request brings a prompt, waits for
its turn, and leaves with an answer. The scheduler decides which requests run in the next step and how many tokens each
of them may compute. A long prompt is cut into chunks, so that it does not hold up the short ones behind it.

What a model has read it keeps in a cache, one row for every token and every layer. When two requests begin with the
same words, the second one can use the rows of the first. When the cache is full, something must leave: rows that nobody
has used for a long time go first, and a request that loses its rows computes them again later.

Attention looks back over all of this. With a million tokens behind it, a query cannot look at every one of them, so a
small and fast network gives each of them a score, and the query only looks at the best few thousand. The experts of a
layer share the work in the same spirit: a router picks eight of them for each token, and the others rest.

"Where does the time go?" is the first question to ask. Measure before you change anything; then change one thing, and
measure again. If the numbers did not move, put it back. It's a simple rule, and we don't always keep it. You'll find
that the slow part isn't where you've been looking, and that's the reason to look.

The user asked: what is the weather in Paris today? The assistant thought about it, called a tool with the name of the
city and the day, and got an answer: 18 degrees, light rain in the morning, dry after 12:30. "Take a coat," it said.

Please write a short story about a robot who learns to paint. Explain how it works, step by step. Let me think about
this. First, we need to find the number of apples. There are 3 boxes with 24 apples each, so there are 3 * 24 = 72
apples in total. If 15 are sold, 72 - 15 = 57 are left. The answer is 57.

    def main(path: str, count: int = 10) -> list[str]:
        # the first lines of a file
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file if line.strip()]
        return lines[:count]

    for index, value in enumerate(values):
        if value is None or index > 100:
            continue
        total += value
    print(f"total: {total}, mean: {total / len(values):.2f}")

        class Cache:
        def __init__(self, size):
            self.size = size
            self.items = {}
        def get(self, key):
            return self.items.get(key)

    {"role": "user", "content": "Hello!", "name": null, "tools": [{"type": "function", "function": {"name":
    "get_weather", "description": "Get the current weather", "parameters": {"type": "object", "properties": {"city":
    {"type": "string"}, "date": {"type": "string"}}, "required": ["city"]}}}], "stream": true, "temperature": 0.7}

    $ cd /home/user/project && git status && make test
    error: could not open file 'data.txt': no such file or directory (code 2)
    https://www.example.com/index.html?page=1&sort=new

On Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday; in January, March, June and December; in 1999,
2000, 2024 and 2026. One, two, three, four, five, six, seven, eight, nine, ten. Red, green, blue, black and white. The
quick brown fox jumps over the lazy dog. Was it good? No, but it was better than before. Could they have done more?
"""
