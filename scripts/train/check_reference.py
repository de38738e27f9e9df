#!/usr/bin/env python3
"""Compares model.py with a reference dump: streams of each layer, picks, logits, MTP rows.

    check_reference.py tiny_v4.safetensors

The dump holds random weights and what the reference implementation computed with them, so agreement means that
training and inference use the same maths.
"""
import json
import sys

import torch

import safefile
from model import from_state

LIMIT = 1e-4


def main():
    dump, meta = safefile.read(sys.argv[1])
    model = from_state(json.loads(meta["config_json"]), dump, 4096)
    own = {k for k in dump if not k.startswith("case.")}
    print("weights in the file that the model has no place for:", sorted(own - set(model.state_dict())) or "none")
    worst = 0.0
    n = 0
    while "case.%d.input_ids" % n in dump:
        p = "case.%d." % n
        ids = torch.from_numpy(dump[p + "input_ids"].astype("int64"))[None]
        keep = []
        with torch.no_grad():
            hidden, X = model.trunk(ids, keep)
            got = {"logits": model.lm_head(hidden)[0], "final": hidden[0]}
            got.update({"hidden.%d" % i: k[0] for i, k in enumerate(keep)})
            picks = [(i, layer.mlp.gate.mask[0], layer.self_attn) for i, layer in enumerate(model.model.layers)]
            wrong = 0
            for i, mask, attn in picks:
                want = torch.zeros_like(mask).scatter(-1, torch.tensor(dump[p + "experts.%d" % i]).long(), 1.0)
                wrong += int((mask != want).sum())
                want = dump.get(p + "index.%d" % i)
                if attn.ratio == 4 and want is not None and ids.shape[1] >= 4:
                    rows = [set(r[r >= 0].tolist()) for r in torch.tensor(want)]
                    mine = [set(r.nonzero()[:, 0].tolist()) for r in attn.picked[0]]
                    wrong += sum(a != b for a, b in zip(rows, mine))
            if ids.shape[1] > 1:
                got["mtp_logits"] = model.lm_head(model.draft(ids, X))[0]
        for k, v in got.items():
            if p + k in dump:
                d = float((v - torch.tensor(dump[p + k])).abs().max())
                worst = max(worst, d)
                if k in ("logits", "mtp_logits"):
                    print("case %d (%3d tokens) %-10s worst difference %.2g" % (n, ids.shape[1], k, d))
        if wrong:
            print("case %d: %d expert or index picks differ" % (n, wrong))
            worst = max(worst, 1.0)
        n += 1
    ok = n > 0 and worst < LIMIT
    print("worst of all %.3g, limit %g: %s" % (worst, LIMIT, "OK" if ok else "FAIL"))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
