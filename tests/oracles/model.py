"""The whole text model, one position after another and one layer after another. Source: report §2.3 and §2.4.1.

Every position is processed as a decode step would be, from an empty cache, every owner's index keys being up to date at
every step. Rows read from the caches are always the quantised ones. Draft layers: `draft.py`. No vision tower.
Keys of the configuration and of the weights are the released reference's own (inference/model.py).
"""

import json

import numpy as np

from . import attention, compressor, engram, hyper_connections, indexer, norms, quant
from .block import Block, Weights

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

    Returns {"logits": [T, V], "final_normed": [T, E], "main_hidden": [T, targets * E] (what the draft layers read; of
    width 0 without them), "layers": [one dict per layer]} (float32 unless said), the dicts holding: attn_in, attn_out,
    ffn_in, ffn_out [T, E]; h_out, engram_out (Engram layers) [T, C, E]; pre_mix_out [T, C]; hc_attn_pre, hc_attn_post,
    hc_ffn_pre, hc_ffn_post [T, C]; hc_attn_comb, hc_ffn_comb [T, C, C]; gate_indices, gate_weights [T, k]; window_rows
    [T, D] by position; for layers with entries attended int32 [T, index_topk], the selection in use; for index sources
    selections, the same of their own, and index_scores [T, N] (-inf = masked); for the candidate source candidates
    int32 [T, topk_blocks] (block ids); for KV sources main_rows [N, D], index_rows [N, Di], open_group (list of
    (position, kv [D], gate [D] or None)) and open_groups, that list after every token.
    Selections ascend, -1 = none.
    Raises ValueError when a compressed layer precedes every KV source or index source.
    """
    weights = Weights(weights)
    layers = [_Layer(weights, config, freqs, i) for i in range(config["n_layers"])]
    logits, finals, main_hidden = [], [], []
    first = 0 if decoded is None else max(0, len(tokens) - decoded)
    decoder = max(config["kv_source_layers"], default=config["n_layers"])
    for position, token in enumerate(tokens):
        stream = np.repeat(weights["embed.weight"][token][None], config["hc_mult"], axis=0)
        pre_mix = np.eye(1, config["hc_mult"], dtype=F32)[0]
        published = {"targets": {}} | ({"ngram_rows": ngram_rows[position]} if ngram_rows else {})
        for layer in layers[:decoder] if position < first else layers:
            stream, pre_mix = layer.step(position, stream, pre_mix, published)
        if position < first:
            layers[decoder].only_compress(position, stream, pre_mix)
            for layer in layers[decoder:]:
                layer.window_rows.append(None)
            continue
        final = norms.rms_norm(hyper_connections.collapse(stream, pre_mix), weights["norm.weight"], config["norm_eps"])
        finals.append(final)
        main_hidden.append(np.concatenate([[], *(published["targets"][i] for i in sorted(published["targets"]))]))
        logits.append(weights["head.weight"] @ final)
    records = [layer.record(len(tokens)) for layer in layers]
    out = {"logits": np.stack(logits), "final_normed": np.stack(finals), "layers": records}
    return out | {"main_hidden": np.stack(main_hidden).astype(F32)}


class _Layer(Block):
    """One block with its caches, which are lists of rows by position (window) or by entry (main, index)."""

    def __init__(self, weights, config, freqs, number):
        self.number = number
        self.ratio = config["compress_ratios"][number]
        self.owns_kv = number in config["kv_source_layers"]
        self.indexes = number in config["index_source_layers"]
        counts = config["n_routed_experts"], config["n_activated_experts"]
        table = "compressed" if self.ratio else "swa"
        super().__init__(weights.under(f"layers.{number}."), config, freqs, table, *counts)
        self.window_rows, self.main_rows, self.index_rows, self.open_group = [], [], [], []
        self.open_groups = []

    def step(self, position, stream, pre_mix, published):
        """Process one token. `published` is what earlier layers handed down for this token. Returns stream, pre_mix."""
        c = self.c
        if self.number in c.get("engram_layer_ids", ()):
            w, rows = self.w.under("engram."), published["ngram_rows"][c["engram_layer_ids"].index(self.number)]
            names = ("embed.weight", "embed.scale", "wkv.weight", "q_weight", "k_weight")
            stream = engram.write(stream, rows, *(w[name] for name in names), c["norm_eps"])
            self.note(engram_out=stream)
        if c.get("n_mtp_layers") and self.number in c["dspark_target_layer_ids"]:
            published["targets"][self.number] = sum(stream) / F32(len(stream))
        x, pre, mix = self.enter(stream, pre_mix, "attn")
        stream = self.leave(stream, self._attention(position, x, published), mix, "attn")
        x, pre, mix = self.enter(stream, pre, "ffn")
        stream = self.leave(stream, self.feed_forward(x), mix, "ffn")
        self.note(h_out=stream, pre_mix_out=pre)
        return stream, pre

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

    def _attention(self, position, x, published):
        q, latent_q = self.query(position, x)
        self.window_rows.append(self.window_row(position, x))
        seen = [self.window_rows[p] for p in attention.window_positions(position, self.c["window_size"]) if p >= 0]
        rows = [row for row in seen if row is not None]
        if self.ratio:
            rows += self._selected_rows(position, x, latent_q, published)
        return self.attend(position, q, rows)

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
        self.note(attended=published["selection"])
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
            self.index_rows.append(quant.fake_quant("mxfp4", self.rotate(key, first_token)))
            self.main_rows.append(quant.fake_quant("fp4_e4m3", self.rotate(latent, first_token)))

    def _select(self, position, x, latent_q, published):
        """Entries this index source attends to; the candidate source also publishes its blocks for later sources."""
        c, w = self.c, self.w.under("attn.indexer.")
        q = (w["wq_b.weight"] @ latent_q).reshape(c["index_n_heads"], c["index_head_dim"])
        q = quant.fake_quant("mxfp4", self.rotate(q, position))
        weights = indexer.head_weights(w["weights_proj.weight"] @ x, c["index_head_dim"])
        visible = indexer.visible_count(position, self.ratio)
        row = indexer.scores(q, np.array(published["owner"].index_rows).reshape(-1, c["index_head_dim"]), weights)
        row = indexer.mask_scores(row, visible, published.get("candidates"), c["candidate_block_size"])
        if self.number == c["candidate_source_layer"]:
            blocks = indexer.candidate_blocks(row, visible, c["candidate_block_size"], c["candidate_topk_blocks"])
            published["candidates"] = blocks
            self.note(candidates=blocks)
        selection = indexer.top_k(row, c["index_topk"])
        self.note(index_scores=row, selections=selection)
        return selection
