"""Feed-forward part of a layer: gate, routed experts, one shared expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dsflash_jax.config import Kernels, ModelConfig
from dsflash_jax.modules.linear import Linear, held, hold
from dsflash_jax.ops.linear import Weight
from dsflash_jax.ops.moe import expert, route, routed_experts, routed_experts_all

EXPERT_AXIS = "expert"  # of a mesh whose devices hold some of the experts each; see `sharding.py`


class Gate(nnx.Module):
    """Router weight [E, d] and the selection bias [E]."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        weight = jax.random.normal(rngs.params(), (cfg.n_routed_experts, cfg.hidden_size)) * cfg.hidden_size**-0.5
        self.weight = nnx.Param(weight)
        self.bias = nnx.Param(jnp.zeros((cfg.n_routed_experts,), jnp.float32))


class Stacked(nnx.Module):
    """One released tensor per expert, stacked on a leading expert axis: [E, out, in], or packed."""

    def __init__(self, count: int, in_width: int, out_width: int, rngs: nnx.Rngs, packed: str, kernels: Kernels):
        self.packed, self.kernels = packed, kernels
        hold(self, in_width**-0.5 * jax.random.normal(rngs.params(), (count, out_width, in_width)), packed)

    def matrices(self) -> Weight:
        """All experts' weights."""
        return held(self, self.packed, self.kernels)


class Experts(nnx.Module):
    """All routed experts of a layer."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        count, d, f = cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size
        packed = cfg.expert_dtype or cfg.quant_method  # as the reference: experts follow unless told otherwise
        self.w1, self.w3 = (Stacked(count, d, f, rngs, packed, cfg.kernels) for _ in range(2))
        self.w2 = Stacked(count, f, d, rngs, packed, cfg.kernels)

    def weights(self) -> tuple[Weight, Weight, Weight]:
        """(w1, w2, w3)."""
        return self.w1.matrices(), self.w2.matrices(), self.w3.matrices()


class SharedExpert(nnx.Module):
    """The expert every token passes."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        d, f, packed = cfg.hidden_size, cfg.moe_intermediate_size, {"packed": cfg.quant_method, "kernels": cfg.kernels}
        self.w1, self.w3 = Linear(d, f, rngs=rngs, **packed), Linear(d, f, rngs=rngs, **packed)
        self.w2 = Linear(f, d, rngs=rngs, **packed)


class MoE(nnx.Module):
    """Shared expert plus the chosen routed experts, summed in float32 (contract.md, experts)."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        self.gate = Gate(cfg, rngs)
        self.experts = Experts(cfg, rngs)
        self.shared_experts = SharedExpert(cfg, rngs)

    def __call__(self, x: jax.Array, capture: dict | None = None, training: bool = False) -> jax.Array:
        """x [T, d] -> [T, d]. `training` runs every expert densely, whose gradient is cheap for few small experts."""
        cfg = self.cfg
        weights, chosen = route(
            x, self.gate.weight[...], self.gate.bias[...], k=cfg.num_experts_per_tok, scoring_func=cfg.scoring_func,
            temp=cfg.gate_temp, normalise=cfg.norm_topk_prob, scale=cfg.routed_scaling_factor,
        )  # fmt: skip
        if capture is not None:
            capture["gate_weights"], capture["gate_indices"] = weights, chosen
        run = routed_experts_all if training else routed_experts
        matrices = self.experts.weights()
        count = matrices[0].shape[0]
        if count == cfg.n_routed_experts:
            routed = run(x, weights, chosen, *matrices, cfg.swiglu_limit)
        else:  # one device's share: the rest of the sum is on the others
            own = chosen - lax.axis_index(EXPERT_AXIS) * count
            own = jnp.where((own >= 0) & (own < count), own, count)
            routed = lax.psum(run(x, weights, own, *matrices, cfg.swiglu_limit), EXPERT_AXIS)
        shared = self.shared_experts
        common = expert(x, shared.w1.matrix(), shared.w2.matrix(), shared.w3.matrix(), cfg.swiglu_limit)
        return (routed + common.astype(jnp.float32)).astype(x.dtype)
