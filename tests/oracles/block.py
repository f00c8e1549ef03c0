"""What every layer does alike for one token: residual streams, projections, experts. Source: report §2.3 and §2.4.1.

Keys of the configuration and of the weights are the released reference's own (inference/model.py).
"""

import numpy as np

from . import attention, hyper_connections, moe, norms, packed, quant, rope

F32 = np.float32


class Weights(dict):
    """Weights by name, as float32, with the prefix of a part put in front."""

    def __init__(self, weights):
        # A packed matrix stays what it is: it multiplies by itself.
        super().__init__({n: v if isinstance(v, packed.Matrix) else np.asarray(v, F32) for n, v in weights.items()})

    def under(self, prefix):
        return Weights({name[len(prefix) :]: value for name, value in self.items() if name.startswith(prefix)})


class Block:
    """The parts of one layer, token by token; what they compute is noted under the names of the recorded arrays.

    weights: those of the layer alone; table: the RoPE table, "swa" or "compressed", that serves its queries, window
    rows, entries and indexer alike; experts, active: how many there are and how many a token meets.
    """

    def __init__(self, weights, config, freqs, table, experts, active):
        self.w, self.c = weights, config
        self.cos, self.sin = freqs[f"{table}/cos"], freqs[f"{table}/sin"]
        self.experts, self.active = experts, active
        self.trace = {}

    def note(self, **values):
        for name, value in values.items():
            self.trace.setdefault(name, []).append(value)

    def enter(self, stream, pre_mix, part):
        """(normed input of the sublayer "attn" or "ffn", its own pre [C], (post, comb)) of one token's stream [C, E].

        The input is collapsed with the coefficients that the sublayer before produced.
        """
        c = self.c
        mix = hyper_connections.mixes(stream, self.w[f"hc_{part}_fn"], c["norm_eps"])
        scale, base = self.w[f"hc_{part}_scale"], self.w[f"hc_{part}_base"]
        pre, post, comb = hyper_connections.coefficients(
            mix, scale, base, c["hc_mult"], c["hc_sinkhorn_iters"], c["hc_eps"]
        )
        x = norms.rms_norm(hyper_connections.collapse(stream, pre_mix), self.w[f"{part}_norm.weight"], c["norm_eps"])
        self.note(**{f"{part}_in": x, f"hc_{part}_pre": pre, f"hc_{part}_post": post, f"hc_{part}_comb": comb})
        return x, pre, (post, comb)

    def leave(self, stream, out, mix, part):
        """The stream behind a sublayer that gave `out` [E]."""
        self.note(**{f"{part}_out": out})
        return hyper_connections.expand(stream, out, *mix)

    def rotate(self, x, position, inverse=False):
        return rope.rotate(x, self.cos[position], self.sin[position], inverse)

    def query(self, position, x):
        """(rotated queries [H, D], their shared normed latent)."""
        c, w = self.c, self.w.under("attn.")
        latent = norms.rms_norm(w["wq_a.weight"] @ x, w["q_norm.weight"], c["norm_eps"])
        return self.rotate((w["wq_b.weight"] @ latent).reshape(c["n_heads"], c["head_dim"]), position), latent

    def window_row(self, position, x):
        """What the window keeps of a token: key and value in one, rotated, as its FP8 row reads back."""
        w = self.w.under("attn.")
        kv = norms.rms_norm(w["wkv.weight"] @ x, w["kv_norm.weight"], self.c["norm_eps"])
        return quant.fake_quant("mxfp8", self.rotate(kv, position))

    def attend(self, position, q, rows):
        """Attention output [E] of the queries of one token over a list of rows."""
        c, w = self.c, self.w.under("attn.")
        every = np.arange(len(rows))[None]
        out = attention.sparse_attention(q[None], np.stack(rows), every, w["attn_sink"], c["head_dim"] ** -0.5)[0]
        out = self.rotate(out, position, inverse=True)
        return attention.grouped_output(out, w["wo_a.weight"], w["wo_b.weight"], c["o_groups"])

    def feed_forward(self, x):
        c, w = self.c, self.w.under("ffn.")
        indices, weights = moe.gate(
            x, w["gate.weight"], w["gate.bias"], self.active, c["score_func"],
            normalise=c["norm_topk_prob"], route_scale=c["route_scale"], temperature=c["gate_temp"],
        )  # fmt: skip
        self.note(gate_indices=indices, gate_weights=weights)
        experts = [_swiglu_weights(w, f"experts.{e}.") for e in range(self.experts)]
        return moe.combine(x, indices, weights, experts, _swiglu_weights(w, "shared_experts."), c["swiglu_limit"])


def _swiglu_weights(weights, prefix):
    return tuple(weights[f"{prefix}{name}.weight"] for name in ("w1", "w2", "w3"))
