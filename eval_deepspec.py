"""Accept length, measured as DeepSpec measures it: propose, verify, accept, commit.

`speculative_decode` is the protocol, one prompt at a time; everything else in this file runs it over task files, sums
integers and writes them down. Only what this loop counts is called accept length. Randomness comes from the default
generator in a fixed order (K draft samples, one row of uniforms, the next token), so that equal seeds give equal
traces. Read next: dspark.py (the draft), capture.py (target sessions), data_glm.py (task files, stop ids).
"""
from dataclasses import dataclass, field

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5                              # temperatures below this mean one-hot argmax distributions


@dataclass
class Trace:
    """One decoded prompt. The three lists have one integer per proposal."""
    output_ids: list[int] = field(default_factory=list)          # prompt included
    acceptance_lengths: list[int] = field(default_factory=list)  # accepted drafts + 1; no + 1 when a stop ended it
    proposal_lengths: list[int] = field(default_factory=list)    # tokens proposed, cut at an accepted stop token
    accepted_draft_lengths: list[int] = field(default_factory=list)


def to_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / T) in the logits' dtype over the last axis; one-hot argmax when T is (almost) 0."""
    if temperature < GREEDY_BELOW:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.softmax(logits / temperature, -1)


def sample(probabilities: Tensor) -> Tensor:
    """One token id per row: [n, V] -> [n]."""
    return torch.multinomial(probabilities, 1).squeeze(-1)


@dataclass
class Proposal:
    tokens: Tensor                               # [1, n] drafted ids, n <= K after the confidence cut
    probabilities: Tensor                        # [n, V] of the corrected logits at the temperature
    confidence: Tensor | None = None             # [K] sigmoid of the confidence head, before the cut


def propose(draft, session, last_token: Tensor, temperature: float, threshold: float) -> Proposal:
    """Draft one block behind last_token [1, 1]: one backbone pass, then the Markov walk from left to right.

    All K slots are sampled; a positive threshold cuts the proposal before the first slot whose confidence is below it.
    """
    hidden = session.block(last_token)                                                        # [1, K, H]
    base, K = draft.lm_head(hidden[0]), hidden.shape[1]                                       # [K, V]
    tokens, rows, logits_c, state, previous = [], [], [], None, last_token[0]
    for t in range(K):
        logits, embedded = base[t:t + 1], None
        if draft.markov_head is not None:
            latent, state = draft.markov_head.step(previous, hidden[:, t], state)
            logits = logits + draft.markov_head.markov_w2(latent)
        if threshold > 0:
            if draft.confidence_head.with_markov:
                embedded = draft.markov_head.markov_w1(previous)
            logits_c.append(draft.confidence_head(hidden[:, t], embedded))
        rows.append(to_probabilities(logits, temperature))
        previous = sample(rows[-1])
        tokens.append(previous)
    n, confidence = K, None
    if threshold > 0:
        confidence = torch.sigmoid(torch.cat(logits_c))                                       # [K]
        low = (confidence < threshold).nonzero()
        n = int(low[0]) if len(low) else K
    return Proposal(torch.stack(tokens, 1)[:, :n], torch.cat(rows)[:n], confidence)


def accept(proposal: Proposal, q: Tensor, stops: set[int]) -> tuple[int, bool, Tensor]:
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
        keep = torch.rand(1, n, device=q.device) < ratio.clamp(max=1).T                       # [1, n]
        accepted = int(keep.long().cumprod(1).sum())
    row = q[accepted]
    if accepted < n:
        residual = (row - proposal.probabilities[accepted].to(q.dtype)).clamp(min=0)
        mass = residual.sum()
        row = residual / mass if mass > 1e-8 else row
    next_token = sample(row[None])
    stop = next((i for i, token in enumerate(proposal.tokens[0, :accepted].tolist()) if token in stops), None)
    return (accepted, False, next_token) if stop is None else (stop + 1, True, next_token)


@torch.inference_mode()
def speculative_decode(target, draft, input_ids: Tensor, *, max_new_tokens: int, temperature: float,
                       stop_token_ids: list[int] | None, confidence_threshold: float = 0.0, on_step=None) -> Trace:
    """Decode one prompt speculatively and count. input_ids [1, S]; stop_token_ids None: nothing stops but the length.

    Raises ValueError, before any compute, for a draft that does not fit the target, an empty prompt, ids outside the
    vocabulary or a negative temperature. Protocol: DeepSpec's evaluation; each step is described in the functions
    above. on_step(trace) is called after each proposal.
    """
    check_pair(target, draft)
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be [1, S] with S >= 1, got {tuple(input_ids.shape)}: "
                         "the prompt is empty or batched")
    if not 0 <= int(input_ids.min()) <= int(input_ids.max()) < target.vocab_size:
        raise ValueError(f"the prompt holds ids from {int(input_ids.min())} to {int(input_ids.max())}, the vocabulary "
                         f"has {target.vocab_size}: it was encoded by another tokenizer")
    if not 0 <= temperature < float("inf"):      # also refuses NaN
        raise ValueError(f"temperature must be at least 0 (greedy decoding) and finite, got {temperature}")
    if confidence_threshold > 0 and draft.confidence_head is None:
        raise ValueError("a confidence threshold needs a draft with a confidence head; this one has none")
    stops, trace = set(stop_token_ids or ()), Trace()
    ids, prompt = input_ids[0].tolist(), input_ids.shape[1]
    with target.session() as session:
        drafting = draft.session()
        seen = session.extend(input_ids)
        last = sample(to_probabilities(target.lm_head(seen.final[:, -1]).float(), temperature))     # [1]
        ids.append(int(last))
        drafting.extend(seen.context)
        start, done = prompt, int(last) in stops
        while not done and start - prompt < max_new_tokens:
            proposal = propose(draft, drafting, last[None], temperature, confidence_threshold)
            seen = session.extend(torch.cat((last[None], proposal.tokens), 1))
            q = to_probabilities(target.lm_head(seen.final[0]).float(), temperature)                # [n + 1, V]
            accepted, stopped, last = accept(proposal, q, stops)
            length = accepted if stopped else accepted + 1
            trace.acceptance_lengths.append(length)
            trace.proposal_lengths.append(accepted if stopped else proposal.tokens.shape[1])
            trace.accepted_draft_lengths.append(accepted)
            ids += proposal.tokens[0, :accepted].tolist()
            if not stopped:
                ids.append(int(last))
            start += length
            session.rollback(start)
            drafting.extend(seen.context[:, :length])
            done = stopped or int(last) in stops
            if on_step:
                on_step(trace)
    generated = ids[prompt:prompt + max_new_tokens]
    end = next((i + 1 for i, token in enumerate(generated) if token in stops), len(generated))
    trace.output_ids = ids[:prompt] + generated[:end]
    return trace


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


def acceptance_metrics(traces: list[Trace], block_size: int) -> dict:
    """The numbers of a task from integer sums over all proposals; see the names' definitions in the README."""
    accepted = [n for t in traces for n in t.acceptance_lengths]
    proposed = [n for t in traces for n in t.proposal_lengths]
    drafted = [n for t in traces for n in t.accepted_draft_lengths]
    proposals, total = len(accepted), sum(accepted)
    rate = [sum(n > k for n in drafted) / max(sum(n > k for n in proposed), 1) for k in range(block_size)]
    return {"num_samples": len(traces), "num_proposals": proposals, "accept_len": total / max(proposals, 1),
            "draft_tokens_per_proposal": sum(proposed) / max(proposals, 1),
            "verify_rate": total / max(sum(proposed) + proposals, 1), "accept_rate": rate}
