"""A decoder whose attention caches latents: keys and values are rebuilt from them when they are read.

    c_K = h W_down + b,   cache holds c_K and c_V,   k = rope(norm(c_K W_up)),   v = c_V W_up

Source: SPECTRA (arXiv:2608.07915), the folded model, Mode A. This file stands alone: `karhunen fold` copies it next to
the weights, and `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` reads it there. The base class
below is the family's own; a cached token's position is its place in the cache, counted back from the newest one.
"""

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM as Base

ATTRIBUTES = (
    *("config", "layer_idx", "layer_type", "head_dim", "num_key_value_groups", "scaling", "attention_dropout"),
    *("is_causal", "sliding_window", "attn_logit_softcapping"),
)


class FoldedAttention(nn.Module):
    """In place of a layer's attention: its own queries, norms and output, its keys and values through latents."""

    def __init__(self, attention: Any, rotary: nn.Module, key_rank: int, value_rank: int) -> None:
        super().__init__()
        for name in ATTRIBUTES:
            if hasattr(attention, name):
                setattr(self, name, getattr(attention, name))
        self.family = type(attention).__module__
        self.rotary = [rotary]  # in a list: it belongs to the model, not to this layer
        self.q_proj, self.o_proj = attention.q_proj, attention.o_proj
        for name in ("q_norm", "k_norm"):
            setattr(self, name, getattr(attention, name, None))
        for name, old, rank in (("k", attention.k_proj, key_rank), ("v", attention.v_proj, value_rank)):
            same = {"dtype": old.weight.dtype, "device": old.weight.device}
            setattr(self, f"{name}_down", nn.Linear(old.in_features, rank, bias=old.bias is not None, **same))
            setattr(self, f"{name}_up", nn.Linear(rank, old.out_features, bias=False, **same))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As the family's own attention, whatever name its version gives the cache."""
        caches = [kwargs.pop(name, None) for name in ("cache", "past_key_values", "past_key_value")]
        cache = next((cache for cache in caches if cache is not None), None)
        shape = hidden_states.shape[:-1]
        query = self.q_proj(hidden_states).view(*shape, -1, self.head_dim)
        query = (query if self.q_norm is None else self.q_norm(query)).transpose(1, 2)
        latent_k, latent_v = self.k_down(hidden_states)[:, None], self.v_down(hidden_states)[:, None]
        if cache is not None:
            latent_k, latent_v = cache.update(latent_k, latent_v, self.layer_idx)
        key, value = self._heads(self.k_up(latent_k)), self._heads(self.v_up(latent_v)).transpose(1, 2)
        key = (key if self.k_norm is None else self.k_norm(key)).transpose(1, 2)
        family = importlib.import_module(self.family)
        query, _ = family.apply_rotary_pos_emb(query, query, *position_embeddings)
        key, _ = family.apply_rotary_pos_emb(key, key, *self._turns(hidden_states, key, kwargs.get("position_ids")))
        name = self.config._attn_implementation
        attend = family.eager_attention_forward if name == "eager" else family.ALL_ATTENTION_FUNCTIONS[name]
        dropout = self.attention_dropout if self.training else 0.0
        if getattr(self, "sliding_window", None) is not None:
            kwargs["sliding_window"] = self.sliding_window
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(*shape, -1).contiguous()), weights

    def _heads(self, x: Tensor) -> Tensor:
        return x[:, 0].unflatten(-1, (-1, self.head_dim))

    def _turns(self, hidden_states: Tensor, key: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every token that is attended to."""
        n = key.shape[2]
        places = torch.arange(n, device=key.device)[None]
        if position_ids is not None:
            places = places - (n - 1) + position_ids[:, -1:]
        rotary = self.rotary[0]
        kind = {"layer_type": self.layer_type} if "layer_type" in inspect.signature(rotary.forward).parameters else {}
        return rotary(hidden_states, places, **kind)


class FoldedForCausalLM(Base):
    """The family's model with the attention of the layers in `config.karhunen_ranks` folded: {layer: [r_K, r_V]}."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer, (key_rank, value_rank) in config.karhunen_ranks.items():
            block = self.model.layers[int(layer)]
            block.self_attn = FoldedAttention(block.self_attn, self.model.rotary_emb, key_rank, value_rank)
