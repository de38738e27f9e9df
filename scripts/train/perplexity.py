#!/usr/bin/env python3
"""Mean NLL and perplexity of the model on a text, and how often its MTP drafts are accepted.

    perplexity.py --model model.safetensors --tokenizer tokenizer.json --text FILE[.xz] [--float32]

The text is tokenised as a whole, BOS first, and cut into consecutive windows of 1024 tokens. Each window starts afresh
at position 0; its first 32 tokens are seed only. Weights are rounded as the Q8_0 GGUF holds them, unless --float32.
"""
import argparse
import json
import lzma
import math

import numpy as np
import torch

import safefile
from evaluate import perplexity, round_weights
from model import from_state
from tokenizer import Tokenizer


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--text", required=True)
    ap.add_argument("--windows", type=int, help="only so many")
    ap.add_argument("--float32", action="store_true", help="do not round the weights")
    a = ap.parse_args()
    tok = Tokenizer(a.tokenizer)
    with (lzma.open if a.text.endswith(".xz") else open)(a.text, "rt", encoding="utf-8") as f:
        ids = np.array([tok.bos] + tok.encode(f.read()), np.uint16)
    tensors, meta = safefile.read(a.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = from_state(json.loads(meta["config_json"]), tensors if a.float32 else round_weights(tensors), 2048).to(device)
    nll, hit, n = perplexity(model, ids, device, batch=16 if device == "cuda" else 1, limit=a.windows)
    print("%s: %d tokens, %d counted" % ("float32" if a.float32 else "Q8_0", len(ids), n))
    print("mean NLL %.5f  perplexity %.4f" % (nll, math.exp(nll)))
    print("MTP acceptance, greedy: %.4f" % hit)


if __name__ == "__main__":
    main()
