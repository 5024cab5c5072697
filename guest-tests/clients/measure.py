"""What llama.cpp makes of a model: usage: measure.py MODEL.gguf TEXT TOKENS

Prints JSON: seconds to load, tokens a second, and the perplexity of so many of the text's first tokens, each given all before it.
"""

import json
import math
import sys
import time

import server
import xllamacpp

# So many of the likeliest tokens are asked for, and all of them where the next is not among these.
LIKELIEST, ALL = 2000, 1 << 20


def main():
    model, text, count = sys.argv[1], open(sys.argv[2]).read(), int(sys.argv[3])
    params = server.parameters(model, 512, server.processors())
    # It reads every weight once, as a first answer does.
    params.warmup = True
    begun = time.monotonic()
    llama = xllamacpp.Server(params)
    seconds = time.monotonic() - begun

    def completed(tokens, predicted, likeliest):
        asked = {"prompt": tokens, "n_predict": predicted, "temperature": 0, "n_probs": likeliest}
        return llama.handle_completions(dict(asked, cache_prompt=True, ignore_eos=True))

    tokens = server.post(llama, "/tokenize", {"content": text})["tokens"]
    answer = completed(tokens[:8], 129, 0)
    speed = answer["timings"]["predicted_per_second"]
    count = min(count, len(tokens))
    logarithms = []
    for at in range(1, count):
        for asked in (LIKELIEST, ALL):
            found = completed(tokens[:at], 1, asked)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            likely = {token["id"]: token["logprob"] for token in found}
            if tokens[at] in likely:
                break
        logarithms.append(likely[tokens[at]])
    perplexity = math.exp(-sum(logarithms) / len(logarithms)) if logarithms else None
    server.end(json.dumps({"seconds": seconds, "speed": speed, "perplexity": perplexity, "tokens": count}))


main()
