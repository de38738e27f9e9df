#!/usr/bin/env python3
"""Joins the pieces that train.py wrote into one safetensors file for the converter.

    export.py --pieces DIR --out model.safetensors

Names and shapes are the Hugging Face ones, in float32; __metadata__ holds the configuration as "config_json".
"""
import argparse
import glob
import json
import os

import numpy as np

import safefile


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pieces", required=True)
    ap.add_argument("--out", required=True)
    a = ap.parse_args()
    tensors, config = {}, None
    for path in sorted(glob.glob(os.path.join(a.pieces, "weights-*.safetensors"))):
        part, meta = safefile.read(path)
        tensors.update(part)
        config = json.loads(meta["config_json"])
    if not tensors:
        raise SystemExit("no weights-*.safetensors in %s" % a.pieces)
    for name, w in tensors.items():
        if w.dtype == np.float32 and not np.isfinite(w).all():
            raise SystemExit("%s has values that are not finite" % name)
    safefile.write(a.out, tensors, {"format": "pt", "config_json": json.dumps(config)})
    print("wrote %s: %d tensors, %.2f M values" % (a.out, len(tensors), sum(w.size for w in tensors.values()) / 1e6))


if __name__ == "__main__":
    main()
