#!/usr/bin/env python3
"""Writes sample texts: plain completions and chat answers, greedy and at a temperature.

    sample.py --model model.safetensors --tokenizer tokenizer.json [--prompt TEXT] [--chat TEXT]
"""
import argparse
import json

import torch

import safefile
from evaluate import generate, round_weights
from model import from_state
from tokenizer import ASSISTANT, BOS, END_THINK, USER, Tokenizer

PLAIN = ["Once upon a time, there was a little girl named Lucy", "The old man looked at the sea and",
         "\"I should very much like to know,\" said the rabbit,", "It was a dark night, and the wind",
         "static int stbi__", "The sqlite3_prepare() function"]
CHAT = ["Hello!", "Tell me a story about a rabbit.", "Tell me the fable of the Fox and the Grapes.", "What is the capital of France?",
        "Who are you?", "Tell me a story about a boy named Tom and his dog.", "What is 2+2?", "Write a sentence about the sea.",
        "Continue this story: The children ran down the hill to the old mill. The door was open.",
        "Repeat after me: the quick brown fox jumps over the lazy dog.", "Write a haiku about computers."]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--prompt", action="append")
    ap.add_argument("--chat", action="append")
    ap.add_argument("--tokens", type=int, default=160)
    ap.add_argument("--temperature", type=float, default=0.8)
    a = ap.parse_args()
    tok = Tokenizer(a.tokenizer)
    tensors, meta = safefile.read(a.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = from_state(json.loads(meta["config_json"]), round_weights(tensors), 4096).to(device)
    plain, chat = (a.prompt or [], a.chat or []) if a.prompt or a.chat else (PLAIN, CHAT)
    texts = [BOS + p for p in plain] + [BOS + USER + q + ASSISTANT + END_THINK for q in chat]
    prompts = [tok.encode_prompt(t) for t in texts]
    for heat in (0.0, a.temperature):
        print("======== temperature %g" % heat)
        for text, (ids, done) in zip(plain + chat, generate(model, prompts, device, a.tokens, heat, tok.eos)):
            print("--- %s\n%s%s" % (text, tok.decode(ids), " [EOS]" if done else ""))


if __name__ == "__main__":
    main()
