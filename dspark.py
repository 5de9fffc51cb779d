"""The DSpark draft: configuration, model, anchor sampler and objective.

A DSpark draft proposes a block of K tokens in one backbone pass and then corrects each slot by the token before it. It
reads hidden states of a few layers of a frozen target (the *context*), attends from a block of K rows (the last known
token, then mask tokens) to that context and to the block itself, and borrows the target's embedding and lm_head. A
Markov head adds to each slot's logits a bias that depends on the previous token, a confidence head estimates how
likely the slot is accepted.

The convention that everything hangs on, stated once: a block at anchor a has rows at positions a, a+1, ..., a+K-1,
sees the context strictly before a, and its slot t predicts token a+t+1. Its teacher is the target's own distribution
at position a+t, one before the label. The previous token of slot t is token a+t. Slot weights decay as exp(-t /
gamma).

Shapes: B batch, S source length, N blocks per sample, K block size, H hidden, V vocabulary, k captured layers, r
Markov rank. Read next: capture.py (where context and final states come from), train.py (the loop), eval_deepspec.py
(how a draft is used).
"""
import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attention import Attention, Visibility, rope_tables
from capture import check_layer_ids
from objective import drop_nonfinite, explain_nonfinite, global_sum, vocabulary_terms_chunked, vocabulary_terms_full

# ---------------------------------------------------------------------------------------------------------------------
# Configuration


@dataclass(frozen=True)
class DSparkConfig:
    """Geometry of a draft, as config.json holds it (layouts.py)."""
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int = 0                   # 0: unknown, the checkpoint of others does not say
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 40_960
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()            # empty: full attention everywhere
    sliding_window: int | None = None
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    num_anchors: int = 512
    eos_token_id: tuple[int, ...] = ()
    layout = "deepspec"                          # of the config.json that `save` writes

    @classmethod
    def from_recipe(cls, recipe) -> "DSparkConfig":
        """A recipe says the same under the same names, but for two."""
        same = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(cls) if hasattr(recipe, f.name)}
        return cls(**same, num_hidden_layers=recipe.num_draft_layers, eos_token_id=recipe.stop_token_ids).validate()

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "DSparkConfig":
        """Read config.json, in whichever layout that layouts.py knows."""
        from layouts import fields_of, read_values
        return cls(**fields_of(read_values(folder)[0], cls)).validate()

    def problems(self) -> list[str]:
        """What makes no sense about these numbers, each with the value and the mend."""
        found, ids = [], self.target_layer_ids
        try:
            check_layer_ids(ids, self.num_target_layers or max(ids, default=0) + 2)
        except ValueError as error:
            found.append(str(error))
        if not 0 <= self.mask_token_id < self.vocab_size:
            found.append(f"mask_token_id {self.mask_token_id} is outside the embedding of {self.vocab_size} rows; "
                         "choose a reserved id that the tokenizer never produces")
        if self.num_attention_heads % self.num_key_value_heads:
            found.append(f"{self.num_attention_heads} query heads are not a multiple of "
                         f"{self.num_key_value_heads} key/value heads")
        if self.block_size < 1 or self.head_dim % 2:
            found.append(f"block_size {self.block_size} must be positive and head_dim {self.head_dim} even")
        if self.markov_rank and self.markov_head_type not in ("vanilla", "gated", "rnn"):
            found.append(f"markov_head_type {self.markov_head_type!r} is none of vanilla, gated, rnn")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            found.append(f"layer_types names {len(self.layer_types)} layers, "
                         f"num_hidden_layers is {self.num_hidden_layers}")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            found.append("layer_types has sliding_attention but sliding_window is not set")
        return found

    def validate(self) -> "DSparkConfig":
        if found := self.problems():
            raise ValueError("; ".join(found))
        return self

    def keys(self) -> dict:
        """What config.json says about this draft, beside what its layout always says."""
        return dataclasses.asdict(self)

    @property
    def slots(self) -> int:
        """Tokens that a block proposes: its last rows."""
        return self.block_size

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, None for full attention."""
        return self.sliding_window if self.layer_types and self.layer_types[layer] == "sliding_attention" else None

    def save(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write config.json in this kind's layout; dtype: that of the tensors beside it."""
        from layouts import save_config
        save_config(self, folder, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Backbone


class MLP(nn.Module):
    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DSparkConfig, layer: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope, context, context_rope, visible) -> Tensor:
        """context: [B, S, H] in training (keys and values are made here), or cached (keys, values) in decoding."""
        context_kv = self.self_attn.keys_values(context, context_rope) if isinstance(context, Tensor) else context
        x = x + self.self_attn(self.input_layernorm(x), rope, context_kv, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


# ---------------------------------------------------------------------------------------------------------------------
# Heads


class MarkovHead(nn.Module):
    """Bias of slot t's logits from the previous token p: W2 applied to a latent of size r.

    vanilla: W1[p].   gated: sigmoid(G [h ; W1[p]]) * W1[p].   rnn: with [gate, candidate, output] = J [s ; W1[p] ; h],
    s <- sigmoid(gate) s + (1 - sigmoid(gate)) tanh(candidate), latent tanh(output); s is zero at the block's start.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        V, r, H = config.vocab_size, config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(V, r)
        self.markov_w2 = nn.Linear(r, V, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(H + r, r)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(H + 2 * r, 3 * r)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot. previous: token ids [...]; hidden [..., H]; state [..., r] or None. Returns (latent [..., r],
        state)."""
        embedded = self.markov_w1(previous)
        if self.kind == "vanilla":
            return embedded, None
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), -1))) * embedded, None
        state = torch.zeros_like(embedded) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat((state, embedded, hidden), -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Teacher-forced latents of whole blocks: previous [..., K], hidden [..., K, H] -> [..., K, r]."""
        if self.kind != "rnn":
            return self.step(previous, hidden, None)[0]
        latents, state = [], None
        for t in range(previous.shape[-1]):
            latent, state = self.step(previous[..., t], hidden[..., t, :], state)
            latents.append(latent)
        return torch.stack(latents, -2)


class ConfidenceHead(nn.Module):
    """Logit of the probability that a slot is accepted, from [h ; W1[p]] or from h alone, in fp32 at least."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov and config.markov_rank > 0
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: Tensor, previous_embedding: Tensor | None) -> Tensor:
        x = torch.cat((hidden, previous_embedding), -1) if self.with_markov else hidden
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.proj.weight.to(wide), self.proj.bias.to(wide)).squeeze(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Anchors and labels


def sample_anchors(loss_mask: Tensor, num_anchors: int, seeds=None, lengths=None) -> tuple[Tensor, Tensor]:
    """Draw block anchors uniformly among positions whose token and whose first label are both supervised.

    loss_mask [B, S], nonzero where supervised. Returns anchors [B, N] (ascending, real ones first, dummies 0) and keep
    [B, N], N = the batch maximum of real anchors, at most num_anchors. Takes exactly one torch.rand(B, S-1) from the
    default generator, as DeepSpec does. With `seeds` and `lengths` (B ints each) every sample draws from a generator of
    its own over its true length: its anchors then depend on neither padding, batch, rank nor world size.
    """
    B, S = loss_mask.shape
    if seeds is None:
        noise = torch.rand(B, max(S - 1, 0), device=loss_mask.device)
    else:
        noise = torch.full((B, max(S - 1, 0)), 2.0)
        for row, seed, length in zip(noise, seeds, lengths, strict=True):
            row[:length - 1] = torch.rand(length - 1, generator=torch.Generator().manual_seed(seed))
        noise = noise.to(loss_mask.device)
    candidate = (loss_mask[:, :-1] != 0) & (loss_mask[:, 1:] != 0)                            # [B, S-1]
    counts = candidate.sum(1).clamp(max=num_anchors)
    width = int(counts.max())
    chosen = noise.masked_fill(~candidate, 2.0).argsort(1)[:, :width]
    keep = torch.arange(width, device=counts.device) < counts[:, None]
    chosen = chosen.masked_fill(~keep, S).sort(1).values                                      # dummies last
    return chosen.masked_fill(~keep, 0), keep


@dataclass
class Supervision:
    """Labels and weights of all blocks; the label convention of this project is the four lines of `build`."""
    labels: Tensor                               # [B, N, K] token a+t+1
    previous: Tensor                             # [B, N, K] token a+t
    source: Tensor                               # [B, N, K] position a+t, where the teacher's final state lies
    valid: Tensor                                # [B, N, K]
    weight: Tensor                               # [B, N, K] valid * exp(-t / gamma), fp32

    @classmethod
    def build(cls, input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, keep: Tensor, K: int, gamma: float):
        S = input_ids.shape[1]
        slots = torch.arange(K, device=input_ids.device)
        position = anchors[..., None] + slots                                                 # [B, N, K] = a+t
        source, target = position.clamp(max=S - 1), (position + 1).clamp(max=S - 1)
        pick = lambda table, index: table.gather(1, index.flatten(1)).view_as(index)          # noqa: E731
        supervised = (position + 1 < S) & (pick(loss_mask, target) != 0) & keep[..., None]
        valid = supervised.long().cumprod(-1).bool()
        decay = torch.exp(-slots.to(torch.float64) / gamma).float()
        return cls(pick(input_ids, target), pick(input_ids, source), source, valid, valid * decay)


# ---------------------------------------------------------------------------------------------------------------------
# The draft


class DSparkDraft(nn.Module):
    """The draft model. Trainable tensors only: the target's embedding and lm_head are attached by reference, never
    registered."""
    config_class, layer_class = DSparkConfig, Layer                  # dflash2.py has others

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.config = config
        H = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * H, H, bias=False)
        self.hidden_norm = nn.RMSNorm(H, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(H, eps=config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
        self.chunk_blocks: int | None = None
        self.ce_weight, self.l1_weight, self.confidence_weight, self.gamma = 0.1, 0.9, 1.0, 4.0
        self.complaints: list[tuple[list[int], str]] = []     # non-finite forwards: (batch rows, why), for the loop
        self._frozen: list[nn.Module] = []       # [embedding, lm_head]; a list hides them from nn.Module

    def configure_objective(self, recipe) -> "DSparkDraft":
        self.ce_weight, self.l1_weight = recipe.ce_weight, recipe.l1_weight
        self.confidence_weight, self.gamma = recipe.confidence_weight, recipe.loss_decay_gamma
        return self

    # -- frozen parts and files

    def attach(self, embed_tokens: nn.Module, lm_head: nn.Linear) -> "DSparkDraft":
        """Share the target's embedding and head. Raises ValueError when they do not fit the draft."""
        want = (self.config.vocab_size, self.config.hidden_size)
        for name, module in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
            if tuple(module.weight.shape) != want:
                raise ValueError(f"the target's {name} is {tuple(module.weight.shape)}, the draft expects {want} "
                                 "(vocabulary, hidden): this draft belongs to another target")
        self._frozen = [embed_tokens, lm_head]
        return self

    def _apply(self, fn, recurse=True):
        """`.to`, `.double` and the like reach embedding and head too, on copies: the target's own stay as they are."""
        super()._apply(fn, recurse)
        for i, module in enumerate(self._frozen):
            weight, converted = module.weight, fn(module.weight.data[:0])
            if (converted.dtype, converted.device) != (weight.dtype, weight.device):
                self._frozen[i] = copy.deepcopy(module)._apply(fn)
        return self

    @property
    def attached(self) -> bool:
        return bool(self._frozen)

    @property
    def embed_tokens(self) -> nn.Module:
        return self._borrowed()[0]

    @property
    def lm_head(self) -> nn.Linear:
        return self._borrowed()[1]

    def _borrowed(self) -> list[nn.Module]:
        if not self._frozen:
            raise RuntimeError("the draft has no embedding and head: its checkpoint holds none, call "
                               "draft.attach(target.embed_tokens, target.lm_head) first")
        return self._frozen

    @classmethod
    def from_pretrained(cls, folder: str | Path, dtype: torch.dtype | None = None, device="cpu") -> "DSparkDraft":
        """Load a checkpoint strictly. dtype None keeps the file's. Embedding and head are taken from it when it has
        them."""
        from layouts import load_draft
        return load_draft(cls, folder, dtype, device)

    def load_tensors(self, tensors: dict[str, Tensor], where: str = "checkpoint") -> None:
        """Copy tensors in by name. Raises ValueError naming every missing, unknown or wrongly shaped one; nothing is
        partial."""
        from layouts import tensor_problems
        problems = tensor_problems(self.state_dict(), tensors)
        if problems:
            raise ValueError(f"{where} does not fit this draft ({len(problems)} problems): " + "; ".join(problems[:8])
                             + (" ..." if len(problems) > 8 else ""))
        self.load_state_dict(tensors, assign=self.fc.weight.is_meta)

    # -- decoding, a slot at a time

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V], before anything is known about the token in front."""
        return self.lm_head(hidden)

    def corrected(self, logits: Tensor, hidden: Tensor, previous: Tensor, state=None) -> tuple[Tensor, Tensor | None]:
        """Logits [..., V] of one slot, from hidden [..., H], given the token before it [...]; and the state of the rnn
        head, None at the block's start."""
        if self.markov_head is None:
            return logits, None
        latent, state = self.markov_head.step(previous, hidden, state)
        return logits + self.markov_head.markov_w2(latent), state

    # -- forward passes

    def context(self, captured: Tensor) -> Tensor:
        """[B, S, k*H] captured layers -> [B, S, H] context: projected and normalised once."""
        return self.hidden_norm(self.fc(captured))

    def embed(self, ids: Tensor) -> Tensor:
        """Block rows' token ids -> embeddings [..., H], in the draft's dtype."""
        return self.embed_tokens(ids).to(self.fc.weight.dtype)

    def block_rows(self, input_ids: Tensor, anchors: Tensor) -> Tensor:
        """Token ids of the block rows [B, N, K]: the anchor's token, then masks."""
        rows = input_ids.new_full((*anchors.shape, self.config.block_size), self.config.mask_token_id)
        rows[..., 0] = input_ids.gather(1, anchors)
        return rows

    def backbone(self, input_ids: Tensor, captured: Tensor, anchors: Tensor, keep: Tensor) -> Tensor:
        """Hidden rows of all blocks [B, N, K, H], after the final norm."""
        c, S, K = self.config, input_ids.shape[1], self.config.block_size
        dtype = self.fc.weight.dtype
        positions = (anchors[..., None] + torch.arange(K, device=anchors.device)).flatten(1)  # [B, N*K]
        rope = rope_tables(positions, c.head_dim, c.rope_theta, dtype)
        context_rope = rope_tables(torch.arange(S, device=anchors.device), c.head_dim, c.rope_theta, dtype)
        x = self.embed(self.block_rows(input_ids, anchors)).flatten(1, 2)                     # [B, N*K, H]
        context, visible = self.context(captured.to(dtype)), Visibility(anchors, keep, S, K)
        for layer in self.layers:
            x = layer(x, rope, context, context_rope, visible)
        return self.norm(x).unflatten(1, (-1, K))

    def session(self, slots: int = 1):
        """Decoding state of `slots` sequences (decode.py)."""
        from decode import DraftSession
        return DraftSession(self, slots)

    def forward(self, input_ids: Tensor, context: Tensor, loss_mask: Tensor, final: Tensor | None = None, *,
                seeds=None, lengths=None) -> tuple[Tensor, dict[str, Tensor]]:
        """One training forward over the blocks of a batch.

        input_ids, loss_mask [B, S]; context [B, S, k*H] captured layers; final [B, S, H] the target's post-norm final
        state (None only when l1_weight and the confidence loss are off); seeds, lengths: see sample_anchors. Returns
        (loss, metrics): the loss is this rank's share times the world size, so that averaged gradients are those of
        the global mean; metrics are global, detached scalars.
        """
        if final is None and (self.l1_weight or (self.confidence_head and self.confidence_weight)):
            raise ValueError("the target's final state is needed unless l1_weight and the confidence loss are 0")
        shape, H = tuple(input_ids.shape), self.config.hidden_size
        for name, x, want in (("loss_mask", loss_mask, shape), ("final", final, (*shape, H)),
                              ("context", context, (*shape, self.fc.in_features))):
            if x is not None and tuple(x.shape) != want:
                raise ValueError(f"{name} is {tuple(x.shape)}, this draft expects {want} for input_ids {shape}: "
                                 f"layers {list(self.config.target_layer_ids)} of a target of hidden size {H}")
        loss_mask, context, final, dropped = drop_nonfinite(loss_mask, context, final)
        anchors, keep = sample_anchors(loss_mask, self.config.num_anchors, seeds, lengths)
        if anchors.shape[1] == 0:                # no supervision: one dummy block keeps the ranks' collectives matched
            anchors, keep = (x.new_zeros(x.shape[0], 1) for x in (anchors, keep))
        sup = Supervision.build(input_ids, loss_mask, anchors, keep, self.config.slots, self.gamma)
        denominator = global_sum(sup.weight.sum()) + 1e-6
        hidden = self.backbone(input_ids, context, anchors, keep)[:, :, -self.config.slots:]  # [B, N, slots, H]
        return self.objective(hidden, final, sup, denominator, dropped)

    def objective(self, hidden: Tensor, final: Tensor | None, sup: Supervision, denominator: Tensor,
                  dropped: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """0.1 CE + 0.9 L1 + 1.0 confidence over valid slots, each a weighted mean over all ranks, and the metrics."""
        latent = self.markov_head(sup.previous, hidden) if self.markov_head else None
        w2 = self.markov_head.markov_w2.weight if self.markov_head else None
        if final is not None:
            final = final.to(hidden.dtype)
        teacher = final if self.l1_weight or self.confidence_head else None
        args = (hidden, latent, w2, self.lm_head, teacher, sup, self.ce_weight / denominator,
                self.l1_weight / denominator)
        terms = (vocabulary_terms_full(*args) if self.chunk_blocks == 0 else
                 vocabulary_terms_chunked(*args, self.chunk_blocks))
        accept = (1 - terms.l1 / 2).clamp(0, 1)                                               # c*, detached
        loss, v, w, logit, bce = terms.loss, sup.valid, sup.weight, None, torch.zeros_like(terms.ce)
        sums = {"ce_loss": (w * terms.ce).sum(), "l1_loss": (w * terms.l1).sum(), "weight": w.sum(),
                "tau": (1 + (accept * v).cumprod(-1).sum(-1))[v[..., 0]].sum(), "blocks": v[..., 0].sum(),
                "agree": (terms.agree & v).sum(), "valid": v.sum(), "nonfinite_tokens": dropped}
        for t, (accepted, proposed) in enumerate(zip((v * accept).sum((0, 1)), v.sum((0, 1)), strict=True)):
            sums |= {f"accepted@{t}": accepted, f"proposed@{t}": proposed}
        if self.confidence_head:
            embedded = self.markov_head.markov_w1(sup.previous) if self.confidence_head.with_markov else None
            logit = self.confidence_head(hidden, embedded)
            bce = w * F.binary_cross_entropy_with_logits(logit, accept.to(logit.dtype), reduction="none")
            loss = loss + self.confidence_weight * bce.sum() / denominator
            c = torch.sigmoid(logit.detach())
            drift = (v * c).cumprod(-1) - (v * accept).cumprod(-1)
            sums |= {"confidence_loss": bce.detach().sum(), "confidence_abs_error": (w * (c - accept).abs()).sum(),
                     "confidence_bias": (w * (c - accept)).sum(), "confidence_cumprod_bias": (w * drift).sum()}
        loss = self.checked(loss, {"ce": terms.ce, "l1": terms.l1, "confidence": bce}, sup, denominator, {
            "hidden": hidden, "markov latent": latent, "confidence logit": logit, "final": final})
        return loss, self.metrics(sums)

    def checked(self, loss: Tensor, numerators: dict[str, Tensor], sup: Supervision, denominator: Tensor,
                inputs: dict[str, Tensor | None]) -> Tensor:
        """The loss times the world size. If it is not finite, who was to blame is noted in `complaints`: the loop skips
        the step on all ranks and prints it."""
        if not torch.isfinite(loss):
            weights = {name: p for name, p in self.named_parameters() if not isinstance(p, DTensor)}
            self.complaints.append(explain_nonfinite(
                {name: torch.where(sup.valid, term, 0) for name, term in numerators.items()}, denominator, inputs | {
                    "lm_head.weight": self.lm_head.weight, "lm_head.bias": self.lm_head.bias} | weights))
        return loss * (dist.get_world_size() if dist.is_initialized() else 1)

    def metrics(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Global metrics from this rank's sums: one all-reduce, fresh detached tensors."""
        s = dict(zip(sums, global_sum(torch.stack([x.detach().double() for x in sums.values()])), strict=True))
        weighted = s["weight"] + 1e-6
        result = {k: s[k] / weighted for k in ("ce_loss", "l1_loss", "confidence_loss", "confidence_abs_error",
                                               "confidence_bias", "confidence_cumprod_bias") if k in s}
        result |= {"tau_probabilistic": s["tau"] / s["blocks"].clamp(min=1),
                   "agree": s["agree"] / s["valid"].clamp(min=1)}
        result |= {f"accept_rate@{t}": s[f"accepted@{t}"] / s[f"proposed@{t}"].clamp(min=1)
                   for t in range(self.config.slots)}
        return result | {"nonfinite_tokens": s["nonfinite_tokens"], "blocks": s["blocks"]}


def frozen_linear(weight: Tensor) -> nn.Linear:
    """A bias-free linear layer around an existing tensor, without a copy and without gradient."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
