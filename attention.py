"""A draft's attention: block rows look at the target's context before their anchor, and at their own block.

`Attention` is the dual-source layer that DSpark and DFlash2 share, `Visibility` who sees what in training: flex
attention with a block mask on CUDA, elsewhere groups of blocks that share one call over the context they need, so that
memory grows linearly with the number of blocks. Shapes: B batch, S source length, N blocks per sample, K block size, H
hidden. Read next: dspark.py (the draft around it).
"""
import dataclasses
import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION_GROUP = 16                                     # blocks that share one attention call off CUDA


def rope_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary embedding for positions [..., n], each [..., 1, n, head_dim] (a 1 where heads go)."""
    wide = torch.promote_types(dtype, torch.float32)
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim)
    angle = positions.to(wide).unsqueeze(-1) * inverse
    angle = torch.cat((angle, angle), -1).unsqueeze(-3)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embedding in the rotate-half form to x [B, heads, n, head_dim]."""
    cos, sin = rope
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


@dataclass
class Visibility:
    """Who sees what in training: block j of sample b sees context positions < anchors[b, j] and its own K rows,
    nothing else."""
    anchors: Tensor                              # [B, N]
    keep: Tensor                                 # [B, N]; a dummy block sees only itself, so its softmax stays finite
    source_length: int
    block_size: int
    memo: dict = dataclasses.field(default_factory=dict)   # masks by window, built once per forward

    def context_limit(self) -> Tensor:
        return torch.where(self.keep, self.anchors, 0)                                        # [B, N]

    def groups(self, window: int | None) -> list[tuple[int, int, int, Tensor]]:
        """Consecutive blocks that share an attention call: (first row, last row, context prefix, mask [B, 1, rows,
        prefix + rows]).

        Memory is linear in N: a group of G blocks needs G*K x (S + G*K) entries, and there are N / G of them.
        """
        if window in self.memo:
            return self.memo[window]
        K, limit = self.block_size, self.context_limit()
        result = self.memo[window] = []
        for first in range(0, limit.shape[1], ATTENTION_GROUP):
            part = limit[:, first:first + ATTENTION_GROUP]                                    # [B, G]
            prefix, G = int(part.max()), part.shape[1]
            columns = torch.arange(prefix, device=part.device)
            seen = (columns < part[..., None]).repeat_interleave(K, dim=1)                    # [B, G*K, prefix]
            if window is not None:
                rows = (part[..., None] + torch.arange(K, device=part.device)).flatten(1)     # positions of the rows
                seen &= rows[..., None] - columns < window
            block = torch.arange(G * K, device=part.device) // K
            own = (block[:, None] == block).expand(part.shape[0], -1, -1)
            result.append((first * K, (first + G) * K, prefix, torch.cat((seen, own), -1).unsqueeze(1)))
        return result

    def flex_mask(self, window: int | None):
        """The same rule as a block mask of flex attention, keys laid out as [context ; blocks]."""
        if window in self.memo:
            return self.memo[window]
        from torch.nn.attention.flex_attention import create_block_mask
        limit, S, K = self.context_limit(), self.source_length, self.block_size

        def rule(b, h, q, kv):
            block, edge = q // K, limit[b, q // K]
            context = (kv < S) & (kv < edge)
            if window is not None:
                context = context & (edge + q % K - kv < window)
            return context | ((kv >= S) & ((kv - S) // K == block))

        rows = limit.shape[1] * K
        self.memo[window] = create_block_mask(rule, limit.shape[0], None, rows, S + rows, device=limit.device)
        return self.memo[window]


@functools.cache
def compiled_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention, dynamic=True)


class Attention(nn.Module):
    """Dual-source attention: queries from the block rows, keys and values from [context ; block] through the same
    projections."""

    def __init__(self, config, layer: int):
        super().__init__()
        H, D, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim, self.window = D, config.window(layer)
        self.q_proj = nn.Linear(H, config.num_attention_heads * D, bias=bias)
        self.k_proj = nn.Linear(H, config.num_key_value_heads * D, bias=bias)
        self.v_proj = nn.Linear(H, config.num_key_value_heads * D, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * D, H, bias=bias)
        self.q_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)                           # [B, heads, n, D]

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return rotate(self.k_norm(self.heads(self.k_proj(x))), rope), self.heads(self.v_proj(x))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], context_kv: tuple[Tensor, Tensor],
                visible: Visibility | list) -> Tensor:
        """x [B, rows, H]; context_kv two [B, kv, S, D]; visible: training's rule, or in decoding (context length, mask
        or None) of each sample: a sample's rows see that much context and one another."""
        q = rotate(self.q_norm(self.heads(self.q_proj(x))), rope)
        k, v = self.keys_values(x, rope)
        ck, cv = context_kv
        attend = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
        if isinstance(visible, list):            # one by one: a sample's rows do not depend on the others, to the bit
            out = torch.cat([attend(q[b:b + 1], torch.cat((ck[b:b + 1, :, :n], k[b:b + 1]), 2),
                                    torch.cat((cv[b:b + 1, :, :n], v[b:b + 1]), 2), attn_mask=mask)
                             for b, (n, mask) in enumerate(visible)])
        elif x.is_cuda:
            out = compiled_flex_attention()(q, torch.cat((ck, k), 2), torch.cat((cv, v), 2), enable_gqa=True,
                                            block_mask=visible.flex_mask(self.window))
        else:
            out = torch.cat([attend(q[:, :, a:b], torch.cat((ck[:, :, :n], k[:, :, a:b]), 2),
                                    torch.cat((cv[:, :, :n], v[:, :, a:b]), 2), attn_mask=mask)
                             for a, b, n, mask in visible.groups(self.window)], 2)
        return self.o_proj(out.transpose(1, 2).flatten(2))
