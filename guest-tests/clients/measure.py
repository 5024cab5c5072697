"""What llama.cpp makes of a model: usage: measure.py MODEL.gguf TEXT TOKENS

Prints JSON: seconds to load, tokens a second, and the perplexity of so many of the text's first tokens, each given all before it.
"""

import json
import math
import os
import sys
import time
import urllib.request

import xllamacpp

# So many of the likeliest tokens are asked for; one that is not among them counts as the last of them.
LIKELIEST = 2000


def main():
    model, text, count = sys.argv[1], open(sys.argv[2]).read(), int(sys.argv[3])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.sampling.temp = 0.0
    # It reads every weight once, as a first answer does.
    params.warmup = True
    begun = time.monotonic()
    server = xllamacpp.Server(params)
    seconds = time.monotonic() - begun

    def post(path, asked):
        body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(server.listening_address + path, body, kind)) as answer:
            return json.load(answer)

    def completed(tokens, predicted, likeliest):
        asked = {"prompt": tokens, "n_predict": predicted, "temperature": 0, "n_probs": likeliest}
        return server.handle_completions(dict(asked, cache_prompt=True, ignore_eos=True))

    tokens = post("/tokenize", {"content": text})["tokens"]
    answer = completed(tokens[:8], 33, 0)
    speed = answer["timings"]["predicted_per_second"]
    logarithms = []
    for at in range(1, count):
        found = completed(tokens[:at], 1, LIKELIEST)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        likely = {token["id"]: token["logprob"] for token in found}
        logarithms.append(likely.get(tokens[at], min(likely.values())))
    perplexity = math.exp(-sum(logarithms) / len(logarithms)) if logarithms else None
    print(json.dumps({"seconds": seconds, "speed": speed, "perplexity": perplexity}), flush=True)
    # The server's threads have nothing more to do, and do not end by themselves.
    os._exit(0)


main()
