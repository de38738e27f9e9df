"""Reads and writes safetensors files: 8-byte header length, JSON header, raw little-endian data."""
import json

import numpy as np

_TYPES = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8"}
_NAMES = {np.dtype(v): k for k, v in _TYPES.items()}


def read(path):
    """Returns (tensors by name, metadata)."""
    with open(path, "rb") as f:
        head = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        data = f.read()
    meta = head.pop("__metadata__", {})
    out = {}
    for name, t in head.items():
        lo, hi = t["data_offsets"]
        out[name] = np.frombuffer(data[lo:hi], _TYPES[t["dtype"]]).reshape(t["shape"])
    return out, meta


def write(path, tensors, meta):
    head, at = {"__metadata__": meta}, 0
    for name, t in tensors.items():
        head[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    raw = json.dumps(head, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as f:
        f.write(len(raw).to_bytes(8, "little"))
        f.write(raw)
        for t in tensors.values():
            f.write(np.ascontiguousarray(t).tobytes())
