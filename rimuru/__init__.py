"""Rimuru serves Mixture-of-Experts language models from GGUF files through one elastic page pool.

    from rimuru import LLM, SamplingParams

Names are imported on first use, so that `import rimuru` is quick and needs no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rimuru.base.env import ensure_code_cache

ensure_code_cache()

__version__ = "0.1.0"
_HOMES = {
    "LLM": "rimuru.llm",
    "SamplingParams": "rimuru.request",
    "Completion": "rimuru.request",
    "Piece": "rimuru.request",
    "TokenLogprob": "rimuru.request",
    "Tokenizer": "rimuru.text.tokenizer",
    "EngineConfig": "rimuru.config",
    "RimuruError": "rimuru.base.errors",
}
__all__ = ["LLM", "Completion", "EngineConfig", "Piece", "RimuruError", "SamplingParams", "TokenLogprob", "Tokenizer"]

if TYPE_CHECKING:
    from rimuru.base.errors import RimuruError
    from rimuru.config import EngineConfig
    from rimuru.llm import LLM
    from rimuru.request import Completion, Piece, SamplingParams, TokenLogprob
    from rimuru.text.tokenizer import Tokenizer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rimuru' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
