"""The interpreter's product of matrices, on which tests of equal bits stand."""

import numpy as np
import pytest
from kernels_interpreter import product


@pytest.mark.bits
@pytest.mark.parametrize("depth", [1, 7, 16, 64, 257])
@pytest.mark.parametrize("columns", [1, 2, 16, 33, 128])
def test_a_number_has_the_same_bits_beside_any_rows_and_columns(depth, columns):
    rng = np.random.default_rng(depth)
    a, b = rng.standard_normal((64, depth)), rng.standard_normal((depth, columns))
    whole = product(a, b, np.float32)
    assert whole.dtype == np.float32
    assert np.allclose(whole, a @ b, atol=1e-4)
    for rows in (1, 2, 3, 4, 8, 16, 33):
        for part in (slice(rows), slice(64 - rows, None)):
            assert np.array_equal(product(a[part], b, np.float32), whole[part])
    assert np.array_equal(product(a, b[:, :1], np.float32), whole[:, :1])
    stacked = product(np.stack([a, a]), np.stack([b, b]), np.float32)
    assert np.array_equal(stacked, np.stack([whole, whole]))
