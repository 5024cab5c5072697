"""What llama.cpp says with a model: usage: llama.py MODEL.gguf"""

import sys

import server
import xllamacpp

# The same text every time, on however many cores.
params = server.parameters(sys.argv[1], 128, 1)
asked = {"prompt": "The capital of France is", "n_predict": 8, "temperature": 0, "seed": 1}
answer = xllamacpp.Server(params).handle_completions(asked)
server.end(answer.get("content") or answer["choices"][0]["text"])
