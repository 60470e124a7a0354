"""How long opening a GGUF takes: header, metadata and tensor directory, then decoding all tokens.

python tools/bench/open_gguf.py FILE [--repeat 5]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script
from rimuru.formats.gguf import open_gguf


def main() -> None:
    """Print the best of several openings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    open_s, tokens_s, n_tokens = [], [], 0
    for _ in range(args.repeat):
        start = time.perf_counter()
        with open_gguf(args.file) as gguf:
            open_s.append(time.perf_counter() - start)
            start = time.perf_counter()
            n_tokens = len(list(gguf.kv.get_list("tokenizer.ggml.tokens", str, [])))
            tokens_s.append(time.perf_counter() - start)
    print(f"open: best {min(open_s):.3f} s, worst {max(open_s):.3f} s of {args.repeat}")
    print(f"decode {n_tokens} tokens: best {min(tokens_s):.3f} s")


if __name__ == "__main__":
    main()
