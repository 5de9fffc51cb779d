"""Evaluation: batches, plain decoding, kills, replicas, what a person gets wrong, calibration, the scheduler.

The protocol itself is tested in test_dspark.py. Read next: decode.py, eval_deepspec.py, calibrate.py, schedule.py.
"""
import copy
import dataclasses
import itertools
import json
import multiprocessing
import random
import shutil
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import calibrate
import data_glm
import eval_deepspec
import schedule
from capture import HFTarget
from conftest import output_of, program
from decode import NoDraft, choose, decode, sample, speculative_decode
from dflash2 import DFlash2Config, DFlash2Draft
from dspark import DSparkDraft
from kvcache import PackedLinear, pack_linears
from recipe import TINY
from targets import target_path
from train import train

HERE = Path(__file__).parent
SERVE = HERE / "testdata" / "golden" / "serve"
LISTS = ("acceptance_lengths", "proposal_lengths", "accepted_draft_lengths")


@pytest.fixture(scope="module")
def golden():
    """(target, draft, recorded traces) whose greedy outputs DeepSpec and vLLM agree on."""
    draft = DSparkDraft.from_pretrained(SERVE / "draft_vanilla")
    target = HFTarget.from_pretrained(SERVE / "target", draft.config.target_layer_ids)
    return target, draft, json.loads((SERVE / "eval_traces.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a draft that the tiny recipe trained, and its task file."""
    folder = tmp_path_factory.mktemp("evaluation")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        data_glm.prepare(TINY)
        data_glm.build_tasks(("gsm_symbolic",))
        train(TINY)
    if dist.is_initialized():
        dist.destroy_process_group()             # children of this process must not inherit it
    return folder


def evaluate(out="out/x", **changes):
    options = {"draft": "out/tiny/latest", "limit": 3, "temperature": 1.0, "max_new_tokens": 24, "out": out}
    return eval_deepspec.run(Namespace(**options | changes))


def timeless(value):
    """A results.json without what the clock wrote, and without the batch size that nothing else may depend on."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in ("seconds", "tokens_per_s", "batch_size")}
    return [timeless(v) for v in value] if isinstance(value, list) else value


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def test_the_batch_equals_the_recorded_traces(golden):
    target, draft, cases = golden
    prompts = [torch.tensor([case["prompt_ids"]]) for case in cases]
    [(new, stops)] = {(case["max_new_tokens"], case["stop_token_ids"]) for case in cases}
    found = dict(decode(target, draft, prompts, max_new_tokens=new, temperature=0.0, stop_token_ids=stops, slots=8))
    for i, case in enumerate(cases):
        assert vars(found[i]).items() >= {k: case[k] for k in ("output_ids", *LISTS)}.items()


@pytest.mark.parametrize("slots", [2, 5, 8])
@pytest.mark.parametrize("temperature, threshold, stops", [(0.0, 0.0, [2]), (1.0, 0.0, [2, 9, 41]), (0.6, 0.4, None)])
def test_a_prompt_does_not_see_its_batch(golden, slots, temperature, threshold, stops):
    """Prompts of many lengths, sharing slots one after the other: every list, confidence and near tie is that of the
    prompt decoded alone with the same seed, to the bit. Cut proposals are padded to the batch's longest, and products
    of another height may round differently: there the confidences are equal to rounding."""
    target, draft, _ = golden
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(96, (1, n), generator=g) for n in (5, 31, 1, 12, 2, 60, 9, 17, 3)]
    settings = {"max_new_tokens": 20, "temperature": temperature, "stop_token_ids": stops,
                "confidence_threshold": threshold}
    seeds = list(range(100, 100 + len(prompts)))
    together = dict(decode(target, draft, prompts, slots=slots, seeds=seeds, **settings))
    assert sorted(together) == list(range(len(prompts)))
    for i, ids in enumerate(prompts):
        torch.manual_seed(seeds[i])              # the default generator and one of its own give the same stream
        many, alone = vars(together[i]), vars(speculative_decode(target, draft, ids, **settings))
        for row in zip(many["confidence_logits"], alone["confidence_logits"], strict=True) if threshold else ():
            assert row[0] == pytest.approx(row[1], abs=1e-5)
        skip = {"confidence_logits"} if threshold else set()
        assert all(many[k] == alone[k] for k in set(many) - skip)
    lengths = [n for trace in together.values() for n in trace.acceptance_lengths]
    assert len(set(lengths)) > 2                 # rows were rolled back by different amounts
    assert threshold == 0 or {0} < {n for trace in together.values() for n in trace.proposal_lengths}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("selector_rank", [0, 8])
def test_dflash_walks_a_batch(golden, temperature, selector_rank):
    target, c = golden[0], golden[1].config
    values = dataclasses.asdict(c) | {"markov_rank": 0, "enable_confidence_head": False,
                                      "confidence_head_with_markov": False, "conv_kernel_size": 2 * bool(selector_rank),
                                      "selector_rank": selector_rank, "selector_top_k": 6}
    torch.manual_seed(3)
    draft = DFlash2Draft(DFlash2Config(**values).validate()).attach(target.embed_tokens, target.lm_head).eval()
    settings = {"max_new_tokens": 16, "temperature": temperature, "stop_token_ids": None, "seeds": [5, 6, 7]}
    prompts = [torch.tensor([list(range(n))]) for n in (4, 9, 30)]
    one, many = (dict(decode(target, draft, prompts, slots=slots, **settings)) for slots in (1, 3))
    assert all(vars(one[i]) == vars(many[i]) for i in range(3))
    assert {n for i in range(3) for n in one[i].proposal_lengths} == {c.block_size - 1}


@torch.inference_mode()
def test_session_rows_are_those_of_sequences_alone(golden):
    target, g = golden[0], torch.Generator().manual_seed(1)
    ids = [torch.randint(96, (1, n), generator=g) for n in (7, 40, 3)]
    new = torch.randint(96, (3, 5), generator=g)
    with target.session(3) as many:
        for row in ids:
            many.admit(row)
        many.rollback([5, 40, 2])
        many.drop(0)                             # row 2 takes its place
        seen = many.extend(new[:2])
        for row, (prefix, keep) in enumerate(((ids[2], 2), (ids[1], 40))):
            with target.session() as one:
                one.extend(prefix)
                one.rollback(keep)
                alone = one.extend(new[row:row + 1])
            assert torch.equal(seen.context[row], alone.context[0]) and torch.equal(seen.final[row], alone.final[0])


def test_one_draw_is_multinomials():
    for seed in range(50):
        p = torch.softmax(3 * torch.randn(4, 300, generator=torch.Generator().manual_seed(seed)), -1)
        generators = [torch.Generator().manual_seed(seed + r) for r in range(4)]
        others = [torch.Generator().manual_seed(seed + r) for r in range(4)]
        want = [int(torch.multinomial(p[r:r + 1], 1, generator=g)) for r, g in enumerate(others)]
        assert sample(p, generators)[0].tolist() == want
        assert all(torch.rand(1, generator=a) == torch.rand(1, generator=b)            # and the streams stay together
                   for a, b in zip(generators, others, strict=True))


def test_near_ties_are_seen():
    logits = torch.tensor([[0.0, 5.0, 4.9999], [0.0, 5.0, 4.99], [3.0, 3.0, 3.0]])
    ids, close = choose(logits)
    assert ids.tolist() == [1, 1, 0] and close.tolist() == [True, False, True]
    equal = torch.full((1, 2), 0.5)
    hits = sum(bool(sample(equal, [torch.Generator().manual_seed(s)])[1]) for s in range(3000))
    assert hits < 10                             # drawn scores of equal probabilities are rarely equal


@torch.no_grad()
def test_packed_layers_compute_what_they_are():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2880, 96), nn.Linear(96, 7, bias=False))
    packed, x = pack_linears(copy.deepcopy(plain)), torch.randn(33, 2880)
    assert all(type(layer) is PackedLinear for layer in packed)
    whole = packed(x)
    torch.testing.assert_close(whole, plain(x))
    assert all(torch.equal(packed(x[:n]), whole[:n]) for n in (1, 2, 7, 8, 20))        # a row knows no other rows
    assert torch.equal(packed(x[0]), whole[0]) and packed(x[None, :1]).shape == (1, 1, 7)
    packed[0].weight.mul_(2)
    plain[0].weight.mul_(2)
    torch.testing.assert_close(packed(x), plain(x))                                    # no stale copy
    torch.testing.assert_close(copy.deepcopy(packed).double()(x.double()), plain.double()(x.double()))
    with torch.enable_grad():
        packed(x).sum().backward()
    assert packed[0].weight.grad is not None


def test_a_draft_that_proposes_nothing_is_plain_decoding(golden):
    target, draft, cases = golden
    prompts = [torch.tensor([case["prompt_ids"]]) for case in cases]
    for slots in (1, 4):
        for i, trace in decode(target, NoDraft(target), prompts, max_new_tokens=48, temperature=0.0,
                               stop_token_ids=None, slots=slots):
            assert trace.output_ids == cases[i]["output_ids"] and set(trace.acceptance_lengths) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_smollm2_in_batches_of_eight(temperature):
    """24 prompts of 64 tokens through the real target: batch 8 equals batch 1."""
    from transformers import AutoTokenizer

    from dspark import DSparkConfig
    from recipe import SMOLLM2_DEMO
    home = target_path(SMOLLM2_DEMO)
    target = HFTarget.from_pretrained(home, SMOLLM2_DEMO.target_layer_ids)
    torch.manual_seed(0)
    draft = DSparkDraft(DSparkConfig.from_recipe(SMOLLM2_DEMO)).eval()
    tokenizer = AutoTokenizer.from_pretrained(home)
    prompts = [data_glm.encode_prompt(text, tokenizer, "chatml") for text in data_glm.gsm_symbolic(1, 24)]
    settings = {"max_new_tokens": 64, "temperature": temperature, "stop_token_ids": [2], "seeds": list(range(24))}
    one, many = (dict(decode(target, draft, prompts, slots=slots, **settings)) for slots in (1, 8))
    assert all(vars(one[i]) == vars(many[i]) for i in range(24))


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_batches_and_options_of_the_command(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    one = evaluate("out/one", limit=10)
    many = evaluate("out/many", limit=10, batch_size=4, tensorboard=True, speedup=True)
    assert all(timeless(one[part]) == timeless(many[part]) for part in ("samples", "metrics"))
    assert one["metrics"]["overall"]["accept_len"] > 1.2
    shown = capsys.readouterr().out
    assert "thinking none" in shown and "batch 4" in shown and "pays above" in shown
    assert (trained / "out/many/eval.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert list((trained / "out/many/tensorboard").glob("events*"))
    r = json.loads((trained / "out/many/results.json").read_text())["speedup"]["gsm_symbolic"]
    assert r["ratio"] == pytest.approx(r["speculative"]["tokens_per_s"] / r["plain"]["tokens_per_s"])
    assert r["speculative"]["steps"] == one["metrics"]["overall"]["num_proposals"]
    assert r["accept_len"] == pytest.approx(one["metrics"]["overall"]["accept_len"])
    assert {"draft", "walk", "verify", "bookkeeping"} < set(r["speculative"]["ms_per_step"])
    capsys.readouterr()
    again = evaluate("out/one", limit=10, batch_size=4)      # from the journal: nobody knows how fast this batch is
    assert timeless(again) == timeless(one) and again["metrics"]["gsm_symbolic"]["tokens_per_s"] is None
    assert capsys.readouterr().out.splitlines()[-2].endswith(" -")
    surest = max(s["confidence_logits"][0][0] for s in one["samples"]["gsm_symbolic"])       # of any first proposal
    cut = evaluate("out/cut", limit=10, confidence_threshold=1 / (1 + np.exp(0.001 - surest)))
    proposed = max(n for s in cut["samples"]["gsm_symbolic"] for n in s["proposal_lengths"])
    rates = cut["metrics"]["gsm_symbolic"]["accept_rate"]
    assert 0 < proposed < TINY.block_size
    assert [x is None for x in rates] == [k >= proposed for k in range(TINY.block_size)]
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("gsm_symbolic")]
    assert row[4:-2] == ["-" if x is None else f"{x:.3f}" for x in rates]
    monkeypatch.setattr(sys, "argv", ["eval_deepspec.py", "--list"])
    eval_deepspec.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 and any(line.split()[:3] == ["gsm_symbolic", "256", "256"] for line in lines)


def test_a_foreign_draft_needs_its_target_named(trained, monkeypatch):
    monkeypatch.chdir(trained)
    shutil.copytree("out/tiny/latest", "foreign", ignore=shutil.ignore_patterns("recipe.json", "state"))
    with pytest.raises(ValueError, match="name it with --target"):
        evaluate(draft="foreign")
    own, foreign = evaluate("out/own"), evaluate("out/foreign", draft="foreign", task=["gsm_symbolic"],
                                                 target=str(target_path(TINY)))
    assert timeless(own["samples"]) == timeless(foreign["samples"])


def test_a_config_that_was_edited_is_evaluated_anew(trained, monkeypatch):
    """Of a draft whose file does not say what it was trained with, as those of others."""
    from safetensors.torch import load_file, save_file
    monkeypatch.chdir(trained)
    shutil.copytree("out/tiny/latest", "edited", ignore=shutil.ignore_patterns("recipe.json", "state"))
    save_file(load_file("edited/model.safetensors"), "edited/model.safetensors")
    given = {"draft": "edited", "task": ["gsm_symbolic"], "target": str(target_path(TINY))}
    before, config = evaluate("out/edited", **given), Path("edited/config.json")
    assert config.read_text().count('"mask_token_id": 300') == 2
    config.write_text(config.read_text().replace('"mask_token_id": 300', '"mask_token_id": 65'))
    after, fresh = evaluate("out/edited", **given), evaluate("out/edited-fresh", **given)
    assert timeless(after["samples"]) == timeless(fresh["samples"]) != timeless(before["samples"])


def test_another_target_at_the_same_place_is_evaluated_anew(trained, monkeypatch):
    from safetensors.torch import load_file, save_file
    monkeypatch.chdir(trained)
    home = Path(shutil.copytree(target_path(TINY), "moving"))
    given = {"target": str(home), "temperature": 0.0}
    before = evaluate("out/moving", **given)
    assert timeless(evaluate("out/moving", **given)) == timeless(before)
    assert len(list(Path("out/moving").glob("samples-*"))) == 1                      # taken over, nothing decoded
    tensors = load_file(home / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)
    save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    after, fresh = evaluate("out/moving", **given), evaluate("out/moving-fresh", **given)
    assert timeless(after["samples"]) == timeless(fresh["samples"]) != timeless(before["samples"])


def test_prompts_that_are_too_long_are_named(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    Path("long").mkdir()
    rows = [{"turns": ["x" * (1 if i % 2 else 5000)]} for i in range(4)]
    Path("long/mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluate("out/long", task=["mine"], datasets="long", limit=None)
    assert [s["index"] for s in found["samples"]["mine"]] == [1, 3]
    assert "2 prompts are too long" in (shown := capsys.readouterr().out) and "[0, 2]" in shown


@pytest.mark.parametrize("arguments, sentence", [
    (["--task", "nonsense"], "nonsense"), (["--draft", "nowhere"], "config.json"), (["--task", "broken"], "line 2"),
    (["--target", "other"], "do not fit|says"), (["--out", "/proc/nothing"], "/proc/nothing"),
    (["--task", "empty"], "no sample is left"), (["--batch-size", "0"], "batch-size"),
    (["--calibrated"], "--calibrate"),
    (["--calibrate", "--confidence-threshold", "0.5"], "whole proposals"), (["--limit", "x"], "invalid int"),
])
def test_a_mistake_ends_with_a_sentence_and_code_2(trained, monkeypatch, capfd, arguments, sentence):
    import re
    monkeypatch.chdir(trained)
    (Path("eval_datasets") / "broken.jsonl").write_text('{"turns": ["a"]}\n{"turns": [\n{"turns": ["b"]}\n')
    (Path("eval_datasets") / "empty.jsonl").write_text("")
    if not Path("other").exists():               # a target of other width
        from transformers import AutoModelForCausalLM, LlamaConfig
        shutil.copytree(target_path(TINY), "other")
        config = LlamaConfig.from_pretrained("other", hidden_size=32)
        AutoModelForCausalLM.from_config(config).save_pretrained("other")
    default = {"--draft": "out/tiny/latest", "--limit": "2", "--max-new-tokens": "8", "--out": "out/mistake"}
    given = [x for key, value in default.items() if key not in arguments for x in (key, value)]
    monkeypatch.setattr(sys, "argv", ["eval_deepspec.py", *given, *arguments])
    with pytest.raises(SystemExit) as end:
        eval_deepspec.main()
    told = capfd.readouterr()
    assert end.value.code == 2 and re.search(sentence, told.err + told.out) and "Traceback" not in told.err


def test_ten_kills_change_nothing(trained, monkeypatch):
    """A sweep of 40 prompts, killed at random ten times and resumed, gives the results.json of an undisturbed one."""
    monkeypatch.chdir(trained)
    fork = multiprocessing.get_context("fork")   # children start with everything imported

    def sweep(out):
        child = fork.Process(target=evaluate, args=(out,), kwargs={"limit": 40, "batch_size": 2})
        child.start()
        return child

    whole = sweep("out/whole")
    whole.join()
    rng, kills, grown = random.Random(0), 0, set()

    def lines():
        return sum(len(path.read_bytes().splitlines()) for path in Path("out/killed").glob("samples-*"))

    while kills < 10:                            # some samples later, and a moment more: never at a clock's time
        child, goal = sweep("out/killed"), lines() + rng.randint(0, 6)
        while child.is_alive() and lines() < goal:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        child.kill()
        child.join()
        if child.exitcode == -signal.SIGKILL:
            kills, _ = kills + 1, grown.add(lines())
        else:                                    # faster than the killing: once more from the start
            assert child.exitcode == 0 and lines() == 40
            shutil.rmtree("out/killed")
    last = sweep("out/killed")
    last.join()
    assert whole.exitcode == last.exitcode == 0 and len(grown) > 3
    a, b = (json.loads(Path(f"out/{out}/results.json").read_text()) for out in ("whole", "killed"))
    assert timeless(a) == timeless(b) and len(a["samples"]["gsm_symbolic"]) == 40


def test_two_replicas_give_the_table_of_one(trained, monkeypatch):
    monkeypatch.chdir(trained)
    one = evaluate("out/one-process", limit=6)
    output_of(program(HERE / "eval_deepspec.py", "--draft", "out/tiny/latest", "--limit", 6, "--temperature", 1,
                      "--max-new-tokens", 24, "--out", "out/two", processes=2))
    assert timeless(json.loads(Path("out/two/results.json").read_text())) == timeless(one)
    shares = [len(p.read_text().splitlines()) for p in Path("out/two").glob("samples-*")]
    assert shares == [3, 3]


TOGETHER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import torch, torch.distributed as dist
import capture, eval_deepspec
run = capture.HFTarget._run
def together(self, *args, **kwargs):             # as an engine's ranks, none of which computes alone
    dist.all_reduce(torch.zeros(1))
    return run(self, *args, **kwargs)
capture.HFTarget._run, capture.HFTarget.tp = together, 2
eval_deepspec.main()
"""


def test_a_target_over_two_ranks_is_timed_by_both(trained, monkeypatch):
    monkeypatch.chdir(trained)
    Path("together.py").write_text(TOGETHER)
    said = output_of(program("together.py", HERE, "--draft", "out/tiny/latest", "--limit", 3, "--temperature", 1,
                             "--max-new-tokens", 24, "--out", "out/together", "--speedup", processes=2))
    assert said.count("pays above") == 1
    assert json.loads(Path("out/together/results.json").read_text())["speedup"]["gsm_symbolic"]["ratio"] > 0


def test_what_a_node_has_on_its_own_disk_counts_on_all(trained, monkeypatch):
    """Two nodes without a common disk: a second run finds all samples of the first one, not those of rank 0 alone."""
    monkeypatch.chdir(trained)
    one = evaluate("out/one-disk", limit=6)
    Path("apart.py").write_text(f"import os, sys\nsys.path.insert(0, {str(HERE)!r})\nimport eval_deepspec\n"
                                "sys.argv[-1] += os.environ['RANK']\neval_deepspec.main()\n")
    for limit in (4, 6, 6):
        output_of(program("apart.py", "--draft", "out/tiny/latest", "--temperature", 1, "--max-new-tokens", 24,
                          "--limit", limit, "--out", "out/disk", processes=2))
    assert timeless(json.loads(Path("out/disk0/results.json").read_text())) == timeless(one)
    assert [sum(len(p.read_text().splitlines()) for p in Path(f"out/disk{rank}").glob("samples-*")) for rank in (0, 1)
            ] == [3, 3]


# ---------------------------------------------------------------------------------------------------------------------
# Calibration


def synthetic(n: int, overconfidence: float, slots: int = 5, seed: int = 0):
    """Proposals whose slots are accepted with the sigmoid of a true logit; the head claims a multiple of it."""
    rng = np.random.default_rng(seed)
    true = rng.normal(0.8, 1.2, (n, slots))
    accepted = np.cumprod(rng.random((n, slots)) < 1 / (1 + np.exp(-true)), 1).astype(bool)
    return true * overconfidence, accepted, np.ones_like(accepted)


def test_scores_equal_their_definitions():
    rng = np.random.default_rng(1)
    p, y = np.round(rng.random(300), 2), rng.random(300) < 0.6
    bins = [[i for i in range(300) if min(int(p[i] * 20), 19) == b] for b in range(20)]
    want = sum(len(b) / 300 * abs(sum(p[i] for i in b) / len(b) - sum(y[i] for i in b) / len(b)) for b in bins if b)
    assert calibrate.ece(p, y) == pytest.approx(want)
    pairs = [(p[i] > p[j]) + 0.5 * (p[i] == p[j]) for i in range(300) for j in range(300) if y[i] and not y[j]]
    assert calibrate.auroc(p, y) == pytest.approx(sum(pairs) / len(pairs))


@pytest.mark.parametrize("overconfidence", [3.0, 0.4])
def test_a_synthetic_head_is_repaired(overconfidence):
    temperatures = calibrate.fit_temperatures(*synthetic(20_000, overconfidence))
    assert np.allclose(temperatures, overconfidence, rtol=0.3)
    held_out = synthetic(20_000, overconfidence, seed=1)
    before, after = calibrate.scores(*held_out), calibrate.scores(*held_out, temperatures)
    assert all(row["ece"] < 0.02 for row in after) and calibrate.mean_ece(before) > 0.05
    assert all(b["brier"] < a["brier"] for a, b in zip(before, after, strict=True))
    assert after[0]["auroc"] == before[0]["auroc"]
    order = np.argsort(held_out[0], 0)           # every slot's own confidences keep their order
    assert (np.argsort(held_out[0] / np.array(temperatures), 0) == order).all()


def test_what_follows_an_accepted_stop_is_not_observed():
    sample = {"confidence_logits": [[0.0, 1.0, 2.0]] * 2, "accepted_draft_lengths": [1, 2], "proposal_lengths": [3, 2]}
    logits, accepted, observed = calibrate.observations([sample])
    assert accepted.tolist() == [[True, False, False], [True, True, False]]
    assert observed.tolist() == [[True] * 3, [True, True, False]] and logits.shape == (2, 3)
    never = calibrate.fit_temperatures(logits, accepted, observed & [True, True, False])[2]
    assert never == pytest.approx(1.0)           # nothing says otherwise
    with pytest.raises(ValueError, match="no confidence head"):
        calibrate.observations([sample | {"confidence_logits": [[], []]}])


def test_calibration_of_the_command_is_stored_and_applied(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    found = evaluate("out/calibration", limit=12, calibrate=True)
    stored = json.loads(Path("out/tiny/latest/calibration.json").read_text())
    assert len(stored["temperatures"]) == len(stored["before"]) == TINY.block_size and stored["samples"] == [6, 6]
    assert (trained / "out/calibration/calibration.png").is_file() and "held-out half" in capsys.readouterr().out
    half = calibrate.observations(found["samples"]["gsm_symbolic"][1::2])
    claimed = calibrate.survival(half[0], stored["temperatures"])[half[2][:, 1], 1]
    assert stored["after"][1]["ece"] == pytest.approx(calibrate.ece(claimed, half[1][half[2][:, 1], 1]))
    cut = evaluate("out/calibrated", limit=12, confidence_threshold=0.5, calibrated=True)
    with pytest.raises(ValueError, match="fitted for temperature .* this evaluation has 0.25; .* --temperature 0.25"):
        evaluate("out/other", limit=12, temperature=0.25, calibrated=True)
    heat = np.array(stored["temperatures"])
    for s in cut["samples"]["gsm_symbolic"]:
        for logits, n, accepted in zip(s["confidence_logits"], s["proposal_lengths"], s["accepted_draft_lengths"],
                                       strict=True):
            low = np.flatnonzero(1 / (1 + np.exp(-np.array(logits) / heat)) < 0.5)
            assert n == (low[0] if len(low) else TINY.block_size) or n == accepted


# ---------------------------------------------------------------------------------------------------------------------
# The scheduler


def random_load(rng, requests, slots):
    return [sorted((rng.random() for _ in range(slots)), reverse=True) for _ in range(requests)]


def unimodal(rng):
    """Steps per second of a target whose seconds per step are convex in the tokens verified."""
    base, slope, bend, knee = rng.uniform(1, 20), rng.uniform(0.01, 2), rng.uniform(0, 0.1), rng.randrange(1, 12)
    return lambda n: 1 / (base + slope * max(0, n - knee) + bend * n * n)


@pytest.mark.parametrize("seed", range(40))
def test_the_schedule_is_the_best_of_all(seed):
    """Over every combination of prefix lengths of three requests."""
    rng = random.Random(seed)
    load, speed = random_load(rng, 3, 4), unimodal(rng)

    def value(lengths):
        return (3 + sum(sum(row[:n]) for row, n in zip(load, lengths, strict=True))) * speed(3 + sum(lengths))

    best = max(map(value, itertools.product(range(5), repeat=3)))
    assert value(schedule.schedule(load, speed)) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_no_admission_looks_ahead(seed):
    """Changing a token and all after it, of one request, never changes whether its earlier tokens are admitted; tables
    with cliffs included."""
    rng = random.Random(seed)
    load, table = random_load(rng, 4, 5), [rng.random() for _ in range(30)]
    lengths = schedule.schedule(load, lambda n: table[n])
    for r in range(4):
        for t in range(5):
            changed = [list(row) for row in load]
            changed[r][t:] = sorted((rng.uniform(0, ([1.0] + load[r])[t]) for _ in range(5 - t)), reverse=True)
            after = schedule.schedule(changed, lambda n: table[n])
            assert min(after[r], t) == min(lengths[r], t)


def test_the_schedule_follows_the_load():
    """One request: verifying is free, so everything is; many: verifying costs, and shorter proposals win."""
    logits, accepted, _ = synthetic(4000, 1.0, slots=7)
    claimed, accepted = calibrate.survival(logits), accepted.sum(1)
    costs = {"verify": [[1, 1.0], [16, 1.0], [512, 32.0]], "draft": [[1, 0.1], [64, 0.4]]}

    def speed(requests, policy):
        return schedule.simulate(claimed, accepted, costs, requests, policy)

    assert speed(1, "scheduled") == speed(1, "fixed") > speed(1, "plain")
    assert speed(32, "scheduled") > 1.2 * speed(32, "fixed") and speed(32, "scheduled") > speed(32, "threshold")


def test_a_cost_stands_beside_the_tokens_that_were_verified(golden):
    """In blocks of 7, 32 tokens are no equal rows: 35 were measured, so the table says 35."""
    target, draft, _ = golden
    small = DSparkDraft(dataclasses.replace(draft.config, block_size=6)).attach(target.embed_tokens, target.lm_head)
    real, seen = target.session, set()

    def session(slots):
        opened = real(slots)
        extend = opened.extend
        opened.extend = lambda ids: seen.add(ids.numel()) or extend(ids)
        return opened

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "session", session)
        patch.setattr(schedule, "TURNS", 1)
        patch.setattr(schedule, "CONCURRENCY", (1,))
        table = schedule.profile(target, small.eval())
    assert [n for n, _ in table["verify"]] == sorted(seen - {schedule.CONTEXT}) == [1, 2, 4, 8, 18, 35, 70, 133, 259]


def test_profile_and_simulation_of_a_recorded_evaluation(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    monkeypatch.setattr(schedule, "SIZES", (1, 4, 16))
    monkeypatch.setattr(schedule, "CONCURRENCY", (1, 4))
    evaluate("out/load", limit=6)
    for arguments in (["profile", "out/tiny/latest", "--json", "costs.json"],
                      ["simulate", "out/load/results.json", "--costs", "costs.json"]):
        monkeypatch.setattr(sys, "argv", ["schedule.py", *arguments])
        schedule.main()
    costs = json.loads(Path("costs.json").read_text())
    assert [n for n, _ in costs["verify"]] == [1, 4, 16] and all(s > 0 for _, s in costs["verify"] + costs["draft"])
    result = json.loads(Path("out/load/schedule.json").read_text())
    assert result["requests"] == [1, 4] and Path("out/load/schedule.png").is_file()
    assert all(len(result[p]) == 2 for p in ("plain", "fixed", "threshold", "scheduled"))
    evaluate("out/cut-load", limit=6, confidence_threshold=0.5)
    monkeypatch.setattr(sys, "argv", ["schedule.py", "simulate", "out/cut-load/results.json", "--costs", "costs.json"])
    with pytest.raises(SystemExit) as end:
        schedule.main()
    assert end.value.code == 2 and "without a threshold" in capsys.readouterr().err
