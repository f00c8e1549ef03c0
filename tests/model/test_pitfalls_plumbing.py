"""Reported defects of streams, addresses, budgets and precision, restated (numbers: docs/pitfalls.md)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import steps
from dsflash_jax.batch import Chunk, make_step
from dsflash_jax.cache.accounting import sequence_bytes
from dsflash_jax.cache.addressing import paged_rows
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.step_index import completing_rows
from dsflash_jax.types import GLOBAL_GROUP
from tests.model import running
from tests.model.running import PAGES, Session, run_chunks
from tests.oracles import norms

pytestmark = pytest.mark.smoke
CFG = running.shallow(window_format="fp32")
RELEASED = ModelConfig.from_json(running.CONFIGS / "v41_flash.json")


def changed(params, layer, name, value):
    """A copy of the parameters with one array of one layer replaced by value(array)."""
    copy = jax.tree.map(lambda v: v, params)
    copy["layers"][layer][name] = value(copy["layers"][layer][name])
    return copy


def captures(params, tokens):
    return run_chunks(CFG, params, tokens, [len(tokens)], row_bucket=16).runs[0]


def test_mixing_coefficients_are_used_one_sublayer_later():
    """B65: layer 1's attention coefficients reach its feed-forward input, not its own attention input."""
    params, tokens = running.parameters(CFG), running.prompt(5, 0)
    base = captures(params, tokens)
    pre_only = lambda v: v.at[: CFG.hc_mult].add(jnp.arange(1.0, CFG.hc_mult + 1))  # noqa: E731
    other = captures(changed(params, 1, "hc_attn_base", pre_only), tokens)
    same = lambda layer, name: np.array_equal(base.stack(layer, name), other.stack(layer, name))  # noqa: E731
    assert same(1, "attn_in") and same(1, "attn_out")
    assert not same(1, "ffn_in")
    last = captures(changed(params, 2, "hc_ffn_base", pre_only), tokens)
    assert np.array_equal(base.stack(2, "ffn_out"), last.stack(2, "ffn_out"))
    assert np.abs(np.array(base.logits) - np.array(last.logits)).max() > 1e-3, "the output uses the last sublayer's"


def test_the_first_sublayer_reads_stream_zero():
    """B65: a one-hot mix on stream 0, so the first attention input is the normed embedding itself."""
    params, tokens = running.parameters(CFG), running.prompt(5, 0)
    embedded = np.asarray(params["embed"]["weight"])[tokens]
    expected = norms.rms_norm(embedded, np.asarray(params["layers"][0]["attn_norm"]["weight"]), 1e-20)
    np.testing.assert_allclose(captures(params, tokens).stack(0, "attn_in"), expected, rtol=1e-6, atol=1e-6)


def test_scratch_bounds_the_peak_memory():
    """B42: 256 rows against 4,096 entries are 4 MiB of scores per head; the budget keeps the whole step far below."""
    cfg = running.single(compress_ratios=(1,), max_position_embeddings=4096, scratch_bytes=64 * 1024)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), steps.abstract_params(cfg))
    step = make_step([Chunk(0, [1], 0, [0])], cfg, rows=256, seqs=1, pages=512)
    lowered = steps._step.lower(params, ModelCache.abstract(cfg, 512, 1), step, cfg, "last", True)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 1_500_000 < 4 * 256 * 4096


def test_every_product_names_its_precision():
    """B103: a GPU takes TF32 for float32 products unless told otherwise."""
    params = running.parameters(CFG)
    step = make_step([Chunk(0, [1, 2, 3], 0, [0])], CFG, rows=16, seqs=1, pages=PAGES)
    cache = ModelCache.abstract(CFG, 16, 1)
    traced = steps._step.trace(params, cache, step, CFG, "last", True)
    products = [e for e in equations(traced.jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) > 30
    for product in products:
        if all(v.aval.dtype == jnp.float32 for v in product.invars):
            assert product.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2, product


def equations(jaxpr):
    """Every equation of a jaxpr, inner ones included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def test_no_two_rows_of_a_step_share_an_address():
    """B102: the order of duplicate scatter targets is undefined, so every live target is named once."""
    chunks = [Chunk(2, [1] * 9, 5, [7, 3]), Chunk(0, [1], 0, [1]), Chunk(3, [1] * 4, 7, [0, 6])]
    step = jax.tree.map(jnp.asarray, make_step(chunks, CFG, rows=16, seqs=4, pages=4))
    for member in cache_layout(CFG).members:
        rows = completing_rows(step, member.tokens_per_row)
        live = np.asarray(rows)[np.asarray(rows) >= 0]
        entry = step.positions[live] // member.tokens_per_row
        seq = step.row_to_seq[live]
        arena = np.zeros((1, cache_layout(CFG).page_bytes), np.uint8)
        page, offset = paged_rows(member, arena, step.block_tables[GLOBAL_GROUP], seq).address(entry, seq)
        targets = list(zip(np.asarray(page).tolist(), np.asarray(offset).tolist(), strict=True))
        assert len(targets) == len(set(targets)) and min(p for p, _ in targets) >= 0
        ratio = member.tokens_per_row
        assert len(targets) == sum((c.start + len(c.tokens)) // ratio - c.start // ratio for c in chunks)


def test_padding_rows_leave_the_last_page_and_slot_alone():
    """B100: three real and thirteen padding rows; index -1 would have written the last page, slot and state row."""
    session = Session(CFG, running.parameters(CFG), poison=True)
    session.feed({0: running.prompt(3, 0)}, rows=16, seqs=4)
    assert (np.asarray(session.cache.pages)[-1] == running.POISON_BYTE).all()
    assert (np.asarray(session.cache.ring)[-1] == running.POISON_BYTE).all()
    assert np.isnan(session.cache.state[-1]).all() and session.cache.length.tolist() == [3, 77, 77, 77]


def test_page_numbers_and_offsets_fit_32_bits_at_the_released_size():
    """B35: an arena of 40,000 pages holds 4.5e9 bytes; page and offset stay apart, each far below 2^31."""
    member = cache_layout(RELEASED).members[-1]
    arena, seq = np.zeros((1, 1), np.uint8), np.zeros(1, np.int32)

    def address(table, entry):
        return paged_rows(member, arena, table, seq).address(entry)

    table = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    entry = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    page, offset = jax.eval_shape(address, table, entry)
    assert page.dtype == offset.dtype == jnp.int32
    last = address(jnp.arange(8192)[None], jnp.array([[2**20 - 1]]))
    assert [int(v[0, 0]) for v in last] == [8191, member.offset + 127 * member.row_bytes]
    assert 40_000 * cache_layout(RELEASED).page_bytes > 2**31 > cache_layout(RELEASED).page_bytes


def test_bytes_grow_by_a_fixed_part_and_890_per_token():
    """B105: two lengths recover both terms, and the arrays have those sizes; B60: 288, 68 and 528 bytes per row."""
    layout = cache_layout(RELEASED)
    near, far = 128 * 10, 128 * 8000
    slope = (sequence_bytes(layout, far) - sequence_bytes(layout, near)) / (far - near)
    fixed = sequence_bytes(layout, near) - slope * near
    assert slope == 890 and fixed == layout.ring_bytes + layout.state_bytes
    cache = ModelCache.abstract(RELEASED, num_pages=10, num_slots=1)
    assert cache.tail is None, "encoder states are kept only for a decoder that runs on the ends of prompts"
    arrays = {"pages": cache.pages, "ring": cache.ring, "state": cache.state}
    sizes = {name: array.size * array.dtype.itemsize for name, array in arrays.items()}
    assert sizes["pages"] == 890 * near and sizes["ring"] + sizes["state"] == fixed
    assert {m.kind: m.row_bytes for m in layout.members + layout.ring} == {"main": 288, "index": 68, "window": 528}
    assert 20 * layout.ring_rows * 528 == 1_415_040


def test_window_layers_need_a_halo_to_be_rebuilt_exactly():
    """B94: three window layers of W = 4 need 4 + 2 * 3 = 10 tokens for an exact last output; nine are not enough."""
    cfg = running.tiny(
        num_hidden_layers=3, compress_ratios=(0, 0, 0), kv_source_layer_ids=(), index_source_layer_ids=(),
        candidate_source_layer_id=-1, window_format="fp32",
    )  # fmt: skip
    params, tokens = running.parameters(cfg), running.prompt(16, 0)
    exact = run_chunks(cfg, params, tokens, [16], row_bucket=16).runs[0].logits[-1]

    def replayed(count):
        session = Session(cfg, params, poison=True)
        start = len(tokens) - count
        chunk = dataclasses.replace(session.chunk(0, tokens[start:]), start=start, replay_start=start)
        step = make_step([chunk], cfg, rows=16, seqs=1, pages=PAGES)
        return np.abs(np.asarray(steps.trace_step(params, session.cache, step, cfg)[0])[count - 1] - exact).max()

    assert replayed(10) <= 2e-6 < 1e-5 < replayed(9)
