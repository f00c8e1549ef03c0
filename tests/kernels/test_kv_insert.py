"""`kv_insert`: every byte that it writes, and every byte that it leaves, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.numerics.formats import get_format
from dsflash_jax.ops.rope import apply_rope
from pallas_kernels.common.dispatch import UnsupportedError
from pallas_kernels.common.formats import FORMATS, RowLayout
from pallas_kernels.kv_insert import reference
from pallas_kernels.kv_insert.api import kv_insert
from pallas_kernels.kv_insert.config import InsertConfig
from pallas_kernels.kv_insert.insert import Insert
from tests.oracles import kernels_kv_insert as oracle

WAYS = {
    "xla": lambda arenas, inserts: jax.jit(lambda *a: kv_insert(*a, implementation="xla"))(arenas, inserts),
    "kernel": lambda arenas, inserts: kv_insert(arenas, inserts, implementation="pallas_triton", interpret=True),
    "reference": reference.kv_insert,
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def hard_rows(rng, rows, width):
    """Values that round differently if any rule is off: ties, saturation, subnormals, zeros of both signs, spread."""
    x = (rng.normal(size=(rows, width)) * 2.0 ** rng.integers(-9, 9, (rows, width))).astype(np.float32)
    x[0] = np.tile([6, -0.25, 0.75, 1.25, 1.75, -2.5, 3.5, 5, 0, -0.0, 0.5, -5, 7, -7, 1e-3, 2.0**-9], width // 16)
    x[1] = 2.0 ** rng.integers(-130, -110, width) * rng.choice([-1, 1], width)  # subnormal against every floor
    x[2] = np.where(np.arange(width) % 2, 0.0, -0.0)
    x[3] = rng.integers(-256, 256, width) / 16 + rng.choice([0, 2.0**-12], width)  # on and just off ties of E4M3
    x[4, 0::5] = 3e4 * rng.choice([-1, 1], len(x[4, 0::5]))  # beyond 448 * 6: the scale of fp4_e4m3 saturates
    return x


def make(name, dtype="float32", *, rows=7, width=64, rope=16, seed=0, pages=5, offset=3, layout=None, arena=0):
    """(arena, insert) with shuffled pages, a table with holes, and rows of several sequences among padding."""
    rng = np.random.default_rng(seed)
    layout = layout or RowLayout(name, width, offset, 3)
    table = np.array([[4, 1], [2, -1]], np.int32)
    index, seq = np.array([2, 3, -1, 0, 5, 1, 4, -7, 6])[:rows], np.array([0, 0, 1, 1, 0, 1, 1, 0, 0])[:rows]
    angle = rng.uniform(-3, 3, (rows, rope // 2))
    x = hard_rows(rng, 9, width)
    x[1, width - rope :] *= 2.0**40  # XLA's CPU backend flushes subnormal products, so none are rotated here
    values = jnp.asarray(x[:rows]).astype(DTYPES[dtype])
    cos, sin = (jnp.asarray(f(angle), jnp.float32) if rope else None for f in (np.cos, np.sin))
    ints = [jnp.asarray(a, jnp.int32) for a in (index, seq, table)]
    bytes_ = rng.integers(0, 256, (pages, offset + 3 * layout.row_bytes + 4), dtype=np.uint8)
    return bytes_, Insert(values, cos, sin, *ints, layout, arena)


def expected(arena, insert):
    """The arena after the oracle's loops over the insert, and how many rows it wrote."""
    arena, layout, rows = arena.copy(), insert.layout, []
    values = np.asarray(insert.values.astype(jnp.float32))
    for n in range(len(values)):
        angle = (None, None) if insert.cos is None else (np.asarray(insert.cos[n]), np.asarray(insert.sin[n]))
        bfloat16 = insert.values.dtype == jnp.bfloat16
        rows.append((values[n], *angle, bfloat16, int(insert.index[n]), int(insert.seq[n])))
    table = np.asarray(insert.table).tolist()
    count = oracle.insert(arena, table, layout.format, layout.rows_per_page, layout.offset, layout.row_bytes, rows)
    return arena, count


def some(default, every):
    """Parameters of which those in `default` run by default and the others are slow."""
    return [p if p in default else pytest.param(*p, marks=pytest.mark.slow) for p in every]


EVERY = [(name, dtype) for name in FORMATS for dtype in DTYPES]


def check_bytes(name, dtype, ways):
    arena, insert = make(name, dtype, rows=9)
    wanted, count = expected(arena, insert)
    assert count == 5, "4 of the 9 rows have nowhere to go"
    for way in ways:
        assert np.array_equal(WAYS[way]((jnp.asarray(arena),), (insert,))[0], wanted), way


@pytest.mark.parametrize(("name", "dtype"), some([("fp8_fp32", "float32")], EVERY))
def test_bytes_equal_the_loops(name, dtype):
    """Padding, rows behind the table and rows on page -1 write nothing; all others every byte as the loops do."""
    check_bytes(name, dtype, ("xla", "kernel"))


@pytest.mark.parametrize(("name", "dtype"), some([("bf16", "float32")], EVERY))
def test_bytes_of_the_reference_equal_the_loops(name, dtype):
    """Apart from the others: an operation at a time, it takes ten times as long."""
    check_bytes(name, dtype, ("reference",))


@pytest.mark.parametrize(
    ("name", "way"), some([("mxfp8", "xla")], [(n, way) for n in FORMATS for way in ("xla", "kernel")])
)
def test_bytes_equal_the_formats_of_the_model(name, way):
    """The same codes as `KVFormat.pack(apply_rope(...))`, which does not share a line with the kernel."""
    layout = RowLayout(name, 128, 0, 32)
    rng = np.random.default_rng(3)
    values = jnp.asarray(hard_rows(rng, 32, 128)).astype(jnp.bfloat16)
    angle = rng.uniform(-3, 3, (32, 16))
    cos, sin = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    index, seq = jnp.arange(32, dtype=jnp.int32), jnp.zeros(32, jnp.int32)
    insert = Insert(values, cos, sin, index, seq, jnp.zeros((1, 1), jnp.int32), layout)
    # Not under jit: there, XLA rounds a product and the sum after it at once where it likes, here they round apart.
    wanted = jax.jit(get_format(name).pack)(apply_rope(values, cos, sin))
    got = WAYS[way]((jnp.zeros((1, 32 * layout.row_bytes), jnp.uint8),), (insert,))[0]
    assert np.array_equal(got.reshape(32, -1), wanted)


@pytest.mark.smoke
def test_one_call_writes_three_kinds_of_rows_into_two_arenas():
    """Main rows and index keys side by side in pages, window rows in a ring; NaN in padding rows changes nothing."""
    main = RowLayout("fp4_e4m3", 32, 0, 3)
    index = RowLayout("mxfp4", 32, 3 * main.row_bytes, 3)
    pages, first = make("fp4_e4m3", "bfloat16", width=32, layout=main, offset=index.offset + 3 * index.row_bytes)
    _, second = make("mxfp4", "bfloat16", width=32, layout=index, seed=1)
    ring, third = make("mxfp8", "bfloat16", width=32, seed=2, rope=0, arena=1)
    inserts = [first, second, third]
    for n, insert in enumerate(inserts):
        poison = jnp.where(insert.index[:, None] < 0, jnp.nan, insert.values.astype(jnp.float32))
        inserts[n] = Insert(poison.astype(jnp.bfloat16), insert.cos, insert.sin, insert.index, insert.seq,
                            insert.table, insert.layout, insert.arena)  # fmt: skip
    wanted, (wanted_ring, _) = expected(expected(pages, first)[0], second)[0], expected(ring, third)
    for way in ("xla", "kernel"):
        got = WAYS[way]((jnp.asarray(pages), jnp.asarray(ring)), tuple(inserts))
        assert np.array_equal(got[0], wanted) and np.array_equal(got[1], wanted_ring), way


@pytest.mark.parametrize("rows", [3, pytest.param(16, marks=pytest.mark.slow)])
def test_rows_of_a_program_and_their_number_do_not_matter(rows):
    arena, insert = make("mxfp8", rows=7)
    wanted, _ = expected(arena, insert)
    config = InsertConfig(rows=rows)
    got = kv_insert((jnp.asarray(arena),), (insert,), implementation="pallas_triton", interpret=True, config=config)
    assert np.array_equal(got[0], wanted)


def test_the_whole_row_may_rotate_and_a_call_may_have_no_rows():
    arena, insert = make("mxfp4", rope=64)
    wanted, _ = expected(arena, insert)
    _, empty = make("mxfp4", rows=0)
    for way in ("xla", "kernel"):
        assert np.array_equal(WAYS[way]((jnp.asarray(arena),), (insert, empty))[0], wanted)
        assert np.array_equal(WAYS[way]((jnp.asarray(arena),), (empty,))[0], arena)


def test_a_page_beyond_the_arena_is_never_written():
    """Interpretation would clamp the address to the last page, so the range is tested here, apart."""
    arena, insert = make("bf16")
    table = jnp.asarray([[7, 1], [2, 5]], jnp.int32)
    insert = Insert(insert.values, insert.cos, insert.sin, insert.index, insert.seq, table, insert.layout)
    wanted, count = expected(arena, insert)
    assert count == 4
    for way in ("xla", "kernel"):
        assert np.array_equal(WAYS[way]((jnp.asarray(arena),), (insert,))[0], wanted), way


def test_donated_arenas_are_updated_in_place():
    """No copy of an arena in the compiled program: input and output are one buffer, temporaries do not hold it."""
    arena, insert = make("fp4_e4m3", pages=5)
    big = jax.ShapeDtypeStruct((50_000, arena.shape[1]), jnp.uint8)
    call = jax.jit(lambda a, i: kv_insert(a, i, implementation="xla"), donate_argnums=0)
    compiled = call.lower((big,), (insert,)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == big.size
    assert memory.temp_size_in_bytes < big.size // 100


def test_bad_input_is_refused_with_its_reason():
    arena, insert = make("mxfp8")
    arenas = (jnp.asarray(arena),)

    def change(**fields):
        names = ("values", "cos", "sin", "index", "seq", "table", "layout", "arena")
        return Insert(**({name: getattr(insert, name) for name in names} | fields))

    wrong = {
        "inserts is empty": (),
        "inserts[0].arena=1 must number one of the 1 arenas": (change(arena=1),),
        "inserts[0].values must be float32 or bfloat16 [N, D], got int32[7, 64]": (
            change(values=insert.values.astype(jnp.int32)),
        ),
        "inserts[0].values are 32 wide, but layout.width=64": (change(values=insert.values[:, :32]),),
        "inserts[0].index must be int32[7], got int32[6]": (change(index=insert.index[:6]),),
        "cos and sin must both be given, or neither": (change(sin=None),),
        "inserts[0].sin must be float32[7, r / 2], got float32[7, 4]": (change(sin=insert.sin[:, :4]),),
        "rows end at byte": (change(layout=RowLayout("mxfp8", 64, 100, 3)),),
        "rotates r=128 elements of rows that are 64 wide": (
            change(cos=jnp.ones((7, 64)), sin=jnp.ones((7, 64))),
        ),
    }  # fmt: skip
    for sentence, inserts in wrong.items():
        with pytest.raises(ValueError) as error:
            kv_insert(arenas, inserts)
        assert sentence in str(error.value) and str(error.value).endswith(".")
    odd, row = make("mxfp8", width=96, rope=0)
    with pytest.raises(UnsupportedError, match=r"width=96 must be a power of two"):
        kv_insert((jnp.asarray(odd),), (row,), implementation="pallas_triton", interpret=True)
    with pytest.raises(ValueError, match="rows=0 must be at least 1"):
        InsertConfig(rows=0)
