#!/usr/bin/env python3
"""Size in bytes of the Q8_0 GGUF that a configuration and a tokenizer give.

    budget.py config.json tokenizer.json
"""
import json
import sys

LIMIT = 12_000_000


def gguf_bytes(c, tok):
    """Matrices Q8_0 (34 bytes for 32 values); mHC fn, ape and router F16; vectors F32; table I32."""
    D, V, A, Dh = c["hidden_size"], c["vocab_size"], c["num_attention_heads"], c["head_dim"]
    QL, G, R, F = c["q_lora_rank"], c["o_groups"], c["o_lora_rank"], c["moe_intermediate_size"]
    E, H, I = c["n_routed_experts"], c["hc_mult"], c["index_head_dim"]
    mix = H * (2 + H)
    q8 = 2 * V * D + 2 * D * D                                     # embedding, head, MTP projections
    f16 = 2 * H * H * D                                            # two output heads of the streams
    f32 = 4 * D + 2 * (H + 1)
    i32, tensors = 0, 14
    for layer, ratio in enumerate(c["compress_ratios"]):
        mtp = layer >= c["num_hidden_layers"]
        q8 += QL * D + A * Dh * QL + Dh * D + R * A * Dh + D * G * R    # q_a, q_b, kv, o_a, o_b
        q8 += (E + 1) * 3 * D * F
        f16 += 2 * mix * H * D + E * D
        f32 += 2 * D + QL + Dh + A + 2 * (mix + 3)
        tensors += 23
        if ratio:
            wide = 2 if ratio == 4 else 1
            q8 += 2 * wide * Dh * D
            f16 += ratio * wide * Dh
            f32 += Dh
            tensors += 4
        if ratio == 4:
            q8 += c["index_n_heads"] * I * QL + c["index_n_heads"] * D + 4 * I * D
            f16 += 8 * I
            f32 += I
            tensors += 6
        if not mtp and layer < c["num_hash_layers"]:
            i32 += V * c["num_experts_per_tok"]
        else:
            f32 += E
    texts = list(tok["model"]["vocab"]) + [t["content"] for t in tok["added_tokens"] if t["id"] > 2]
    merges = [m if isinstance(m, str) else " ".join(m) for m in tok["model"]["merges"]]
    strings = sum(8 + len(t.encode()) for t in texts + merges) + 4 * len(texts)
    headers = tensors * (90 + 32) + 4096                           # tensor records with padding; metadata
    return q8 // 32 * 34 + 2 * f16 + 4 * f32 + 4 * i32 + strings + headers


def main():
    c, tok = (json.load(open(p, encoding="utf-8")) for p in sys.argv[1:3])
    n = gguf_bytes(c, tok)
    print("%d bytes of Q8_0 GGUF, limit %d: %s" % (n, LIMIT, "fits" if n < LIMIT else "TOO LARGE"))
    return 0 if n < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
