"""The table of tensor types that GGUF files use (facts: ggml type ids, elements and bytes per block).

`ENGINE_FORMATS` are those that the kernels can compute with. Any other type is refused from the header, before
anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One tensor type. A row of n elements takes `n / block_elements * block_bytes` bytes."""

    ggml_id: int
    name: str
    block_elements: int
    block_bytes: int

    @property
    def is_float(self) -> bool:
        """True for f32, f16, bf16 and f64: plain numbers, no blocks."""
        return self.name in ("f32", "f16", "bf16", "f64")

    def row_bytes(self, n_elements: int) -> int:
        """Bytes of a row of n_elements, which must be a multiple of block_elements."""
        n_blocks, rest = divmod(n_elements, self.block_elements)
        if rest:
            raise ValueError(f"{n_elements} elements are no multiple of a {self.name} block of {self.block_elements}")
        return n_blocks * self.block_bytes


_ROWS = (
    (0, "f32", 1, 4),
    (1, "f16", 1, 2),
    (2, "q4_0", 32, 18),
    (3, "q4_1", 32, 20),
    (6, "q5_0", 32, 22),
    (7, "q5_1", 32, 24),
    (8, "q8_0", 32, 34),
    (9, "q8_1", 32, 36),
    (10, "q2_k", 256, 84),
    (11, "q3_k", 256, 110),
    (12, "q4_k", 256, 144),
    (13, "q5_k", 256, 176),
    (14, "q6_k", 256, 210),
    (15, "q8_k", 256, 292),
    (16, "iq2_xxs", 256, 66),
    (17, "iq2_xs", 256, 74),
    (18, "iq3_xxs", 256, 98),
    (19, "iq1_s", 256, 50),
    (20, "iq4_nl", 32, 18),
    (21, "iq3_s", 256, 110),
    (22, "iq2_s", 256, 82),
    (23, "iq4_xs", 256, 136),
    (24, "i8", 1, 1),
    (25, "i16", 1, 2),
    (26, "i32", 1, 4),
    (27, "i64", 1, 8),
    (28, "f64", 1, 8),
    (29, "iq1_m", 256, 56),
    (30, "bf16", 1, 2),
    (34, "tq1_0", 256, 54),
    (35, "tq2_0", 256, 66),
    (39, "mxfp4", 32, 17),
    (40, "nvfp4", 64, 36),
    (41, "q1_0", 128, 18),
    (42, "q2_0", 64, 18),
)

BY_ID: dict[int, QuantFormat] = {row[0]: QuantFormat(*row) for row in _ROWS}
BY_NAME: dict[str, QuantFormat] = {f.name: f for f in BY_ID.values()}

ENGINE_FORMATS: tuple[QuantFormat, ...] = tuple(
    BY_NAME[name]
    for name in (
        "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0",
        "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4",
        "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "tq1_0", "tq2_0", "nvfp4",
    )
)  # fmt: skip
