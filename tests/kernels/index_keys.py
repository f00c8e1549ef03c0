"""Small arenas of index keys for the tests of the score ops: legal rows where they may be read, NaN everywhere else."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.formats import PagedRows, RowLayout
from tests.oracles.kernels_indexer_scores import ROW_BYTES

FORMATS = tuple(ROW_BYTES)
OFFSET, SPARE_BYTES = 24, 12  # before and behind the keys of a page


@dataclasses.dataclass
class Keys:
    """arena uint8 [P, page_bytes], table int32 [S, W], place as the oracles take it; `filled` entries per sequence."""

    arena: np.ndarray
    table: np.ndarray
    place: dict

    def rows(self, seq) -> PagedRows:
        layout = RowLayout(**self.place)
        return PagedRows(jnp.asarray(self.arena), jnp.asarray(self.table), jnp.asarray(seq, jnp.int32), layout)

    def write(self, seq: int, entry: int, row: bytes) -> None:
        per_page = self.place["rows_per_page"]
        start = self.place["offset"] + entry % per_page * len(row)
        self.arena[self.table[seq, entry // per_page], start : start + len(row)] = np.frombuffer(row, np.uint8)


def make_keys(rng, fmt, filled, *, width=32, rows_per_page=6, pages=7) -> Keys:
    """Sequences with `filled[s]` keys in shuffled pages; other rows are all ones (NaN), tables end with -1."""
    size = ROW_BYTES[fmt](width)
    total = len(filled) * pages + 2
    arena = np.full((total, OFFSET + rows_per_page * size + SPARE_BYTES), 0xFF, np.uint8)
    table = rng.permutation(total)[: len(filled) * pages].reshape(len(filled), pages).astype(np.int32)
    place = {"format": fmt, "width": width, "offset": OFFSET, "rows_per_page": rows_per_page}
    keys = Keys(arena, table, place)
    for seq, count in enumerate(filled):
        for entry in range(count):
            keys.write(seq, entry, random_row(rng, fmt, width))
        table[seq, -(-count // rows_per_page) :] = -1
    return keys


def random_row(rng, fmt, width) -> bytes:
    """A packed row of values of the order of one, without NaN."""
    if fmt in ("bf16", "fp32"):
        values = rng.normal(size=width).astype(np.float32)
        return values.tobytes() if fmt == "fp32" else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    nibbles = fmt in ("mxfp4", "fp4_e4m3")
    codes = rng.integers(0, 256, width // 2 if nibbles else width, dtype=np.uint8)
    if not nibbles:
        codes &= 0xBF  # magnitudes below 2
    if fmt == "fp8_fp32":
        return codes.tobytes() + np.float32(rng.uniform(0.1, 0.3)).tobytes()
    count = ROW_BYTES[fmt](width) - len(codes)
    lowest = 0x20 if fmt == "fp4_e4m3" else 124  # 2^-3
    return codes.tobytes() + rng.integers(lowest, lowest + 4, count, dtype=np.uint8).tobytes()
