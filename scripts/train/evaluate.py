"""Loss on held-out text, acceptance of the MTP drafts, Q8_0 rounding, and sampling."""
import math

import numpy as np
import torch
import torch.nn.functional as F

WINDOW, SEED = 1024, 32


def windows(ids, size=WINDOW):
    """Consecutive windows over the whole text; the last one may be shorter."""
    return [ids[i:i + size] for i in range(0, len(ids), size)]


@torch.no_grad()
def perplexity(model, ids, device, batch=16, limit=None, autocast=False):
    """Mean NLL over all windows without each window's first 32 tokens, and the share of MTP drafts that equal the
    trunk's own greedy choice. Each window starts afresh at position 0."""
    model.eval()
    parts = windows(ids)[:limit]
    nll = count = hit = drafts = 0.0
    full = [p for p in parts if len(p) == WINDOW]
    groups = [full[i:i + batch] for i in range(0, len(full), batch)] + [[p] for p in parts if len(p) < WINDOW]
    for group in groups:
        t = torch.from_numpy(np.stack(group).astype(np.int64)).to(device)
        if t.shape[1] <= SEED:
            continue
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            hidden, X = model.trunk(t)
            draft = model.draft(t, X)
        logits = model.lm_head(hidden.float())
        nll += float(F.cross_entropy(logits[:, SEED - 1:-1].flatten(0, 1), t[:, SEED:].flatten(), reduction="sum"))
        count += t[:, SEED:].numel()
        same = model.lm_head(draft.float()).argmax(-1) == logits[:, 1:].argmax(-1)
        hit += float(same[:, SEED:].sum())
        drafts += same[:, SEED:].numel()
    return nll / count, hit / max(drafts, 1), int(count)


def round_q8_0(w):
    """What a weight is after Q8_0: 32 values share a half-precision scale."""
    b = w.reshape(-1, 32).astype(np.float32)
    d = np.abs(b).max(1, keepdims=True) / 127
    inv = np.divide(1, d, out=np.zeros_like(d), where=d > 0)
    q = np.trunc(b * inv + np.copysign(0.5, b))           # halves away from zero, as C's roundf
    return (q * d.astype(np.float16).astype(np.float32)).reshape(w.shape)


def round_weights(tensors):
    """All weights as the Q8_0 GGUF holds them: matrices Q8_0; mHC fn, ape and router F16; vectors as they are."""
    out = {}
    for name, w in tensors.items():
        last = name.split(".")[-1]
        if w.dtype != np.float32 or w.ndim < 2:
            out[name] = w
        elif last in ("fn", "hc_fn", "position_bias") or name.endswith("mlp.gate.weight"):
            out[name] = w.astype(np.float16).astype(np.float32)
        else:
            out[name] = round_q8_0(w)
    return out


@torch.no_grad()
def generate(model, prompts, device, n, temperature=0.0, eos=1, seed=1):
    """Continues several prompts (lists of ids) at once, without a cache. Returns the new ids of each."""
    model.eval()
    rng = torch.Generator().manual_seed(seed)
    seqs, done = [list(p) for p in prompts], [False] * len(prompts)
    for _ in range(n):
        length = max(len(s) for s in seqs)
        t = torch.zeros(len(seqs), length, dtype=torch.long)
        for i, s in enumerate(seqs):
            t[i, :len(s)] = torch.tensor(s)               # padding comes after: causal, so it changes nothing
        hidden, _ = model.trunk(t.to(device))
        last = torch.stack([hidden[i, len(s) - 1] for i, s in enumerate(seqs)])
        logits = model.lm_head(last.float()).cpu()
        for i in range(len(seqs)):
            if done[i]:
                continue
            if temperature == 0:
                pick = int(logits[i].argmax())
            else:
                pick = int(torch.multinomial(torch.softmax(logits[i] / temperature, -1), 1, generator=rng))
            if pick == eos:
                done[i] = True
            else:
                seqs[i].append(pick)
        if all(done):
            break
    return [(s[len(p):], d) for s, p, d in zip(seqs, prompts, done)]


def ppl(nll):
    return math.exp(nll)
