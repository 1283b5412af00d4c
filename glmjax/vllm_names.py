"""Names of vLLM's that glmjax calls otherwise or does not have, and what is said to whoever uses them."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

Refused = Mapping[str, tuple[tuple[Any, ...], str]]  # field -> (values that ask for nothing, why not)

NO_GRAMMAR = "needs constrained decoding, which is not there yet"
_NEEDS = f"it {NO_GRAMMAR}"
_AS_THEY_ARE = "tokens are sampled from the model's logits as they are"
_NO_BEAMS = "there is no beam search"

# Sampling parameters, over HTTP and in Python.
SAMPLING: Refused = {
    "presence_penalty": ((0,), _AS_THEY_ARE),
    "frequency_penalty": ((0,), _AS_THEY_ARE),
    "repetition_penalty": ((1,), _AS_THEY_ARE),
    "length_penalty": ((1,), _NO_BEAMS),
    "use_beam_search": ((False,), _NO_BEAMS),
    "best_of": ((1,), "use n"),
    "logit_bias": (({},), _AS_THEY_ARE),
    "prompt_logprobs": ((), "only new tokens come with log-probabilities"),
    "bad_words": (([],), _AS_THEY_ARE),
    "allowed_token_ids": ((), "any token may be sampled"),
    "logprob_token_ids": (([],), "log-probabilities are those of the likeliest tokens, see logprobs"),
    "logits_processors": (([],), _AS_THEY_ARE),
    "thinking_token_budget": ((-1,), "only max_tokens limits it"),
    "truncate_prompt_tokens": ((), "prompts are never truncated"),
    "structured_outputs": ((), _NEEDS),
    "guided_json": ((), _NEEDS),
    "guided_regex": ((), _NEEDS),
    "guided_choice": ((), _NEEDS),
    "guided_grammar": ((), _NEEDS),
}

# Those of vLLM's SamplingParams that are no fields of requests.
SAMPLING_IN_PYTHON: Refused = {
    **SAMPLING,
    "early_stopping": ((False,), _NO_BEAMS),
    "guided_decoding": ((), _NEEDS),
    "spaces_between_special_tokens": ((True,), "text is what the tokenizer makes of the ids"),
    "flat_logprobs": ((False,), "log-probabilities are one mapping for each token"),
    "output_kind": ((), "outputs come whole; a server streams"),
    "stream_interval": ((1,), "outputs come whole; a server streams"),
    "extra_args": (({},), "nothing reads them"),
    "repetition_detection": ((), "stop, stop_token_ids and max_tokens end an output"),
    "skip_reading_prefix_cache": ((False,), "use LLM.reset_prefix_cache()"),
}

DEGREES = {
    "data_parallel_size": "dp",
    "tensor_parallel_size": "tp",
    "prefill_context_parallel_size": "pcp",
    "decode_context_parallel_size": "dcp",
    "enable_expert_parallel": "ep",
    "dcp_kv_cache_interleave_size": "interleave",
    "cp_kv_cache_interleave_size": "interleave",
}
ENGINE = {
    "gpu_memory_utilization": "kv_cache_gib",
    "kv_cache_memory_bytes": "kv_cache_gib",
    "num_gpu_blocks_override": "num_device_blocks",
    "scheduling_policy": "policy",
}


def refusal(given: Mapping[str, Any], table: Refused) -> tuple[str, str] | None:
    """The first of the given fields that asks for something that is not supported, and what to say; None: none does."""
    for field, (neutral, why) in table.items():
        value = given.get(field)
        if value is None or value in neutral or (field == "best_of" and value == given.get("n")):
            continue
        return field, f"{field} is not supported: {why}"
    return None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one is nearest to."""
    return next(iter(difflib.get_close_matches(name.lower()[:60], tuple(known), n=1, cutoff=0.7)), None)
