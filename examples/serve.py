"""Start a server in this process and stream an answer from it with the official client.

    python examples/serve.py [MODEL]

MODEL is a checkpoint folder, or "demo", whose weights are random: it answers nonsense.  Needs ``pip install openai``.
"""

import sys

from openai import OpenAI

import glmjax


def main(model: str = "demo") -> None:
    # Small limits, so that few programs are compiled; without them it takes more requests at once.
    options = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    with glmjax.serve(model, port=0, block=False, **options) as server:
        print(f"serving on {server.url}")
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=32, temperature=0, stream=True
        )
        for chunk in stream:
            delta = chunk.choices[0].delta
            print(getattr(delta, "reasoning_content", None) or delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
