"""A KV cache of llama.cpp, saved and restored: usage: kv.py save|restore|none MODEL.gguf FOLDER

`save` reads a prompt and saves the cache of it in FOLDER, `restore` goes on from there in another process, `none` reads the
prompt again. All print JSON: how the prompt is continued, and how many of its tokens were read for that.
"""

import json
import os
import sys
import urllib.request

import xllamacpp

PROMPT = "Once upon a time, in a village by the sea, there lived a keeper of the lighthouse who wrote letters to the moon. " * 6


def main():
    what, model, folder = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = 1024
    params.n_parallel = 1
    # The same text every time, on however many cores.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.sampling.temp = 0.0
    params.warmup = False
    params.endpoint_slots = True
    params.slot_save_path = folder + "/"
    server = xllamacpp.Server(params)

    def post(path, asked):
        body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(server.listening_address + path, body, kind)) as answer:
            return json.load(answer)

    if what == "restore":
        post("/slots/0?action=restore", {"filename": "cache.bin"})
    asked = {"prompt": PROMPT, "n_predict": 16, "temperature": 0, "seed": 1, "cache_prompt": True, "id_slot": 0}
    answer = post("/completion", asked)
    if what == "save":
        post("/slots/0?action=save", {"filename": "cache.bin"})
    print(json.dumps({"text": answer["content"], "read": answer["timings"]["prompt_n"]}), flush=True)
    # The server's threads have nothing more to do, and do not end by themselves.
    os._exit(0)


main()
