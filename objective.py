"""The vocabulary-sized part of a draft's objective: cross entropy and L1 distance to the teacher, over all block slots.

Two forms, one meaning. `vocabulary_terms_full` materialises every slot's logits and lets autograd work: the reference,
used in tests. `vocabulary_terms_chunked` is what training uses: slices of blocks, loss and gradients in one forward
pass, memory flat in the number of anchors. dspark.py calls them and adds the confidence loss; bench.py compares them.
"""
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# Bytes of one vocabulary-sized fp32 buffer: on a GPU 123 blocks of 7 at V = 154,880, on a CPU 73 at V = 49,152. Every
# slice reads the whole head, so few rows are slow: 512 blocks on two CPU cores are as fast in slices of 96 MiB as of
# 192, and 5 to 10% slower in slices of 32 to 64.
BUFFER_BYTES = {"cuda": 512 << 20, "cpu": 96 << 20}
# Small batches are cut as well: 64 blocks at V = 49,152 in 3 slices are as fast as in one (6 slices: 25% slower).
FEWEST_SLICES = 3
# Bytes per buffer that the elementwise steps handle at once: on a CPU they stay in the second-level cache.
CACHE_ROWS_BYTES = {"cuda": 128 << 20, "cpu": 2 << 20}
# Columns of the vocabulary that one product of oneDNN takes, so that weights and product stay in the caches. 511 rows,
# two cores: 400 GFLOP/s in tiles of 512 to 4,096 columns, 250 over all 49,152 at once; MKL, behind torch.mm, 190.
TILE = 1024


@dataclass(frozen=True)
class Terms:
    """Per-slot results of the vocabulary part: `loss` carries the gradient, the rest is detached."""
    loss: Tensor                                 # scalar: sum over slots of weight * (ce_scale * CE + l1_scale * L1)
    ce: Tensor                                   # [..., K]
    l1: Tensor                                   # [..., K]; 2 where L1 is off or a slot is invalid
    agree: Tensor                                # [..., K] bool: the label has the largest corrected logit


def vocabulary_terms_full(hidden, latent, w2, head: nn.Linear, final, sup, ce_scale, l1_scale) -> Terms:
    """The reference form: [B, N, K, V] logits, autograd does the rest. hidden [B,N,K,H], latent [B,N,K,r] or None."""
    logits = head(hidden)
    if latent is not None:
        logits = logits + F.linear(latent, w2)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = logits.log_softmax(-1)
    ce = -log_p.gather(-1, sup.labels[..., None]).squeeze(-1)
    agree = logits.gather(-1, sup.labels[..., None]).squeeze(-1) == logits.amax(-1)
    loss = ce_scale * (sup.weight * ce).sum()
    l1 = torch.full_like(ce, 2.0)
    if final is not None:
        with torch.no_grad():
            index = sup.source.flatten(1)[..., None].expand(-1, -1, final.shape[-1])
            q = head(final.gather(1, index).view_as(hidden)).to(logits.dtype).softmax(-1)
        l1 = (log_p.exp() - q).abs().sum(-1)
        loss = loss + l1_scale * (sup.weight * l1).sum()
    return Terms(loss, ce.detach(), l1.detach(), agree)


def rows_per_slice(vocab_size: int, device_type: str) -> int:
    """How many vocabulary-sized fp32 rows one buffer of the chunked objective holds."""
    return max(1, BUFFER_BYTES[device_type] // (vocab_size * 4))


def slice_rows(rows_per_block: list[int], blocks: int | None, vocab_size: int, block_size: int, device_type: str):
    """Row ranges (start, stop) of the slices: whole blocks, as many as `blocks` says, or else as few slices of equal
    size as the byte budget allows (at least FEWEST_SLICES). Dummy blocks do not count."""
    rows_per_block = [n for n in rows_per_block if n]
    if not blocks:
        most = max(1, rows_per_slice(vocab_size, device_type) // block_size)
        count = max(FEWEST_SLICES, math.ceil(len(rows_per_block) / most))
        blocks = max(1, math.ceil(len(rows_per_block) / count))
    rows = [sum(rows_per_block[first:first + blocks]) for first in range(0, len(rows_per_block), blocks)]
    return list(pairwise(accumulate(rows, initial=0)))


def buffer_rows(slices, distinct: list[int], vocab_size: int, device_type: str):
    """Vocabulary-sized rows that the chunked objective holds at its peak, whatever the number of slices.

    slices: row ranges; distinct: teacher positions of each. Returns (rows of the draft's buffer, rows of the teacher's,
    rows of each of the two scratch buffers that the elementwise steps use).
    """
    rows = max((b - a for a, b in slices), default=0)
    step = max(1, CACHE_ROWS_BYTES[device_type] // (vocab_size * 4))
    return rows, max(distinct, default=0), min(step, rows)


def in_onednn(x: Tensor) -> bool:
    """Whether matrix products of x go to oneDNN: fp32 on a CPU, where torch.mm takes MKL, half as fast on AMD."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def multiply(out: Tensor, a: Tensor, b: Tensor, accumulate: bool = False) -> None:
    """out (+)= a @ b for matrices, in place where library and dtypes allow; out may be wider than a and b."""
    if in_onednn(a):
        product = torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
    elif a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
        return
    else:
        product = a @ b
    out.add_(product) if accumulate else out.copy_(product)


class ChunkedVocabulary(torch.autograd.Function):
    """Loss and gradients of the vocabulary part, slice by slice, in the forward pass; backward only scales them.

    With p the draft's distribution, q the teacher's, s = sign(p - q): d CE / d logit = p - onehot(label) and d L1 / d
    logit = p * (s - sum_v s p). Nothing vocabulary-sized outlives its slice, there is no second pass over the
    vocabulary, and the teacher is computed once per distinct position of the slice (sorted anchors overlap: 128 blocks
    of 7 often touch a quarter as many positions as they have rows).

    Inputs are flat rows of valid slots: hidden [R, H], latent [R, r] or None, w2 [V, r] or None, weight/bias of the
    frozen head, final [P, H] or None, labels [R], source [R] (rows of final), row weights [R]. Outputs (loss, ce [R],
    l1 [R], agree [R]).
    """

    @staticmethod
    def forward(ctx, hidden, latent, w2, head_weight, head_bias, final, labels, source, weight, ce_scale, l1_scale,
                slices):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        R, V, device = hidden.shape[0], head_weight.shape[0], hidden.device
        ce, l1 = hidden.new_zeros(R, dtype=wide), hidden.new_full((R,), 2.0, dtype=wide)
        agree = torch.zeros(R, dtype=torch.bool, device=device)
        g_hidden, g_latent, g_w2 = torch.empty_like(hidden), None, None
        if latent is not None:
            g_latent, g_w2 = torch.empty_like(latent), torch.zeros(w2.shape, dtype=wide, device=device)
        # The teacher's rows: distinct sources per slice, and which of them each row of the slice reads.
        teachers = [source[a:b].unique(return_inverse=True) if final is not None else (labels[:0], None)
                    for a, b in slices]
        rows, distinct, step = buffer_rows(slices, [len(t) for t, _ in teachers], V, device.type)
        width = TILE if in_onednn(hidden) else V
        tiles = [slice(i, min(i + width, V)) for i in range(0, V, width)]
        buffer = lambda n: torch.empty(n, V, dtype=wide, device=device)                       # noqa: E731
        p_buffer, q_buffer, scratch = buffer(rows), buffer(distinct), buffer(2 * step).view(2, step, V)

        def logits(out, *products):
            """out = sum of x @ table^T over the products, plus the head's bias."""
            for t in tiles:
                for i, (x, table) in enumerate(products):
                    multiply(out[:, t], x, table[t].T, accumulate=i > 0)
            return out if head_bias is None else out.add_(head_bias)

        for (a, b), (positions, where) in zip(slices, teachers, strict=True):
            markov = [] if latent is None else [(latent[a:b], w2)]
            p = logits(p_buffer[:b - a], (hidden[a:b], head_weight), *markov)
            if final is not None:
                q_all = logits(q_buffer[:len(positions)], (final[positions], head_weight))
                for part in q_all.split(step):
                    torch.softmax(part, 1, out=part)
            for i in range(0, b - a, step):
                part, here = p[i:i + step], slice(a + i, min(a + i + step, b))
                label, w = labels[here, None], weight[here, None].to(wide)
                at_label, top = part.gather(1, label), part.amax(1, keepdim=True)
                agree[here] = (at_label == top).squeeze(1)
                # The fused softmax takes half the time of amax, sub, exp, sum, div; its largest entry is 1 / total.
                torch.softmax(part, 1, out=part)
                ce[here] = (top - part.amax(1, keepdim=True).log() - at_label).squeeze(1)
                if final is not None:
                    d, other = scratch[:, :len(part)]
                    torch.index_select(q_all, 0, where[i:i + step], out=other)
                    torch.sub(part, other, out=d)
                    l1[here] = torch.abs(d, out=other).sum(1)                                 # 3x faster than norm(1)
                    mean_sign = torch.linalg.vecdot(part, d.sign_()).unsqueeze(1)
                    part.mul_(torch.addcmul(w * (ce_scale - l1_scale * mean_sign), d, l1_scale * w, out=d))
                else:
                    part.mul_(ce_scale * w)
                part.scatter_add_(1, label, -ce_scale * w)                                    # now d loss / d logits
            for t in tiles:
                d = p[:, t].to(hidden.dtype).contiguous()
                multiply(g_hidden[a:b], d, head_weight[t], accumulate=t.start > 0)
                if latent is not None:
                    multiply(g_latent[a:b], d, w2[t], accumulate=t.start > 0)
                    multiply(g_w2[t], d.T, latent[a:b], accumulate=True)
        ctx.save_for_backward(g_hidden, g_latent, g_w2 if g_w2 is None else g_w2.to(w2.dtype))
        loss = (ce_scale * (weight * ce).sum()).to(wide)
        if final is not None:
            loss = loss + l1_scale * (weight * l1).sum()
        ctx.mark_non_differentiable(ce, l1, agree)
        return loss, ce, l1, agree

    @staticmethod
    def backward(ctx, g_loss, *_):
        """Scale the gradients. The slice buffers are gone by now, so the copies do not add to the peak."""
        return *(None if g is None else g * g_loss.to(g.dtype) for g in ctx.saved_tensors), *([None] * 9)


def vocabulary_terms_chunked(hidden, latent, w2, head: nn.Linear, final, sup, ce_scale, l1_scale, blocks) -> Terms:
    """As `vocabulary_terms_full` with memory flat in N and B; blocks: per slice, None for the byte budget."""
    valid = sup.valid.flatten(0, 1)                                                           # [B*N, K]
    rows = valid.flatten().nonzero().squeeze(1)
    pick = lambda x: None if x is None else x.flatten(0, 2).index_select(0, rows)             # noqa: E731
    slices = slice_rows(valid.sum(1).tolist(), blocks, head.weight.shape[0], valid.shape[1], hidden.device.type)
    sample = torch.arange(sup.source.shape[0], device=rows.device)[:, None, None]
    source = None
    if final is not None:
        source = pick(sup.source + sample * final.shape[1])
        final = final.flatten(0, 1)
    loss, ce, l1, agree = ChunkedVocabulary.apply(
        pick(hidden), pick(latent), w2, head.weight.detach(),
        None if head.bias is None else head.bias.detach(), final, pick(sup.labels), source, pick(sup.weight),
        ce_scale, l1_scale, slices)
    spread = lambda x, fill: x.new_full((valid.numel(),), fill).index_copy(0, rows, x).view_as(sup.valid)  # noqa: E731
    return Terms(loss, spread(ce, 0.0), spread(l1, 2.0), spread(agree, False))


def explain_nonfinite(numerators: dict[str, Tensor], denominator: Tensor, inputs: dict[str, Tensor | None]):
    """Who made a loss non-finite: (batch rows concerned, one sentence).

    numerators: [B, N, K] terms by name; denominator: the sum of all ranks' slot weights; inputs: what the terms were
    made from, by name, None where absent. Rows are those with a non-finite term, all of them if a sum overflowed.
    """
    count = lambda x: int((~torch.isfinite(x.detach())).sum())                                # noqa: E731
    B = next(iter(numerators.values())).shape[0]
    wrong = {name: x.detach() for name, x in numerators.items() if not torch.isfinite(x.detach().sum())}
    rows = sorted({b for x in wrong.values() for b in (~torch.isfinite(x)).flatten(1).any(1).nonzero()[:, 0].tolist()})
    terms = [f"{name} ({count(x)} of {x.numel()} slots)" for name, x in wrong.items()]
    present = {name: x for name, x in inputs.items() if x is not None}
    sources = [f"{name} ({count(x)} of {x.numel()} entries)" for name, x in present.items() if count(x)]
    state = f"{float(denominator):g}" + ("" if torch.isfinite(denominator) and denominator > 0 else ", not usable")
    return rows or list(range(B)), (
        f"non-finite numerators: {', '.join(terms) or 'none'}; denominator {state}; "
        f"non-finite inputs: {', '.join(sources) or 'none, so the terms themselves overflowed'}")


def global_sum(x: Tensor) -> Tensor:
    """Sum over all ranks, detached; the value itself in a single process."""
    x = x.detach().clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(x)
    return x


def drop_nonfinite(loss_mask: Tensor, context: Tensor, final: Tensor | None):
    """Take tokens whose captured states hold inf or NaN out of supervision and zero their states.

    Returns (loss_mask, context, final, count of such tokens). The healthy path costs one reduction: a sum is finite
    when every entry is.
    """
    parts = [context] if final is None else [context, final]
    with torch.no_grad():
        if torch.isfinite(sum(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in parts)):
            return loss_mask, context, final, torch.zeros((), device=context.device)
        finite = torch.stack([torch.isfinite(x).all(-1) for x in parts]).all(0)               # [B, S]
        clean = [torch.where(finite[..., None], x, 0) for x in parts]
    return loss_mask * finite, clean[0], clean[1] if len(clean) > 1 else None, (~finite).sum().to(torch.float32)
