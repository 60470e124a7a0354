"""The factor by which the CUDA kernels find a row's page without dividing."""

from __future__ import annotations

import numpy as np
import pytest

from rimuru.base.errors import RimuruError
from rimuru.ops.cuda.moe import page_factor


@pytest.mark.parametrize("n_rows", [1, 2, 31, 768, 2048, 14336, 32768])
def test_every_row_lies_in_its_page(n_rows: int) -> None:
    rows = np.arange(n_rows, dtype=np.uint64)
    for rows_per_page in {1, 2, 3, 7, 384, 702, 1024, 2047, n_rows - 1, n_rows, n_rows + 1} - {0}:
        factor = page_factor(rows_per_page, n_rows)
        assert 0 <= factor <= 1 << 30
        assert np.array_equal(4 * rows * np.uint64(factor) >> np.uint64(32), rows // np.uint64(rows_per_page))


def test_rows_for_which_there_is_none_are_refused() -> None:
    with pytest.raises(RimuruError, match="too many"):
        page_factor((1 << 29) + 1, 1 << 30)
