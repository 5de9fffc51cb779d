"""The DFlash2 draft on DSpark's backbone: dynamic convolutions around attention and MLP, and a candidate selector.

A DFlash block has B rows, the anchor's token and B-1 masks, and row k predicts the token at its *own* position a+k (a
DSpark row predicts the next one): the draft proposes B-1 tokens, and its slots are rows 1..B-1. In the words of
dspark.py slot t = k-1 has label a+t+1 and previous token a+t, so anchors, labels and weights are those of DSpark.

DFlash2 adds two things to plain DFlash (the same classes with `conv_kernel_size` and `selector_rank` 0). Each sublayer
is wrapped in two causal convolutions along the block whose kernels depend on the row; at initialisation they are the
identity. And the selector re-scores the best K tokens of each slot given the token chosen for the slot before, so that
a block is walked from left to right although the backbone ran once.

The objective is hard cross entropy on the target's own tokens, as in verl-SpeCo's trainer, plus the selector's, which
is detached: convolutions learn from the first term only, the selector's three tensors from the second only.
Shapes: as in dspark.py; T taps, G = H / g groups, r selector rank. Read next: cotrain.py.
"""
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark import DSparkConfig, DSparkDraft, Layer, Supervision
from layouts import FLASH2, draft_kind, read_values, speculative_tokens
from objective import global_sum, rows_per_slice, vocabulary_terms_chunked, vocabulary_terms_full

ADDED = ("attention_conv.", "mlp_conv.", "candidate_selector.")          # parts of DFlash2 that DFlash does not have


def serving_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names of checkpoints, engines and the classes below. Trainers that keep the codebooks
    in nn.Embedding say `.weight`; loading, export and publishing all come through here. Idempotent."""
    return {name.replace("_codebook.weight", "_codebook"): tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class DFlash2Config(DSparkConfig):
    """Geometry of a DFlash or DFlash2 draft."""
    conv_kernel_size: int = 0                    # taps; 0: no convolutions
    conv_group_size: int = 16                    # channels that share a dynamic kernel
    selector_rank: int = 0                       # 0: no selector
    selector_top_k: int = 16
    input_embedding_scale: float = 1.0           # of the embedded block rows
    output_multiplier: float = 1.0               # of the logits
    final_logit_softcapping: float | None = None             # cap * tanh(logits / cap), after the multiplier
    layout = "zlab"

    @classmethod
    def from_recipe(cls, recipe) -> "DFlash2Config":
        off = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
        if recipe.draft == "dflash":
            off |= {key: getattr(cls, key) for key in FLASH2}
        return super().from_recipe(dataclasses.replace(recipe, **off))

    @property
    def slots(self) -> int:
        return speculative_tokens({"block_size": self.block_size, "sample_from_anchor": False})

    @property
    def is_dflash2(self) -> bool:
        return bool(self.conv_kernel_size or self.selector_rank)

    def problems(self) -> list[str]:
        found, plain = super().problems(), not self.conv_kernel_size
        if self.block_size < 2:
            found.append(f"block_size {self.block_size} proposes nothing: DFlash predicts all rows but the first")
        if plain != (not self.selector_rank):
            found.append(f"conv_kernel_size {self.conv_kernel_size} and selector_rank {self.selector_rank}: "
                         "DFlash2 has convolutions and selector, DFlash neither")
        if not plain and self.hidden_size % self.conv_group_size:
            found.append(f"conv_group_size {self.conv_group_size} does not divide hidden_size {self.hidden_size}")
        if self.conv_kernel_size > self.block_size:
            found.append(f"conv_kernel_size {self.conv_kernel_size} exceeds block_size {self.block_size}")
        if self.selector_rank and not 0 < self.selector_top_k <= self.vocab_size:
            found.append(f"selector_top_k {self.selector_top_k} must lie in 1..{self.vocab_size}, the vocabulary")
        return found

    def keys(self) -> dict:
        """As DSpark's; what belongs to the other kind of draft is left out."""
        others = ("markov", "conf", "enable") + (() if self.is_dflash2 else ("conv", "selector"))
        values = {k: v for k, v in dataclasses.asdict(self).items() if not k.startswith(others) and v is not None}
        return values | {"architectures": ["DFlash2DraftModel" if self.is_dflash2 else "DFlashDraftModel"]}


# ---------------------------------------------------------------------------------------------------------------------
# The two additions


def convolve(x: Tensor, base: Tensor, delta: Tensor, block_size: int) -> Tensor:
    """y[i, c] = sum_t (base[t, c] + delta[i, t, group of c]) * x[i - t, c] inside every block, zero before its start.

    x [B, n * block, H], base [T, H], delta [B, n * block, T, G]. ValueError when the rows are no whole blocks. Engines
    do the same on one flat batch with a mask (row % block) >= t, which is why they must know the trained block size.
    """
    if x.shape[1] % block_size:
        raise ValueError(f"{x.shape[1]} rows are not a multiple of block_size {block_size}")
    G = delta.shape[-1]
    blocks = x.unflatten(1, (-1, block_size)).unflatten(-1, (G, -1))                          # [B, n, block, G, g]
    kernel = delta[..., None] + base.to(x.dtype).unflatten(-1, (G, -1))                       # [B, n * block, T, G, g]
    kernel = kernel.unflatten(1, (-1, block_size))
    y = kernel[..., 0, :, :] * blocks
    for t in range(1, len(base)):
        y = y + kernel[..., t, :, :] * F.pad(blocks[:, :, :-t], (0, 0, 0, 0, t, 0))
    return y.flatten(-2).flatten(1, 2)


class DynamicConv(nn.Module):
    """The two convolutions around a sublayer: side 0 on its input, side 1 on its output, one projection for both."""

    def __init__(self, config: DFlash2Config):
        super().__init__()
        T, H, G = config.conv_kernel_size, config.hidden_size, config.hidden_size // config.conv_group_size
        self.block_size, self.shape = config.block_size, (2, T, G)
        self.base_kernel = nn.Parameter(torch.empty(2, T, H))
        self.kernel_projection = nn.Linear(H, 2 * T * G, bias=False)

    def reset_parameters(self) -> None:
        """The identity: tap 0 is one, everything else zero. Gradients reach all of it."""
        nn.init.zeros_(self.kernel_projection.weight)
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])

    def forward(self, u: Tensor, sublayer) -> Tensor:
        """conv1(sublayer(conv0(u))), both kernels from the normed input u [B, rows, H]."""
        delta = self.kernel_projection(u).unflatten(-1, self.shape)                           # [B, rows, 2, T, G]
        x = sublayer(convolve(u, self.base_kernel[0], delta[:, :, 0], self.block_size))
        return convolve(x, self.base_kernel[1], delta[:, :, 1], self.block_size)


class ConvLayer(Layer):
    """DSpark's layer with its two sublayers wrapped. Only block rows are convolved, the context is not."""

    def __init__(self, config: DFlash2Config, layer: int):
        super().__init__(config, layer)
        self.attention_conv = DynamicConv(config) if config.conv_kernel_size else None
        self.mlp_conv = DynamicConv(config) if config.conv_kernel_size else None

    def forward(self, x: Tensor, rope, context, context_rope, visible) -> Tensor:
        if self.attention_conv is None:
            return super().forward(x, rope, context, context_rope, visible)
        context_kv = self.self_attn.keys_values(context, context_rope) if isinstance(context, Tensor) else context
        x = x + self.attention_conv(self.input_layernorm(x), lambda u: self.self_attn(u, rope, context_kv, visible))
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


class CandidateSelector(nn.Module):
    """Score of candidate b behind predecessor a: the slot's own logit of b plus <A[a] * P h, S[b]>."""

    def __init__(self, config: DFlash2Config):
        super().__init__()
        V, r = config.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(V, r))
        self.successor_codebook = nn.Parameter(torch.empty(V, r))
        self.hidden_projection = nn.Linear(config.hidden_size, r, bias=False)

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor, logits: Tensor) -> Tensor:
        """hidden [..., H], previous [...], candidates and their logits [..., K] -> scores [..., K]."""
        query = F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(hidden)
        keys = F.embedding(candidates, self.successor_codebook)                               # [..., K, r]
        return logits + torch.linalg.vecdot(query.unsqueeze(-2), keys).to(logits.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The draft


class DFlash2Draft(DSparkDraft):
    """DFlash and DFlash2: backbone, sessions, files and anchors are DSpark's, objective and walk are here."""
    config_class, layer_class = DFlash2Config, ConvLayer

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        for module in self.modules():
            if isinstance(module, DynamicConv):
                module.reset_parameters()        # the backbone's initialisation has been over its projection
            elif isinstance(module, CandidateSelector):
                for p in module.parameters():    # small: a fresh selector barely moves the logits
                    nn.init.normal_(p, std=0.02)
        self.l1_weight, self.gamma, self.selector_weight = 0.0, 7.0, 1.0         # cross entropies only

    def configure_objective(self, recipe) -> "DFlash2Draft":
        self.gamma = recipe.loss_decay_gamma if recipe.loss_decay_gamma > 0 else float("inf")
        self.selector_weight = recipe.selector_loss_weight
        return self

    def load_tensors(self, tensors: dict[str, Tensor], where: str = "checkpoint") -> None:
        """As DSpark's; a plain DFlash checkpoint starts a DFlash2 draft, a half-present DFlash2 is refused."""
        tensors = serving_names(tensors)
        own = self.state_dict()
        added = {name for name in own if any(part in name for part in ADDED)}
        found = {name for name in tensors if any(part in name for part in ADDED)}
        if added and not found and not self.fc.weight.is_meta:
            tensors = tensors | {name: own[name] for name in added}
        elif found != added:
            raise ValueError(f"{where} holds only part of the DFlash2 modules: missing {sorted(added - found)[:8]}, "
                             f"unrecognized {sorted(found - added)[:8]}")
        super().load_tensors(tensors, where)

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * self.config.input_embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Unary logits [..., V] in fp32 at least, with multiplier and soft cap."""
        logits = self.lm_head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * self.config.output_multiplier
        cap = self.config.final_logit_softcapping or 0
        return cap * torch.tanh(logits / cap) if cap > 0 else logits

    def corrected(self, logits: Tensor, hidden: Tensor, previous: Tensor, state=None) -> tuple[Tensor, None]:
        """As DSpark's: the selector's scores of the K candidates, -inf for all other tokens. So the probabilities that
        lossless rejection divides by live on the candidates."""
        if self.candidate_selector is None:
            return logits, None
        values, candidates = logits.topk(self.config.selector_top_k)
        scores = self.candidate_selector(hidden, previous, candidates, values)
        return torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores), None

    def objective(self, hidden: Tensor, final: Tensor | None, sup: Supervision, denominator: Tensor,
                  dropped: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross entropy over valid slots + selector_weight * the selector's, each a weighted mean over all ranks."""
        if self.chunk_blocks == 0 or self.config.final_logit_softcapping or self.config.output_multiplier != 1:
            terms = vocabulary_terms_full(hidden, None, None, self.logits, None, sup, 1 / denominator, 0.0)
        else:
            terms = vocabulary_terms_chunked(hidden, None, None, self.lm_head, None, sup, 1 / denominator, 0.0,
                                             self.chunk_blocks)
        loss, v, correct = terms.loss, sup.valid, terms.agree
        sums = {"ce_loss": (sup.weight * terms.ce).sum(), "weight": sup.weight.sum(), "agree": (correct & v).sum(),
                "valid": v.sum(), "blocks": v[..., 0].sum(), "nonfinite_tokens": dropped}
        if self.candidate_selector is not None and self.selector_weight > 0:
            weighted, weights, chosen, covered = self.selector_terms(hidden.detach(), sup)
            loss = loss + self.selector_weight * weighted.sum() / global_sum(weights.sum()).clamp(min=1e-6)
            sums |= {"selector_loss": weighted.detach().sum(), "selector_weight": weights.sum(),
                     "selector_correct": chosen.sum(), "selector_base": (correct[v] & covered).sum(),
                     "covered": covered.sum()}
            correct = correct.masked_scatter(v, chosen)
        sums["tau"] = (1 + (correct & v).cumprod(-1).sum(-1))[v[..., 0]].sum()
        loss = self.checked(loss, {"ce": terms.ce}, sup, denominator, {"hidden": hidden})
        return loss, self.metrics(sums)

    def selector_terms(self, hidden: Tensor, sup: Supervision) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Per valid slot [R]: weight * CE over the K candidates, its weight, whether the choice is right, whether the
        label is among the candidates. Slots without it keep weight 0, so that every rank walks the same graph."""
        rows = hidden[sup.valid]                                                              # [R, H]
        labels, previous, weight = sup.labels[sup.valid], sup.previous[sup.valid], sup.weight[sup.valid]
        with torch.no_grad():                    # a slice of vocabulary-sized rows at a time
            top = [self.logits(part).topk(self.config.selector_top_k)
                   for part in rows.split(rows_per_slice(self.config.vocab_size, rows.device.type))]
        values, candidates = (torch.cat(parts) for parts in zip(*top, strict=True))           # [R, K]
        scores = self.candidate_selector(rows, previous, candidates, values)
        gold = candidates == labels[:, None]
        ce = torch.logsumexp(scores, -1) - (scores * gold).sum(-1)
        covered = gold.any(-1)
        weight = weight * (covered & ce.detach().isfinite())
        chosen = gold.gather(1, scores.detach().argmax(-1, keepdim=True)).squeeze(1)
        return weight * ce.nan_to_num(0, 0, 0), weight, chosen, covered

    def metrics(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Global metrics, fresh and detached. `tau_greedy` is 1 + the leading slots of a block that are right, with
        labels as previous tokens: a training signal, not an accept length. `selector_lift` compares the selector with
        the plain argmax on the slots whose candidates hold the label."""
        s = dict(zip(sums, global_sum(torch.stack([x.detach().double() for x in sums.values()])), strict=True))
        result = {"ce_loss": s["ce_loss"] / (s["weight"] + 1e-6), "agree": s["agree"] / s["valid"].clamp(min=1),
                  "tau_greedy": s["tau"] / s["blocks"].clamp(min=1)}
        if "selector_loss" in s:
            result |= {"selector_loss": s["selector_loss"] / s["selector_weight"].clamp(min=1e-6),
                       "selector_coverage": s["covered"] / s["valid"].clamp(min=1),
                       "selector_lift": (s["selector_correct"] - s["selector_base"]) / s["covered"].clamp(min=1)}
        return result | {"nonfinite_tokens": s["nonfinite_tokens"], "blocks": s["blocks"]}


# ---------------------------------------------------------------------------------------------------------------------
# Which draft a recipe or a checkpoint means


DRAFTS = {"dspark": DSparkDraft, "dflash": DFlash2Draft, "dflash2": DFlash2Draft}


def new_draft(recipe) -> DSparkDraft:
    """A fresh draft of the recipe's kind, with its objective. ValueError for a kind that does not exist."""
    if recipe.draft not in DRAFTS:
        raise ValueError(f"{recipe.name}: draft {recipe.draft!r} is none of {', '.join(DRAFTS)}; mend recipe.py")
    kind = DRAFTS[recipe.draft]
    return kind(kind.config_class.from_recipe(recipe)).configure_objective(recipe)


def read_draft(folder: str | Path, **options) -> DSparkDraft:
    """The draft of a checkpoint folder, whichever kind its config.json names (options: see from_pretrained)."""
    return draft_kind(read_values(folder)[2]).from_pretrained(folder, **options)
