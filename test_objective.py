"""What the objective promises: one meaning in two forms, on any number of ranks, whatever the target hands out.

`full` (autograd over whole logits) is the reference; test_dspark.py holds it against loops and DeepSpec's own vectors.
Here the sliced form must equal it in loss, metrics and every gradient; two ranks must equal one process; the grouped
and the flex attention must equal one dense mask; and a token with inf must vanish without a trace. Read next:
objective.py.
"""
import argparse
import copy
import dataclasses
import json
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import attention
import bench
import objective
import test_dspark
from attention import Attention, Visibility, rope_tables
from conftest import output_of, program
from dspark import DSparkConfig, DSparkDraft
from test_dspark import HEADS

SMALL = DSparkConfig(
    vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=24, block_size=4, mask_token_id=36, target_layer_ids=(0, 2), num_target_layers=5,
    rope_theta=100.0, num_anchors=12)


def make_draft(head: str = "vanilla", dtype=torch.float64, bias: bool = False, **changes) -> DSparkDraft:
    draft = test_dspark.make_draft(5, dtype, 0.3, SMALL, **test_dspark.head_config(head), **changes)
    if bias:
        draft.lm_head.bias = nn.Parameter(torch.linspace(-2, 2, SMALL.vocab_size, dtype=dtype), requires_grad=False)
    return draft


def make_batch(dtype=torch.float64, B: int = 4, S: int = 23) -> tuple:
    """(input_ids, context, loss_mask, final): holes that cut blocks short, a row with few anchors, one with none."""
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(SMALL.vocab_size, (B, S), generator=random)
    mask = (torch.rand(B, S, generator=random) > 0.15).long()
    mask[1:2, :S - 3] = 0
    mask[2:3] = 0
    states = torch.randn(B, S, 3 * SMALL.hidden_size, generator=random).to(dtype)
    return ids, states[..., :2 * SMALL.hidden_size], mask, states[..., 2 * SMALL.hidden_size:]


def outcome(draft: DSparkDraft, batch: tuple, chunk_blocks: int | None = None) -> dict:
    """Loss, metrics and gradients of one forward and backward on always the same anchors, by name."""
    draft.chunk_blocks = chunk_blocks
    draft.zero_grad()
    B, S = batch[0].shape
    loss, metrics = draft(*batch, seeds=range(B), lengths=[S] * B)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | metrics | gradients


def assert_equal(a: dict, b: dict, tolerance: float) -> None:
    """Same names; every entry within tolerance of the tensor's largest."""
    assert a.keys() == b.keys()
    for name in a:
        gap, size = (a[name].double() - b[name].double()).abs().max(), b[name].double().abs().max()
        assert gap <= tolerance * max(size, 1e-3), f"{name}: {gap:.2e} of {size:.2e}"


# ---------------------------------------------------------------------------------------------------------------------
# Two forms, one meaning


@pytest.mark.parametrize("chunk_blocks", [1, 3, 128, 10_000, None])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("head", HEADS)
def test_slices_change_nothing(head, dtype, tolerance, chunk_blocks):
    draft, batch = make_draft(head, dtype), make_batch(dtype)
    full = outcome(draft, batch, 0)
    assert len(full) > 25 and full["blocks"] > 12 and full["fc.weight"].any()
    assert_equal(outcome(draft, batch, chunk_blocks), full, tolerance)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_tiles_of_the_vocabulary_change_nothing(head, bias, monkeypatch):
    """On a CPU fp32 products go to oneDNN in tiles: here three of 37 columns, the last one narrow."""
    draft, batch = make_draft(head, torch.float32, bias), make_batch(torch.float32)
    monkeypatch.setattr(objective, "TILE", 15)
    assert objective.in_onednn(batch[1])
    assert_equal(outcome(draft, batch), outcome(draft, batch, 0), 1e-5)


OFF = {"no confidence": {"confidence_weight": 0.0}, "no L1": {"l1_weight": 0.0}, "no CE": {"ce_weight": 0.0},
       "CE only": {"l1_weight": 0.0, "confidence_weight": 0.0}}


@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("bias", [False, True])
def test_terms_can_be_off(off, bias):
    """Any term without the others, with a plain head and one with bias. CE alone asks for no final state at all."""
    draft, (ids, context, mask, final) = make_draft(bias=bias), make_batch()
    vars(draft).update(OFF[off])
    batch = (ids, context, mask, None if off == "CE only" else final)
    for chunk_blocks in (1, 3, None):
        assert_equal(outcome(draft, batch, chunk_blocks), outcome(draft, batch, 0), 1e-10)


def test_small_byte_budgets_mean_small_slices(monkeypatch):
    """The budget decides slices and steps, and nothing else: here two blocks per slice and one row per step."""
    draft, batch = make_draft(), make_batch()
    full, whole = outcome(draft, batch, 0), objective.slice_rows([4] * 30, None, 37, 4, "cpu")
    row = 37 * 4
    monkeypatch.setitem(objective.BUFFER_BYTES, "cpu", 8 * row)
    monkeypatch.setitem(objective.CACHE_ROWS_BYTES, "cpu", row)
    assert whole == [(0, 40), (40, 80), (80, 120)] and len(objective.slice_rows([4] * 30, None, 37, 4, "cpu")) == 15
    assert_equal(outcome(draft, batch), full, 1e-10)


def test_bf16_is_near_fp32():
    """bf16 weights and states, softmax and sums in fp32: within bf16's own rounding of the same numbers in fp32.
    Gradients without L1's: their sign jumps where p is near q, so that rounding alone moves them by up to a quarter."""
    draft, batch = make_draft(dtype=torch.bfloat16), make_batch(torch.bfloat16)
    wide = DSparkDraft(draft.config).attach(copy.deepcopy(draft.embed_tokens).float(),
                                            copy.deepcopy(draft.lm_head).float())
    wide.load_state_dict(draft.state_dict())
    exact_batch = tuple(x.float() if x.is_floating_point() else x for x in batch)
    sliced, exact = outcome(draft, batch), outcome(wide, exact_batch)
    for name in ("loss", "ce_loss", "l1_loss", "tau_probabilistic"):
        assert sliced[name].item() == pytest.approx(exact[name].item(), rel=0.02), name
    draft.l1_weight = wide.l1_weight = 0
    exact = outcome(wide, exact_batch)
    for form in (outcome(draft, batch), outcome(draft, batch, 0)):
        for name in ("fc.weight", "markov_head.markov_w2.weight"):
            assert (form[name].float() - exact[name]).norm() < 0.08 * exact[name].norm(), name


def test_backward_scales_and_repeats():
    """Gradients follow the scale of the loss, and a kept graph gives them again."""
    draft, batch = make_draft(), make_batch()
    loss, _ = draft(*batch, seeds=range(4), lengths=[23] * 4)
    once, = torch.autograd.grad(loss, draft.markov_head.markov_w2.weight, retain_graph=True)
    thrice, = torch.autograd.grad(3 * loss, draft.markov_head.markov_w2.weight)
    torch.testing.assert_close(thrice, 3 * once)


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def test_no_slice_outgrows_the_budget():
    """Memory is flat: 64 or 4,096 blocks, the slices at V = 154,880 fit the budget and cover every row once."""
    for device, limit in objective.BUFFER_BYTES.items():
        for blocks in (64, 1024, 4096):
            counts = [7, 7, 0, 3] * (blocks // 4)
            slices = objective.slice_rows(counts, None, 154_880, 7, device)
            assert [b for _, b in slices] == [a for a, _ in slices[1:]] + [sum(counts)]
            assert max(b - a for a, b in slices) * 154_880 * 4 <= limit


def test_the_announced_peak_fits_two_gib():
    """1,024 blocks of 7 at 154,880, even if no two blocks shared a teacher position; what bench.py --dry prints."""
    for device in objective.BUFFER_BYTES:
        slices = objective.slice_rows([7] * 1024, None, 154_880, 7, device)
        draft, teacher, scratch = objective.buffer_rows(slices, [b - a for a, b in slices], 154_880, device)
        assert (draft + teacher + 2 * scratch) * 154_880 * 4 <= 2 << 30


def test_the_buffers_are_the_announced_ones(monkeypatch):
    """Every vocabulary-wide tensor that the forward makes is counted; bench.py's formula has the same rows."""
    draft, batch = make_draft(num_anchors=64), make_batch(B=1)
    args = argparse.Namespace(vocab=37, length=23, block_size=4, blocks=64, head="vanilla", rank=5)
    torch.manual_seed(0)
    formula = bench.vocabulary_memory(args, "cpu")
    torch.manual_seed(0)
    anchors, sup = bench.supervised(args)
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kw: made.append(size) or empty(*size, **kw))
    hidden = torch.randn(*anchors.shape, 4, 16, dtype=torch.float64, requires_grad=True)
    draft.objective(hidden, batch[3], sup, sup.weight.sum(), torch.zeros(()))
    rows = formula["draft_rows"] + formula["teacher_rows"] + formula["scratch_rows"]
    assert sum(size[0] for size in made if size[-1] == 37) == rows > 64


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def dense_mask(anchors, keep, S: int, K: int, window: int | None) -> torch.Tensor:
    """The rule, entry by entry: [B, 1, N*K, S + N*K]."""
    B, N = anchors.shape
    mask = torch.zeros(B, 1, N * K, S + N * K, dtype=torch.bool)
    for b in range(B):
        for row in range(N * K):
            block, anchor = row // K, int(anchors[b, row // K])
            for p in range(S):
                near = window is None or anchor + row % K - p < window
                mask[b, 0, row, p] = bool(keep[b, block]) and p < anchor and near
            mask[b, 0, row, S + block * K:S + (block + 1) * K] = True
    return mask


def attention_case(N: int = 37, S: int = 41, K: int = 4, window: int | None = None):
    torch.manual_seed(3)
    changes = {} if window is None else {"layer_types": ("sliding_attention",) * 2, "sliding_window": window}
    layer = Attention(dataclasses.replace(SMALL, **changes).validate(), 0)
    keep = torch.arange(N) < torch.tensor([[N], [N // 2]])
    anchors = torch.where(keep, torch.randint(S - 1, (2, N)).sort(1).values, 0)
    x = torch.randn(2, N * K, SMALL.hidden_size, requires_grad=True)
    context = torch.randn(2, S, SMALL.hidden_size, requires_grad=True)
    rope = rope_tables((anchors[..., None] + torch.arange(K)).flatten(1), SMALL.head_dim, 100.0, x.dtype)
    kv = layer.keys_values(context, rope_tables(torch.arange(S), SMALL.head_dim, 100.0, x.dtype))
    return layer, x, context, rope, kv, Visibility(anchors, keep, S, K), dense_mask(anchors, keep, S, K, window)


@pytest.mark.parametrize("window", [None, 6])
def test_grouped_attention_equals_one_dense_mask(window):
    """Outputs and gradients, over several groups of blocks, with dummy blocks and a sliding window."""
    layer, x, context, rope, kv, visible, mask = attention_case(window=window)
    assert x.shape[1] > 2 * attention.ATTENTION_GROUP * visible.block_size
    results = []
    for seen in (visible, [(context.shape[1], m) for m in mask]):
        out = layer(x, rope, kv, seen)
        wanted = (x, context, layer.q_proj.weight)
        results.append((out, *torch.autograd.grad(out.square().sum(), wanted, retain_graph=True)))
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_follows_the_same_rule(window):
    """The mask that CUDA training uses, run uncompiled here: forward equals the dense mask."""
    from torch.nn.attention.flex_attention import flex_attention
    layer, x, _, rope, (ck, cv), visible, mask = attention_case(N=9, S=19, window=window)
    with torch.no_grad():
        q = attention.rotate(layer.q_norm(layer.heads(layer.q_proj(x))), rope)
        k, v = layer.keys_values(x, rope)
        keys, values = torch.cat((ck, k), 2), torch.cat((cv, v), 2)
        flex = flex_attention(q, keys, values, enable_gqa=True, block_mask=visible.flex_mask(window))
        dense = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
    assert (flex - dense).abs().max() <= 1e-5 * dense.abs().max()


# ---------------------------------------------------------------------------------------------------------------------
# Non-finite states and losses


@pytest.mark.parametrize("chunk_blocks", [0, None])
@pytest.mark.parametrize("where, value", [("context", float("inf")), ("final", float("nan")), ("final", -float("inf"))])
def test_a_nonfinite_token_leaves_no_trace(where, value, chunk_blocks):
    """Bit for bit the gradients of the batch with that token unsupervised and its states zero; and it is counted."""
    draft, (ids, context, mask, final) = make_draft(dtype=torch.float32), make_batch(torch.float32)
    assert mask[0, 9]
    sick = {"context": context.clone(), "final": final.clone()}
    sick[where][0, 9, 3] = value
    context[0, 9], final[0, 9] = 0, 0
    ours = outcome(draft, (ids, sick["context"], mask.clone(), sick["final"]), chunk_blocks)
    mask[0, 9] = 0
    healthy = outcome(draft, (ids, context, mask, final), chunk_blocks)
    assert ours.pop("nonfinite_tokens") == 1 and healthy.pop("nonfinite_tokens") == 0
    assert ours.keys() == healthy.keys() and all(torch.equal(ours[n], healthy[n]) for n in ours)
    assert not draft.complaints


FAULTS = {"markov_head.markov_w2.weight": "ce", "confidence_head.proj.bias": "confidence",
          "layers.1.mlp.up_proj.weight": "ce", "lm_head.weight": "l1"}


@pytest.mark.parametrize("chunk_blocks", [0, None])
@pytest.mark.parametrize("name", FAULTS)
def test_a_nonfinite_loss_names_its_culprit(name, chunk_blocks):
    draft, batch = make_draft(), make_batch()
    sick = draft.lm_head.weight if name == "lm_head.weight" else draft.get_parameter(name)
    with torch.no_grad():
        sick.view(-1)[0] = float("nan")
    assert not outcome(draft, batch, chunk_blocks)["loss"].isfinite()
    (rows, why), = draft.complaints
    numerators, denominator, inputs = why.split("; ")
    assert f"{FAULTS[name]} (" in numerators and f"{name} (1 of {sick.numel()} entries)" in inputs
    assert "not usable" not in denominator and 0 in rows and 2 not in rows            # row 2 has no anchors
    if name.startswith("confidence"):
        assert "," not in numerators and "hidden" not in inputs                               # nothing else is blamed


def test_explanations_tell_overflow_from_bad_input():
    huge = {"ce": torch.full((2, 1, 4), 3e38), "l1": torch.ones(2, 1, 4)}
    rows, why = objective.explain_nonfinite(huge, torch.tensor(0.0), {"hidden": torch.ones(3), "final": None})
    assert rows == [0, 1] and "ce (0 of 8 slots)" in why and "0, not usable" in why and "overflowed" in why


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


@pytest.fixture(scope="module", autouse=True)
def started(tmp_path_factory):
    """Two gloo processes that run all jobs below, started before the first test so that nobody waits for them long."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, [program(__file__, folder, rank) for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(started) -> list[dict]:
    """Per rank: what each job returned, by the job's name."""
    folder, processes = started
    for process in processes:
        output_of(process)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def shares(draft: DSparkDraft, batch: tuple, rank: int, chunk_blocks: int | None) -> dict:
    """One rank's forward over its half of the batch, with the anchors that the samples have in the whole batch."""
    rows = [2 * rank, 2 * rank + 1]
    draft.chunk_blocks = chunk_blocks
    loss, metrics = draft(*(x[rows] for x in batch), seeds=rows, lengths=[23] * 2)
    loss.backward()
    return {"loss": loss.detach()} | metrics


def job_plain(rank: int) -> dict:
    """Rank 1 holds the row without anchors; both forms, each head."""
    found = {}
    for head in HEADS:
        for chunk_blocks in (0, 3):
            draft = make_draft(head)
            result = shares(draft, make_batch(), rank, chunk_blocks)
            for name, p in draft.named_parameters():
                result[name] = p.grad
            found[head, chunk_blocks] = result
    return found


def job_fsdp(rank: int) -> dict:
    """Two micro-steps without gradient reduction in the first, as the training loop accumulates."""
    draft, mesh = make_draft("rnn"), init_device_mesh("cpu", (2,))
    for layer in draft.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(draft, mesh=mesh, reshard_after_forward=False)
    for last in (False, True):
        draft.set_requires_gradient_sync(last)
        draft.set_reshard_after_backward(last)
        result = shares(draft, make_batch(), rank, 3)
    for name, p in draft.named_parameters():
        assert isinstance(p.grad, DTensor)
        result[name] = p.grad.full_tensor()
    return result


def job_poisoned(rank: int) -> dict:
    """An inf in the head of rank 1 only: its own loss is not finite, and after the reduction no rank's gradient is."""
    draft, mesh = make_draft("vanilla"), init_device_mesh("cpu", (2,))
    fully_shard(draft, mesh=mesh, reshard_after_forward=False)
    if rank == 1:
        with torch.no_grad():
            draft.lm_head.weight[5, 5] = float("inf")
    shares(draft, make_batch(), rank, 3)
    norm = nn.utils.get_total_norm([p.grad for p in draft.parameters() if p.grad is not None]).full_tensor()
    return {"norm": norm, "complaints": json.dumps(draft.complaints)}


def test_two_ranks_equal_one_process(ranks):
    """Each rank's share times the world size, averaged: the global mean, though the ranks hold unequal supervision."""
    first, second = (rank["job_plain"] for rank in ranks)
    for head, chunk_blocks in first:
        a, b = first[head, chunk_blocks], second[head, chunk_blocks]
        one = outcome(make_draft(head), make_batch(), chunk_blocks)
        mean = {name: (a[name] + b[name]) / 2 for name in one}
        assert_equal(mean, one, 1e-10)
        assert all(torch.equal(a[name], b[name]) for name in a if name in ("ce_loss", "tau_probabilistic", "agree"))


def test_sharded_and_accumulated_equals_one_process(ranks):
    """FSDP2 over layers and root: two micro-steps on the same batch give twice the gradients of one process."""
    one = outcome(make_draft("rnn"), make_batch())
    mean = {name: (ranks[0]["job_fsdp"][name] + ranks[1]["job_fsdp"][name]) / 2 for name in one}
    twice = {name: value * (2 if "." in name else 1) for name, value in one.items()}
    assert_equal(mean, twice, 1e-10)


def test_one_bad_rank_is_seen_by_all_and_named(ranks):
    """The gradient norm is not finite on every rank, so all skip the step; the rank at fault knows why."""
    good, bad = (rank["job_poisoned"] for rank in ranks)
    assert not good["norm"].isfinite() and not bad["norm"].isfinite()
    assert json.loads(good["complaints"]) == []
    assert "lm_head.weight (1 of" in json.loads(bad["complaints"])[0][1]


if __name__ == "__main__":
    folder, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    torch.save({job.__name__: job(rank) for job in (job_plain, job_fsdp, job_poisoned)}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
