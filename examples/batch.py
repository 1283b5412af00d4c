"""Complete several prompts offline.

    python examples/batch.py [MODEL]

MODEL is a checkpoint folder, or "demo", whose weights are random: it answers nonsense.
"""

import sys

import glmjax

PROMPTS = ["The sun", "The moon", "The sun and the moon", "Where does the time go?"]


def main(model: str = "demo") -> None:
    how = glmjax.SamplingParams(temperature=0, max_tokens=16)
    # Small limits, so that few programs are compiled; without them it takes more requests at once.
    with glmjax.LLM(model, max_model_len=256, max_num_seqs=2, max_num_batched_tokens=16) as llm:
        for output in llm.generate(PROMPTS, how):
            print(f"{output.prompt} -> {output.outputs[0].text!r}")

        # Other ways to ask: a conversation, and several samples with log-probabilities.
        (answer,) = llm.chat([{"role": "user", "content": "Hello"}], how)
        print(f"chat -> {answer.outputs[0].text!r}")
        (samples,) = llm.generate("The sun", glmjax.SamplingParams(n=2, seed=7, max_tokens=4, logprobs=1))
        for sample in samples.outputs:
            print(f"sample {sample.index}, log-probability {sample.cumulative_logprob:.2f} -> {sample.text!r}")

        stats = llm.stats()
        print(f"cached {stats['cached_tokens']} of {stats['prompt_tokens']} prompt tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
