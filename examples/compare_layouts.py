"""Layouts side by side, as in a notebook: what they move, what they look like, and that they agree.

    python examples/compare_layouts.py [MODEL]

On a machine without GPUs it simulates eight devices. Each ``# %%`` begins a cell.
"""

# %%
import sys

import jax

jax.config.update("jax_num_cpu_devices", 8)  # before JAX starts; GPUs are used if there are any

import glmjax  # noqa: E402
from glmjax.sharding.layout import PRESETS  # noqa: E402

MODEL = sys.argv[1] if len(sys.argv) > 1 else "demo"

# %% What a device of GLM-5.3 receives in a layer, for a chunk of 2,048 tokens after 262,144
config = glmjax.GLMConfig.glm_5_3()
for name, layout in PRESETS.items():
    prefill = layout.traffic(config, tokens=2048, context_rows=264_192)
    decode = layout.traffic(config, tokens=1, requests=16, context_rows=264_192)
    print(f"{name:10} prefill {prefill.layer_bytes / 2**20:8.1f} MiB a layer, decode {decode.layer_bytes / 2**20:8.2f}")

# %% One of them in full
layout = PRESETS["pcp8_dcp8"]
print(layout.traffic(config, tokens=2048, context_rows=264_192))

# %% And as a picture
layout.draw(2048, cached=262_144).savefig("layout.png")

# %% The same tokens from every layout
prompts = ["The sun rises over the sea, and the ships leave the harbour one after another.", "Once"]
how = glmjax.SamplingParams(temperature=0, max_tokens=8)
small = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 16}
for degrees in ("dp=1", "tp=4", "pcp=2,tp=2,dcp=4,ep=4"):
    with glmjax.LLM(MODEL, layout=degrees, **small) as llm:
        outputs = llm.generate(prompts, how)
        print(f"{degrees:24}", [out.outputs[0].token_ids for out in outputs])
