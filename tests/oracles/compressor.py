"""The compressor: m tokens become one latent. Source: report §2.3, reference inference/model.py."""

import numpy as np

from .norms import rms_norm

F32 = np.float32


def pool_group(kv, gate):
    """Gated mean of one complete group, the gate being one softmax over the m tokens for every channel.

    kv, gate: [m, D] in token order. Returns float32 [D], un-normed.
    """
    kv, gate = np.asarray(kv, F32), np.asarray(gate, F32)
    pooled = np.zeros(kv.shape[1], F32)
    for channel in range(kv.shape[1]):
        peak = gate[:, channel].max()
        weights = [np.exp(gate[token, channel] - peak) for token in range(kv.shape[0])]
        total = sum(weights, F32(0.0))
        for token, weight in enumerate(weights):
            pooled[channel] += weight / total * kv[token, channel]
    return pooled


def compress(x, start, kept, wkv, wgate, norm_weight, ratio, eps):
    """Latents whose groups the tokens of one call complete, and the rows of the group left open.

    x: [T, E] attention inputs of positions start .. start+T-1.
    kept: what the previous call returned ([] at position 0): list of (position, kv[D], gate[D] or None), one per token
        of the open group, in order.
    wkv, wgate: [D, E] (wgate None when ratio is 1: no gate, no pooling); norm_weight: [D].
    Returns (latents, kept): latents is a list of (entry index, float32 [D]), normed, neither rotated nor quantised.
    Entry j covers tokens j*ratio .. j*ratio+ratio-1 and appears with the last of them.
    Raises ValueError when `kept` is not exactly the open group before `start`.
    """
    expected = list(range(start - start % ratio, start))
    held = [position for position, _, _ in kept]
    if held != expected:
        raise ValueError(f"kept holds positions {held} but the open group before {start} is {expected}.")
    kept = list(kept)
    latents = []
    for offset, token in enumerate(np.asarray(x, F32)):
        position = start + offset
        kept.append((position, wkv @ token, None if ratio == 1 else wgate @ token))
        if (position + 1) % ratio:
            continue
        if ratio == 1:
            pooled = kept[0][1]
        else:
            pooled = pool_group(np.stack([kv for _, kv, _ in kept]), np.stack([gate for _, _, gate in kept]))
        latents.append((position // ratio, rms_norm(pooled, norm_weight, eps)))
        kept = []
    return latents, kept
