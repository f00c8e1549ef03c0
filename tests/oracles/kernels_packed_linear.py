"""Products with packed weights in float64, one output at a time, and how far float32 sums may lie from them."""

import numpy as np

from .packed import element, rounded_input


def product(kind, x, codes, scale):
    """(x times the weight, sum of the magnitudes of its terms), float64 [T, out] each.

    x float32 [T, in] is rounded as the released kernels do; after that nothing is.
    """
    out, size = (np.zeros((len(x), codes.shape[0])) for _ in range(2))
    inputs = [rounded_input(row) for row in x]
    width = x.shape[1]
    for o in range(codes.shape[0]):
        weights = [element(kind, codes, scale, o, i) for i in range(width)]
        weight = np.array([np.float64(value) * np.float64(factor) for value, factor in weights])
        for t, (values, scales) in enumerate(inputs):
            terms = weight * np.float64(values) * np.repeat(np.array(scales, np.float64), width // len(scales))
            out[t, o], size[t, o] = terms.sum(), np.abs(terms).sum()
    return out, size


def bound(size, width):
    """Largest error of a float32 sum of `width` exact terms in any order: each of its additions rounds once.

    A multiplication with a power of two is exact, so it does not matter where scales are multiplied in.
    """
    return width * 2.0**-24 * size * (1 + 1e-4)
