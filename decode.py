"""Speculative decoding, DeepSpec's protocol: propose, verify, accept, commit.

`speculative_decode` decodes one prompt, `decode` many, several at a time. Randomness has a fixed order (K draft
samples, one row of uniforms, the next token), so that equal seeds give equal traces; with `decode` every prompt draws
from a generator of its own. On a CPU sessions compute each row as if it were alone, so a trace does not depend on what
it was batched with; elsewhere, or with cut proposals, it may at near ties, which every trace counts. Read next:
dspark.py (the draft), capture.py (target sessions), eval_deepspec.py (this over task files).
"""
import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import rope_tables

GREEDY_BELOW = 1e-5                              # temperatures below this take the argmax; nothing is drawn then
NEAR_TIE = 2e-4                                  # logits this close, or scores by this share, may swap by rounding


@dataclass
class Trace:
    """One decoded prompt. The three lists have one integer per proposal."""
    output_ids: list[int] = field(default_factory=list)          # prompt included
    acceptance_lengths: list[int] = field(default_factory=list)  # accepted drafts + 1; no + 1 when a stop ended it
    proposal_lengths: list[int] = field(default_factory=list)    # tokens proposed, cut at an accepted stop token
    accepted_draft_lengths: list[int] = field(default_factory=list)

    def __post_init__(self):                     # beside the protocol's lists
        self.confidence_logits: list[list[float]] = []           # per proposal, of all K slots
        self.near_ties = 0                       # decisions that rounding could have turned


class Clock:
    """Where the time goes: `lap` charges the seconds since the last lap to a phase."""

    def __init__(self):
        self.seconds, self.last = {}, time.perf_counter()

    def lap(self, phase: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


def to_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / T) in the logits' dtype over the last axis."""
    return torch.softmax(logits / temperature, -1)


def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy ids [...] of logits [..., V], and whether another token comes so near that rounding could prefer it."""
    ids = logits.argmax(-1)
    best = logits.gather(-1, ids[..., None])
    return ids, (logits >= best - NEAR_TIE).sum(-1) > 1


def sample(probabilities: Tensor, generators) -> tuple[Tensor, Tensor]:
    """One id per row of [B, V], and whether it was a near tie. Each row draws from its own generator (None: the default
    one) exactly what torch.multinomial(row, 1) draws: the largest of probability / exponential noise."""
    noise = torch.empty_like(probabilities)
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)
    scores = probabilities / noise
    ids = scores.argmax(-1)
    best = scores.gather(-1, ids[..., None])
    return ids, (scores >= best * (1 - NEAR_TIE)).sum(-1) > 1


@dataclass
class Proposal:
    tokens: Tensor                               # [1, n] drafted ids, n <= K after the confidence cut
    probabilities: Tensor | None                 # [n, V] of the corrected logits at the temperature; None when greedy
    confidence_logits: list[float] = field(default_factory=list)     # [K] of the confidence head, before the cut
    near_ties: int = 0


def propose(draft, session, last: Tensor, temperature: float, threshold: float, generators=(None,),
            confidence_temperatures=None, lap=lambda phase: None) -> list[Proposal]:
    """Draft a block behind the last token of each row [B, 1]: one backbone pass, then a walk from left to right.

    All K slots are sampled; a positive threshold cuts a proposal before the first slot whose confidence (its logit
    divided by that slot's temperature, if there are any) is below it.
    """
    hidden = session.block(last)[:, -draft.config.slots:]                                     # [B, K, H]
    lap("draft")
    path, near, probabilities = walk(draft, hidden, last[:, 0], temperature, generators)
    B, tokens = len(path), path[:, 1:]
    confidence, lengths = [[]] * B, [tokens.shape[1]] * B
    if draft.confidence_head is not None:
        embedded = draft.markov_head.markov_w1(path[:, :-1]) if draft.confidence_head.with_markov else [None] * B
        logits = torch.stack([draft.confidence_head(h, e) for h, e in zip(hidden, embedded, strict=True)])    # [B, K]
        confidence = logits.tolist()
        if threshold > 0:
            scale = 1.0 if confidence_temperatures is None else torch.tensor(confidence_temperatures).to(logits)
            kept = torch.sigmoid(logits / scale) >= threshold
            lengths = kept.long().cumprod(1).sum(1).tolist()
    return [Proposal(tokens[b:b + 1, :n], None if probabilities is None else probabilities[b, :n], confidence[b], ties)
            for b, (n, ties) in enumerate(zip(lengths, near.tolist(), strict=True))]


def walk(draft, hidden: Tensor, last: Tensor, temperature: float, generators):
    """From left to right over the slots' rows [B, K, H] behind last [B]: last and the drafted tokens [B, 1 + K], near
    ties [B], and the probabilities [B, K, V] that were drawn from, None when greedy."""
    B, K, _ = hidden.shape
    base = draft.logits(hidden.transpose(0, 1).flatten(0, 1)).unflatten(0, (K, B))            # [K, B, V]
    path, rows, near, state = [last], [], torch.zeros_like(last), None
    for t in range(K):
        logits, state = draft.corrected(base[t], hidden[:, t], path[-1], state)
        if temperature < GREEDY_BELOW:
            token, close = choose(logits)
        else:
            rows.append(to_probabilities(logits, temperature))
            token, close = sample(rows[-1], generators)
        path.append(token)
        near = near + close
    return torch.stack(path, 1), near, torch.stack(rows, 1) if rows else None


def accept(proposal: Proposal, q: Tensor, stops: set[int], generator: torch.Generator | None = None):
    """Rejection sampling. q [n + 1, V]: the target's fp32 probabilities after the last token and after each drafted
    one.

    Returns (accepted drafted tokens, whether a stop token is among them, next token [1]). The next token is drawn in
    every case, so that the random stream does not depend on stops.
    """
    n = proposal.tokens.shape[1]
    accepted = 0
    if n:
        at = proposal.tokens[0, :, None]
        ratio = q[:n].gather(1, at) / proposal.probabilities.gather(1, at).to(q.dtype).clamp(min=1e-8)
        draws = torch.rand(1, n, device=q.device, generator=generator)
        keep = draws < ratio.clamp(max=1).T                                                   # [1, n]
        accepted = int(keep.long().cumprod(1).sum())
        proposal.near_ties += int(((draws - ratio.T).abs() < NEAR_TIE * ratio.T)[:, :accepted + 1].sum())
    row = q[accepted]
    if accepted < n:
        residual = (row - proposal.probabilities[accepted].to(q.dtype)).clamp(min=0)
        mass = residual.sum()
        row = residual / mass if mass > 1e-8 else row
    next_token, close = sample(row[None], [generator])
    proposal.near_ties += int(close)
    return *end_at_stop(proposal.tokens[0].tolist(), accepted, stops), next_token


def accept_greedy(proposal: Proposal, best: list[int], close: list[bool], stops: set[int]):
    """The same at temperature 0, where nothing is random: best [n + 1] are the target's own tokens."""
    tokens, accepted = proposal.tokens[0].tolist(), 0
    while accepted < len(tokens) and tokens[accepted] == best[accepted]:
        accepted += 1
    proposal.near_ties += sum(close[:accepted + 1])
    return *end_at_stop(tokens, accepted, stops), best[accepted]


def end_at_stop(tokens: list[int], accepted: int, stops: set[int]) -> tuple[int, bool]:
    """(accepted drafted tokens, False), or, if one of them is a stop token, (those up to it, True)."""
    stop = next((i for i, token in enumerate(tokens[:accepted]) if token in stops), None)
    return (accepted, False) if stop is None else (stop + 1, True)


class DraftSession:
    """Decoding state of one sequence or (slots > 1) many: per layer the keys and values of the committed context, at
    their absolute positions. With many slots the session is empty at first: `admit` adds a row, `drop` removes one."""

    def __init__(self, draft, slots: int = 1, room: int = 512):
        from kvcache import SlotCache, pack_linears  # not above: transformers comes after targets.py, for torchvision
        pack_linears(draft)
        pack_linears(draft.lm_head)
        self.draft, self.cache = draft, SlotCache(len(draft.layers), slots, room, draft.fc.weight.device)
        self.cache.use(0, slots if slots == 1 else 0)

    @property
    def length(self) -> int:
        return self.cache.longest

    def _rope(self, n: int) -> tuple[Tensor, Tensor]:
        c = self.draft.config
        return rope_tables(self.cache.positions(n), c.head_dim, c.rope_theta, self.draft.fc.weight.dtype)

    def extend(self, captured: Tensor, counts: list[int] | None = None) -> None:
        """Append captured layers [B, n, k*H] of newly committed tokens: all n of every row, or counts[b] of row b."""
        n = captured.shape[1]
        self.cache = self.cache.with_room(n)
        context, rope = self.draft.context(captured.to(self.draft.fc.weight.dtype)), self._rope(n)
        for layer, memory in zip(self.draft.layers, self.cache.layers, strict=True):
            memory.update(*layer.self_attn.keys_values(context, rope))
        self.cache.advance(counts or n)

    def admit(self, captured: Tensor) -> None:
        """A new row whose context begins with captured [1, n, k*H]."""
        row = self.cache.new_row()
        self.extend(captured)
        self.cache.use(0, row + 1)

    def drop(self, row: int) -> None:
        self.cache.drop_row(row)

    def block(self, last_token: Tensor) -> Tensor:
        """Hidden rows [B, K, H] of the blocks that start behind each row's context with last_token [B, 1]; leaves no
        trace."""
        c, cache, K = self.draft.config, self.cache, self.draft.config.block_size
        lengths, rope = cache.lengths[cache.first:cache.last], self._rope(K)
        ids = self.draft.block_rows(last_token, torch.zeros_like(last_token))[:, 0]           # [B, K]
        x = self.draft.embed(ids)
        for i, (layer, memory) in enumerate(zip(self.draft.layers, cache.layers, strict=True)):
            visible = [(n, self._window_mask(n, c.window(i))) for n in lengths]
            x = layer(x, rope, memory.stored(), None, visible)
        return self.draft.norm(x)

    def _window_mask(self, length: int, window: int | None) -> Tensor | None:
        if window is None:
            return None
        at = torch.arange(length + self.draft.config.block_size, device=self.cache.device)
        return (at[length:, None] - at < window) | (at >= length)


class NoDraft:
    """A draft that proposes nothing: with it the loop below is plain decoding, one token per step."""
    attached, confidence_head = True, None

    def __init__(self, target):
        self.config = SimpleNamespace(vocab_size=target.vocab_size, hidden_size=target.hidden_size,
                                      target_layer_ids=target.layer_ids, slots=1)

    def session(self, slots: int = 1) -> "NoDraft":
        return self

    def extend(self, captured: Tensor, counts=None) -> None:
        pass

    admit = drop = extend

    def block(self, last: Tensor) -> Tensor:
        return last.new_zeros(len(last), 0, 1)   # no rows, hence no slots

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@dataclass
class Row:
    """A prompt that is being decoded."""
    index: int
    ids: list[int]                               # prompt and committed tokens, the last one not yet verified
    prompt: int                                  # its length
    generator: torch.Generator | None
    trace: Trace = field(default_factory=Trace)


def speculative_decode(target, draft, input_ids: Tensor, **settings) -> Trace:
    """Decode one prompt [1, S] speculatively and count; keywords and errors of `decode`.

    Randomness comes from the target device's default generator.
    """
    [(_, trace)] = decode(target, draft, [input_ids], **settings)
    return trace


@torch.inference_mode()
def decode(target, draft, prompts: list[Tensor], *, max_new_tokens: int, temperature: float,
           stop_token_ids: list[int] | None, confidence_threshold: float = 0.0, confidence_temperatures=None,
           slots: int = 1, seeds: list[int] | None = None, clock: Clock | None = None):
    """Decode prompts [1, S] speculatively, `slots` at a time; yields (index, Trace) as they finish.

    stop_token_ids None: nothing stops but the length. Every prompt has a random stream of its own, seeded by its seed,
    a key/value length and an accept length of its own; a finished one makes room for the next. Raises ValueError,
    before any compute, for a draft that does not fit the target, an empty prompt, ids outside the vocabulary or a
    negative temperature. Protocol: DeepSpec's evaluation; each step is described in the functions above.
    """
    check_pair(target, draft)
    for input_ids in prompts:
        check_prompt(input_ids, target.vocab_size)
    if not 0 <= temperature < float("inf"):      # also refuses NaN
        raise ValueError(f"temperature must be at least 0 (greedy decoding) and finite, got {temperature}")
    if confidence_threshold > 0 and draft.confidence_head is None:
        raise ValueError("a confidence threshold needs a draft with a confidence head; this one has none")
    settings = (max_new_tokens, temperature, set(stop_token_ids or ()), confidence_threshold, confidence_temperatures)
    rows = deque(Row(i, ids[0].tolist(), ids.shape[1],
                     torch.Generator(ids.device).manual_seed(seeds[i]) if seeds else None)
                 for i, ids in enumerate(prompts))
    for group in [rows] if slots > 1 else [deque([row]) for row in rows]:
        with target.session(slots) as session:
            yield from decode_rows(target, draft, session, draft.session(slots), group, slots, *settings, clock)


def decode_rows(target, draft, session, drafting, waiting: deque, slots: int, max_new_tokens: int, temperature: float,
                stops: set[int], threshold: float, confidence_temperatures, clock: Clock | None):
    """The loop: fill free slots, propose, verify, accept, commit, hand over what is finished."""
    greedy, rows, many, device = temperature < GREEDY_BELOW, [], slots > 1, target.embed_tokens.weight.device
    lap = clock.lap if clock else lambda phase: None
    while waiting or rows:
        while waiting and len(rows) < slots:
            row = waiting.popleft()
            ids = torch.tensor([row.ids], device=device)
            seen = session.admit(ids) if many else session.extend(ids)
            (drafting.admit if many else drafting.extend)(seen.context)
            logits = target.lm_head(seen.final[:, -1]).float()
            last, close = choose(logits) if greedy else sample(to_probabilities(logits, temperature), [row.generator])
            row.trace.near_ties += int(close)
            row.ids.append(int(last))
            rows.append(row)
            lap("prefill")
        for i, row in reversed(list(enumerate(rows))):
            if row.ids[-1] in stops or len(row.ids) > row.prompt + max_new_tokens:
                row.trace.output_ids = row.ids[:row.prompt + max_new_tokens]
                yield row.index, row.trace
                rows[i] = rows[-1]
                rows.pop()
                if many:
                    session.drop(i)
                    drafting.drop(i)
        if not rows or waiting and len(rows) < slots:
            continue
        lap("bookkeeping")
        last = torch.tensor([row.ids[-1:] for row in rows], device=device)
        proposals = propose(draft, drafting, last, temperature, threshold, [row.generator for row in rows],
                            confidence_temperatures, lap)
        lap("walk")
        width = max(p.tokens.shape[1] for p in proposals)
        tokens = torch.cat([F.pad(p.tokens, (0, width - p.tokens.shape[1])) for p in proposals])
        seen = session.extend(torch.cat((last, tokens), 1))
        logits = target.lm_head(seen.final).float()                                           # [B, n + 1, V]
        if greedy:
            best, close = (x.tolist() for x in choose(logits))
        else:
            q = to_probabilities(logits, temperature)
        lap("verify")
        lengths = []
        for b, (row, proposal) in enumerate(zip(rows, proposals, strict=True)):
            n = proposal.tokens.shape[1]
            if greedy:
                accepted, stopped, last = accept_greedy(proposal, best[b][:n + 1], close[b], stops)
            else:
                accepted, stopped, last = accept(proposal, q[b, :n + 1], stops, row.generator)
            length = accepted if stopped else accepted + 1
            row.trace.acceptance_lengths.append(length)
            row.trace.proposal_lengths.append(accepted if stopped else n)
            row.trace.accepted_draft_lengths.append(accepted)
            row.trace.confidence_logits.append(proposal.confidence_logits)
            row.trace.near_ties += proposal.near_ties
            row.ids += proposal.tokens[0, :accepted].tolist()
            if not stopped:
                row.ids.append(int(last))
            lengths.append(length)
        starts = [len(row.ids) - 1 for row in rows]
        session.rollback(starts if many else starts[0])
        drafting.extend(seen.context[:, :max(lengths)], lengths)
        lap("bookkeeping")


def check_prompt(input_ids: Tensor, vocab_size: int) -> None:
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be [1, S] with S >= 1, got {tuple(input_ids.shape)}: "
                         "the prompt is empty or batched")
    if not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocab_size:
        raise ValueError(f"the prompt holds ids from {int(input_ids.min())} to {int(input_ids.max())}, the vocabulary "
                         f"has {vocab_size}: it was encoded by another tokenizer")


def check_pair(target, draft) -> None:
    """A draft must fit its target: vocabulary, hidden size, layers. Attaches the target's embedding and head when it
    has none."""
    c = draft.config
    for name, want, have in (("vocabulary", c.vocab_size, target.vocab_size),
                             ("hidden size", c.hidden_size, target.hidden_size),
                             ("layer ids", tuple(c.target_layer_ids), tuple(target.layer_ids))):
        if want != have:
            raise ValueError(f"draft and target do not fit: the draft's {name} is {want}, the target's {have}")
    if not draft.attached:
        draft.attach(target.embed_tokens, target.lm_head)
