"""Muon for the matrices inside the layers, AdamW for everything else."""
import torch


def orthogonal(g, steps=5):
    """Newton-Schulz: g [n, rows, cols] to the nearest semi-orthogonal matrices, roughly, in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g.float()
    flip = x.shape[-2] > x.shape[-1]
    if flip:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return (x.mT if flip else x).float()


class Muon:
    """`params`: list of (parameter, shape seen by Muon [n, rows, cols]). Equal shapes are updated together.
    The step has the size AdamW's would have, so that one learning rate serves both."""

    def __init__(self, params, momentum=0.95, weight_decay=0.1):
        self.momentum, self.wd = momentum, weight_decay
        self.groups = {}
        for p, shape in params:
            self.groups.setdefault(tuple(shape[1:]), []).append((p, shape[0]))
        self.buf = {k: torch.zeros(sum(n for _, n in g), *k, device=g[0][0].device) for k, g in self.groups.items()}

    @torch.no_grad()
    def step(self, lr):
        for shape, group in self.groups.items():
            g = torch.cat([p.grad.view(n, *shape) for p, n in group])
            buf = self.buf[shape]
            buf.lerp_(g, 1 - self.momentum)
            u = orthogonal(g.lerp(buf, self.momentum)) * (0.2 * max(shape) ** 0.5)
            at = 0
            for p, n in group:
                p.mul_(1 - lr * self.wd).add_(u[at:at + n].view_as(p), alpha=-lr)
                at += n

    def state_dict(self):
        return {"%dx%d" % k: v for k, v in self.buf.items()}

    def load_state_dict(self, s):
        for k, v in self.buf.items():
            v.copy_(s["%dx%d" % k])


def split_params(model):
    """(for Muon with shapes, for AdamW with decay, for AdamW without)."""
    muon, decay, plain = [], [], []
    for name, p in model.named_parameters():
        if "indexer" in name or "gate.weight" in name:
            plain.append(p)
        elif name.endswith("gate_up_proj"):
            E, W, D = p.shape
            muon.append((p, (2 * E, W // 2, D)))          # gate and up are two matrices
        elif name.endswith("down_proj") and p.dim() == 3:
            muon.append((p, tuple(p.shape)))
        elif name.endswith("o_a_proj.weight"):
            groups = model.c["o_groups"]                  # one small matrix for each output group
            muon.append((p, (groups, p.shape[0] // groups, p.shape[1])))
        elif name.endswith("_proj.weight") and p.dim() == 2:
            muon.append((p, (1,) + tuple(p.shape)))
        elif p.dim() == 2 and ("embed_tokens" in name or "lm_head" in name):
            decay.append(p)
        else:
            plain.append(p)
    return muon, decay, plain
