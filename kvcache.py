"""Key/value memory for running a transformers model token by token, without waste.

Three things make `generate` slow on a CPU: its cache grows by concatenation (every step copies everything), its
attention repeats the keys of a query group once per head, and every small product lays its weight out anew. Here the
memory is allocated once and written in place (`SlotCache`), the attention function (`register_attention`) lets the
heads of a group share their keys, and frozen weights are laid out once (`pack_linears`). All hang on public interfaces
of transformers, so any decoder model with keys and values works. Used by regen.py and by the sessions of capture.py and
decode.py.

Every row is computed as if it were alone: the same products, the same attention at its own length. On a CPU the states
of a row are therefore equal to the bit, whatever it is batched with. Read next: regen.py, `generate`.
"""
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

ATTENTION = "grouped"                            # pass as attn_implementation= to from_pretrained


class PackedLinear(nn.Linear):
    """A linear layer that keeps a copy of its weight in oneDNN's own layout, for inference in float32 on a CPU.

    SmolLM2's head on 8 rows takes 2.4 ms instead of 11 on two cores with AVX-512, its body 22 instead of 44; and a
    row's result does not depend on how many rows there are (a single row, whose sums oneDNN splits, is computed as
    two). Any other use (gradients, other dtypes and devices) is the plain layer's. A weight that was written to since
    is laid out again; torch does not count writes through `.data`, which go unseen.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or not x.dtype == self.weight.dtype == torch.float32 or self.weight.is_cuda:
            return super().forward(x)
        state = (self.weight.data_ptr(), 0 if self.weight.is_inference() else self.weight._version)
        if self.__dict__.get("_packed", (None,))[0] != state:
            # Laid out for about 8 rows: good from 1 to 64, where a layout made for 1 row is slower and less exact.
            self.__dict__["_packed"] = (state, torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), 8))
        single = x.numel() == self.in_features
        rows = x.reshape(1, -1).repeat(2, 1) if single else x
        y = torch.ops.mkldnn._linear_pointwise(rows, self._packed[1], self.bias, "none", [], "")
        return y[0].view(*x.shape[:-1], -1) if single else y

    def __getstate__(self) -> dict:              # copies and files carry the weight once
        return {key: value for key, value in self.__dict__.items() if key != "_packed"}


def pack_linears(model: nn.Module) -> nn.Module:
    """`model`, every plain linear layer of it a PackedLinear, where this build of torch has the operators."""
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        for module in model.modules():
            if type(module) is nn.Linear and module.weight.device.type == "cpu":
                module.__class__ = PackedLinear
    return model


def register_attention() -> str:
    """Make the attention function and its mask known to transformers; returns the name for `attn_implementation`."""
    AttentionInterface.register(ATTENTION, grouped_attention)
    AttentionMaskInterface.register(ATTENTION, grouped_mask)
    return ATTENTION


def grouped_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    """Attention of query [B, h, n, D] to key, value [B, kvh, L, D] without expanding the groups of g = h / kvh heads.

    With a mask the g heads of a group become g*n query rows of one head: at 64 rows of 300 keys and g = 3 that takes
    1.6 ms on two cores where expanded keys take 28. Without a mask the queries are causal (aligned to the first key) or
    a single row. A list of (keys, mask) is one for each row: they are attended one by one, which costs no more and
    makes a row's result independent of the others. Returns (output [B, n, h, D], None).
    """
    if isinstance(attention_mask, list):
        parts = [grouped_attention(module, query[b:b + 1], key[b:b + 1, :, :length], value[b:b + 1, :, :length], mask,
                                   dropout, scaling, is_causal, **kwargs)[0]
                 for b, (length, mask) in enumerate(attention_mask)]
        return torch.cat(parts), None
    if more := [key for key in ("position_bias", "s_aux", "softcap") if kwargs.get(key) is not None]:
        raise ValueError(f"this target's attention takes {more} besides a mask; load it with targets.load_model, or "
                         "with attn_implementation='eager'")
    batch, heads, n, _ = query.shape
    if attention_mask is None:
        causal = n > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=causal, scale=scaling,
                                             enable_gqa=True)
    else:
        groups = heads // key.shape[1]
        folded = query.reshape(batch, key.shape[1], groups * n, query.shape[-1])     # [B, kvh, g*n, D]
        mask = attention_mask.repeat(1, 1, groups, 1)                                # [B, 1, g*n, L]
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
        out = out.reshape(batch, heads, n, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def grouped_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None,
                 local_size=None, allow_is_causal_skip=True, dtype=torch.float32, device="cpu", **kwargs):
    """Additive mask [B, 1, n, L] (0 or the lowest number), or None when plain causal attention says the same.

    q_offset is an int, or a list of B when rows have different lengths (SlotCache): then the result is a list of (keys,
    mask) for each row. `mask_function` (batch, head, query, key indices) comes from transformers and carries the
    pattern: causal, sliding window, packed.
    """
    if isinstance(q_offset, list):
        return [(start + q_length, grouped_mask(
            1, q_length, start + q_length, start, kv_offset, mask_function,
            None if attention_mask is None else attention_mask[b:b + 1], local_size, allow_is_causal_skip, dtype, device
        )) for b, start in enumerate(q_offset)]
    padded = attention_mask is not None and not attention_mask.all()
    whole = local_size is None or kv_length <= local_size
    if allow_is_causal_skip and whole and not padded:
        if q_length == 1 and q_offset + 1 == kv_length + kv_offset or q_length == kv_length and q_offset == kv_offset:
            return None
    queries = q_offset + torch.arange(q_length, device=device)[None, None, :, None]
    keys = kv_offset + torch.arange(kv_length, device=device)[None, None, None, :]
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    allowed = mask_function(rows, torch.zeros_like(rows), queries, keys).expand(batch_size, 1, q_length, kv_length)
    if padded:
        allowed = allowed & attention_mask[:, None, None, kv_offset:kv_offset + kv_length]
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, torch.finfo(dtype).min)


class SlotCache(Cache):
    """Keys and values of `slots` sequences, allocated once at [slots, kvh, max_length, D] per layer.

    A forward runs on a contiguous range of slots (`use`, at first all of them) and appends n tokens to each row at that
    row's own length; `positions(n)` are their position ids. Nothing counts as stored until `advance`: after a forward
    padded on the right a row may advance by less than n. `truncate` forgets a tail. What lies past a row's length is
    stale, masked, and overwritten.

        cache = SlotCache(model.config.num_hidden_layers, slots=1, max_length=2048)
        model.model(ids, position_ids=cache.positions(n), past_key_values=cache)      # extend by ids [1, n]
        cache.advance(n)
        cache.truncate(length)                                                        # roll back
    """

    def __init__(self, num_layers: int, slots: int, max_length: int, device: str | torch.device = "cpu"):
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])
        self.slots, self.max_length, self.device = slots, max_length, device
        self.lengths = [0] * slots               # tokens stored per slot
        self.use(0, slots)

    def use(self, first: int, last: int) -> None:
        """The next forwards run on slots first..last-1; row i of their batch is slot first + i."""
        self.first, self.last = first, last
        rows = self.lengths[first:last]
        self.uniform = len(set(rows)) <= 1
        self.start = torch.tensor(rows, device=self.device)  # [B] where each row's new tokens go
        self.longest = max(rows, default=0)

    def positions(self, n: int) -> torch.Tensor:
        """Position ids [B, n] of the next n tokens of every row in use."""
        return self.start[:, None] + torch.arange(n, device=self.device)[None]

    def advance(self, n: int | list[int]) -> None:
        """Count the last forward's tokens as stored: n of every row in use, or n[i] of row i."""
        new = [n] * (self.last - self.first) if isinstance(n, int) else n
        for slot, count in zip(range(self.first, self.last), new, strict=True):
            self.lengths[slot] += count
        self.use(self.first, self.last)

    def truncate(self, length: int, slot: int = 0) -> None:
        """Keep only the first `length` tokens of a slot."""
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"cannot truncate slot {slot} to {length} tokens: it holds {self.lengths[slot]}")
        self.lengths[slot] = length
        self.use(self.first, self.last)

    def copy(self, source: int, target: int) -> None:
        """Slot `target` becomes a copy of slot `source`."""
        n = self.lengths[target] = self.lengths[source]
        for layer in self.layers:
            for memory in layer.memory.values():
                memory[target, ..., :n, :] = memory[source, ..., :n, :]
        self.use(self.first, self.last)

    def new_row(self) -> int:
        """The slot behind the rows in use (0..last-1), emptied and alone in use; `use(0, row + 1)` joins it to them."""
        row = self.last
        self.lengths[row] = 0
        self.use(row, row + 1)
        return row

    def drop_row(self, row: int) -> None:
        """A row leaves those in use (0..last-1); the last one takes its place."""
        if row < self.last - 1:
            self.copy(self.last - 1, row)
        self.use(0, self.last - 1)

    def with_room(self, n: int) -> "SlotCache":
        """This cache, or a copy twice as large (or four times, ...), with room for n more tokens in every row."""
        size = self.max_length
        while size < self.longest + n:
            size *= 2
        if size == self.max_length:
            return self
        new = SlotCache(len(self.layers), self.slots, size, self.device)
        for old, layer in zip(self.layers, new.layers, strict=True):
            layer.memory = {name: F.pad(x, (0, 0, 0, size - self.max_length)) for name, x in old.memory.items()}
        new.lengths = list(self.lengths)
        new.use(self.first, self.last)
        return new

    # Short convolutions: their inputs are kept like keys, so that they roll back with them.
    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.longest > 0

    def update_conv_state(self, states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0,
                          **kwargs) -> torch.Tensor:
        """New inputs [B, C, n] of a convolution; returns them behind the conv_kernel_size inputs before them."""
        seen = self.layers[layer_idx].write(f"conv{state_idx}", states.transpose(1, 2)).transpose(1, 2)  # [B, C, L]
        wanted = conv_kernel_size + states.shape[2]
        ends = [length + states.shape[2] for length in self.lengths[self.first:self.last]]
        return torch.stack([F.pad(row[:, :end], (max(0, wanted - end), 0))[..., -wanted:]
                            for row, end in zip(seen, ends, strict=True)])

    def update_recurrent_state(self, *args, **kwargs):
        raise ValueError("this target has layers with a recurrent state (linear attention), which keep no past to go "
                         "back to when a drafted token is refused; such targets are not supported")

    # What transformers asks while it builds the mask.
    def get_query_offset(self, layer_idx: int = 0):
        return self.longest if self.uniform else self.lengths[self.first:self.last]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.longest


class SlotLayer(CacheLayerMixin):
    """What one layer remembers, by name, each [slots, ..., max_length, D]: keys and values, and for some architectures
    the keys of an indexer or the inputs of short convolutions. Sliding-window layers keep everything, the mask holds
    the window; so every layer can be rolled back."""
    is_sliding, record_past = False, True

    def __init__(self, cache: SlotCache):
        super().__init__()
        self.cache, self.memory = cache, {}

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass                                     # `write` does that

    def write(self, name: str, new: torch.Tensor) -> torch.Tensor:
        """Append new [B, ..., n, D] in place; returns a view [B, ..., L, D] up to the longest row."""
        cache, n = self.cache, new.shape[-2]
        end = cache.longest + n
        if end > cache.max_length:
            raise ValueError(f"the key/value cache holds {cache.max_length} tokens per sequence and {end} are needed; "
                             "make it with a larger max_length")
        if name not in self.memory:              # zeros, not empty: a masked NaN would poison the sum of the values
            self.memory[name] = new.new_zeros(cache.slots, *new.shape[1:-2], cache.max_length, new.shape[-1])
        rows = self.memory[name][cache.first:cache.last]
        if cache.uniform:
            rows[..., cache.longest:end, :] = new
        else:
            each, places = torch.arange(len(rows), device=cache.device)[:, None], cache.positions(n)
            rows[each, :, places] = new.transpose(1, 2)                             # [B, h, n, D]
        return rows[..., :end, :]

    def update(self, key_states, value_states, *args, **kwargs):
        """New keys and values [B, kvh, n, D]; returns all of them [B, kvh, L, D]."""
        return self.write("keys", key_states), self.write("values", value_states)

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, kvh, L, D] of the rows in use, up to the longest."""
        rows, end = slice(self.cache.first, self.cache.last), self.cache.longest
        return self.memory["keys"][rows, :, :end], self.memory["values"][rows, :, :end]

    def update_indexer(self, keys: torch.Tensor) -> torch.Tensor:
        """New indexer keys [B, n, D]; returns all of them [B, L, D]."""
        return self.write("indexer", keys)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.longest + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.longest

    def get_max_length(self) -> int:
        return self.cache.max_length
