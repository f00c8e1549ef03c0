"""DSpark draft layers, one row of a block after another. Source: model.md §6, reference inference/model.py.

A draft layer's window rows come from what entered the backbone's target layers, not from its own stream. A block is
the next token and noise behind it; its rows see the window and each other, before and behind, and are not kept.
Greedy: every token of the block is the best of its corrected logits.
"""

import numpy as np

from . import attention, hyper_connections, norms
from .block import Block, Weights

F32 = np.float32


def run(weights, config, freqs, main_hidden, anchors):
    """Blocks drafted behind `anchors`, and the window rows of every draft layer.

    weights, config, freqs: as for `model.run`, whose "main_hidden" [T, targets * E] is what the layers read here.
    anchors: [(length, token)]: `token` stands at position `length` <= T behind that many committed tokens.

    Returns {"window_rows": [one [T, D] per draft layer], "blocks": [one dict per anchor]}, the dicts holding tokens
    int32 [block], logits [block, V] (Markov correction included), confidence [block] (before the sigmoid), window
    (int32 [window_size], the positions seen, -1 = none) and layers: per draft layer what a layer of `model.run` notes
    of its sublayers, [block, ...].
    """
    weights = Weights(weights)
    layers = [_DraftLayer(weights, config, freqs, number) for number in range(config["n_mtp_layers"])]
    for position, hidden in enumerate(main_hidden):
        x = project(hidden, layers[0].w, config["norm_eps"])
        for layer in layers:
            layer.window_rows.append(layer.window_row(position, x))
    blocks = [_block(weights, config, layers, length, token) for length, token in anchors]
    return {"window_rows": [np.stack(layer.window_rows) for layer in layers], "blocks": blocks}


def project(main_hidden, first_layer, eps):
    """Input of all draft layers' window rows at one position: float32 [E]."""
    return norms.rms_norm(first_layer["main_proj.weight"] @ main_hidden, first_layer["main_norm.weight"], eps)


class _DraftLayer(Block):
    def __init__(self, weights, config, freqs, number):
        counts = config["dspark_n_routed_experts"], config["dspark_n_activated_experts"]
        super().__init__(weights.under(f"mtp.{number}."), config, freqs, "swa", *counts)
        self.window_rows = []

    def step(self, length, streams, pres):
        """Rows of a block at positions `length` onwards: (streams, pres) behind the layer."""
        inputs = [self.enter(stream, pre, "attn") for stream, pre in zip(streams, pres, strict=True)]
        fresh = [self.window_row(length + row, x) for row, (x, _, _) in enumerate(inputs)]
        seen = attention.window_positions(length - 1, self.c["window_size"])
        rows = [self.window_rows[position] for position in seen if position >= 0] + fresh
        out_streams, out_pres = [], []
        for row, (x, pre, mix) in enumerate(inputs):
            q, _ = self.query(length + row, x)
            stream = self.leave(streams[row], self.attend(length + row, q, rows), mix, "attn")
            x, pre, mix = self.enter(stream, pre, "ffn")
            stream = self.leave(stream, self.feed_forward(x), mix, "ffn")
            self.note(h_out=stream, pre_mix_out=pre)
            out_streams.append(stream)
            out_pres.append(pre)
        return out_streams, out_pres


def _block(weights, config, layers, length, token):
    tokens = [token] + [config["dspark_noise_token_id"]] * (config["dspark_block_size"] - 1)
    streams = [np.repeat(weights["embed.weight"][t][None], config["hc_mult"], axis=0) for t in tokens]
    pres = [np.eye(1, config["hc_mult"], dtype=F32)[0] for _ in tokens]
    notes = []
    for layer in layers:
        layer.trace = {}
        streams, pres = layer.step(length, streams, pres)
        notes.append({name: np.stack(rows) for name, rows in layer.trace.items()})
    hidden = [hyper_connections.collapse(stream, pre) for stream, pre in zip(streams, pres, strict=True)]
    drafted = heads(weights["head.weight"], layers[-1].w, hidden, token, config["norm_eps"])
    window = attention.window_positions(length - 1, config["window_size"])
    return dict(zip(("tokens", "logits", "confidence"), drafted, strict=True)) | {"window": window, "layers": notes}


def heads(head, last_layer, hidden, token, eps):
    """(tokens int32 [block], logits [block, V], confidence [block]) from the rows' collapsed states [block, E].

    Row i is corrected by the token before the one it predicts: row 0 by `token`, row i by what row i - 1 chose.
    """
    tokens, logits, confidence = [], [], []
    for state in hidden:
        markov = last_layer["markov_head.embed.weight"][token]
        base = head @ norms.rms_norm(state, last_layer["norm.weight"], eps)
        logits.append(base + last_layer["markov_head.head.weight"] @ markov)
        confidence.append((last_layer["confidence_head.proj.weight"] @ np.concatenate([state, markov]))[0])
        token = int(np.argmax(logits[-1]))
        tokens.append(token)
    return np.array(tokens, np.int32), np.array(logits, F32), np.array(confidence, F32)
