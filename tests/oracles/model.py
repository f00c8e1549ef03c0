"""The whole text model, one position after another and one layer after another. Source: report §2.3 and §2.4.1.

Every position is processed as a decode step would be, from an empty cache, every owner's index keys being up to date at
every step. Rows read from the caches are always the quantised ones. No DSpark, no vision tower.
Keys of the configuration and of the weights are the released reference's own (inference/model.py).
"""

import json

import numpy as np

from . import attention, compressor, engram, hyper_connections, indexer, moe, norms, packed, quant, rope

F32 = np.float32


def from_golden(archive):
    """(weights, config, freqs) for `run` out of an opened CASE.weights.npz."""
    weights = {name[2:]: archive[name] for name in archive.files if name.startswith("w/")}
    freqs = {name[6:]: archive[name] for name in archive.files if name.startswith("freqs/")}
    return weights, json.loads(str(archive["config_json"])), freqs


def run(weights, config, freqs, tokens, decoded=None, ngram_rows=None):
    """Logits of every position and what each layer computed on the way.

    weights: {"layers.2.attn.wq_a.weight": array, ...}, linear weights [out, in]; config: dict of the reference's model
    arguments; freqs: {"swa/cos", "swa/sin", "compressed/cos", "compressed/sin"}: [length, R / 2]; tokens: [T] ids.
    ngram_rows: [T][Engram layers] table rows of each token, of models that have Engram layers; [] = reads none.
    C = hc_mult, E = dim, D = head_dim, N = entries after T tokens of that layer's ratio.
    decoded: how many of the last tokens the decoder layers (from the last KV source on) process; they then see no
    window row of an earlier token, and "logits" and what those layers note begin with the first of these tokens.

    Returns {"logits": [T, V], "final_normed": [T, E], "layers": [one dict per layer]} (float32 unless said), the dicts
    holding: attn_in, attn_out, ffn_in, ffn_out [T, E]; h_out, engram_out (Engram layers) [T, C, E]; pre_mix_out [T, C];
    hc_attn_pre, hc_attn_post, hc_ffn_pre, hc_ffn_post [T, C]; hc_attn_comb, hc_ffn_comb [T, C, C]; gate_indices,
    gate_weights [T, k]; window_rows [T, D] by position; for layers with entries attended int32 [T, index_topk], the
    selection in use; for index sources selections, the same of their own, and index_scores [T, N] (-inf = masked); for
    the candidate source candidates int32 [T, topk_blocks] (block ids); for KV sources main_rows [N, D], index_rows [N,
    Di], open_group (list of (position, kv [D], gate [D] or None)) and open_groups, that list after every token.
    Selections ascend, -1 = none.
    Raises ValueError when a compressed layer precedes every KV source or index source.
    """
    weights = _Weights(weights)
    layers = [_Layer(weights, config, freqs, i) for i in range(config["n_layers"])]
    logits, finals = [], []
    first = 0 if decoded is None else max(0, len(tokens) - decoded)
    decoder = max(config["kv_source_layers"], default=config["n_layers"])
    for position, token in enumerate(tokens):
        stream = np.repeat(weights["embed.weight"][token][None], config["hc_mult"], axis=0)
        pre_mix = np.eye(1, config["hc_mult"], dtype=F32)[0]
        published = {"ngram_rows": ngram_rows[position]} if ngram_rows else {}
        for layer in layers[:decoder] if position < first else layers:
            stream, pre_mix = layer.step(position, stream, pre_mix, published)
        if position < first:
            layers[decoder].only_compress(position, stream, pre_mix)
            for layer in layers[decoder:]:
                layer.window_rows.append(None)
            continue
        final = norms.rms_norm(hyper_connections.collapse(stream, pre_mix), weights["norm.weight"], config["norm_eps"])
        finals.append(final)
        logits.append(weights["head.weight"] @ final)
    records = [layer.record(len(tokens)) for layer in layers]
    return {"logits": np.stack(logits), "final_normed": np.stack(finals), "layers": records}


class _Weights(dict):
    """Weights by name, as float32, with the prefix of a part put in front."""

    def __init__(self, weights):
        # A packed matrix stays what it is: it multiplies by itself.
        super().__init__({n: v if isinstance(v, packed.Matrix) else np.asarray(v, F32) for n, v in weights.items()})

    def under(self, prefix):
        return _Weights({name[len(prefix) :]: value for name, value in self.items() if name.startswith(prefix)})


class _Layer:
    """One block with its caches, which are lists of rows by position (window) or by entry (main, index)."""

    def __init__(self, weights, config, freqs, number):
        self.w = weights.under(f"layers.{number}.")
        self.c = config
        self.number = number
        self.ratio = config["compress_ratios"][number]
        self.owns_kv = number in config["kv_source_layers"]
        self.indexes = number in config["index_source_layers"]
        # One table per layer serves its queries, window rows, entries and indexer alike.
        table = "compressed" if self.ratio else "swa"
        self.cos, self.sin = freqs[f"{table}/cos"], freqs[f"{table}/sin"]
        self.window_rows, self.main_rows, self.index_rows, self.open_group = [], [], [], []
        self.open_groups = []
        self.trace = {}

    def step(self, position, stream, pre_mix, published):
        """Process one token. `published` is what earlier layers handed down for this token. Returns stream, pre_mix."""
        c = self.c
        if self.number in c.get("engram_layer_ids", ()):
            w, rows = self.w.under("engram."), published["ngram_rows"][c["engram_layer_ids"].index(self.number)]
            names = ("embed.weight", "embed.scale", "wkv.weight", "q_weight", "k_weight")
            stream = engram.write(stream, rows, *(w[name] for name in names), c["norm_eps"])
            self._note(engram_out=stream)
        pre, post, comb = self._coefficients(stream, "attn")
        x = hyper_connections.collapse(stream, pre_mix)
        attn_in = norms.rms_norm(x, self.w["attn_norm.weight"], c["norm_eps"])
        attn_out = self._attention(position, attn_in, published)
        stream = hyper_connections.expand(stream, attn_out, post, comb)

        # The feed-forward input is collapsed with the coefficients the attention sublayer produced, and so on.
        next_pre, post, comb = self._coefficients(stream, "ffn")
        x = hyper_connections.collapse(stream, pre)
        ffn_in = norms.rms_norm(x, self.w["ffn_norm.weight"], c["norm_eps"])
        ffn_out = self._feed_forward(ffn_in)
        stream = hyper_connections.expand(stream, ffn_out, post, comb)
        self._note(attn_in=attn_in, attn_out=attn_out, ffn_in=ffn_in, ffn_out=ffn_out)
        self._note(h_out=stream, pre_mix_out=next_pre)
        return stream, next_pre

    def only_compress(self, position, stream, pre_mix):
        """What a KV source stores of a token that it does not otherwise process."""
        x = hyper_connections.collapse(stream, pre_mix)
        self._compress(position, norms.rms_norm(x, self.w["attn_norm.weight"], self.c["norm_eps"]))

    def record(self, length):
        """Everything noted, stacked over positions, and the caches."""
        out = {name: np.stack(rows) for name, rows in self.trace.items() if name != "index_scores"}
        out["window_rows"] = np.stack([row for row in self.window_rows if row is not None])
        if self.indexes:
            noted = len(self.trace["index_scores"])
            out["index_scores"] = np.full((noted, length // self.ratio), -np.inf, F32)
            for t, row in enumerate(self.trace["index_scores"]):
                out["index_scores"][t, : len(row)] = row
        if self.owns_kv:
            out["main_rows"] = np.array(self.main_rows, F32).reshape(-1, self.c["head_dim"])
            out["index_rows"] = np.array(self.index_rows, F32).reshape(-1, self.c["index_head_dim"])
            out["open_group"], out["open_groups"] = self.open_group, self.open_groups
        return out

    def _note(self, **values):
        for name, value in values.items():
            self.trace.setdefault(name, []).append(value)

    def _coefficients(self, stream, part):
        c = self.c
        mix = hyper_connections.mixes(stream, self.w[f"hc_{part}_fn"], c["norm_eps"])
        scale, base = self.w[f"hc_{part}_scale"], self.w[f"hc_{part}_base"]
        parts = hyper_connections.coefficients(mix, scale, base, c["hc_mult"], c["hc_sinkhorn_iters"], c["hc_eps"])
        self._note(**{f"hc_{part}_{name}": value for name, value in zip(("pre", "post", "comb"), parts, strict=True)})
        return parts

    def _rotate(self, x, position, inverse=False):
        return rope.rotate(x, self.cos[position], self.sin[position], inverse)

    def _attention(self, position, x, published):
        c, w = self.c, self.w.under("attn.")
        latent_q = norms.rms_norm(w["wq_a.weight"] @ x, w["q_norm.weight"], c["norm_eps"])
        q = self._rotate((w["wq_b.weight"] @ latent_q).reshape(c["n_heads"], c["head_dim"]), position)
        kv = norms.rms_norm(w["wkv.weight"] @ x, w["kv_norm.weight"], c["norm_eps"])
        self.window_rows.append(quant.fake_quant("mxfp8", self._rotate(kv, position)))

        seen = [self.window_rows[p] for p in attention.window_positions(position, c["window_size"]) if p >= 0]
        rows = [row for row in seen if row is not None]
        if self.ratio:
            rows += self._selected_rows(position, x, latent_q, published)
        everything = np.arange(len(rows))[None]
        out = attention.sparse_attention(q[None], np.stack(rows), everything, w["attn_sink"], c["head_dim"] ** -0.5)[0]
        out = self._rotate(out, position, inverse=True)
        return attention.grouped_output(out, w["wo_a.weight"], w["wo_b.weight"], c["o_groups"])

    def _selected_rows(self, position, x, latent_q, published):
        """Main rows of the current KV source that the current selection names; sources publish theirs first."""
        if self.owns_kv:
            self._compress(position, x)
            published["owner"] = self
        if "owner" not in published:
            raise ValueError(f"layer {self.number} has ratio {self.ratio} but no KV source precedes it.")
        if self.indexes:
            published["selection"] = self._select(position, x, latent_q, published)
        if "selection" not in published:
            raise ValueError(f"layer {self.number} has ratio {self.ratio} but no index source precedes it.")
        self._note(attended=published["selection"])
        return [published["owner"].main_rows[entry] for entry in published["selection"] if entry >= 0]

    def _compress(self, position, x):
        """Add the entry that this token completes, if any, to the main rows and the index keys."""
        c, w = self.c, self.w.under("attn.compressor.")
        latents, self.open_group = compressor.compress(
            x[None], position, self.open_group, w["wkv.weight"], w.get("wgate.weight"), w["norm.weight"],
            self.ratio, c["norm_eps"],
        )
        self.open_groups.append(self.open_group)
        w = self.w.under("attn.indexer.")
        for entry, latent in latents:
            first_token = entry * self.ratio
            key = norms.rms_norm(w["wk.weight"] @ latent, w["k_norm.weight"], c["norm_eps"])
            self.index_rows.append(quant.fake_quant("mxfp4", self._rotate(key, first_token)))
            self.main_rows.append(quant.fake_quant("fp4_e4m3", self._rotate(latent, first_token)))

    def _select(self, position, x, latent_q, published):
        """Entries this index source attends to; the candidate source also publishes its blocks for later sources."""
        c, w = self.c, self.w.under("attn.indexer.")
        q = (w["wq_b.weight"] @ latent_q).reshape(c["index_n_heads"], c["index_head_dim"])
        q = quant.fake_quant("mxfp4", self._rotate(q, position))
        weights = indexer.head_weights(w["weights_proj.weight"] @ x, c["index_head_dim"])
        visible = indexer.visible_count(position, self.ratio)
        row = indexer.scores(q, np.array(published["owner"].index_rows).reshape(-1, c["index_head_dim"]), weights)
        row = indexer.mask_scores(row, visible, published.get("candidates"), c["candidate_block_size"])
        if self.number == c["candidate_source_layer"]:
            blocks = indexer.candidate_blocks(row, visible, c["candidate_block_size"], c["candidate_topk_blocks"])
            published["candidates"] = blocks
            self._note(candidates=blocks)
        selection = indexer.top_k(row, c["index_topk"])
        self._note(index_scores=row, selections=selection)
        return selection

    def _feed_forward(self, x):
        c, w = self.c, self.w.under("ffn.")
        indices, weights = moe.gate(
            x, w["gate.weight"], w["gate.bias"], c["n_activated_experts"], c["score_func"],
            normalise=c["norm_topk_prob"], route_scale=c["route_scale"], temperature=c["gate_temp"],
        )
        self._note(gate_indices=indices, gate_weights=weights)
        experts = [_swiglu_weights(w, f"experts.{e}.") for e in range(c["n_routed_experts"])]
        return moe.combine(x, indices, weights, experts, _swiglu_weights(w, "shared_experts."), c["swiglu_limit"])


def _swiglu_weights(weights, prefix):
    return tuple(weights[f"{prefix}{name}.weight"] for name in ("w1", "w2", "w3"))
