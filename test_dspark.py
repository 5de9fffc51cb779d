"""What makes a draft DSpark: model, anchors, objective and decoding, each against something independent.

Three kinds of evidence. Reference vectors (testdata/golden) are what DeepSpec itself computed. Oracles are loops
written from the formulas, one slot, row or head at a time, sharing no code with what they test. Laws hold whatever the
weights: nothing leaks, decoding is lossless, gradients are those of the loss. `python test_dspark.py mutate` asks
whether these tests would notice ten classic mistakes. Read next: dspark.py, eval_deepspec.py.
"""
import dataclasses
import functools
import json
import math
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from capture import Captured, HFTarget
from decode import DraftSession, Proposal, accept, speculative_decode
from dspark import DSparkConfig, DSparkDraft, Supervision, frozen_linear, sample_anchors
from eval_deepspec import acceptance_metrics

HERE = Path(__file__).parent
GOLDEN = HERE / "testdata" / "golden"
LOSS_CASES = sorted(GOLDEN.glob("loss_*.json")) + sorted(GOLDEN.glob("extra/loss_*.json"))
HEADS = ("none", "vanilla", "gated", "rnn")
SMALL = DSparkConfig(
    vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    intermediate_size=12, block_size=3, mask_token_id=10, target_layer_ids=(0, 2), num_target_layers=5,
    rope_theta=100.0, num_anchors=64)


def head_config(head: str) -> dict:
    """Config changes for a Markov head, with a confidence head that reads its embedding where there is one."""
    return {"markov_rank": 0 if head == "none" else 3, "markov_head_type": "vanilla" if head == "none" else head,
            "enable_confidence_head": True, "confidence_head_with_markov": head != "none"}


def make_draft(seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 0.5, config: DSparkConfig = SMALL,
               kind: type = DSparkDraft, **changes):
    """A draft with weights large enough that every part of it matters (at scale 0: as it comes from its
    initialisation), and an embedding and head of its own."""
    config = dataclasses.replace(config, **changes).validate()
    generator = torch.Generator().manual_seed(seed)
    draft = kind(config).to(dtype).eval()
    with torch.no_grad():
        for p in draft.parameters() if scale else ():
            p.copy_(scale * torch.randn(p.shape, generator=generator))
        for module in draft.modules() if scale else ():
            if isinstance(module, nn.RMSNorm):
                module.weight.add_(1)
    tables = torch.randn(2, config.vocab_size, config.hidden_size, generator=generator).to(dtype)
    return draft.attach(nn.Embedding.from_pretrained(tables[0]), frozen_linear(tables[1]))


def make_batch(draft: DSparkDraft, B: int, S: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random (input_ids, context, loss_mask, final); the mask has holes, so that blocks end early."""
    c, generator = draft.config, torch.Generator().manual_seed(seed)
    ids = torch.randint(c.vocab_size, (B, S), generator=generator)
    widths = [len(c.target_layer_ids) * c.hidden_size, c.hidden_size]
    states = torch.randn(B, S, sum(widths), generator=generator).to(draft.fc.weight.dtype)
    mask = (torch.rand(B, S, generator=generator) < 0.8).long()
    context, final = states.split(widths, -1)
    return ids, context, mask, final


# ---------------------------------------------------------------------------------------------------------------------
# Reference vectors


def load_json(path: Path):
    return json.loads(path.read_text())


@functools.cache
def golden_target(folder: Path, layer_ids: tuple[int, ...]) -> HFTarget:
    return HFTarget.from_pretrained(folder, layer_ids)


@functools.cache
def golden_case(path: Path) -> tuple[dict, dict[str, Tensor], Captured]:
    """(info, tensors, captured states) of a loss case; the states are recomputed, which is a test of capture.py."""
    info, tensors = load_json(path), load_file(path.with_suffix(".safetensors"))
    tensors = {k: v.long() if v.dtype == torch.int32 else v for k, v in tensors.items()}
    layer_ids = DSparkConfig.from_pretrained(path.parent / info["draft"]).target_layer_ids
    return info, tensors, golden_target(GOLDEN / "target", layer_ids).capture(tensors["input_ids"])


def test_no_reference_vector_is_lost():
    traces = [len(load_json(GOLDEN / folder / "eval_traces.json")) for folder in ("", "extra", "serve")]
    assert (len(load_json(GOLDEN / "anchors.json")), len(LOSS_CASES), traces) == (40, 30, [45, 40, 8])


@pytest.mark.parametrize("i", range(40))
def test_golden_anchors(i):
    case = load_json(GOLDEN / "anchors.json")[i]
    torch.manual_seed(case["seed"])
    anchors, keep = sample_anchors(torch.tensor(case["loss_mask"]), case["num_anchors"])
    assert keep.sum(1).tolist() == case["keep_counts"]
    assert [a[k].tolist() for a, k in zip(anchors, keep, strict=True)] == case["anchors"]
    assert anchors.shape[1] == max(case["keep_counts"]) and not anchors[~keep].any()


@pytest.mark.parametrize("chunk_blocks", [0, None, 3])
@pytest.mark.parametrize("path", LOSS_CASES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_golden_loss(path, chunk_blocks):
    info, t, captured = golden_case(path)
    draft = DSparkDraft.from_pretrained(path.parent / info["draft"])
    draft.chunk_blocks = chunk_blocks
    torch.manual_seed(info["anchor_seed"])
    anchors, keep = sample_anchors(t["loss_mask"], draft.config.num_anchors)
    n = anchors.shape[1]
    assert torch.equal(keep, t["keep"][:, :n]) and not t["keep"][:, n:].any()
    assert torch.equal(anchors[keep], t["anchors"][:, :n][keep])
    sup = Supervision.build(t["input_ids"], t["loss_mask"], anchors, keep, draft.config.block_size, 4.0)
    assert torch.equal(sup.valid, t["eval_mask"][:, :n])
    assert torch.equal(sup.labels[sup.valid], t["target_ids"][:, :n][sup.valid])

    torch.manual_seed(info["anchor_seed"])
    loss, metrics = draft(t["input_ids"], captured.context, t["loss_mask"], captured.final)
    loss.backward()
    assert abs(loss.item() - info["loss"]) <= 1e-5 * max(1, abs(info["loss"]))
    for name, value in info["metrics"].items():
        if name != "loss":
            assert abs(metrics[name].item() - value) <= 2e-5 * max(1, abs(value)), name
    for name, p in draft.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        want = t[f"grad.{name}"] * t[f"scale.{name}"] if f"grad.{name}" in t else torch.zeros_like(p)
        assert (grad - want).abs().max() <= 1e-4 * want.abs().max() + 1e-8, name


def trace_groups() -> list[tuple[str, str]]:
    return [(folder, draft) for folder in ("", "extra", "serve")
            for draft in sorted({case["draft"] for case in load_json(GOLDEN / folder / "eval_traces.json")})]


@pytest.mark.parametrize("folder, name", trace_groups(), ids=lambda x: x or "golden")
def test_golden_traces(folder, name):
    draft = DSparkDraft.from_pretrained(GOLDEN / folder / name)
    home = GOLDEN / folder / "target"
    target = golden_target(home if home.is_dir() else GOLDEN / "target", draft.config.target_layer_ids)
    for case in load_json(GOLDEN / folder / "eval_traces.json"):
        if case["draft"] != name:
            continue
        if case.get("run") != "second":          # a second run continues the random stream of the first
            torch.manual_seed(case["seed"])
        trace = speculative_decode(
            target, draft, torch.tensor([case["prompt_ids"]]), max_new_tokens=case["max_new_tokens"],
            temperature=case["temperature"], stop_token_ids=case["stop_token_ids"],
            confidence_threshold=case["confidence_threshold"])
        assert dataclasses.asdict(trace) == {k: case[k] for k in dataclasses.asdict(trace)}


# ---------------------------------------------------------------------------------------------------------------------
# The backbone against a loop


def naive_rows(draft: DSparkDraft, ids: Tensor, captured: Tensor, anchor: int, real: bool = True) -> Tensor:
    """Hidden rows [K, H] of one block of one sample (ids [S], captured [S, k*H]), one query row and head at a time."""
    c, P = draft.config, {**dict(draft.named_parameters()), "embed": draft.embed_tokens.weight}
    heads, kv, D, K = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.block_size

    def linear(x, name):
        y = x @ P[f"{name}.weight"].T
        return y + P[f"{name}.bias"] if f"{name}.bias" in P else y

    def norm(x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + c.rms_norm_eps) * P[f"{name}.weight"]

    def turn(x, position):                       # RoPE: components i and i + D/2 are one complex number
        angle = position * c.rope_theta ** (-torch.arange(D // 2, dtype=torch.float64) * 2 / D)
        z = torch.complex(x[:D // 2], x[D // 2:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag))

    context = norm(linear(captured, "fc"), "hidden_norm")
    x = P["embed"][[int(ids[anchor])] + [c.mask_token_id] * (K - 1)]
    for i in range(c.num_hidden_layers):
        L, window = f"layers.{i}", c.sliding_window if c.layer_types and "sliding" in c.layer_types[i] else None
        h, A = norm(x, f"{L}.input_layernorm"), f"{L}.self_attn"
        attended = torch.zeros(K, heads * D, dtype=x.dtype)
        for t in range(K):
            for n in range(heads):
                group = n // (heads // kv)
                part = slice(group * D, group * D + D)
                query = turn(norm(linear(h[t], f"{A}.q_proj")[n * D:n * D + D], f"{A}.q_norm"), anchor + t)
                sources = [(context[s], s) for s in range(anchor if real else 0)
                           if window is None or anchor + t - s < window]
                sources += [(h[u], anchor + u) for u in range(K)]
                keys = [turn(norm(linear(row, f"{A}.k_proj")[part], f"{A}.k_norm"), at) for row, at in sources]
                values = [linear(row, f"{A}.v_proj")[part] for row, _ in sources]
                scores = torch.stack([query @ key for key in keys]) / math.sqrt(D)
                share = torch.exp(scores - scores.max())
                attended[t, n * D:n * D + D] = (share[:, None] * torch.stack(values)).sum(0) / share.sum()
        x = x + linear(attended, f"{A}.o_proj")
        h = norm(x, f"{L}.post_attention_layernorm")
        gate = linear(h, f"{L}.mlp.gate_proj")
        x = x + linear(gate / (1 + torch.exp(-gate)) * linear(h, f"{L}.mlp.up_proj"), f"{L}.mlp.down_proj")
    return norm(x, "norm")


SHAPES = {
    "gqa": {},
    "mha-bias": {"num_key_value_heads": 4, "attention_bias": True, "block_size": 2},
    "mqa-window": {"num_key_value_heads": 1, "layer_types": ("full_attention", "sliding_attention"),
                   "sliding_window": 4},
    "block-5": {"block_size": 5, "target_layer_ids": (-1, 0, 3), "head_dim": 6},
}


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_backbone_equals_the_loop(shape):
    """Overlapping anchors, more blocks than one attention call takes, dummies at the end of a shorter row."""
    draft = make_draft(1, torch.float64, **SHAPES[shape])
    ids, captured, _, _ = make_batch(draft, B=2, S=24, seed=2)
    anchors = torch.tensor([[0, 1, 2, 4, 5, 6, 7, 9, 10, 11, 12, 13, 15, 16, 17, 18, 20, 21],
                            [3, 4, 5, 8, 9, 22] + [0] * 12])
    keep = torch.tensor([[True] * 18, [True] * 6 + [False] * 12])
    rows = draft.backbone(ids, captured, anchors, keep)
    assert rows.isfinite().all()
    for b, j in ((0, 0), (0, 1), (0, 5), (0, 15), (0, 16), (0, 17), (1, 0), (1, 2), (1, 5), (1, 6), (1, 17)):
        want = naive_rows(draft, ids[b], captured[b], int(anchors[b, j]), bool(keep[b, j]))
        torch.testing.assert_close(rows[b, j], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_decoding_makes_the_rows_of_training(shape):
    check_session(make_draft(3, torch.float64, **SHAPES[shape]))


def check_session(draft: DSparkDraft) -> None:
    """A session fed piece by piece, growing on the way, gives the rows of a block anchored at its length."""
    ids, captured, _, _ = make_batch(draft, B=1, S=20, seed=4)
    session = DraftSession(draft, room=2)
    for stop in (1, 4, 5, 13, 19):
        session.extend(captured[:, session.length:stop])
        got, anchor = session.block(ids[:, stop:stop + 1]), torch.tensor([[stop]])
        want = draft.backbone(ids, captured, anchor, torch.ones(1, 1, dtype=torch.bool))[0]
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_nothing_leaks_into_a_block():
    check_visibility(make_draft(5))


def check_visibility(draft: DSparkDraft) -> None:
    """A block's rows are, to the bit, a function of its own token and of the context rows before its anchor."""
    ids, captured, _, _ = make_batch(draft, B=1, S=24, seed=6)
    anchors = torch.tensor([[2, 3, 4, 8, 9, 10, 13, 20]])
    keep = torch.ones_like(anchors, dtype=torch.bool)
    rows = draft.backbone(ids, captured, anchors, keep)[0]
    for s in range(24):                          # one context row at a time
        touched = captured.clone()
        touched[0, s] += 3
        new = draft.backbone(ids, touched, anchors, keep)[0]
        for j, anchor in enumerate(anchors[0].tolist()):
            if s >= anchor:
                assert torch.equal(new[j], rows[j]), f"block at {anchor} sees context row {s}"
            else:
                assert not torch.isclose(new[j], rows[j]).all(1).any(), f"block at {anchor} does not see row {s}"
    for j, anchor in enumerate(anchors[0].tolist()):         # one block at a time: its token decides its rows alone
        other = ids.clone()
        other[0, anchor] = (other[0, anchor] + 1) % SMALL.vocab_size
        new = draft.backbone(other, captured, anchors, keep)[0]
        same = [torch.equal(a, b) for a, b in zip(new, rows, strict=True)]
        assert same == [i != j for i in range(len(same))]


# ---------------------------------------------------------------------------------------------------------------------
# Anchors, labels and the objective against loops


@pytest.mark.parametrize("seed", range(20))
def test_anchors_equal_the_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    B, S, N = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 4), (2, 30), (1, 20)))
    mask = (torch.rand(B, S, generator=generator) < 0.7).long()
    torch.manual_seed(seed)
    anchors, keep = sample_anchors(mask, N)
    torch.manual_seed(seed)
    noise = torch.rand(B, S - 1)
    for b in range(B):
        candidates = [p for p in range(S - 1) if mask[b, p] and mask[b, p + 1]]
        want = sorted(sorted(candidates, key=lambda p: noise[b, p].item())[:N])      # noqa: B023
        assert anchors[b].tolist() == want + [0] * (anchors.shape[1] - len(want))
        assert keep[b].tolist() == [j < len(want) for j in range(anchors.shape[1])]


def test_seeded_anchors_do_not_depend_on_the_batch():
    """Alone, padded, or elsewhere in another batch: a sample's anchors are its own, and no global draw is made."""
    generator = torch.Generator().manual_seed(0)
    lengths, seeds = [30, 12, 1, 21], [7, 8, 9, 10]
    mask = torch.zeros(4, 40, dtype=torch.long)
    for b, n in enumerate(lengths):
        mask[b, :n] = torch.rand(n, generator=generator) < 0.8
    before = torch.get_rng_state()
    anchors, keep = sample_anchors(mask, 6, seeds, lengths)
    order = [3, 1, 0, 2]
    shuffled, shuffled_keep = sample_anchors(mask[order, :33], 6, [seeds[b] for b in order],
                                                    [lengths[b] for b in order])
    assert torch.equal(shuffled, anchors[order]) and torch.equal(shuffled_keep, keep[order])
    for b, n in enumerate(lengths):
        alone, _ = sample_anchors(mask[b:b + 1, :n], 6, seeds[b:b + 1], [n])
        assert alone[0].tolist() == anchors[b][keep[b]].tolist()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(sample_anchors(mask, 6, [1, 2, 3, 4], lengths)[0], anchors)


@pytest.mark.parametrize("K", [1, 3, 7])
def test_labels_and_weights_equal_the_loop(K):
    generator = torch.Generator().manual_seed(K)
    ids = torch.randint(50, (3, 20), generator=generator)
    mask = (torch.rand(3, 20, generator=generator) < 0.85).long()
    anchors, keep = sample_anchors(mask, 12)
    sup = Supervision.build(ids, mask, anchors, keep, K, 4.0)
    for b in range(3):
        for j, anchor in enumerate(anchors[b].tolist()):
            alive = bool(keep[b, j])
            for t in range(K):
                alive = alive and anchor + t + 1 < 20 and bool(mask[b, anchor + t + 1])
                assert bool(sup.valid[b, j, t]) == alive
                assert sup.weight[b, j, t].item() == pytest.approx(math.exp(-t / 4) if alive else 0.0)
                if alive:
                    assert sup.labels[b, j, t] == ids[b, anchor + t + 1]
                    assert sup.previous[b, j, t] == ids[b, anchor + t]
                    assert sup.source[b, j, t] == anchor + t


@dataclasses.dataclass
class Slot:
    """One valid slot as the loop sees it."""
    t: int
    weight: float
    ce: float
    l1: float
    accept: float
    logit: Tensor                                # of the confidence head
    agree: bool


def naive_slots(draft: DSparkDraft, hidden: Tensor, batch, anchors: Tensor, keep: Tensor) -> list[list[Slot]]:
    """Valid slots of every kept block, from the formulas: Markov bias, CE, L1, accept rate, confidence logit."""
    ids, _, mask, final = batch
    c, P, U = draft.config, dict(draft.named_parameters()), draft.lm_head.weight
    sigmoid = lambda x: 1 / (1 + torch.exp(-x))                                       # noqa: E731
    blocks = []
    for b, j in keep.nonzero().tolist():
        anchor, slots, state = int(anchors[b, j]), [], torch.zeros(c.markov_rank, dtype=hidden.dtype)
        for t in range(c.block_size):
            if anchor + t + 1 >= ids.shape[1] or not mask[b, anchor + t + 1]:
                break
            h, logits = hidden[b, j, t], U @ hidden[b, j, t]
            read = h
            if c.markov_rank:
                w1 = P["markov_head.markov_w1.weight"][ids[b, anchor + t]]
                latent, read = w1, torch.cat((h, w1))
                if c.markov_head_type == "gated":
                    G, bias = P["markov_head.gate_proj.weight"], P["markov_head.gate_proj.bias"]
                    latent = sigmoid(G @ torch.cat((h, w1)) + bias) * w1
                elif c.markov_head_type == "rnn":
                    J, bias, r = P["markov_head.joint_proj.weight"], P["markov_head.joint_proj.bias"], c.markov_rank
                    z = J @ torch.cat((state, w1, h)) + bias
                    gate, candidate, output = sigmoid(z[:r]), torch.tanh(z[r:2 * r]), torch.tanh(z[2 * r:])
                    latent, state = output, gate * state + (1 - gate) * candidate
                logits = logits + P["markov_head.markov_w2.weight"] @ latent
            p, q = (torch.exp(x - x.max()) / torch.exp(x - x.max()).sum() for x in (logits, U @ final[b, anchor + t]))
            label, l1 = int(ids[b, anchor + t + 1]), float((p - q).abs().sum())
            logit = P["confidence_head.proj.weight"][0] @ read + P["confidence_head.proj.bias"][0]
            slots.append(Slot(t, math.exp(-t / 4), -math.log(p[label]), l1, min(max(1 - l1 / 2, 0), 1), logit,
                              int(logits.argmax()) == label))
        blocks.append(slots)
    return blocks


@pytest.mark.parametrize("chunk_blocks", [0, None, 3])
@pytest.mark.parametrize("head", HEADS)
def test_objective_equals_the_loop(head, chunk_blocks):
    """Loss and every metric, slot by slot; the last row of the batch has nothing to supervise."""
    draft = make_draft(7, torch.float64, **head_config(head))
    draft.chunk_blocks = chunk_blocks
    batch = make_batch(draft, B=3, S=18, seed=8)
    batch[2][2] = 0
    seeds, lengths = [1, 2, 3], [18, 18, 18]
    anchors, keep = sample_anchors(batch[2], draft.config.num_anchors, seeds, lengths)
    with torch.no_grad():
        hidden = draft.backbone(batch[0], batch[1], anchors, keep)
        loss, metrics = draft(*batch, seeds=seeds, lengths=lengths)
        blocks = naive_slots(draft, hidden, batch, anchors, keep)
    slots, K = [s for block in blocks for s in block], draft.config.block_size
    total = sum(s.weight for s in slots) + 1e-6
    mean = lambda term: sum(s.weight * term(s) for s in slots) / total                # noqa: E731
    c = {id(s): 1 / (1 + math.exp(-s.logit)) for s in slots}
    drift = sum(s.weight * (math.prod(c[id(u)] for u in block[:s.t + 1]) - math.prod(u.accept for u in block[:s.t + 1]))
                for block in blocks for s in block) / total
    want = {
        "ce_loss": mean(lambda s: s.ce), "l1_loss": mean(lambda s: s.l1),
        "confidence_loss": mean(lambda s: -s.accept * math.log(c[id(s)]) - (1 - s.accept) * math.log(1 - c[id(s)])),
        "confidence_abs_error": mean(lambda s: abs(c[id(s)] - s.accept)),
        "confidence_bias": mean(lambda s: c[id(s)] - s.accept), "confidence_cumprod_bias": drift,
        "tau_probabilistic": sum(1 + sum(math.prod(u.accept for u in block[:s.t + 1]) for s in block)
                                 for block in blocks) / len(blocks),
        "agree": sum(s.agree for s in slots) / len(slots),
    }
    for t in range(K):
        here = [s.accept for s in slots if s.t == t]
        want[f"accept_rate@{t}"] = sum(here) / max(len(here), 1)
    for name, value in want.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-6, abs=1e-9), name
    whole = 0.1 * want["ce_loss"] + 0.9 * want["l1_loss"] + want["confidence_loss"]
    assert loss.item() == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("chunk_blocks", [0, None])
@pytest.mark.parametrize("S", [1, 6])
def test_a_batch_without_supervision_trains_nothing(S, chunk_blocks):
    draft = make_draft(9, **head_config("rnn"))
    draft.chunk_blocks = chunk_blocks
    ids, context, mask, final = make_batch(draft, B=2, S=S)
    loss, _ = draft(ids, context, torch.zeros_like(mask), final)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in draft.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


TINY = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2,
        "intermediate_size": 3, "vocab_size": 5, "mask_token_id": 4, "target_layer_ids": (0,), "num_anchors": 3}


@pytest.mark.parametrize("chunk_blocks", [0, 2])
@pytest.mark.parametrize("head", HEADS)
def test_gradients_are_those_of_the_loss(head, chunk_blocks):
    """CE + L1 against finite differences in every parameter; then the confidence term, whose accept rate is a constant.

    The accept rate depends on the parameters but is not differentiated, so that term is compared to the finite
    difference of the loop's cross entropy with the accept rates of the starting point.
    """
    draft = make_draft(11, torch.float64, **TINY, **head_config(head))
    draft.chunk_blocks = chunk_blocks
    batch, where = make_batch(draft, B=1, S=8, seed=12), {"seeds": [0], "lengths": [8]}
    names, values = zip(*draft.named_parameters(), strict=True)

    def loss(*parameters):
        return torch.func.functional_call(draft, dict(zip(names, parameters, strict=True)), batch, where)[0]

    with_confidence = torch.autograd.grad(loss(*values), values)
    draft.confidence_weight = 0.0
    without = torch.autograd.grad(loss(*values), values, allow_unused=True, materialize_grads=True)
    assert torch.autograd.gradcheck(loss, values)

    anchors, keep = sample_anchors(batch[2], draft.config.num_anchors, **where)

    def slots():
        return [s for block in naive_slots(draft, draft.backbone(*batch[:2], anchors, keep), batch, anchors, keep)
                for s in block]

    with torch.no_grad():
        fixed = slots()

        def confidence():
            logits = torch.stack([s.logit for s in slots()])
            a, w = torch.tensor([[s.accept, s.weight] for s in fixed], dtype=torch.float64).T
            entropy = a * torch.log1p(torch.exp(-logits)) + (1 - a) * torch.log1p(torch.exp(logits))
            return (w * entropy).sum() / (w.sum() + 1e-6)

        for name, value, both, rest in zip(names, values, with_confidence, without, strict=True):
            flat, slope = value.view(-1), (both - rest).view(-1)
            for i in {0, len(flat) // 2, len(flat) - 1}:
                start = flat[i].item()
                ends = []
                for step in (1e-5, -1e-5):
                    flat[i] = start + step
                    ends.append(confidence().item())
                flat[i] = start
                assert slope[i].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-8), (name, i)


@pytest.mark.parametrize("chunk_blocks", [0, None])
def test_the_teacher_is_a_constant(chunk_blocks):
    """No gradient reaches the target's final state, its head or its embedding."""
    draft = make_draft(13, **head_config("vanilla"))
    draft.chunk_blocks = chunk_blocks
    ids, context, mask, final = make_batch(draft, B=1, S=12, seed=14)
    final.requires_grad_()
    draft.lm_head.weight.requires_grad_()
    frozen = [final, draft.embed_tokens.weight]
    loss, metrics = draft(ids, context, mask, final)
    loss.backward()
    assert all(x.grad is None for x in frozen) and draft.fc.weight.grad.abs().sum() > 0
    assert not any(m.requires_grad for m in metrics.values())


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


def naive_accept(tokens: list[int], p: list, q: list, stops: set[int]) -> tuple[int, bool, int]:
    """Rejection sampling as one reads it in the paper, slot by slot; p [n][V], q [n + 1][V]."""
    n, accepted = len(tokens), 0
    uniform = torch.rand(1, n)[0].tolist() if n else []
    while accepted < n:
        x = tokens[accepted]
        if uniform[accepted] >= min(1, q[accepted][x] / max(p[accepted][x], 1e-8)):
            break
        accepted += 1
    row = q[accepted]
    if accepted < n:
        residual = [max(a - b, 0) for a, b in zip(q[accepted], p[accepted], strict=True)]
        if sum(residual) > 1e-8:
            row = [x / sum(residual) for x in residual]
    following = int(torch.multinomial(torch.tensor([row]), 1))
    for i in range(accepted):
        if tokens[i] in stops:
            return i + 1, True, following
    return accepted, False, following


def test_acceptance_equals_the_loop():
    """Random, sharp, one-hot and equal distributions; empty proposals; stop tokens; a draft surer than 1e-8 allows."""
    seen = set()
    for seed in range(600):
        g = torch.Generator().manual_seed(seed)
        n, V, kind = int(torch.randint(0, 6, (), generator=g)), 6, seed % 4
        p, q = (torch.softmax(torch.randn(n + 1, V, generator=g) * (1, 4, 4, 1)[kind], -1) for _ in range(2))
        if kind == 2:
            p, q = (torch.nn.functional.one_hot(x.argmax(-1), V).float() for x in (p, q))
        if kind == 3:                            # equal, with a token so rare that the guard on p rejects it
            p[:, 5] = 1e-10
            q = p = p / p.sum(-1, keepdim=True)
        tokens = torch.multinomial(p[:n], 1, generator=g).T if n else torch.zeros(1, 0, dtype=torch.long)
        if kind == 3 and n:
            tokens[0, n // 2] = 5
        stops = set(torch.randint(V, (1,), generator=g).tolist())
        torch.manual_seed(seed)
        accepted, stopped, following = accept(Proposal(tokens, p[:n]), q, stops)
        torch.manual_seed(seed)
        assert (accepted, stopped, int(following)) == naive_accept(tokens[0].tolist(), p.tolist(), q.tolist(), stops)
        seen.add((kind, "empty" if not n else "stop" if stopped else "all" if accepted == n else "partial"))
    assert len(seen) == 16                       # every kind met every outcome


class LookupTarget:
    """A target over five tokens whose next-token distribution is a table over the last two; no network at all."""
    vocab_size, hidden_size, layer_ids = 5, 8, (0, 2)

    def __init__(self, seed: int = 0, scale: float = 0.5):
        g = torch.Generator().manual_seed(seed)
        self.states = torch.randn(6, 5, 3 * 8, generator=g)  # [token before or 5, token, context and final]
        self.embed_tokens = nn.Embedding.from_pretrained(torch.randn(5, 8, generator=g))
        self.lm_head = frozen_linear(scale * torch.randn(5, 8, generator=g))

    def probabilities(self, before: int, token: int) -> Tensor:
        return torch.softmax(self.lm_head(self.states[before, token, 16:]), -1)

    def greedy(self, ids: list[int], n: int) -> list[int]:
        ids = list(ids)
        for _ in range(n):
            ids.append(int(self.probabilities(ids[-2] if len(ids) > 1 else 5, ids[-1]).argmax()))
        return ids

    def session(self, slots: int = 1) -> "LookupSession":
        return LookupSession(self)


class LookupSession:
    def __init__(self, target: LookupTarget):
        self.target, self.ids = target, []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def extend(self, ids: Tensor) -> Captured:
        new = ids[0].tolist()
        before = [*self.ids[-1:], *new] if self.ids else [5, *new]
        self.ids += new
        rows = self.target.states[before[:-1], new].unsqueeze(0)
        return Captured(rows[..., :16], rows[..., 16:])

    def rollback(self, length: int) -> None:
        assert 0 < length <= len(self.ids)
        del self.ids[length:]


def bad_draft(head: str, seed: int = 20, layers: int = 1) -> DSparkDraft:
    """Random weights: it fits the lookup target's shapes and knows nothing about its table."""
    draft = make_draft(seed, vocab_size=5, mask_token_id=4, num_hidden_layers=layers, **head_config(head))
    draft._frozen = []                           # takes the target's embedding and head
    return draft


class MemoSession:
    """A draft session that computes the rows of a block once per committed history: 20,000 runs share 200 of them."""

    def __init__(self, draft: DSparkDraft, memo: dict):
        self.draft, self.memo, self.pieces, self.key = draft, memo, [], ()

    def extend(self, captured: Tensor, counts: list[int] | None = None) -> None:
        self.pieces.append(captured)
        self.key += tuple(captured[0, :, 0].tolist())        # one channel tells the states of the table apart

    def block(self, last_token: Tensor) -> Tensor:
        key = (*self.key, int(last_token))
        if key not in self.memo:
            session = DraftSession(self.draft)
            for piece in self.pieces:
                session.extend(piece)
            self.memo[key] = session.block(last_token)
        return self.memo[key]


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """p-value of Pearson's test; cells expected fewer than 5 times are pooled."""
    rare = expected < 5
    counts, expected = (torch.cat((x[~rare], x[rare].sum()[None])) for x in (counts.double(), expected.double()))
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1e-12)).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2), statistic.float() / 2))


@pytest.mark.parametrize("runs, threshold, head", [(20_000, 0.0, "vanilla"), (8_000, 0.5, "gated")])
def test_sampling_is_lossless(runs, threshold, head):
    assert check_lossless(bad_draft(head), runs, threshold) == ({0, 1, 2, 3} if threshold else {3})


def check_lossless(draft: DSparkDraft, runs: int, threshold: float = 0.0) -> set[int]:
    """The first three generated tokens of many seeded runs follow the target's exact distribution, however bad the
    draft is and wherever its confidence cuts the proposals; returns the lengths of these."""
    target, prompt, memo = LookupTarget(), [1, 3], {}
    draft.session = lambda slots: MemoSession(draft, memo)
    counts, lengths, proposed = torch.zeros(125), 0, set()
    for seed in range(runs):
        torch.default_generator.manual_seed(seed)            # torch.manual_seed costs as much as a decoding step
        trace = speculative_decode(target, draft, torch.tensor([prompt]), max_new_tokens=3, temperature=1.0,
                                   stop_token_ids=None, confidence_threshold=threshold)
        a, b, c = trace.output_ids[2:]
        counts[25 * a + 5 * b + c] += 1
        lengths += trace.acceptance_lengths[0]
        proposed |= set(trace.proposal_lengths)
    exact = torch.tensor([float(target.probabilities(1, 3)[a] * target.probabilities(3, a)[b]
                                * target.probabilities(a, b)[c]) for a in range(5) for b in range(5) for c in range(5)])
    assert 1.1 < lengths / runs < 2.8            # the draft is bad, but not useless: both outcomes are exercised
    assert chi_square_p(counts, exact * runs) > 1e-3
    assert chi_square_p(counts, (0.9 * exact + 0.1 / 125) * runs) < 1e-6     # the test would notice a tenth of noise
    return proposed


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize("head", HEADS)
def test_greedy_decoding_is_plain_greedy_decoding(head, threshold):
    """At T = 0 the tokens are the target's own, for prompts from one token on, ending inside a block."""
    lengths, proposed = set(), set()
    for seed in range(4):
        target, draft = LookupTarget(seed), bad_draft(head, seed, layers=2)
        for prompt in ([seed], [seed, 4, 1], [3, 3, 2, seed, 0]):
            trace = speculative_decode(target, draft, torch.tensor([prompt]), max_new_tokens=17, temperature=0.0,
                                       stop_token_ids=None, confidence_threshold=threshold)
            assert trace.output_ids == target.greedy(prompt, 17)
            lengths |= set(trace.acceptance_lengths)
            proposed |= set(trace.proposal_lengths)
    assert len(lengths) > 2                      # rejections and longer accepted prefixes both occurred
    assert proposed == ({0, 1, 2, 3} if threshold else {3})


def test_a_stop_token_ends_the_output_and_the_counts():
    """The output ends with the first generated stop token; a step ended by a stop counts no bonus token."""
    ended_inside = 0
    for seed in range(30):
        target, draft, prompt = LookupTarget(seed, scale=0.2), bad_draft("vanilla", seed), [2, 0]
        torch.manual_seed(seed)
        free = speculative_decode(target, draft, torch.tensor([prompt]), max_new_tokens=24, temperature=1.0,
                                  stop_token_ids=None)
        torch.manual_seed(seed)
        stop = speculative_decode(target, draft, torch.tensor([prompt]), max_new_tokens=24, temperature=1.0,
                                  stop_token_ids=[3])
        generated = free.output_ids[2:]
        end = generated.index(3) + 1 if 3 in generated else len(generated)
        assert stop.output_ids == prompt + generated[:end]
        n = len(stop.acceptance_lengths)
        assert stop.acceptance_lengths[:-1] == free.acceptance_lengths[:max(n - 1, 0)]
        if n and stop.acceptance_lengths[-1] == stop.accepted_draft_lengths[-1]:
            ended_inside += 1
            assert 1 + sum(stop.acceptance_lengths) == end and stop.proposal_lengths[-1] == stop.acceptance_lengths[-1]
    assert ended_inside > 3


def test_metrics_are_ratios_of_integer_sums():
    cases = [case for case in load_json(GOLDEN / "eval_traces.json") if case["draft"] == "draft_vanilla"]
    fields = ("acceptance_lengths", "proposal_lengths", "accepted_draft_lengths")
    traces = [type("Trace", (), {f: case[f] for f in fields})() for case in cases]
    got = acceptance_metrics(traces, 7)
    steps = [step for case in cases for step in zip(*(case[f] for f in fields), strict=True)]
    assert got["num_samples"] == len(cases) and got["num_proposals"] == len(steps)
    assert got["accept_len"] == pytest.approx(sum(a for a, _, _ in steps) / len(steps))
    assert got["draft_tokens_per_proposal"] == pytest.approx(sum(p for _, p, _ in steps) / len(steps))
    assert got["verify_rate"] == pytest.approx(sum(a for a, _, _ in steps) / sum(p + 1 for _, p, _ in steps))
    for k, rate in enumerate(got["accept_rate"]):
        reached = [d for _, p, d in steps if p > k]
        assert rate == pytest.approx(sum(d > k for d in reached) / max(len(reached), 1))


# ---------------------------------------------------------------------------------------------------------------------
# Files


def write_draft(folder: Path, draft: DSparkDraft, edit=lambda tensors: tensors, config=lambda values: values) -> Path:
    """Save a draft in the DeepSpec layout; `edit` and `config` may change its tensors and its config.json."""
    draft.config.save(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(config(load_json(path))))
    tensors = {**draft.state_dict(), "embed_tokens.weight": draft.embed_tokens.weight,
               "lm_head.weight": draft.lm_head.weight}
    save_file({k: v.detach().contiguous() for k, v in edit(tensors).items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def saved_draft():
    return make_draft(30, attention_bias=True, layer_types=("full_attention",) * 2, **head_config("rnn"))


def without(values: dict, *keys: str) -> dict:
    return {k: v for k, v in values.items() if k not in keys}


def same_weights(a: DSparkDraft, b: DSparkDraft) -> bool:
    return a.config == b.config and all(torch.equal(x, y) for x, y in zip(
        [*a.state_dict().values(), a.embed_tokens.weight, a.lm_head.weight],
        [*b.state_dict().values(), b.embed_tokens.weight, b.lm_head.weight], strict=True))


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "draft_model."])
def test_a_draft_survives_its_file(tmp_path, saved_draft, prefix):
    write_draft(tmp_path, saved_draft, lambda t: {prefix + k: v for k, v in t.items()})
    before = torch.get_rng_state()
    loaded = DSparkDraft.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)        # loading draws nothing
    assert same_weights(loaded, saved_draft) and not any(p.is_meta for p in loaded.parameters())


@pytest.mark.parametrize("edit, message", [
    (lambda t: without(t, "norm.weight"), r"missing norm\.weight"),
    (lambda t: t | {"layers.7.extra": torch.ones(2)}, r"unknown layers\.7\.extra \(2,\)"),
    (lambda t: t | {"fc.weight": torch.ones(3, 4)}, r"fc\.weight is \(3, 4\), expected \(8, 16\)"),
    (lambda t: without(t, "embed_tokens.weight"), "lm_head.weight without embed_tokens.weight"),
    (lambda t: t | {"embed_tokens.weight": torch.ones(4, 8)}, r"embed_tokens is \(4, 8\)"),
    (lambda t: t | {"module.norm.weight": torch.ones(8)}, "norm.weight twice"),
    (lambda t: without(t, "norm.weight") | {"strange": torch.ones(1), "fc.weight": torch.ones(1)},
     "3 problems.*missing norm.weight.*unknown strange.*fc.weight is"),
])
def test_a_file_that_does_not_fit_is_named(tmp_path, saved_draft, edit, message):
    with pytest.raises(ValueError, match=message):
        DSparkDraft.from_pretrained(write_draft(tmp_path, saved_draft, edit))


def test_a_tied_head_is_the_embedding_and_a_bare_draft_borrows_both(tmp_path, saved_draft):
    tied = DSparkDraft.from_pretrained(write_draft(tmp_path, saved_draft, lambda t: without(t, "lm_head.weight")))
    assert torch.equal(tied.lm_head.weight, saved_draft.embed_tokens.weight)
    bare = DSparkDraft.from_pretrained(
        write_draft(tmp_path, saved_draft, lambda t: without(t, "lm_head.weight", "embed_tokens.weight")))
    with pytest.raises(RuntimeError, match="attach"):
        bare(*make_batch(saved_draft, 1, 8))
    bare.attach(saved_draft.embed_tokens, saved_draft.lm_head)
    assert bare.lm_head.weight is saved_draft.lm_head.weight     # shared, not copied
    assert not any("lm_head" in name or "embed_tokens" in name for name in bare.state_dict())


def test_a_damaged_file_is_named(tmp_path, saved_draft):
    path = write_draft(tmp_path, saved_draft) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors cannot be read.*damaged"):
        DSparkDraft.from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="no .safetensors file"):
        DSparkDraft.from_pretrained(tmp_path)


def test_config_may_be_nested_and_is_found_either_way(tmp_path, saved_draft):
    keys = ("mask_token_id", "target_layer_ids", "block_size", "markov_rank", "markov_head_type")
    nest = lambda v: without(v, *keys) | {"dflash_config": {k: v[k] for k in keys}}   # noqa: E731
    assert same_weights(DSparkDraft.from_pretrained(write_draft(tmp_path, saved_draft, config=nest)), saved_draft)


@pytest.mark.parametrize("change, message", [
    (lambda v: v | {"rope_theta": 5.0}, r"rope_theta is \[5\.0, 100\.0\]"),
    (lambda v: without(v, "rope_theta", "rope_parameters"), "rope_theta is missing"),
    (lambda v: v | {"rope_parameters": {"rope_theta": 100.0, "rope_type": "yarn"}}, "rope_type 'yarn'"),
    (lambda v: without(v, "block_size", "dflash_config"), r"lacks \['block_size'"),
    (lambda v: without(v, "hidden_size", "head_dim"), "lacks .*'hidden_size'"),
    (lambda v: v | {"markov_head_type": "lstm"}, "markov_head_type 'lstm' is none of"),
    (lambda v: v | {"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
    (lambda v: v | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is not set"),
])
def test_a_config_that_makes_no_sense_is_refused(tmp_path, saved_draft, change, message):
    with pytest.raises(ValueError, match=message):
        DSparkConfig.from_pretrained(write_draft(tmp_path, saved_draft, config=change))


# ---------------------------------------------------------------------------------------------------------------------
# Bad input: refused with a sentence, before any compute


class Untouchable(LookupTarget):
    """A target that must not be asked for anything."""
    def session(self, slots: int = 1):
        raise AssertionError("the target was asked to compute")


def refused(message: str, prompt=((1, 2),), temperature=1.0, draft: DSparkDraft | None = None, threshold=0.0, **target):
    place = Untouchable()
    for name, value in target.items():
        setattr(place, name, value)
    with pytest.raises(ValueError, match=message):
        speculative_decode(place, draft or bad_draft("vanilla"), torch.tensor(prompt, dtype=torch.long),
                           max_new_tokens=4, temperature=temperature, stop_token_ids=None,
                           confidence_threshold=threshold)


def test_a_draft_of_another_target_is_refused():
    refused("vocabulary is 5, the target's 6", vocab_size=6)
    refused("hidden size is 8, the target's 16", hidden_size=16)
    refused(r"layer ids is \(0, 2\), the target's \(0, 3\)", layer_ids=(0, 3))
    refused(r"lm_head is \(5, 7\), the draft expects \(5, 8\)", lm_head=frozen_linear(torch.zeros(5, 7)))
    with pytest.raises(ValueError, match=r"embed_tokens is \(6, 8\), the draft expects \(5, 8\)"):
        bad_draft("none").attach(nn.Embedding(6, 8), LookupTarget().lm_head)


def test_bad_requests_are_refused():
    refused("prompt is empty", prompt=((),))
    refused("prompt is empty or batched", prompt=((1, 2), (3, 4)))
    refused("ids from 1 to 5, the vocabulary has 5", prompt=((1, 5),))
    refused("ids from -1 to 2", prompt=((-1, 2),))
    for temperature in (-1.0, -1e-9, float("nan"), float("inf")):
        refused("temperature must be at least 0", temperature=temperature)
    refused("needs a draft with a confidence head", threshold=0.1,
            draft=make_draft(vocab_size=5, mask_token_id=4))


@pytest.mark.parametrize("ids, message", [
    ((1, 5), "the largest usable id is 4"), ((1, 6), "the largest usable id is 4"), ((2, 1), "strictly increasing"),
    ((1, 1), "without repeats"), ((-2, 1), "at least -1"), ((), "strictly increasing"),
])
def test_layer_ids_that_cannot_be_captured_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        HFTarget.from_pretrained(GOLDEN / "target", ids)     # a target of six layers
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, target_layer_ids=ids, num_target_layers=6).validate()


@pytest.mark.parametrize("mask_id", [-1, 11, 300])
def test_a_mask_id_outside_the_embedding_is_refused(mask_id):
    with pytest.raises(ValueError, match=f"mask_token_id {mask_id} is outside the embedding of 11 rows"):
        dataclasses.replace(SMALL, mask_token_id=mask_id).validate()


def test_a_training_batch_of_the_wrong_shape_is_refused():
    draft = make_draft(31, **head_config("none"))
    ids, context, mask, final = make_batch(draft, B=2, S=9)
    with pytest.raises(ValueError, match=r"context is \(2, 9, 8\), this draft expects \(2, 9, 16\)"):
        draft(ids, context[..., :8], mask, final)
    with pytest.raises(ValueError, match=r"loss_mask is \(2, 8\), this draft expects \(2, 9\)"):
        draft(ids, context, mask[:, 1:], final)
    with pytest.raises(ValueError, match=r"final is \(2, 9, 16\), this draft expects \(2, 9, 8\)"):
        draft(ids, context, mask, context)
    with pytest.raises(ValueError, match="final state is needed"):
        draft(ids, context, mask, None)


# ---------------------------------------------------------------------------------------------------------------------
# A real target


@pytest.mark.slow
def test_smollm2_greedy_decoding_is_plain_greedy_decoding():
    """20 prompts of 128 tokens in fp32 with a random draft: the tokens are those of `generate` in regen.py, which
    decodes all prompts as one batch, a token at a time, and shares no loop with decode.py. Two logits within rounding
    (1e-5) could fall either way; no prompt here meets such a tie."""
    from transformers import AutoTokenizer

    from recipe import SMOLLM2_DEMO
    from regen import generate
    from targets import target_path
    folder, length = target_path(SMOLLM2_DEMO), 128
    target = HFTarget.from_pretrained(folder, SMOLLM2_DEMO.target_layer_ids, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    draft = DSparkDraft(DSparkConfig.from_recipe(SMOLLM2_DEMO)).eval()
    things = ("rain", "a bridge", "yeast", "tides", "the number seven", "maps", "glass", "bees", "sleep", "copper")
    prompts = [tokenizer(f"<|im_start|>user\n{verb} {thing}.<|im_end|>\n<|im_start|>assistant\n").input_ids
               for verb in ("Explain", "Write a story about") for thing in things]
    plain = {i: ids for i, ids, _ in generate(target.model, prompts, length, [0.0] * 20, [0] * 20, stop_ids=[])}
    for i, ids in enumerate(prompts):
        trace = speculative_decode(target, draft, torch.tensor([ids]), max_new_tokens=length, temperature=0.0,
                                   stop_token_ids=None)
        assert trace.output_ids[len(ids):] == plain[i], f"prompt {i}"


# ---------------------------------------------------------------------------------------------------------------------
# Would the tests notice?

# (mistake, file, exact text, replacement, tests that must notice between them)
MUTATIONS = [
    ("label shift by one", "dspark.py", "return cls(pick(input_ids, target),", "return cls(pick(input_ids, source),",
     "labels_and_weights"),
    ("decay from t+1", "dspark.py", "torch.exp(-slots.to(", "torch.exp(-(slots + 1).to(", "labels_and_weights"),
    ("<= in the context mask", "attention.py", "columns < part[..., None]", "columns <= part[..., None]", "leaks"),
    ("softmax in bf16 (objective, full)", "objective.py",
     "logits = logits.to(torch.promote_types(logits.dtype, torch.float32))", "logits = logits.to(torch.bfloat16)",
     "objective_equals"),
    ("softmax in bf16 (objective, chunked)", "objective.py",
     "wide = torch.promote_types(hidden.dtype, torch.float32)", "wide = torch.bfloat16", "objective_equals"),
    ("softmax in bf16 (decoding)", "decode.py", "return torch.softmax(logits / temperature, -1)",
     "return torch.softmax((logits / temperature).bfloat16(), -1).to(logits.dtype)", "golden_traces"),
    ("accept draw per prefix", "decode.py", "torch.rand(1, n, device=q.device, generator",
     "torch.rand(1, 1, device=q.device, generator", "acceptance_equals"),
    ("bonus counted at a stop", "decode.py", "length = accepted if stopped else accepted + 1",
     "length = accepted + 1", "stop_token_ends"),
    ("teacher not detached (final state)", "objective.py", "        with torch.no_grad():\n            index",
     "        with torch.enable_grad():\n            index", "teacher_is_a_constant"),
    ("teacher not detached (accept rate)", "objective.py", "Terms(loss, ce.detach(), l1.detach(), agree)",
     "Terms(loss, ce.detach(), l1, agree)", "gradients_are_those"),
    ("anchors unsorted", "dspark.py", "chosen.masked_fill(~keep, S).sort(1).values", "chosen.masked_fill(~keep, S)",
     "anchors_equal"),
    ("candidates to S-K", "dspark.py", "(loss_mask[:, :-1] != 0) & (loss_mask[:, 1:] != 0)",
     "(loss_mask[:, :-1] != 0) & (loss_mask[:, 1:] != 0) & (torch.arange(-loss_mask.shape[1], -1) <= -7)",
     "anchors_equal"),
    ("residual not clamped", "decode.py", "(row - proposal.probabilities[accepted].to(q.dtype)).clamp(min=0)",
     "(row - proposal.probabilities[accepted].to(q.dtype))", "acceptance_equals"),
]


def run_mutation(mutation, home: Path) -> tuple[int, str]:
    """(pytest's exit code, its last line or first failure) on a copy of the project with one mistake in it."""
    _, file, old, new, tests = mutation
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for path in [*home.glob("*.py"), home / "pyproject.toml"]:
            shutil.copy(path, copy)
        (copy / "testdata").symlink_to(home / "testdata")
        if file:
            (copy / file).write_text((copy / file).read_text().replace(old, new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rf", "test_dspark.py", "-k", tests]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
        return done.returncode, next((line for line in lines if line.startswith("FAILED")), lines[-1])


def mutate() -> None:
    """Apply each mistake to a copy of the project and fail unless a test fails for each; without one all must pass."""
    for mistake, file, old, *_ in MUTATIONS:
        if (found := (HERE / file).read_text().count(old)) != 1:
            raise SystemExit(f"{file} holds {old!r} {found} times, expected once: update the mutation {mistake!r}")
    untouched = ("(none)", "", "", "", " or ".join(sorted({tests for *_, tests in MUTATIONS})))
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda m: run_mutation(m, HERE), [untouched, *MUTATIONS]))
    missed = 0
    for (mistake, file, *_), (code, line) in zip([untouched, *MUTATIONS], results, strict=True):
        good = code == (1 if file else 0)        # 1: tests ran and some failed; anything else is not a verdict
        missed += not good
        print(f"{'ok' if good else 'MISSED':7} {mistake:38} {line[:90]}")
    if missed:
        raise SystemExit(f"{missed} of {len(results)} rows are not as they should be")


if __name__ == "__main__":
    if sys.argv[1:] != ["mutate"]:
        raise SystemExit("usage: python test_dspark.py mutate (the tests themselves: pytest test_dspark.py)")
    mutate()
