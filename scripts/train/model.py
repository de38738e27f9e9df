"""DeepSeek V4 in PyTorch, whole sequences at once, for training and for checking.

Module names give the Hugging Face tensor names. B batch, S positions, D hidden, H streams, A heads, Dh head width,
C compressed rows. Streams, mHC, norms, router and softmax stay in float32 also under autocast.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn


def rms(x, eps, weight=None):
    x = x.float()
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def no_autocast(x):
    return torch.autocast(x.device.type, enabled=False)


def matmul_type(x):
    """What matrix products take in: bfloat16 under autocast (GPU only), else float32."""
    return torch.bfloat16 if x.is_cuda and torch.is_autocast_enabled() else torch.float32


def normed_linear(x, weight, eps):
    """weight R(x), with the norm applied to the few results instead of the many inputs."""
    ms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
    return F.linear(x, weight) * torch.rsqrt(ms + eps)


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return rms(x, self.eps, self.weight)


def linear(n_in, n_out):
    m = nn.Linear(n_in, n_out, bias=False)
    nn.init.normal_(m.weight, std=n_in ** -0.5)
    return m


# ---- rotary positions -----------------------------------------------------------------------------
def rope_freqs(c, compress):
    d = c["qk_rope_head_dim"]
    i = torch.arange(d // 2, dtype=torch.float64)
    base = c["compress_rope_theta"] if compress else c["rope_theta"]
    f = base ** (-2.0 * i / d)
    if not compress:
        return f
    y = c["rope_scaling"]

    def corr(turns):
        return d * math.log(y["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base))

    lo, hi = max(math.floor(corr(y["beta_fast"])), 0), min(math.ceil(corr(y["beta_slow"])), d - 1)
    ramp = ((i - lo) / (hi - lo if hi != lo else 0.001)).clamp(0, 1)
    return f / y["factor"] * ramp + f * (1 - ramp)


class Rope(nn.Module):
    """Tables of cos and sin, built in float64: one for plain layers, one for compressing ones."""

    def __init__(self, c, compress, length):
        super().__init__()
        a = torch.outer(torch.arange(length, dtype=torch.float64), rope_freqs(c, compress))
        self.register_buffer("cos", a.cos().float(), persistent=False)
        self.register_buffer("sin", a.sin().float(), persistent=False)

    def forward(self, x, step=1, inverse=False):
        """x [B, n, ..., width]; row i has position i*step. Rotates the trailing channels, pairs (2i, 2i+1)."""
        n, half = x.shape[1], self.cos.shape[1]
        shape = (1, n) + (1,) * (x.dim() - 3) + (half,)
        cos = self.cos[: n * step: step].view(shape)
        sin = self.sin[: n * step: step].view(shape)
        if inverse:
            sin = -sin
        head, tail = x[..., : -2 * half], x[..., -2 * half:].float()
        a, b = tail[..., 0::2], tail[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        kind = matmul_type(x)
        return torch.cat([head.to(kind), turned.to(kind)], -1)


# ---- mHC -------------------------------------------------------------------------------------------
def sinkhorn(g, iters, eps):
    """Scores [N, H, H] to mixing matrices with columns, and nearly rows, that sum to one. Ends with the columns."""
    g = g.softmax(-1) + eps
    g = g / (g.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        g = g / (g.sum(-1, keepdim=True) + eps)
        g = g / (g.sum(-2, keepdim=True) + eps)
    return g


class HyperConnection(nn.Module):
    """Mixes H streams into one input, and the result back into the streams."""

    def __init__(self, c, site):
        super().__init__()
        H, D = c["hc_mult"], c["hidden_size"]
        self.H, self.eps, self.norm_eps, self.iters = H, c["hc_eps"], c["rms_norm_eps"], c["hc_sinkhorn_iters"]
        self.fn = nn.Parameter(torch.randn(H * (2 + H), H * D) * 0.01)
        self.scale = nn.Parameter(torch.ones(3))
        # Start: each site reads mostly from one stream, writes to all, and the streams keep to themselves.
        base = torch.zeros(H * (2 + H))
        base[:H] = -1.5
        base[site % H] = 0.5
        base[H:2 * H] = torch.linspace(-0.5, 0.5, H).roll(site)
        base[2 * H:] = (torch.eye(H) * 4).flatten()
        self.base = nn.Parameter(base)
        self.graph = None               # (rows, sinkhorn as a CUDA graph): training only, see use_graphs

    def forward(self, X):
        H = self.H
        with no_autocast(X):
            m = normed_linear(X.flatten(-2), self.fn, self.norm_eps)
            b, s = self.base, self.scale
            pre = torch.sigmoid(m[..., :H] * s[0] + b[:H]) + self.eps
            post = 2 * torch.sigmoid(m[..., H:2 * H] * s[1] + b[H:2 * H])
            g = (m[..., 2 * H:] * s[2] + b[2 * H:]).view(-1, H, H)
            if self.graph is not None and self.training and len(g) == self.graph[0]:
                g = self.graph[1](g)
            else:
                g = sinkhorn(g, self.iters, self.eps)
            g = g.view(*X.shape[:-1], H)
            return (pre.unsqueeze(-2) @ X).squeeze(-2), post, g

    @staticmethod
    def update(X, out, post, comb):
        with no_autocast(X):
            new = torch.baddbmm((post.unsqueeze(-1) * out.float().unsqueeze(-2)).flatten(0, 1),
                                comb.transpose(-1, -2).flatten(0, 1), X.flatten(0, 1))
            return new.view(*X.shape)


class HyperHead(nn.Module):
    def __init__(self, c):
        super().__init__()
        H, D = c["hc_mult"], c["hidden_size"]
        self.eps, self.norm_eps = c["hc_eps"], c["rms_norm_eps"]
        self.hc_fn = nn.Parameter(torch.randn(H, H * D) * 0.01)
        self.hc_base = nn.Parameter(torch.zeros(H))
        self.hc_scale = nn.Parameter(torch.ones(1))

    def forward(self, X):
        with no_autocast(X):
            w = torch.sigmoid(normed_linear(X.flatten(-2), self.hc_fn, self.norm_eps) * self.hc_scale + self.hc_base)
            return ((w + self.eps).unsqueeze(-2) @ X).squeeze(-2)


# ---- attention ---------------------------------------------------------------------------------------
class Pool(nn.Module):
    """One compressor: every `ratio` tokens become one row; ratio 4 also looks at the window before."""

    def __init__(self, c, ratio, width):
        super().__init__()
        self.ratio, self.width, self.overlap = ratio, width, ratio == 4
        wide = width * (2 if self.overlap else 1)
        self.kv_proj = linear(c["hidden_size"], wide)
        self.gate_proj = linear(c["hidden_size"], wide)
        self.position_bias = nn.Parameter(torch.zeros(ratio, wide))
        self.kv_norm = Norm(width, c["rms_norm_eps"])

    def rows(self, x, rope):
        m, n = self.ratio, x.shape[1] // self.ratio
        x = x[:, : n * m]
        v = self.kv_proj(x).float().unflatten(1, (n, m))
        z = self.gate_proj(x).float().unflatten(1, (n, m)) + self.position_bias
        if self.overlap:
            # First half of the channels feeds the next row, second half the own row.
            w = self.width
            before_v = F.pad(v[:, :-1, :, :w], (0, 0, 0, 0, 1, 0))
            before_z = F.pad(z[:, :-1, :, :w], (0, 0, 0, 0, 1, 0), value=float("-inf"))
            v = torch.cat([before_v, v[..., w:]], 2)
            z = torch.cat([before_z, z[..., w:]], 2)
        return rope(self.kv_norm((z.softmax(2) * v).sum(2)), step=m)


class Scorer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weights_proj = linear(c["hidden_size"], c["index_n_heads"])


class Indexer(Pool):
    """Scores compressed rows so that each query attends only to the best ones."""

    def __init__(self, c):
        super().__init__(c, 4, c["index_head_dim"])
        self.heads, self.topk = c["index_n_heads"], c["index_topk"]
        self.q_b_proj = linear(c["q_lora_rank"], self.heads * self.width)
        self.scorer = Scorer(c)

    def scores(self, x, qr, rope):
        k = self.rows(x, rope)
        q = rope(self.q_b_proj(qr).unflatten(-1, (self.heads, self.width)))
        hw = self.scorer.weights_proj(x).float() * (self.width ** -0.5) * (self.heads ** -0.5)
        with no_autocast(x):
            return (torch.einsum("bshd,bcd->bshc", q.float(), k.float()).relu() * hw.unsqueeze(-1)).sum(2)


class Compressor(Pool):
    def __init__(self, c, ratio):
        super().__init__(c, ratio, c["head_dim"])
        if ratio == 4:
            self.indexer = Indexer(c)


def closed(ok, kind):
    """Mask to add to scores: 0 where a key may be seen, -inf elsewhere."""
    return torch.zeros(ok.shape, dtype=kind, device=ok.device).masked_fill(~ok, float("-inf"))


class Attention(nn.Module):
    def __init__(self, c, ratio, ropes):
        super().__init__()
        D, A, Dh, eps = c["hidden_size"], c["num_attention_heads"], c["head_dim"], c["rms_norm_eps"]
        self.A, self.Dh, self.G, self.R, self.eps = A, Dh, c["o_groups"], c["o_lora_rank"], eps
        self.ratio, self.window = ratio, c["sliding_window"]
        self.rope = [ropes["compress" if ratio else "plain"]]     # in a list: shared, not a child module
        self.q_a_proj = linear(D, c["q_lora_rank"])
        self.q_a_norm = Norm(c["q_lora_rank"], eps)
        self.q_b_proj = linear(c["q_lora_rank"], A * Dh)
        self.kv_proj = linear(D, Dh)
        self.kv_norm = Norm(Dh, eps)
        self.o_a_proj = linear(A * Dh // self.G, self.G * self.R)
        self.o_b_proj = linear(self.G * self.R, D)
        self.sinks = nn.Parameter(torch.zeros(A))
        if ratio:
            self.compressor = Compressor(c, ratio)
        self.dense_index = False        # first stage of training: attend to every visible row
        self.index_loss, self.picked = None, None

    def forward(self, x):
        B, S, _ = x.shape
        A, Dh, w, rope = self.A, self.Dh, self.window, self.rope[0]
        qr = self.q_a_norm(self.q_a_proj(x))
        q = rope(self.scaled_rms(self.q_b_proj(qr).unflatten(-1, (A, Dh))))
        kv = rope(self.kv_norm(self.kv_proj(x)))
        # Window part in blocks of w queries: a query sees only its own and the previous block of keys.
        nb = -(-S // w)
        qb = F.pad(q, (0, 0, 0, 0, 0, nb * w - S)).view(B, nb, w * A, Dh)
        kb = F.pad(kv, (0, 0, 0, nb * w - S)).view(B, nb, w, Dh)
        kb = torch.cat([F.pad(kb[:, :-1], (0, 0, 0, 0, 1, 0)), kb], 2)
        i = torch.arange(w, device=x.device)[:, None]
        j = torch.arange(2 * w, device=x.device)[None]
        ok = ((j > i) & (j <= i + w)).expand(nb, w, 2 * w) & \
            ((torch.arange(nb, device=x.device)[:, None, None] > 0) | (j >= w))
        near = (qb @ kb.transpose(-1, -2)).view(B, nb, w, A, 2 * w) + closed(ok, q.dtype).unsqueeze(2)
        s = [near.view(B, nb * w, A, 2 * w)[:, :S]]
        rows = None
        if self.ratio and S >= self.ratio:
            rows = self.compressor.rows(x, rope)
            see = self.visible(x, qr, rows.shape[1])
            far = (q.reshape(B, S * A, Dh) @ rows.transpose(-1, -2)).view(B, S, A, -1)
            s.append(far + closed(see, q.dtype).unsqueeze(2))
        # The sink is one more column without a value: it only adds to the denominator.
        s.append(self.sinks.to(q.dtype).view(1, 1, A, 1).expand(B, S, A, 1))
        with no_autocast(x):
            p = torch.cat(s, -1).softmax(-1)
        pn = F.pad(p[..., : 2 * w], (0, 0, 0, 0, 0, nb * w - S)).view(B, nb, w * A, 2 * w)
        o = (pn @ kb).view(B, nb * w, A, Dh)[:, :S]
        if rows is not None:
            pf = p[..., 2 * w:-1]
            o = o + (pf.reshape(B, S * A, -1) @ rows).view(B, S, A, Dh)
            if self.ratio == 4 and self.training:
                self.learn_index(pf, see)
        o = rope(o, inverse=True)
        o = o.view(B, S, self.G, -1)
        low = torch.einsum("bsgi,gri->bsgr", o, self.o_a_proj.weight.view(self.G, self.R, -1))
        return self.o_b_proj(low.flatten(-2))

    def scaled_rms(self, q):
        """R(q) / sqrt(Dh): the softmax scale costs nothing here."""
        q = q.float()
        ms = torch.linalg.vector_norm(q, dim=-1, keepdim=True).square() / self.Dh
        return q * (torch.rsqrt(ms + self.eps) * self.Dh ** -0.5)

    def visible(self, x, qr, C):
        """Which rows each query attends to: complete ones, and for ratio 4 the indexer's choice of them."""
        S = x.shape[1]
        full = (torch.arange(S, device=x.device) + 1).div(self.ratio, rounding_mode="floor")
        see = (torch.arange(C, device=x.device)[None] < full[:, None])[None].expand(x.shape[0], S, C)
        if self.ratio != 4:
            return see
        ix = self.compressor.indexer
        # Detached: the indexer learns from the attention it serves, and pulls at nothing else.
        self.scores = ix.scores(x.detach(), qr.detach(), self.rope[0])
        if self.dense_index or C <= ix.topk:
            self.picked = see
            return see
        ranked = self.scores.detach().masked_fill(~see, float("-inf"))
        best = ranked.topk(ix.topk, -1).indices
        self.picked = torch.zeros_like(see).scatter(-1, best, True) & see
        return self.picked

    def learn_index(self, pf, see):
        """Cross entropy between the attention that all heads give to the rows and the indexer's scores."""
        target = pf.detach().float().sum(2)
        mass = target.sum(-1, keepdim=True)
        logp = torch.log_softmax(self.scores.masked_fill(~see, -1e30), -1)
        ce = -(target / (mass + 1e-9) * logp).sum(-1)
        has = (see.sum(-1) > 1).float()
        self.index_loss = (ce * has).sum() / (has.sum() + 1)


# ---- mixture of experts ----------------------------------------------------------------------------------
def glu(gate, up, limit):
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Router(nn.Module):
    def __init__(self, c, hashed):
        super().__init__()
        E, k = c["n_routed_experts"], c["num_experts_per_tok"]
        self.k, self.scale = k, c["routed_scaling_factor"]
        self.weight = nn.Parameter(torch.randn(E, c["hidden_size"]) * c["hidden_size"] ** -0.5)
        if hashed:
            first = torch.arange(c["vocab_size"])
            self.register_buffer("tid2eid", torch.stack([(first + j) % E for j in range(k)], 1).int())
        else:
            self.register_buffer("e_score_correction_bias", torch.zeros(E))
            self.register_buffer("load", torch.zeros(E), persistent=False)
        self.hashed = hashed

    def forward(self, x, ids):
        """Weight of each expert, zero where it is not chosen, [B, S, E]."""
        with no_autocast(x):
            s = F.softplus(F.linear(x.float(), self.weight)).sqrt()
            if self.hashed:
                chosen = self.tid2eid[ids].long()
            else:
                chosen = (s + self.e_score_correction_bias).topk(self.k, -1).indices
            mask = torch.zeros_like(s).scatter(-1, chosen, 1.0)
            if self.training and not self.hashed:
                self.load += mask.detach().sum((0, 1))
            self.mask = mask
            a = s * mask
            return a / a.sum(-1, keepdim=True) * self.scale

    def balance(self, rate):
        """Experts with too few tokens become easier to choose; no loss term is needed."""
        if not self.hashed:
            self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
            self.load.zero_()


class Experts(nn.Module):
    def __init__(self, c):
        super().__init__()
        E, D, W = c["n_routed_experts"], c["hidden_size"], c["moe_intermediate_size"]
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * W, D) * D ** -0.5)
        self.down_proj = nn.Parameter(torch.randn(E, D, W) * W ** -0.5)


class SharedExpert(nn.Module):
    def __init__(self, c):
        super().__init__()
        D, W = c["hidden_size"], c["moe_intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = linear(D, W), linear(D, W), linear(W, D)


class Moe(nn.Module):
    def __init__(self, c, hashed):
        super().__init__()
        self.limit = c["swiglu_limit"]
        self.gate, self.experts, self.shared_experts = Router(c, hashed), Experts(c), SharedExpert(c)

    def forward(self, x, ids):
        # Few experts: computing all of them costs less than gathering the tokens of each.
        a = self.gate(x, ids)
        e, sh = self.experts, self.shared_experts
        gate, up = torch.einsum("bsd,efd->bsef", x, e.gate_up_proj).chunk(2, -1)
        h = glu(gate, up, self.limit) * a.unsqueeze(-1).to(gate.dtype)
        y = torch.einsum("bsef,edf->bsd", h, e.down_proj)
        return y + sh.down_proj(glu(sh.gate_proj(x), sh.up_proj(x), self.limit))


# ---- the whole ------------------------------------------------------------------------------------------
class Layer(nn.Module):
    def __init__(self, c, index, ropes):
        super().__init__()
        D, eps = c["hidden_size"], c["rms_norm_eps"]
        hashed = index < min(c["num_hash_layers"], c["num_hidden_layers"])
        self.input_layernorm, self.post_attention_layernorm = Norm(D, eps), Norm(D, eps)
        self.attn_hc, self.ffn_hc = HyperConnection(c, 2 * index), HyperConnection(c, 2 * index + 1)
        self.self_attn = Attention(c, c["compress_ratios"][index], ropes)
        self.mlp = Moe(c, hashed)
        self.drop = nn.Dropout(c.get("dropout", 0.0))

    def forward(self, X, ids):
        x, post, comb = self.attn_hc(X)
        X = HyperConnection.update(X, self.drop(self.self_attn(self.input_layernorm(x))), post, comb)
        x, post, comb = self.ffn_hc(X)
        return HyperConnection.update(X, self.drop(self.mlp(self.post_attention_layernorm(x), ids)), post, comb)


class Trunk(nn.Module):
    def __init__(self, c, ropes):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(c, i, ropes) for i in range(c["num_hidden_layers"]))
        self.hc_head, self.norm = HyperHead(c), Norm(c["hidden_size"], c["rms_norm_eps"])


class MtpBlock(nn.Module):
    """Predicts token i+2 from the streams at i and the embedding of token i+1."""

    def __init__(self, c, ropes):
        super().__init__()
        D, eps = c["hidden_size"], c["rms_norm_eps"]
        self.enorm, self.hnorm = Norm(D, eps), Norm(D, eps)
        self.e_proj, self.h_proj = linear(D, D), linear(D, D)
        self.block = Layer(c, c["num_hidden_layers"], ropes)
        self.hc_head, self.norm = HyperHead(c), Norm(D, eps)

    def forward(self, emb, X, ids):
        X = (self.e_proj(self.enorm(emb)).unsqueeze(2) + self.h_proj(self.hnorm(X))).float()
        X = self.block(X, ids)
        return self.norm(self.hc_head(X)), X


class Model(nn.Module):
    def __init__(self, c, length=None):
        super().__init__()
        self.c = c
        length = length or c["max_position_embeddings"]
        ropes = {"plain": Rope(c, False, length), "compress": Rope(c, True, length)}
        self.ropes = nn.ModuleDict(ropes)
        self.model = Trunk(c, ropes)
        self.lm_head = linear(c["hidden_size"], c["vocab_size"])
        if c["num_nextn_predict_layers"]:
            self.mtp = nn.ModuleList([MtpBlock(c, ropes)])
        self.drop = nn.Dropout(c.get("dropout", 0.0) / 2)

    def trunk(self, ids, keep=None):
        """Returns (final hidden [B,S,D], streams [B,S,H,D]); `keep`, a list, receives the streams of each layer."""
        x = self.drop(self.model.embed_tokens(ids).float())
        X = x.unsqueeze(2).expand(-1, -1, self.c["hc_mult"], -1)
        for layer in self.model.layers:
            X = layer(X, ids)
            if keep is not None:
                keep.append(X)
        return self.model.norm(self.model.hc_head(X)), X

    def draft(self, ids, X):
        """Row i pairs Emb(ids[i+1]) with the streams at i. Returns the hidden before lm_head, [B, S-1, D]."""
        emb = self.drop(self.model.embed_tokens(ids[:, 1:]).float())
        return self.mtp[0](emb, X[:, :-1], ids[:, 1:])[0]

    def use_graphs(self, tokens):
        """The Sinkhorn steps are hundreds of tiny kernels; as CUDA graphs their launches cost little.
        `tokens`: the numbers of rows that trunk and MTP see in a step."""
        sites = [m for m in self.modules() if isinstance(m, HyperConnection)]
        rows = [tokens[1] if name.startswith("mtp") else tokens[0]
                for name, m in self.named_modules() if isinstance(m, HyperConnection)]
        H = self.c["hc_mult"]
        args = tuple((torch.randn(n, H, H, device="cuda", requires_grad=True),) for n in rows)
        calls = tuple((lambda g, m=m: sinkhorn(g, m.iters, m.eps)) for m in sites)
        for m, n, call in zip(sites, rows, torch.cuda.make_graphed_callables(calls, args)):
            m.graph = (n, call)

    def routers(self):
        return [m for m in self.modules() if isinstance(m, Router)]

    def attentions(self):
        return [m for m in self.modules() if isinstance(m, Attention)]


def to_state(model):
    """Weights as numpy arrays under their file names."""
    return {k: v.detach().cpu().numpy() for k, v in model.state_dict().items()}


def from_state(c, tensors, length=None):
    """Model with the given weights; fails when a name is missing or left over."""
    model = Model(c, length)
    names = set(model.state_dict())
    model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in tensors.items() if k in names}, strict=True)
    return model.eval()
