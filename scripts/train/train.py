#!/usr/bin/env python3
"""Trains the small model.

    train.py --config config.json --data DIR --out DIR [--steps N] [--minutes M]

Writes OUT/last.pt (weights and optimiser, to resume) and, at the end, OUT/weights-K.safetensors: the weights in
float32, in pieces.
"""
import argparse
import json
import math
import os
import time

import numpy as np
import torch
import torch.nn.functional as F

import safefile
from evaluate import perplexity
from model import Model, to_state
from optim import Muon, split_params

PIECE_BYTES = 15_000_000


class Sampler:
    """Random windows of tokens from the parts, in their shares. Half of them begin at a document's BOS,
    so that position 0 is as familiar as the middle of a chapter."""

    def __init__(self, folder, seed):
        with open(os.path.join(folder, "parts.json")) as f:
            self.shares = json.load(f)["shares"]
        self.parts = {}
        for name in self.shares:
            path = os.path.join(folder, name)
            self.parts[name] = (np.fromfile(path + ".bin", np.uint16), np.fromfile(path + ".starts", np.int32))
        self.rng = np.random.default_rng(seed)

    def batch(self, rows, length):
        names = self.rng.choice(list(self.shares), rows, p=np.array(list(self.shares.values())) / sum(self.shares.values()))
        out = np.empty((rows, length), np.int64)
        for i, name in enumerate(names):
            ids, starts = self.parts[name]
            if name == "chat" or self.rng.random() < 0.5:
                at = self.rng.choice(starts)
            else:
                at = self.rng.integers(len(ids))
            out[i] = np.take(ids, np.arange(at, at + length), mode="wrap")
        return torch.from_numpy(out)


def losses(model, ids, bos):
    """(next token, MTP, indexer). BOS is never a target: nothing in a text foretells where a new one starts."""
    inputs, target = ids[:, :-1], ids[:, 1:].clone()
    target[target == bos] = -100
    hidden, X = model.trunk(inputs)
    draft = model.draft(inputs, X)
    with torch.autocast(ids.device.type, enabled=False):
        main = F.cross_entropy(model.lm_head(hidden.float()).flatten(0, 1), target.flatten())
        mtp = F.cross_entropy(model.lm_head(draft.float()).flatten(0, 1), target[:, 1:].flatten())
    index = sum(a.index_loss for a in model.attentions() if a.ratio == 4)
    return main, mtp, index


def learning_rate(progress, peak):
    warm, flat = 0.02, 0.35
    if progress < warm:
        return peak * progress / warm + peak * 0.01
    return peak * min(1.0, max(0.0, (1 - progress) / (1 - flat)))


def save_pieces(model, folder):
    pieces, size = [{}], 0
    for name, w in to_state(model).items():
        if size + w.nbytes > PIECE_BYTES:
            pieces.append({})
            size = 0
        pieces[-1][name] = w
        size += w.nbytes
    for i, p in enumerate(pieces):
        safefile.write(os.path.join(folder, "weights-%d.safetensors" % i), p, {"config_json": json.dumps(model.c)})
    return len(pieces)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--config", required=True)
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--steps", type=int, default=4000)
    ap.add_argument("--minutes", type=float, default=18, help="the schedule ends here even if steps are left")
    ap.add_argument("--tokens", type=int, default=32768, help="tokens in a step")
    ap.add_argument("--length", type=int, default=1024)
    ap.add_argument("--long-length", type=int, default=4096, help="window length of the last part of the run")
    ap.add_argument("--long-share", type=float, default=0.12)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--weight-decay", type=float, default=0.3)
    ap.add_argument("--dropout", type=float, default=0.1)
    ap.add_argument("--mtp-weight", type=float, default=0.3)
    ap.add_argument("--dense-share", type=float, default=0.35, help="part of the run without the indexer's selection")
    ap.add_argument("--eval-every", type=int, default=500)
    ap.add_argument("--save-seconds", type=float, default=120)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--no-graphs", action="store_true", help="no CUDA graphs for the Sinkhorn steps")
    ap.add_argument("--resume", action="store_true")
    a = ap.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(a.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    with open(a.config) as f:
        c = json.load(f)
    model = Model(dict(c, dropout=a.dropout), max(a.length, a.long_length, 1024) + 8).to(device)
    rows = a.tokens // a.length
    if device == "cuda" and not a.no_graphs:
        model.use_graphs((rows * a.length, rows * (a.length - 1)))
    matrices, decay, plain = split_params(model)
    muon = Muon(matrices, weight_decay=a.weight_decay)
    adam = torch.optim.AdamW([{"params": decay, "weight_decay": a.weight_decay}, {"params": plain, "weight_decay": 0.0}],
                             lr=a.lr, betas=(0.9, 0.95), eps=1e-10)
    sampler = Sampler(a.data, a.seed)
    valid = np.fromfile(os.path.join(a.data, "valid.bin"), np.uint16)
    os.makedirs(a.out, exist_ok=True)
    last = os.path.join(a.out, "last.pt")
    step, used = 0, 0.0
    if a.resume and os.path.exists(last):
        s = torch.load(last, map_location=device)
        model.load_state_dict(s["model"])
        adam.load_state_dict(s["adam"])
        muon.load_state_dict(s["muon"])
        step, used = s["step"], s["seconds"]
        sampler.rng = np.random.default_rng([a.seed, step])
        print("resumed at step %d" % step)
    print("%.2f M parameters on %s, %d for Muon" % (sum(p.numel() for p in model.parameters()) / 1e6, device,
                                                  sum(p.numel() for p, _ in matrices)), flush=True)

    start, saved, shown, seen = time.time() - used, time.time(), time.time(), 0
    log = torch.zeros(3, device=device)
    n_log = 0
    while True:
        progress = max(step / a.steps, (time.time() - start) / (60 * a.minutes))
        if progress >= 1:
            break
        length = a.long_length if progress > 1 - a.long_share else a.length
        for attn in model.attentions():
            attn.dense_index = progress < a.dense_share
        ids = sampler.batch(max(1, a.tokens // length), length + 1).to(device, non_blocking=True)
        model.train()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            main_loss, mtp_loss, index_loss = losses(model, ids, c["bos_token_id"])
        (main_loss + a.mtp_weight * mtp_loss + index_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        lr = learning_rate(progress, a.lr)
        for g in adam.param_groups:
            g["lr"] = lr
        muon.step(lr)
        adam.step()
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for r in model.routers():
                r.balance(1e-3 * min(1.0, 2 * (1 - progress)))
            log += torch.stack([main_loss, mtp_loss, index_loss]).detach()
        step, n_log, seen = step + 1, n_log + 1, seen + a.tokens
        if step % 50 == 0 or step < 4:
            m = (log / n_log).tolist()
            if not all(math.isfinite(v) for v in m):
                raise SystemExit("loss is not finite at step %d" % step)
            now = time.time()
            print("step %5d  %5.1f s  %3.0f%%  loss %.4f  mtp %.4f  index %.4f  lr %.2e  %.0f tok/s" %
                  (step, now - start, 100 * progress, *m, lr, seen / (now - shown)), flush=True)
            log.zero_()
            n_log, seen, shown = 0, 0, now
        if step % a.eval_every == 0:
            nll, hit, _ = perplexity(model, valid, device, limit=40, autocast=device == "cuda")
            print("step %5d  valid %.4f  ppl %.2f  mtp acceptance %.3f" % (step, nll, math.exp(nll), hit), flush=True)
        if time.time() - saved > a.save_seconds:
            torch.save({"model": model.state_dict(), "adam": adam.state_dict(), "muon": muon.state_dict(), "step": step,
                        "seconds": time.time() - start}, last + ".new")
            os.replace(last + ".new", last)
            saved = time.time()
    seconds = time.time() - start
    model.c.pop("dropout", None)
    n = save_pieces(model, a.out)
    nll, hit, count = perplexity(model, valid, device)
    print("done: %d steps, %.0f s; held-out book: NLL %.4f, ppl %.2f over %d tokens, mtp acceptance %.3f; %d pieces" %
          (step, seconds, nll, math.exp(nll), count, hit, n), flush=True)


if __name__ == "__main__":
    main()
