"""Fields of other servers that would change an answer, and that this one does not know: refused by name.

Other unknown fields are tolerated, because clients send what their own server knows, and so are these where their value
asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rimuru.server.errors import NotSupportedError

_SCHEMA = "response_format with a json_schema holds an answer to a form"
_TOOLS = "use tools and tool_choice"
_STOP = "use stop, or logit_bias"
_BIAS = "use logit_bias"
_SAMPLING = "use temperature, top_p, top_k or min_p"
_HINTS = {
    "grammar": _SCHEMA, "guided_json": _SCHEMA, "guided_regex": _SCHEMA, "guided_choice": _SCHEMA,
    "guided_grammar": _SCHEMA, "structured_outputs": _SCHEMA, "json_schema": _SCHEMA, "regex": _SCHEMA, "ebnf": _SCHEMA,
    "functions": _TOOLS, "function_call": _TOOLS,
    "min_tokens": "use ignore_eos with max_tokens", "stop_token_ids": _STOP, "n_predict": "use max_tokens",
    "bad_words": _BIAS, "allowed_token_ids": _BIAS, "logits_processors": _BIAS,
    "repeat_penalty": "use repetition_penalty",
    "mirostat": _SAMPLING, "typical_p": _SAMPLING, "tfs_z": _SAMPLING, "top_a": _SAMPLING, "top_n_sigma": _SAMPLING,
    "dynatemp_range": _SAMPLING, "xtc_probability": _SAMPLING, "dry_multiplier": _SAMPLING,
    "smoothing_factor": _SAMPLING,
    "use_beam_search": _SAMPLING, "length_penalty": _SAMPLING,
    "prompt_logprobs": "use logprobs, which are of the answer", "n_probs": "use logprobs",
    "chat_template": "use chat_template_kwargs", "continue_final_message": "use /v1/completions",
    "add_generation_prompt": "use /v1/completions", "truncate_prompt_tokens": "shorten the prompt",
    "skip_special_tokens": "answers hold no control tokens", "include_stop_str_in_output": "answers end before it",
    "modalities": "answers are text", "web_search_options": _TOOLS, "lora": "the model is served as it is",
    "echo": "the answer never repeats the prompt", "suffix": "this server does not fill in the middle of a text",
    "best_of": "only as many answers are made as n says",
}  # fmt: skip
"""Field -> what to do instead."""
_OFF: dict[str, tuple[Any, ...]] = {
    "grammar": ("",), "guided_regex": ("",), "guided_grammar": ("",), "regex": ("",), "ebnf": ("",),
    "functions": ([],), "function_call": ("none",), "stop_token_ids": ([],), "bad_words": ([],),
    "logits_processors": ([],), "lora": ([],), "min_tokens": (0,), "n_probs": (0,), "n_predict": (-1,),
    "repeat_penalty": (1,), "length_penalty": (1,), "typical_p": (1,), "tfs_z": (1,), "mirostat": (0,), "top_a": (0,),
    "top_n_sigma": (0, -1), "dynatemp_range": (0,), "xtc_probability": (0,), "dry_multiplier": (0,),
    "smoothing_factor": (0,), "use_beam_search": (False,), "continue_final_message": (False,),
    "include_stop_str_in_output": (False,), "add_generation_prompt": (True,), "skip_special_tokens": (True,),
    "modalities": (["text"],), "echo": (False,), "suffix": ("",),
}  # fmt: skip
"""Values, besides null, that ask for nothing."""


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises NotSupportedError for the first of these fields that asks for something."""
    for name in _HINTS:
        off = (body.get("n") or 1,) if name == "best_of" else _OFF.get(name, ())
        if body.get(name) is not None and body[name] not in off:
            raise NotSupportedError(f"{name} is not supported: {_HINTS[name]}", name)
