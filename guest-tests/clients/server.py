"""llama.cpp in this process, as the other programs here use it."""

import json
import os
import sys
import urllib.request

import xllamacpp


def parameters(model, context, threads):
    """A server's parameters: the likeliest token each time, and no first run over the weights."""
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.sampling.temp = 0.0
    params.warmup = False
    return params


def processors():
    return len(os.sched_getaffinity(0))


def post(server, path, asked):
    """What the server answers to a request of JSON."""
    body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(server.listening_address + path, body, kind)) as answer:
        return json.load(answer)


def end(said):
    """Prints the result and ends: the server's threads have nothing more to do, and do not end by themselves."""
    print(said, flush=True)
    sys.stdout.flush()
    os._exit(0)
