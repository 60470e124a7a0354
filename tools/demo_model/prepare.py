#!/usr/bin/env python3
"""Stage 2: from stories to a corpus of tokens.

    tools/demo_model/prepare.py --stories stories --out demo_data [--tales 150000]

Reads what generate.py wrote, keeps the stories that are fit, wander least and are unlike each other (cleaning.py), adds
tales of tales.py, holds out one document in HELD_OUT_ONE_IN by its hash and all tales of HELD_OUT_PLOTS, trains a
byte-level BPE tokenizer on the rest, writes

    OUT/tokens-N.xz      token ids, 16 bits each, little endian, cut in files
    OUT/documents.npz    lengths, sources and held_out of the documents, in their order
    OUT/corpus.json      what there is, in numbers
    OUT/tokenizer.json   the tokenizer
    OUT/held_out.txt     held-out documents of all sources, for `rimuru perplexity`

Half of the tales and all of the stories are written as a conversation, with the request that they answer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parent))  # run as a script

from cleaning import cut, distinct, is_good, normalise, simplicity, wandering
from generate import SEED as REQUEST_SEED
from tales import Tale, tale, talk
from words import request

SOURCES = ("tales", "stories", "new plots")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
N_VOCAB = 4096
HELD_OUT_ONE_IN = (100, 20)
"""Documents of the first two sources, by their hash."""
SIMPLE_SHARE = 0.9
"""Of the stories, those with the commonest words."""
N_STORIES = 6_000
"""Of the stories, those that wander least."""
N_NEW_PLOTS, N_TALK = 1_000, 1_500
SHIPPED = {"tales": 40, "stories": 20, "new plots": 20}
"""Held-out documents of each source in held_out.txt, in this order."""
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 5, "lp": 1}]
PART_BYTES = 12_000_000


@dataclass(frozen=True)
class Document:
    """A story of a source, and the request that it answers."""

    source: int
    request: str
    story: str
    is_talk: bool = False

    @property
    def digest(self) -> int:
        return int.from_bytes(hashlib.sha256(self.story.encode()).digest()[:8], "little")

    @property
    def is_held_out(self) -> bool:
        return self.source == 2 or (not self.is_talk and self.digest % HELD_OUT_ONE_IN[self.source] == 0)

    @property
    def is_chat(self) -> bool:
        """Written as a conversation. All generated stories are, so that plain text leads to tales, which hold together
        better."""
        return self.source == 1 or self.is_talk or self.digest >> 32 & 1 == 1

    @property
    def text(self) -> str:
        if not self.is_chat:
            return f"{self.story}<|endoftext|>"
        asked = f"<|im_start|>user\n{self.request}<|im_end|>\n<|im_start|>assistant\n"
        return f"{asked}{self.story}<|im_end|>\n<|endoftext|>"


def read_stories(folder: Path) -> Iterator[tuple[int, str]]:
    """(request index, story) of all records; a file that was cut off gives what is whole."""
    for path in sorted(folder.glob("stories-*.jsonl.xz")):
        try:
            with lzma.open(path, "rt", encoding="utf-8") as lines:
                for line in lines:
                    index, _, text = json.loads(line)
                    yield index, text
        except (EOFError, lzma.LZMAError, json.JSONDecodeError) as error:
            print(f"{path}: {error}; the rest of it is left out")


def good_stories(folder: Path, limit: int) -> tuple[list[Document], dict[str, int]]:
    """The stories that are kept, and how many were left after each step.

    Only those that answer a request with more in it than a topic: plain requests are left to the tales."""
    read = list(read_stories(folder))
    numbers = {"generated": len(read)}
    once = {text: index for index, text in read}
    numbers["different"] = len(once)
    cleaned = [(index, cut(normalise(text))) for text, index in once.items()]
    fit = [(index, text) for index, text in cleaned if is_good(text)]
    numbers["fit"] = len(fit)
    if fit:
        scores = simplicity([text for _, text in fit])
        least = np.quantile(scores, 1 - SIMPLE_SHARE)
        fit = [pair for pair, score in zip(fit, scores, strict=True) if score >= least]
    numbers["simple"] = len(fit)
    asked = [(request(index, REQUEST_SEED).text, text) for index, text in fit]
    asked = [pair for pair in asked if pair[0].count(".") + pair[0].count("?") > 1]
    numbers["asked for with words"] = len(asked)
    scored = sorted((score, pair) for pair in asked if (score := wandering(pair[1])) < float("inf"))
    numbers["not wandering"] = len(scored)
    kept = [pair for _, pair in scored]
    kept = [kept[i] for i in distinct(text for _, text in kept)][:limit]
    numbers["distinct, the best"] = len(kept)
    return [Document(1, *pair) for pair in kept], numbers


def documents_of(told: Iterable[Tale], source: int) -> list[Document]:
    """Each text once."""
    found = {one.text: Document(source, one.request, one.text, one.plot == "talk") for one in told}
    return list(found.values())


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE with GPT-2's splitting (`tokenizer.ggml.pre` gpt-2)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB, special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokens(folder: Path, encoded: list[np.ndarray]) -> int:
    """The ids in parts; returns their bytes on disk."""
    raw = np.concatenate(encoded).astype("<u2").tobytes()
    n_bytes, part_bytes = 0, 4 * PART_BYTES
    for number, start in enumerate(range(0, len(raw), part_bytes)):
        packed = lzma.compress(raw[start : start + part_bytes], filters=FILTERS)
        (folder / f"tokens-{number:02d}.xz").write_bytes(packed)
        n_bytes += len(packed)
    return n_bytes


def held_out_text(documents: list[Document]) -> str:
    """The first held-out documents of each source in turn, as they are written for training."""
    chosen = [
        [d for d in documents if d.is_held_out and d.source == source][: SHIPPED[name]]
        for source, name in enumerate(SOURCES)
    ]
    return "".join(d.text for source in chosen for d in source)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stories", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tales", type=int, default=150_000)
    parser.add_argument("--limit", type=int, default=N_STORIES, help="stories at most")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    stories, numbers = good_stories(options.stories, options.limit)
    documents = documents_of(map(tale, range(options.tales)), 0) + documents_of(map(talk, range(N_TALK)), 0) + stories
    documents += documents_of((tale(i, held_out=True) for i in range(N_NEW_PLOTS)), 2)
    print(numbers, len(documents), "documents", flush=True)
    training = [d.text for d in documents if not d.is_held_out]
    sample = training[:: max(1, len(training) // 40_000)]
    tokenizer = train_tokenizer(sample)
    tokenizer.save(str(options.out / "tokenizer.json"))
    encoded = [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch([d.text for d in documents])]
    lengths = np.array([len(ids) for ids in encoded])
    sources = np.array([d.source for d in documents], np.uint8)
    held_out = np.array([d.is_held_out for d in documents])
    np.savez_compressed(
        options.out / "documents.npz", lengths=lengths.astype(np.uint16), sources=sources, held_out=held_out
    )
    n_bytes = write_tokens(options.out, encoded)
    (options.out / "held_out.txt").write_text(held_out_text(documents), encoding="utf-8")
    about = {
        "sources": list(SOURCES),
        "n_vocab": tokenizer.get_vocab_size(),
        "stories": numbers,
        "documents": {name: int((sources == i).sum()) for i, name in enumerate(SOURCES)},
        "tokens": {name: int(lengths[(sources == i) & ~held_out].sum()) for i, name in enumerate(SOURCES)},
        "held_out_tokens": {name: int(lengths[(sources == i) & held_out].sum()) for i, name in enumerate(SOURCES)},
        "bytes": n_bytes,
    }
    (options.out / "corpus.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
