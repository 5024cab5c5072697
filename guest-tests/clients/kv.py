"""A KV cache of llama.cpp, saved and restored: usage: kv.py save|restore|none MODEL.gguf FOLDER

`save` reads a prompt and saves the cache of it in FOLDER, `restore` goes on from there in another process, `none` reads the
prompt again. All print JSON: how the prompt is continued, and how many of its tokens were read for that.
"""

import json
import sys

import server
import xllamacpp

PROMPT = "Once upon a time, in a village by the sea, there lived a keeper of the lighthouse who wrote letters to the moon. " * 6


def main():
    what, model, folder = sys.argv[1:]
    # The same text every time, on however many cores.
    params = server.parameters(model, 1024, 1)
    params.endpoint_slots = True
    params.slot_save_path = folder + "/"
    llama = xllamacpp.Server(params)
    if what == "restore":
        server.post(llama, "/slots/0?action=restore", {"filename": "cache.bin"})
    asked = {"prompt": PROMPT, "n_predict": 16, "temperature": 0, "seed": 1, "cache_prompt": True, "id_slot": 0}
    answer = server.post(llama, "/completion", asked)
    if what == "save":
        server.post(llama, "/slots/0?action=save", {"filename": "cache.bin"})
    server.end(json.dumps({"text": answer["content"], "read": answer["timings"]["prompt_n"]}))


main()
