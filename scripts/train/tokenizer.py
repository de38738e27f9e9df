#!/usr/bin/env python3
"""Byte-level BPE with the DeepSeek V4 pre-tokeniser: training, encoding, decoding.

    tokenizer.py train --texts DIR --vocab-size 4000 --out tokenizer.json
    tokenizer.py check --json tokenizer.json --golden golden.jsonl

The file format is Hugging Face's tokenizer.json, so one loader reads this vocabulary and the real one.
"""
import argparse
import heapq
import json
import lzma
import os
import re
import sys
import unicodedata
from collections import Counter, defaultdict

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"

# The special tokens behind the merges, in the order they have in the real vocabulary.
TAIL_TOKENS = [
    "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", USER, ASSISTANT, "<|EOT|>",
    "<｜begin▁of▁repo▁name｜>", "<｜end▁of▁repo▁name｜>", "<｜begin▁of▁file▁name｜>",
    "<｜end▁of▁file▁name｜>", "<｜begin▁of▁file｜>", "<｜end▁of▁file｜>",
    THINK, END_THINK, "｜DSML｜", "<｜begin▁sys｜>", "<｜end▁sys｜>", "<｜latest_reminder｜>",
    "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜task｜>", "<｜political｜>",
    "<｜entity｜>", "<｜title｜>", "<｜safety｜>", "<｜answer｜>", "<｜search｜>", "<dsml:", "</dsml:",
]

# How much each text counts when merges are chosen: what the model should write best comes first.
TEXT_WEIGHTS = {
    "en_stories": 6, "en_novels": 3, "synth_stories260k": 2, "en_shakespeare": 2, "en_kjv": 1,
    "en_speeches": 1, "en_techdocs_sqlite": 1, "code_c_stb": 2,
}


# ---- pre-tokeniser ----------------------------------------------------------------------------
def _class_ranges(initials):
    """Ranges of all code points whose general category starts with one of `initials`."""
    out, start = [], None
    for cp in range(0x110000 + 1):
        inside = cp < 0x110000 and unicodedata.category(chr(cp))[0] in initials
        if inside and start is None:
            start = cp
        elif not inside and start is not None:
            out.append("\\U%08x-\\U%08x" % (start, cp - 1))
            start = None
    return "".join(out)


_L, _M, _N, _P, _S = (_class_ranges(c) for c in "LMNPS")
# Unicode White_Space. Python's \s would add U+001C..U+001F, which the original does not treat as space.
_W = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ASCII_PUNCT = re.escape("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")

_PASSES = [re.compile(p) for p in (
    "[%s]{1,3}" % _N,
    "[\\u4e00-\\u9fa5\\u3040-\\u309f\\u30a0-\\u30ff]+",
    "|".join([
        "[%s][A-Za-z]+" % _ASCII_PUNCT,
        "[^\\r\\n%s%s%s]?[%s%s]+" % (_L, _P, _S, _L, _M),
        " ?[%s%s]+[\\r\\n]*" % (_P, _S),
        "[%s]*[\\r\\n]+" % _W,
        "[%s]+(?![^%s])" % (_W, _W),
        "[%s]+" % _W,
    ]),
)]


def pieces(text):
    """Three passes; each isolates its matches inside the pieces that the pass before it left."""
    out = [text]
    for pattern in _PASSES:
        new = []
        for piece in out:
            at = 0
            for m in pattern.finditer(piece):
                if m.start() > at:
                    new.append(piece[at:m.start()])
                new.append(m.group())
                at = m.end()
            if at < len(piece):
                new.append(piece[at:])
        out = new
    return out


# ---- bytes as printable characters -------------------------------------------------------------
def _byte_symbols():
    plain = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    table, extra = {}, 256
    for b in range(256):
        if b in plain:
            table[b] = chr(b)
        else:
            table[b] = chr(extra)
            extra += 1
    return table


BYTE_TO_CHAR = _byte_symbols()
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}


def to_symbols(text):
    return "".join(BYTE_TO_CHAR[b] for b in text.encode("utf-8"))


# ---- encoding ------------------------------------------------------------------------------------
class Tokenizer:
    def __init__(self, path):
        with open(path, encoding="utf-8") as f:
            data = json.load(f)
        self.vocab = dict(data["model"]["vocab"])
        pairs = [m.split(" ") if isinstance(m, str) else m for m in data["model"]["merges"]]
        self.rank = {tuple(p): i for i, p in enumerate(pairs)}
        self.special = {t["content"]: t["id"] for t in data["added_tokens"]}
        self.text = {i: t for t, i in self.vocab.items()}
        self.text.update({i: t for t, i in self.special.items()})
        self.size = max(self.text) + 1
        self.bos, self.eos = self.special[BOS], self.special[EOS]
        by_length = sorted(self.special, key=len, reverse=True)
        self._special_re = re.compile("|".join(re.escape(t) for t in by_length))
        self._cache = {}

    def _bpe(self, piece):
        got = self._cache.get(piece)
        if got is not None:
            return got
        sym = list(to_symbols(piece))
        while len(sym) > 1:
            best = min(range(len(sym) - 1), key=lambda i: self.rank.get((sym[i], sym[i + 1]), 1 << 60))
            if (sym[best], sym[best + 1]) not in self.rank:
                break
            sym[best:best + 2] = [sym[best] + sym[best + 1]]
        ids = [self.vocab[s] for s in sym]
        if len(self._cache) < 1_000_000:
            self._cache[piece] = ids
        return ids

    def encode(self, text):
        """Plain text: strings that look like special tokens are ordinary text."""
        return [i for p in pieces(text) for i in self._bpe(p)]

    def encode_prompt(self, text):
        """Rendered prompt: special tokens are recognised."""
        ids, at = [], 0
        for m in self._special_re.finditer(text):
            ids += self.encode(text[at:m.start()]) if m.start() > at else []
            ids.append(self.special[m.group()])
            at = m.end()
        return ids + (self.encode(text[at:]) if at < len(text) else [])

    def decode(self, ids):
        special_ids = set(self.special.values())
        raw = b"".join(self.text[i].encode() if i in special_ids else bytes(CHAR_TO_BYTE[c] for c in self.text[i])
                       for i in ids)
        return raw.decode("utf-8", errors="replace")


# ---- training ------------------------------------------------------------------------------------
def read_text(folder, name):
    with lzma.open(os.path.join(folder, name + ".txt.xz"), "rt", encoding="utf-8") as f:
        return f.read()


def count_pieces(folder):
    counts = Counter()
    for name, weight in TEXT_WEIGHTS.items():
        got = Counter()
        # Paragraph by paragraph: keeps the piece lists small and changes no count that matters.
        for para in re.split(r"(?<=\n\n)(?=[^\n])", read_text(folder, name)):
            got.update(pieces(para))
        for piece, n in got.items():
            counts[piece] += n * weight
        print("%-20s %8d distinct pieces" % (name, len(got)), flush=True)
    return counts


def train_merges(counts, n_merges):
    """Greedy BPE: merge the most frequent adjacent pair; ties go to the pair that sorts first."""
    words = [(list(to_symbols(p)), n) for p, n in counts.items() if n > 3]
    pair_count, where = Counter(), defaultdict(set)
    for w, (sym, n) in enumerate(words):
        for pair in zip(sym, sym[1:]):
            pair_count[pair] += n
            where[pair].add(w)
    heap = [(-n, p) for p, n in pair_count.items()]
    heapq.heapify(heap)
    merges, made = [], set()
    while len(merges) < n_merges and heap:
        n, pair = heapq.heappop(heap)
        if pair_count[pair] != -n:                        # stale entry
            if pair_count[pair] > 0:
                heapq.heappush(heap, (-pair_count[pair], pair))
            continue
        joined, changed = pair[0] + pair[1], set()
        if joined not in made:                            # two ways to one string: the first has the id
            merges.append(pair)
            made.add(joined)
        for w in where.pop(pair):
            sym, count = words[w]
            for p in zip(sym, sym[1:]):
                pair_count[p] -= count
            new, i = [], 0
            while i < len(sym):
                if i + 1 < len(sym) and (sym[i], sym[i + 1]) == pair:
                    new.append(joined)
                    i += 2
                else:
                    new.append(sym[i])
                    i += 1
            words[w] = (new, count)
            for p in zip(new, new[1:]):
                pair_count[p] += count
                where[p].add(w)
                changed.add(p)
        for p in changed:
            if p != pair and pair_count[p] > 0:
                heapq.heappush(heap, (-pair_count[p], p))
    return merges


def write_json(path, merges):
    vocab = {t: i for i, t in enumerate([BOS, EOS, PAD])}
    for c in sorted(CHAR_TO_BYTE):                        # by code point, as in the real vocabulary
        vocab[c] = len(vocab)
    for a, b in merges:
        vocab[a + b] = len(vocab)
    added = [(i, t, True) for i, t in enumerate([BOS, EOS, PAD])]
    added += [(len(vocab) + i, t, False) for i, t in enumerate(TAIL_TOKENS)]

    def split(regex):
        return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    words = ("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
             "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+")
    data = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": s} for i, t, s in added],
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            split("\\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"), split(words), byte_level]},
        "post_processor": None,
        "decoder": dict(byte_level, use_regex=True),
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": vocab, "merges": ["%s %s" % m for m in merges]},
    }
    with open(path, "w", encoding="utf-8") as f:
        json.dump(data, f, ensure_ascii=False, indent=0)
        f.write("\n")


def check(path, golden):
    tok, bad, n = Tokenizer(path), 0, 0
    opener = lzma.open if golden.endswith(".xz") else open
    with opener(golden, "rt", encoding="utf-8") as f:
        for line in f:
            case = json.loads(line)
            n += 1
            plain = tok.encode(case["text"])
            full = tok.encode_prompt(case["text"])
            if full != case["ids"] or plain != case.get("ids_plain", case["ids"]):
                bad += 1
                if bad <= 10:
                    print("differs: %r" % case["text"][:80])
    print("%d cases, %d differ" % (n, bad))
    return 1 if bad else 0


def main():
    ap = argparse.ArgumentParser()
    sub = ap.add_subparsers(dest="what", required=True)
    t = sub.add_parser("train")
    t.add_argument("--texts", required=True)
    t.add_argument("--vocab-size", type=int, default=4000)
    t.add_argument("--out", required=True)
    c = sub.add_parser("check")
    c.add_argument("--json", required=True)
    c.add_argument("--golden", required=True)
    a = ap.parse_args()
    if a.what == "check":
        return check(a.json, a.golden)
    merges = train_merges(count_pieces(a.texts), a.vocab_size - 3 - 256 - len(TAIL_TOKENS))
    write_json(a.out, merges)
    print("wrote %s: %d merges" % (a.out, len(merges)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
