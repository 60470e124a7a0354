"""qwen2 and qwen3, the dense Qwen models (facts section 4.14)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.spec import LayerSpec, ModelConfig

NAMES = ("qwen2", "qwen3")
MODELS = {"qwen2": "Qwen2, Qwen2.5", "qwen3": "Qwen3 (dense)"}
RUNNABLE = {"qwen2": ("cpu", "cuda"), "qwen3": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    """qwen2 has biases on q, k and v; qwen3 norms every head of q and k before rope."""
    rope = base.rope("half")
    is_qwen2 = base.architecture == "qwen2"

    def layer(index: int) -> LayerSpec:
        attention = base.attention(
            index, rope, bias="required" if is_qwen2 else "optional", qk_norm="none" if is_qwen2 else "head"
        )
        return LayerSpec(index, attention, base.dense(index))

    return base.config(
        base.layers(layer),
        output_bias=is_qwen2 and "output.bias" in base.gguf.tensors,
        ignored_tensors=frozenset(("cls.output.weight", "cls.output.bias")),
    )
