#!/usr/bin/env python3
"""Turns the texts into token files for training.

    data.py --texts DIR --tokenizer tokenizer.json --out DIR

Writes OUT/<part>.bin (uint16 ids), OUT/<part>.starts (int32 offsets of the documents, each beginning with BOS),
OUT/valid.bin (the held-out book, BOS first) and OUT/parts.json with the share of each part in training.
"""
import argparse
import json
import os
import random
import re

import numpy as np

from chat import ChatMaker
from tokenizer import EOS, Tokenizer, read_text

# Share of the training windows; stories count most because stories are what the model should write.
SHARES = {"stories": 0.30, "novels": 0.22, "synth": 0.04, "kjv": 0.05, "speeches": 0.05, "shakespeare": 0.03,
          "techdocs": 0.04, "code": 0.04, "chat": 0.23}
CHAT_SAMPLES = 20000


def is_heading(p):
    return len(p) < 60 and not re.search(r"[.!?,;:'\"]$", p)


def chapters(text):
    """Lists of paragraphs, cut where a heading follows ordinary text."""
    docs, doc = [], []
    for p in (p.strip() for p in text.split("\n\n")):
        if not p:
            continue
        if is_heading(p) and doc and not is_heading(doc[-1]):
            docs.append(doc)
            doc = []
        doc.append(p)
    return docs + [doc]


def cut(doc, rng, low=2500, high=9000):
    """Long chapters become several documents, so that many paragraphs are seen right after BOS.
    Only the last one gets EOS: the others do not end there."""
    out, part, size, want = [], [], 0, rng.randint(low, high)
    for p in doc:
        part.append(p)
        size += len(p)
        if size > want:
            out.append("\n\n".join(part))
            part, size, want = [], 0, rng.randint(low, high)
    if part:
        out.append("\n\n".join(part))
    return [(t, i == len(out) - 1) for i, t in enumerate(out)]


def plain_parts(folder, rng):
    parts = {}
    stories = chapters(read_text(folder, "en_stories"))
    novels = chapters(read_text(folder, "en_novels"))
    parts["stories"] = [c for d in stories for c in cut(d, rng)]
    parts["novels"] = [c for d in novels for c in cut(d, rng)]
    synth = [s.strip() for s in read_text(folder, "synth_stories260k").split("<|endoftext|>") if len(s.strip()) > 100]
    parts["synth"] = [(s, True) for s in synth]

    books = re.split(r"\n\n(?=(?:\d )?[A-Z][A-Za-z ]+ \d+\n)", "\n\n" + read_text(folder, "en_kjv").strip())
    verses = []
    parts["kjv"] = []
    for b in books:                                       # verse numbers teach nothing about English: drop them
        lines = [re.sub(r"^\d+ ", "", ln) for ln in b.strip().split("\n") if ln]
        if lines:
            parts["kjv"].append((lines[0] + "\n\n" + "\n".join(lines[1:]), True))
            verses += [ln for ln in lines[1:] if len(ln) > 40]
    parts["speeches"] = []
    for speech in read_text(folder, "en_speeches").split("\n"):
        sents = re.split(r"(?<=[.!?]) ", speech.strip())
        if len(sents) > 5:
            parts["speeches"] += [(t.replace("\n\n", " "), e) for t, e in cut(sents, rng)]
    play = [p.strip() for p in read_text(folder, "en_shakespeare").split("\n\n") if p.strip()]
    parts["shakespeare"] = cut(play, rng)
    parts["techdocs"] = [c for d in chapters(read_text(folder, "en_techdocs_sqlite")) for c in cut(d, rng)]
    parts["code"] = cut(read_text(folder, "code_c_stb").split("\n\n"), rng)

    fables = [(d[0], "\n\n".join(d[1:])) for d in stories if is_heading(d[0]) and 1 < len(d) < 8
              and 200 < sum(map(len, d)) < 2500 and re.match(r"(The|Mercury|Hercules|Jupiter|Venus) ", d[0])]
    short = [s for s in synth if len(s) < 1500 and s[-1] in ".!?\""]
    return parts, ChatMaker(short, stories + novels[:len(novels) // 2], fables, play, verses)


def save(folder, name, docs):
    starts, at = [], 0
    for d in docs:
        starts.append(at)
        at += len(d)
    np.concatenate([np.array(d, np.uint16) for d in docs]).tofile(os.path.join(folder, name + ".bin"))
    np.array(starts, np.int32).tofile(os.path.join(folder, name + ".starts"))
    print("%-12s %6d documents %9d tokens" % (name, len(docs), at), flush=True)
    return at


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--texts", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--out", required=True)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    tok, rng = Tokenizer(a.tokenizer), random.Random(1)
    parts, chat = plain_parts(a.texts, rng)
    print("%d fables, %d short stories, %d sentences for chat" % (len(chat.fables), len(chat.stories), len(chat.sentences)))
    sizes = {}
    for name, docs in parts.items():
        ids = [[tok.bos] + tok.encode(text) + ([tok.eos] if end else []) for text, end in docs]
        sizes[name] = save(a.out, name, ids)
    samples = [chat.sample() for _ in range(CHAT_SAMPLES)]
    with open(os.path.join(a.out, "chat_examples.txt"), "w", encoding="utf-8") as f:
        f.write("\n----\n".join(samples[:200]).replace(EOS, EOS + "\n"))
    sizes["chat"] = save(a.out, "chat", [tok.encode_prompt(s) for s in samples])
    valid = [tok.bos] + tok.encode(read_text(a.texts, "en_stories.valid"))
    np.array(valid, np.uint16).tofile(os.path.join(a.out, "valid.bin"))
    print("valid        %9d tokens" % len(valid))
    with open(os.path.join(a.out, "parts.json"), "w") as f:
        json.dump({"shares": SHARES, "tokens": sizes}, f, indent=1)


if __name__ == "__main__":
    main()
