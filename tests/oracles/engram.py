"""N-gram memory in Python integers, token by token and head by head: constants, row numbers, gate and write."""

import math

import numpy as np

from . import quant

F32 = np.float32


def primes(layers, sizes, heads, start):
    """[layer][size][head]: per layer and size from `start` upwards the next primes that nobody has yet."""
    taken, out = set(), []
    for _ in range(layers):
        out.append([])
        for _ in range(sizes):
            out[-1].append([])
            number = start
            while len(out[-1][-1]) < heads:
                if number not in taken and all(number % d for d in range(2, math.isqrt(number) + 1)):
                    taken.add(number)
                    out[-1][-1].append(number)
                number += 1
    return out


def row_numbers(tokens, dead, token_map, multipliers, moduli, pad):
    """[T][L][C] of a whole sequence. tokens: ids; dead: positions that n-grams do not read; moduli: as `primes`.

    multipliers: [L][max n-gram]; pad: compressed id in place of what is not read. Sizes are major, heads minor.
    """
    out = []
    for position in range(len(tokens)):
        words, stopped = [], False
        for back in range(len(multipliers[0])):
            at = position - back
            stopped = stopped or at < 0 or at in dead
            words.append(pad if stopped else int(token_map[tokens[at]]))
        out.append([_layer_rows(words, *constants) for constants in zip(multipliers, moduli, strict=True)])
    return out


def _layer_rows(words, multipliers, moduli):
    rows, first = [], 0
    for size, of_size in enumerate(moduli, start=2):
        mixed = 0
        for word, multiplier in zip(words[:size], multipliers, strict=False):
            mixed ^= word * int(multiplier)
        for modulus in of_size:
            rows.append(first + mixed % int(modulus))
            first += int(modulus)
    return rows


def gate(product):
    """Sigmoid of the signed root of one number; the root is of 1e-6 at least, -0 counts as negative."""
    root = math.copysign(math.sqrt(max(abs(product), 1e-6)), product)
    return 1 / (1 + math.exp(-root))


def write(stream, rows, table, scales, wkv, q_weight, k_weight, eps):
    """One token's stream [C, E] with its memory written in; rows: row numbers, [] for a token that reads none."""
    if len(rows) == 0:
        return stream
    width = table.shape[1]
    packed = np.concatenate([table[rows], scales[rows]], axis=1).astype(np.uint8)
    values = np.concatenate([quant.unpack_row("mxfp8", bytes(row), width) for row in packed])
    keys_value = wkv @ values
    copies, dim = stream.shape
    value, out = keys_value[copies * dim :], np.array(stream)
    for copy in range(copies):
        key = keys_value[copy * dim : (copy + 1) * dim]
        norms = [1 / math.sqrt(float(np.mean(side * side)) + eps) for side in (stream[copy], key)]
        product = float(np.sum(stream[copy] * q_weight[copy] * k_weight[copy] * key))
        out[copy] += F32(gate(product * norms[0] * norms[1] / math.sqrt(dim))) * value
    return out
