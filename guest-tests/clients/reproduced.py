"""Whether a reproduction has llama.cpp's opinion beside the decoder's, and both agree: usage: reproduced.py FOLDER

FOLDER is what `./x reproduce --model smollm2` wrote.
"""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy

folder = Path(sys.argv[1])
book = json.loads((folder / "report.json").read_text())
sections = {section["id"]: section for section in book["sections"]}

# Two programs that round at other places, on the same text: under one part in a hundred of each
# perplexity.
ours = {row["what"]: row["ours"] for row in sections["cxl-ndp-fig-4"]["rows"]}
beside = {what: (ours[what.removesuffix(", by llama.cpp")], of) for what, of in ours.items() if what.endswith(", by llama.cpp")}
assert len(beside) == 4, ours
for what, (decoder, llama) in beside.items():
    assert abs(llama / decoder - 1) < 0.01, (what, decoder, llama)

# Fig. 15 is of llama.cpp's own cache, which is nearly the decoder's.
assert "llama.cpp" in sections["trace-fig-15"]["source"], sections["trace-fig-15"]["source"]
[name] = folder.glob("*-llama.cpp-kv.safetensors")
theirs = safetensors.numpy.load_file(name)
decoder = safetensors.numpy.load_file(str(name).replace("-llama.cpp-kv", "-kv"))
assert set(theirs) == set(decoder)
worst = 0
for tensor, of in decoder.items():
    assert of.dtype == theirs[tensor].dtype == ml_dtypes.bfloat16, tensor
    # The decoder does not feed the last token, which nothing follows.
    one, other = of.astype(np.float32), theirs[tensor].astype(np.float32)[: len(of)]
    worst = max(worst, float(np.linalg.norm(one - other) / np.linalg.norm(one)))
assert worst < 0.03, worst
print(f"reproduce: llama.cpp and the decoder agree on {len(beside)} precisions, and to {worst:.3f} of a KV tensor's norm")
