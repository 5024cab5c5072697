"""What llama.cpp says with a model: usage: llama.py MODEL.gguf"""

import os
import sys

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 128
# The same text every time, on however many cores.
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.sampling.temp = 0.0
params.warmup = False
asked = {"prompt": "The capital of France is", "n_predict": 8, "temperature": 0, "seed": 1}
answer = xllamacpp.Server(params).handle_completions(asked)
print(answer.get("content") or answer["choices"][0]["text"], flush=True)
# The server's threads have nothing more to do, and do not end by themselves.
os._exit(0)
