"""Which type each tensor has in a file of a named quantisation, by the quantiser's rules (facts section 7.2).

For built-in shapes and test models. Files are never judged by a name like this: every tensor states its own type.
"""

from __future__ import annotations

from collections.abc import Mapping

from rimuru.arch.spec import ModelConfig, MoeSpec
from rimuru.base.errors import BadInputError
from rimuru.formats.quants import BY_NAME, ENGINE_FORMATS, QuantFormat

_MIXES = {"q4_k_m": ("q4_k", "q6_k"), "q5_k_m": ("q5_k", "q6_k")}
"""Name -> type of most matrices, type of the sensitive ones."""
_FALLBACKS = {
    "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "q2_k": "q4_0", "q3_k": "q4_0", "iq4_xs": "iq4_nl",
    "tq1_0": "q4_0", "tq2_0": "q4_0", "iq1_s": "iq4_nl", "iq1_m": "iq4_nl", "iq2_xxs": "iq4_nl", "iq2_xs": "iq4_nl",
    "iq2_s": "iq4_nl", "iq3_xxs": "iq4_nl", "iq3_s": "iq4_nl",
}  # fmt: skip
_FLOAT_SUFFIXES = ("_norm.weight", "ffn_gate_inp.weight", "shortconv.conv.weight", "indexer.proj.weight")


def quantisations() -> tuple[str, ...]:
    """Names of quantisations: the engine's types as they are, and the mixes."""
    return (*(fmt.name for fmt in ENGINE_FORMATS), *_MIXES, "mxfp4_moe")


def tensor_formats(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], quant: str) -> dict[str, QuantFormat]:
    """Type of every tensor (name -> ne shape) of a model in the quantisation. Raises BadInputError for its name."""
    quant = quant.lower()
    if quant not in quantisations():
        raise BadInputError(f"unknown quantisation {quant!r}; known: {', '.join(quantisations())}")
    n_blocks = len(config.layers) + config.n_mtp_blocks
    eight_experts = any(isinstance(layer.ffn, MoeSpec) and layer.ffn.n_experts == 8 for layer in config.layers)
    n_values = sum(map(_is_value_tensor, shapes))
    value_index = 0
    found: dict[str, QuantFormat] = {}
    for name, shape in shapes.items():
        if name.endswith("tid2eid.weight"):
            found[name] = BY_NAME["i32"]
            continue
        if not _is_quantised(name, shape):
            found[name] = BY_NAME["f32"]
            continue
        if quant in _MIXES:
            wanted = _mixed(name, quant, config, eight_experts, (value_index, n_values), n_blocks)
        elif quant == "mxfp4_moe":
            wanted = "mxfp4" if len(shape) == 3 else "q8_0"
        else:
            wanted = quant
        value_index += _is_value_tensor(name)
        found[name] = _fitting(wanted, shape[0])
    return found


def _mixed(
    name: str, quant: str, config: ModelConfig, eight_experts: bool, value: tuple[int, int], n_blocks: int
) -> str:
    base, better = _MIXES[quant]
    if name == ("token_embd.weight" if config.tied_head else "output.weight"):
        return better
    if (eight_experts and ".attn_v." in name) or (eight_experts and ".attn_k." in name):
        return "q8_0"
    if eight_experts and ".attn_output." in name:
        return "q5_k"
    if _is_value_tensor(name):
        return better if _more(*value) else base
    if ".ffn_down" in name:
        return better if _more(int(name.split(".")[1]), n_blocks) else base
    return base


def _more(index: int, n: int) -> bool:
    """The first eighth, the last eighth, and every third in between."""
    return index < n // 8 or index >= 7 * n // 8 or (index - n // 8) % 3 == 2


def _is_value_tensor(name: str) -> bool:
    return name.endswith((".attn_v.weight", ".attn_qkv.weight", ".attn_kv_b.weight"))


def _is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    is_matrix = len(shape) >= 2 and name.endswith(".weight")
    return is_matrix and not name.endswith(_FLOAT_SUFFIXES) and ".ssm_conv1d" not in name


def _fitting(name: str, n_in: int) -> QuantFormat:
    """The type, or what the quantiser takes where its block does not divide a row."""
    fmt = BY_NAME[name]
    if n_in % fmt.block_elements:
        fmt = BY_NAME[_FALLBACKS.get(name, "f16")]
    return fmt if n_in % fmt.block_elements == 0 else BY_NAME["f16"]
