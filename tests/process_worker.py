"""One of several processes that run the same engine together: ``process_worker.py PORT PROCESSES INDEX DEVICES JOB``.

The job is JSON: the model, its options and prompts.  Prints the tokens of every prompt as JSON.
"""

import json
import sys

import jax


def main() -> None:
    port, processes, index, devices = map(int, sys.argv[1:5])
    job = json.loads(sys.argv[5])
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    from glmjax.api import LLM
    from glmjax.types import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    with LLM(job["model"], **job["options"]) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], how, use_tqdm=False)
    print(json.dumps([out.outputs[0].token_ids for out in outputs]))


if __name__ == "__main__":
    main()
