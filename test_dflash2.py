"""DFlash2 against loops: convolutions, selector, objective, losslessness, files. With the engine: test_vllm_cotrain.py.
"""
import dataclasses
import json
import math
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import export
import test_dspark
from decode import propose
from dflash2 import ConvLayer, DFlash2Config, DFlash2Draft, convolve, new_draft, read_draft, serving_names
from dspark import DSparkDraft, Supervision
from export import from_speculators
from recipe import TINY

SMALL = DFlash2Config(
    vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    intermediate_size=12, block_size=4, mask_token_id=10, target_layer_ids=(0, 2), num_target_layers=5,
    rope_theta=100.0, num_anchors=64, conv_kernel_size=3, conv_group_size=4, selector_rank=5, selector_top_k=4)
PLAIN = {"conv_kernel_size": 0, "selector_rank": 0, "conv_group_size": 16, "selector_top_k": 16}


def make_draft(seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 0.5, **changes) -> DFlash2Draft:
    torch.manual_seed(seed)
    return test_dspark.make_draft(seed, dtype, scale, SMALL, DFlash2Draft, **changes)


def make_batch(draft: DFlash2Draft, B: int = 2, S: int = 21) -> tuple[Tensor, Tensor, Tensor]:
    """(input_ids, context, loss_mask): an unsupervised prompt, then an answer with one hole."""
    c = draft.config
    ids = torch.randint(c.vocab_size, (B, S))
    mask = torch.ones(B, S, dtype=torch.long)
    mask[:, :4], mask[0, 12] = 0, 0
    return ids, torch.randn(B, S, len(c.target_layer_ids) * c.hidden_size, dtype=draft.fc.weight.dtype), mask


# ---------------------------------------------------------------------------------------------------------------------
# Convolutions


def conv_case(blocks: int = 3, B: int = 2, block: int = 4, T: int = 3, G: int = 2, g: int = 4):
    torch.manual_seed(1)
    return (torch.randn(B, blocks * block, G * g, dtype=torch.double), torch.randn(T, G * g, dtype=torch.double),
            torch.randn(B, blocks * block, T, G, dtype=torch.double), block)


def test_the_convolution_equals_a_scalar_loop():
    x, base, delta, block = conv_case()
    want = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            for c in range(x.shape[2]):
                for t in range(len(base)):
                    if i % block - t >= 0:
                        want[b, i, c] += (base[t, c] + delta[b, i, t, c // 4]) * x[b, i - t, c]
    torch.testing.assert_close(convolve(x, base, delta, block), want, rtol=1e-12, atol=1e-12)


def test_folding_equals_the_mask_by_modulo():
    """Engines convolve one flat batch and mask tap t where row % block < t; without the mask, or with another block
    size, the result differs."""
    x, base, delta, block = conv_case()

    def flat(period: int) -> Tensor:
        rows, kernels = x.flatten(0, 1), delta.flatten(0, 1).repeat_interleave(4, -1) + base  # [n, H], [n, T, H]
        at, y = torch.arange(len(rows)) % period, torch.zeros_like(rows)
        for t in range(len(base)):
            shifted = torch.cat((torch.zeros_like(rows[:t]), rows[:len(rows) - t]))
            y += kernels[:, t] * shifted * (at >= t)[:, None]
        return y.view_as(x)

    folded = convolve(x, base, delta, block)
    torch.testing.assert_close(folded, flat(block), rtol=1e-12, atol=1e-12)
    for wrong in (2 * block, 10**6):
        assert (folded - flat(wrong)).abs().max() > 0.1


def test_nothing_crosses_a_block_and_tap_one_is_the_row_before():
    x, base, delta, block = conv_case()
    before = convolve(x, base, delta, block)
    touched = x.clone()
    touched[:, block - 1] += 1                   # the last row of block 0
    changed = (convolve(touched, base, delta, block) != before).any(-1).any(0)
    assert changed.nonzero().flatten().tolist() == [block - 1]
    only_tap_one = torch.zeros_like(base)
    only_tap_one[1] = 1
    y = convolve(x, only_tap_one, torch.zeros_like(delta), block).unflatten(1, (-1, block))
    assert torch.equal(y[:, :, 0], torch.zeros_like(y[:, :, 0]))
    assert torch.equal(y[:, :, 1:], x.unflatten(1, (-1, block))[:, :, :-1])


def test_rows_that_are_no_whole_blocks_are_refused():
    x, base, delta, _ = conv_case()
    with pytest.raises(ValueError, match="12 rows are not a multiple of block_size 5"):
        convolve(x, base, delta, 5)


@torch.no_grad()
def test_a_layer_equals_its_formula():
    """u = norm(r); o = attn(conv0(u; D(u))); r += conv1(o; D(u)): both sides take the kernel of the sublayer's input,
    and the projection's rows are ordered side, tap, group."""
    draft = make_draft(3)
    layer, c = draft.layers[0], draft.config
    r = torch.randn(1, 2 * c.block_size, c.hidden_size, dtype=torch.double)

    def wrapped(conv, u, sublayer):
        D = u @ conv.kernel_projection.weight.T
        D = D.reshape(*u.shape[:2], 2, c.conv_kernel_size, c.hidden_size // c.conv_group_size)
        x = convolve(u, conv.base_kernel[0], D[:, :, 0], c.block_size)
        return convolve(sublayer(x), conv.base_kernel[1], D[:, :, 1], c.block_size)

    rope = (torch.ones(1, 1, 1, c.head_dim).double(), torch.zeros(1, 1, 1, c.head_dim).double())
    empty, alone = torch.zeros(1, c.num_key_value_heads, 0, c.head_dim).double(), [(0, None)]
    h = r + wrapped(layer.attention_conv, layer.input_layernorm(r),
                    lambda u: layer.self_attn(u, rope, (empty, empty), alone))
    want = h + wrapped(layer.mlp_conv, layer.post_attention_layernorm(h), layer.mlp)
    torch.testing.assert_close(layer(r, rope, (empty, empty), None, alone), want, rtol=1e-12, atol=1e-12)


def test_at_initialisation_it_is_dflash_and_every_parameter_learns():
    """Bit for bit plain DFlash before the first step; gradients reach all tensors all the same."""
    draft = make_draft(4, torch.float32, scale=0)
    plain = DFlash2Draft(dataclasses.replace(draft.config, **PLAIN)).attach(draft.embed_tokens, draft.lm_head)
    plain.load_tensors({n: t for n, t in draft.state_dict().items() if n in plain.state_dict()})
    ids, context, mask = make_batch(draft)
    anchors, keep = torch.tensor([[4, 6, 11], [5, 5, 9]]), torch.ones(2, 3, dtype=torch.bool)
    assert torch.equal(draft.backbone(ids, context, anchors, keep), plain.backbone(ids, context, anchors, keep))
    draft(ids, context, mask)[0].backward()
    assert [n for n, p in draft.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert not any(isinstance(m, ConvLayer) and m.attention_conv for m in plain.modules())


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, PLAIN], ids=["dflash2", "dflash"])
def test_nothing_leaks_into_a_block(changes):
    test_dspark.check_visibility(make_draft(5, torch.float32, **changes))


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, PLAIN], ids=["dflash2", "dflash"])
def test_decoding_makes_the_rows_of_training(changes):
    test_dspark.check_session(make_draft(6, **changes))


# ---------------------------------------------------------------------------------------------------------------------
# Labels, selector, objective


def slot_terms(draft: DFlash2Draft, ids, context, mask, anchors, keep):
    """The objective slot by slot, from its definition: row k >= 1 of the block at a predicts token a+k, weighs
    exp(-(k-1) / gamma), and ends with the first unsupervised label. Yields (weight, unary CE, selector CE or None)."""
    c = draft.config
    hidden = draft.backbone(ids, context, anchors, keep)
    for b in range(ids.shape[0]):
        for j in range(anchors.shape[1]):
            for k in range(1, c.block_size):
                at = int(anchors[b, j]) + k
                if not keep[b, j] or at >= ids.shape[1] or not mask[b, at]:
                    break
                h, label = hidden[b, j, k], int(ids[b, at])
                logits, selector = draft.logits(h), None
                if draft.candidate_selector:
                    s = draft.candidate_selector
                    values, found = logits.detach().topk(c.selector_top_k)
                    scores = {int(v): u + (s.predecessor_codebook[ids[b, at - 1]] * s.hidden_projection(h.detach())
                                           ) @ s.successor_codebook[v] for u, v in zip(values, found, strict=True)}
                    if label in scores:
                        selector = torch.stack(list(scores.values())).logsumexp(0) - scores[label]
                yield math.exp(-(k - 1) / draft.gamma), logits.logsumexp(-1) - logits[label], selector


@pytest.mark.parametrize("changes", [{}, PLAIN, {"final_logit_softcapping": 2.0, "output_multiplier": 1.5}])
def test_the_objective_equals_the_loop(changes, monkeypatch):
    """Value and gradients: total = unary + weight * selector, each over its own denominator."""
    draft = make_draft(7, **changes)
    draft.selector_weight = 0.7
    batch = ids, context, mask = make_batch(draft)
    anchors, keep = torch.tensor([[4, 6, 10, 17], [5, 8, 9, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    monkeypatch.setattr("dspark.sample_anchors", lambda *_: (anchors, keep))
    loss, metrics = draft(*batch)
    terms = list(slot_terms(draft, ids, context, mask, anchors, keep))
    unary = sum(w * ce for w, ce, _ in terms) / (sum(w for w, _, _ in terms) + 1e-6)
    chosen = [(w, ce) for w, _, ce in terms if ce is not None]
    total = unary
    if chosen:
        assert 0 < len(chosen) < len(terms)      # some labels are outside the candidates: they weigh nothing
        selector = sum(w * ce for w, ce in chosen) / sum(w for w, _ in chosen)
        total = unary + 0.7 * selector
        torch.testing.assert_close(metrics["selector_loss"], selector.detach(), rtol=1e-6, atol=0)
        assert metrics["selector_coverage"] == len(chosen) / len(terms)
    torch.testing.assert_close(metrics["ce_loss"], unary.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(loss, total, rtol=1e-6, atol=0)
    names, parameters = zip(*draft.named_parameters(), strict=True)
    for name, a, b in zip(names, torch.autograd.grad(loss, parameters),
                          torch.autograd.grad(total, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=name)


def test_the_selector_is_detached():
    """Its loss moves its three tensors and nothing else; the unary loss moves all but these."""
    draft = make_draft(8)
    torch.manual_seed(0)
    hidden = torch.randn(2, 3, draft.config.slots, draft.config.hidden_size, dtype=torch.double, requires_grad=True)
    ids, _, mask = make_batch(draft)
    anchors, keep = torch.tensor([[4, 6, 10], [5, 8, 9]]), torch.ones(2, 3, dtype=torch.bool)
    sup = Supervision.build(ids, mask, anchors, keep, draft.config.slots, draft.gamma)
    one, none = torch.ones((), dtype=torch.double), torch.zeros(())
    gradients = {}
    for weight in (0.0, 1.0):
        draft.selector_weight = weight
        draft.zero_grad()
        hidden.grad = None
        draft.objective(hidden, None, sup, one, none)[0].backward()
        gradients[weight] = hidden.grad
        own = [p.grad for p in draft.candidate_selector.parameters()]
        assert all(g is not None and g.any() for g in own) if weight else all(g is None for g in own)
    assert torch.equal(gradients[0.0], gradients[1.0]) and gradients[0.0].any()
    assert draft.lm_head.weight.grad is None


@torch.no_grad()
def test_the_greedy_walk_equals_a_replay_of_pair_scores():
    """All K x K pair scores of every slot first, as engines do it, then a walk over table rows."""
    draft = make_draft(9, scale=0.8)
    s, c = draft.candidate_selector, draft.config
    captured = torch.randn(1, 6, len(c.target_layer_ids) * c.hidden_size, dtype=torch.double)
    differs = 0
    for last in range(c.vocab_size):
        session = draft.session()
        session.extend(captured)
        [proposal] = propose(draft, session, torch.tensor([[last]]), 0.0, 0.0)
        rows = session.block(torch.tensor([[last]]))[0, 1:]
        values, found = draft.logits(rows).topk(c.selector_top_k)
        before = torch.cat((torch.full_like(found[:1], last), found[:-1]))                    # [n, K] predecessors
        pairs = values[:, None] + torch.einsum("npr,ncr->npc", s.predecessor_codebook[before]
                                               * s.hidden_projection(rows)[:, None], s.successor_codebook[found])
        at, want = 0, []
        for t in range(c.slots):
            at = int(pairs[t, at].argmax())
            want.append(int(found[t, at]))
        assert proposal.tokens[0].tolist() == want and proposal.tokens.shape == (1, c.block_size - 1)
        differs += want != draft.logits(rows).argmax(-1).tolist()
    assert differs > 3                           # the selector changes what is drafted


@torch.no_grad()
def test_multiplier_and_soft_cap_keep_the_candidates():
    plain, capped = make_draft(10), make_draft(10, output_multiplier=3.0, final_logit_softcapping=4.0)
    h = torch.randn(5, SMALL.hidden_size, dtype=torch.double)
    a, b = plain.logits(h).topk(4), capped.logits(h).topk(4)
    assert torch.equal(a.indices, b.indices)
    torch.testing.assert_close(b.values, 4 * torch.tanh(3 * a.values / 4))


@torch.no_grad()
def test_the_embedding_scale_reaches_the_block_rows_only():
    draft, scaled = make_draft(11), make_draft(11, input_embedding_scale=0.5)
    half = scaled.embed_tokens.weight * 2
    scaled.attach(nn.Embedding.from_pretrained(half), scaled.lm_head)
    ids, captured, _ = make_batch(draft, B=1)
    at = torch.tensor([[7]]), torch.ones(1, 1, dtype=torch.bool)
    torch.testing.assert_close(draft.backbone(ids, captured, *at), scaled.backbone(ids, captured, *at))


# ---------------------------------------------------------------------------------------------------------------------
# Losslessness


@pytest.mark.parametrize("runs, changes", [(20_000, {}), (8_000, PLAIN)], ids=["dflash2", "dflash"])
def test_sampling_is_lossless(runs, changes):
    """Although the selector's distribution lives on 3 of 5 tokens only."""
    config = dict(vocab_size=5, mask_token_id=4, num_hidden_layers=1, selector_top_k=3) | changes
    draft = make_draft(20, torch.float32, **config)
    draft._frozen = []                           # takes the target's embedding and head
    assert test_dspark.check_lossless(draft, runs) == {3}


# ---------------------------------------------------------------------------------------------------------------------
# Recipes and files


def write(draft: DFlash2Draft, folder, edit=lambda tensors: tensors):
    folder.mkdir(exist_ok=True)
    draft.config.save(folder)
    save_file(edit({n: t.contiguous() for n, t in draft.state_dict().items()}), folder / "model.safetensors")
    return folder


def test_recipes_name_the_draft():
    kinds = {kind: new_draft(dataclasses.replace(TINY, draft=kind, selector_rank=8)) for kind in
             ("dspark", "dflash", "dflash2")}
    assert type(kinds["dspark"]) is DSparkDraft
    assert kinds["dflash"].candidate_selector is None and kinds["dflash"].config.slots == TINY.block_size - 1
    assert len(kinds["dflash2"].state_dict()) == 15 * TINY.num_draft_layers + 6
    with pytest.raises(ValueError, match="draft 'eagle' is none of dspark, dflash, dflash2"):
        new_draft(dataclasses.replace(TINY, draft="eagle"))


@pytest.mark.parametrize("changes, architecture", [({}, "DFlash2DraftModel"), (PLAIN, "DFlashDraftModel")])
def test_a_draft_survives_its_file(tmp_path, changes, architecture):
    draft = make_draft(12, torch.float32, final_logit_softcapping=30.0 if not changes else None, **changes)
    found = read_draft(write(draft, tmp_path / "draft"))
    raw = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert raw["architectures"] == [architecture] and raw["is_causal"] is False
    assert all(raw[key] == value for key, value in raw["dflash_config"].items())             # nested and flat agree
    assert found.config == dataclasses.replace(draft.config, layer_types=("full_attention",) * 2)
    assert all(torch.equal(t, draft.state_dict()[n]) for n, t in found.state_dict().items())


def spelled_by_a_trainer(tensors: dict) -> dict:
    return {"draft_model." + (n + ".weight" if n.endswith("codebook") else n): t for n, t in tensors.items()}


def test_a_trainers_spelling_of_the_codebooks_loads(tmp_path):
    draft = make_draft(13, torch.float32)
    found = read_draft(write(draft, tmp_path / "draft", spelled_by_a_trainer))
    assert all(torch.equal(t, draft.state_dict()[n]) for n, t in found.state_dict().items())
    names = ["candidate_selector.successor_codebook.weight", "candidate_selector.hidden_projection.weight", "fc.weight"]
    once = serving_names(dict.fromkeys(names, torch.zeros(1)))
    assert list(once) == ["candidate_selector.successor_codebook", *names[1:]] and serving_names(once) == once


def test_dflash_starts_dflash2_and_half_a_dflash2_is_refused():
    draft, plain = make_draft(14, torch.float32, scale=0), make_draft(15, torch.float32, **PLAIN)
    draft.load_tensors(plain.state_dict())
    assert torch.equal(draft.fc.weight, plain.fc.weight)
    assert draft.layers[0].mlp_conv.base_kernel[:, 0].eq(1).all()            # the additions are as initialised
    partly = {n: t for n, t in make_draft(16, torch.float32).state_dict().items() if "successor" not in n}
    renamed = partly | {"candidate_selector.next_codebook": partly["candidate_selector.predecessor_codebook"]}
    for tensors in (partly, renamed):
        with pytest.raises(ValueError, match="only part of the DFlash2 modules: missing .*successor_codebook"):
            draft.load_tensors(tensors)
    with pytest.raises(ValueError, match=r"unrecognized \['candidate_selector.next_codebook'\]"):
        draft.load_tensors(renamed)
    with pytest.raises(ValueError, match="missing fc.weight"):
        draft.load_tensors({n: t for n, t in plain.state_dict().items() if n != "fc.weight"})


@pytest.mark.parametrize("change, message", [
    ({"conv_group_size": 3}, "conv_group_size 3 does not divide hidden_size 8"),
    ({"conv_kernel_size": 5}, "conv_kernel_size 5 exceeds block_size 4"),
    ({"selector_top_k": 12}, "selector_top_k 12 must lie in 1..11"),
    ({"selector_rank": 0}, "DFlash2 has convolutions and selector, DFlash neither"),
    ({"block_size": 1, **PLAIN}, "block_size 1 proposes nothing"),
])
def test_a_config_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change).validate()


# ---------------------------------------------------------------------------------------------------------------------
# From the speculators layout


def foreign(**changes) -> dict:
    """What speculators writes beside a DFlash2 draft (key names from its sources); None leaves a key out."""
    layers = {"model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 12, "vocab_size": 11, "rms_norm_eps": 1e-6,
              "max_position_embeddings": 512, "hidden_act": "silu", "rope_scaling": None,
              "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "sliding_window": 64,
              "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    raw = {"speculators_model_type": "dflash2", "speculators_config": {"algorithm": "dflash2"}, "dtype": "float32",
           "transformer_layer_config": layers, "aux_hidden_state_layer_ids": [1, 3], "mask_token_id": 10,
           "block_size": 4, "conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 4,
           "draft_vocab_size": 11} | changes
    return {key: value for key, value in raw.items() if value is not None}


@pytest.fixture
def target_folder(tmp_path):
    (tmp_path / "target").mkdir()
    nested = {"num_hidden_layers": 5, "hidden_size": 8, "vocab_size": 11, "eos_token_id": 2, "bos_token_id": None}
    (tmp_path / "target" / "config.json").write_text(json.dumps({"text_config": nested}))
    return tmp_path / "target"


def foreign_folder(folder, draft, raw):
    write(draft, folder)
    (folder / "config.json").write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return folder


def test_a_speculators_draft_becomes_zlabs(tmp_path, target_folder):
    """The config says what z-lab's says, nothing of speculators is left, and our loader takes the result."""
    draft = make_draft(17, torch.float32)
    source = foreign_folder(tmp_path / "source", draft, foreign())
    out = from_speculators(source, tmp_path / "out", target_folder)
    text = (out / "config.json").read_text()
    raw = json.loads(text)
    assert text == json.dumps(raw, indent=2, sort_keys=True) + "\n"
    assert raw["architectures"] == ["DFlash2DraftModel"] and raw["num_target_layers"] == 5
    assert raw["dflash_config"] == {"block_size": 4, "conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 5,
                                    "selector_top_k": 4, "mask_token_id": 10, "target_layer_ids": [0, 2]}
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 100.0
    assert (raw["use_sliding_window"], raw["sliding_window"]) == (False, None)
    assert raw["layer_types"] == ["full_attention"] * 2
    assert (raw["eos_token_id"], raw["bos_token_id"], raw["dtype"]) == (2, None, "float32")
    assert not {"speculators_config", "speculators_model_type", "transformer_layer_config",
                "aux_hidden_state_layer_ids", "rope_scaling"} & set(raw)
    found = read_draft(out)
    assert found.config.target_layer_ids == (0, 2) and found.config.slots == 3
    assert all(torch.equal(t, draft.state_dict()[n]) for n, t in found.state_dict().items())


def test_windows_links_and_explicit_ids(tmp_path, target_folder):
    """Windows only on request, links replace what is in the way, explicit ids win, a written rope_theta is kept."""
    raw = foreign(target_layer_ids=[1, 3])
    raw["transformer_layer_config"] |= {"rope_theta": 50.0}
    source = foreign_folder(tmp_path / "source", make_draft(18, torch.float32), raw)
    for _ in range(2):
        out = from_speculators(source, tmp_path / "out", target_folder, keep_window=True, link=True)
        assert (out / "model.safetensors").resolve() == (source / "model.safetensors").resolve()
    config = json.loads((out / "config.json").read_text())
    assert config["sliding_window"] == 64 and config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["dflash_config"]["target_layer_ids"] == [1, 3] and config["rope_theta"] == 50.0
    from_speculators(source, out, target_folder)
    assert not (out / "model.safetensors").is_symlink()


@pytest.mark.parametrize("raw, message", [
    ("[1, 2]", "config.json is a list, not a JSON object"),
    ("{", "not valid JSON"),
    (foreign(speculators_model_type="eagle3", speculators_config={"algorithm": "eagle3"}),
     "not a speculators DFlash2 config"),
    (foreign(transformer_layer_config=None), "no transformer_layer_config"),
    (foreign(aux_hidden_state_layer_ids=None), "neither target_layer_ids nor aux_hidden_state_layer_ids"),
    (foreign(aux_hidden_state_layer_ids=[0, 3]), "must be >= 1"),
    (foreign(aux_hidden_state_layer_ids=[1, 6]), "exceed the target, which has 5 layers"),
    (foreign(draft_vocab_size=7), "share the target vocabulary"),
    (foreign(mask_token_id=None), "mask_token_id is None"),
    (foreign(selector_rank=None), r"lacks \['selector_rank'\]"),
])
def test_a_malformed_speculators_config_is_named(tmp_path, target_folder, raw, message):
    source = foreign_folder(tmp_path / "source", make_draft(19, torch.float32), raw)
    with pytest.raises(ValueError, match=message):
        from_speculators(source, tmp_path / "out", target_folder)
    assert not (tmp_path / "out").exists()


def test_the_command_converts(tmp_path, target_folder, monkeypatch, capsys):
    source = foreign_folder(tmp_path / "source", make_draft(19, torch.float32), foreign())
    command = ["export.py", str(source), "--to", "zlab", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="--to zlab needs --target"):
        export.main()
    monkeypatch.setattr(sys, "argv", [*command, "--target", str(target_folder), "--link-weights"])
    with pytest.raises(SystemExit) as ended:
        export.main()
    assert ended.value.code == 0 and capsys.readouterr().out.strip() == str(tmp_path / "out")
    (source / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no .safetensors file"):
        from_speculators(source, tmp_path / "other", target_folder)
