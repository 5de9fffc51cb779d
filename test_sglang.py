"""Facts about the SGLang engine in this process: what it captures is what transformers computes, and it gives back.

`bash run.sh test engines` runs this in .venv-sglang; the base tests leave it alone.
"""
import dataclasses
import functools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import sglang_target
from capture import HFTarget, apart
from conftest import output_of, own_port, program
from decode import decode, speculative_decode
from dspark import DSparkDraft
from sglang_target import SGLangTarget

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "testdata" / "golden"
LAYERS = (0, 2, 4)
LENGTHS = (37, 5, 48, 1)                         # of one batch; 48 fills pages of 16, 37 cuts one


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of random tiny targets with six layers. Qwen3 and Llama, which the engine captures itself; Gemma 3, whose
    layers slide over 16 tokens, and GLM-4-MoE, which it does not."""
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )
    shape = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": 1}
    sliding = {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 3}
    experts = {"moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
               "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
    folders = {"golden": GOLDEN / "target"}
    for name, config, model in (("qwen3", Qwen3Config(**shape, tie_word_embeddings=True), Qwen3ForCausalLM),
                                ("llama", LlamaConfig(**shape, tie_word_embeddings=False), LlamaForCausalLM),
                                ("gemma", Gemma3TextConfig(**shape, **sliding), Gemma3ForCausalLM),
                                ("glm", Glm4MoeConfig(**shape, **experts), Glm4MoeForCausalLM)):
        torch.manual_seed(0)
        made = model(config).float()
        with torch.no_grad():                    # transformers' own start is so small that all states look alike
            for weight in made.parameters():
                weight.mul_(4) if weight.ndim == 2 else weight.add_(torch.randn_like(weight) * 0.2)
        folders[name] = tmp_path_factory.mktemp(name)
        made.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def engine(checkpoints):
    """engine(name, page, ...) loads a target; the one before it is closed, for a process holds one."""
    live = {}

    def load(name="qwen3", page=16, layers=LAYERS):
        key = (name, page, layers)
        if key not in live:
            for target in live.values():
                target.close()
            live.clear()
            live[key] = SGLangTarget.from_pretrained(checkpoints[name], layers, page_size=page)
        return live[key]
    yield load
    for target in live.values():
        target.close()


@pytest.fixture(scope="module")
def reference(checkpoints):
    return lambda name="qwen3", layers=LAYERS: HFTarget.from_pretrained(checkpoints[name], layers)


def batch(lengths=LENGTHS, seed=0):
    """Random ids [B, S], right-padded, and their mask."""
    ids = torch.randint(3, 90, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, 0), mask.long()


@pytest.mark.parametrize("name, page", [("qwen3", 1), ("qwen3", 16), ("llama", 1), ("llama", 16), ("gemma", 16),
                                        ("glm", 1)])
def test_states_equal_transformers(engine, reference, name, page):
    target, want = engine(name, page), reference(name)
    free, (ids, mask) = target.slots.free(), batch()
    got, ref = target.capture(ids, mask), want.capture(ids, mask)
    assert target.native is (name in ("qwen3", "llama"))         # the others: by hook
    assert (got.context - ref.context).abs().max() < 1e-5 and (got.final - ref.final).abs().max() < 1e-5
    assert got.context.abs().max() > 0.5
    for k, layer in enumerate(LAYERS):                   # the order is the requested one: no other layer is near
        stream = got.context[..., 64 * k:64 * (k + 1)]
        others = reference(name, tuple(i for i in range(5) if i != layer)).capture(ids, mask).context
        assert all((stream - other).abs().max() > 0.1 for other in others.split(64, -1))
    alone = target.capture(ids[:1, :LENGTHS[0]])
    assert (alone.context - got.context[:1, :LENGTHS[0]]).abs().max() < 1e-5
    assert (alone.final - got.final[:1, :LENGTHS[0]]).abs().max() < 1e-5
    assert target.slots.free() == free and not got.context[1, 5:].any() and not got.final[1, 5:].any()


def test_bfloat16_stays_near(checkpoints, engine, reference):
    want = reference("llama").capture(*batch())
    engine("llama").close()                      # a process holds one
    target = SGLangTarget.from_pretrained(checkpoints["llama"], LAYERS, dtype=torch.bfloat16)
    got = target.capture(*batch())
    target.close()
    assert got.context.dtype == got.final.dtype == target.lm_head.weight.dtype == torch.bfloat16
    real = want.final.abs().sum(-1) > 0
    assert 1e-4 < apart(got.context[real], want.context[real]) < 0.05
    assert 1e-4 < apart(got.final[real], want.final[real]) < 0.05


# ---------------------------------------------------------------------------------------------------------------------
# Sessions


@pytest.mark.parametrize("kind", ["transformers", "page 1", "page 16"])
def test_a_session_with_rollbacks_is_recomputing_from_scratch(engine, reference, kind):
    target = reference() if kind == "transformers" else engine(page=int(kind.split()[1]))
    free = None if kind == "transformers" else target.slots.free()
    generator = torch.Generator().manual_seed(1)
    tokens, crossed = torch.randint(3, 90, (21,), generator=generator).tolist(), set()
    with target.session() as session:
        seen = session.extend(torch.tensor([tokens]))
        contexts, finals = [seen.context], [seen.final]
        tokens.append(int(target.lm_head(seen.final[0, -1]).argmax()))
        while len(tokens) < 221:                         # as a decode: verify a block, keep some of it, go on
            start, block = len(tokens) - 1, torch.randint(3, 90, (7,), generator=generator).tolist()
            seen = session.extend(torch.tensor([[tokens[-1], *block]]))
            accepted = int(torch.randint(0, 8, (), generator=generator))
            session.rollback(start + accepted + 1)
            crossed.add((start + 8) // 16 - (start + accepted + 1) // 16)
            contexts.append(seen.context[:, :accepted + 1])
            finals.append(seen.final[:, :accepted + 1])
            tokens += [*block[:accepted], int(target.lm_head(seen.final[0, accepted]).argmax())]
        assert session.length == len(tokens) - 1 and crossed == {0, 1}
        ids = torch.tensor([tokens[:-1]])
        for whole in (target.capture(ids), reference().capture(ids)):
            assert (torch.cat(contexts, 1) - whole.context).abs().max() < 1e-5
            assert (torch.cat(finals, 1) - whole.final).abs().max() < 1e-5
            chosen = target.lm_head(whole.final[0]).argmax(-1)
            assert int(chosen[-1]) == tokens[-1] and int(chosen[20]) == tokens[21]
        session.rollback(0)                              # to nothing, and on from there
        again = session.extend(ids[:, :30])
        assert (again.final - whole.final[:, :30]).abs().max() < 1e-5
        with pytest.raises(ValueError, match="30 tokens|holds 30"):
            session.rollback(31)
    if free is not None:
        assert target.slots.free() == free


@pytest.mark.parametrize("page", [1, 16])
def test_every_slot_returns_whatever_raises(engine, monkeypatch, page):
    target = engine(page=page)
    pool, table = target.slots.free(), target.slots.table.available_size()
    for keep in (None, 0, 5, 16, 17):                    # how far the body came before it failed
        with pytest.raises(KeyError), target.session() as session:
            if keep is not None:
                session.extend(torch.arange(3, 40)[None])
                session.rollback(keep)
                assert target.slots.free() == pool - -(-keep // page) * page
            raise KeyError
        assert (target.slots.free(), target.slots.table.available_size()) == (pool, table)

    def broken(*args):
        raise RuntimeError("in the forward")
    monkeypatch.setattr(target.runner, "forward", broken)
    with pytest.raises(RuntimeError, match="in the forward"), target.session() as session:
        session.extend(torch.arange(3, 40)[None])
    with pytest.raises(RuntimeError, match="in the forward"):
        target.capture(*batch())
    monkeypatch.undo()
    with pytest.raises(ValueError, match="do not fit the engine"), target.session() as session:
        session.extend(torch.full((1, pool + 1), 5))
    allocator = target.runner.token_to_kv_pool_allocator
    taken = allocator.alloc(pool - 32)                   # others hold the pool: rows run one by one, and fit
    ids, mask = batch()
    with pytest.raises(ValueError, match="room for 32 more"):
        target.capture(ids, mask)
    allocator.free(taken)
    assert (target.slots.free(), target.slots.table.available_size()) == (pool, table)
    free_pages = allocator.free_pages.tolist()
    assert len(set(free_pages)) == len(free_pages) == pool // page          # nothing was freed twice


# ---------------------------------------------------------------------------------------------------------------------
# Decoding, processes, and what must be refused


@pytest.mark.parametrize("page, folder, name", [
    (1, "", "draft_vanilla"), (16, "", "draft_vanilla"), (16, "", "draft_rnn"), (1, "", "draft_block4"),
    (16, "extra", "draft_embed")])               # which taps layer -1: by hook
def test_decoding_gives_the_traces_of_transformers_and_of_the_reference(engine, reference, page, folder, name):
    draft = DSparkDraft.from_pretrained(GOLDEN / folder / name)
    layers = draft.config.target_layer_ids
    cases = [case for case in json.loads((GOLDEN / folder / "eval_traces.json").read_text()) if case["draft"] == name]
    assert {0.0, 1.0} <= {case["temperature"] for case in cases}
    for target in (engine("golden", page, layers), reference("golden", layers)):
        for case in cases:
            if case.get("run") != "second":              # which continues the random stream of the first
                torch.manual_seed(case["seed"])
            trace = speculative_decode(
                target, draft, torch.tensor([case["prompt_ids"]]), max_new_tokens=case["max_new_tokens"],
                temperature=case["temperature"], stop_token_ids=case["stop_token_ids"],
                confidence_threshold=case["confidence_threshold"])
            assert dataclasses.asdict(trace) == {k: case[k] for k in dataclasses.asdict(trace)}


@pytest.mark.parametrize("page", [1, 16])
def test_many_prompts_at_once_give_the_traces_of_one_at_a_time(engine, reference, page):
    draft = DSparkDraft.from_pretrained(GOLDEN / "draft_vanilla")
    target, want = (make("golden", **k, layers=draft.config.target_layer_ids) for make, k in
                    ((engine, {"page": page}), (reference, {})))
    free, generator = target.slots.free(), torch.Generator().manual_seed(3)
    prompts = [torch.randint(4, 90, (1, n), generator=generator) for n in (21, 5, 48, 17, 33)]
    for temperature in (0.0, 1.0):
        settings = {"max_new_tokens": 40, "temperature": temperature, "stop_token_ids": [7], "seeds": [1, 2, 3, 4, 5]}
        one = dict(decode(want, draft, prompts, **settings))
        assert dict(decode(target, draft, prompts, slots=3, **settings)) == one
        assert dict(decode(target, draft, prompts, **settings)) == one and target.slots.free() == free


TWO_PROCESSES = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from capture import HFTarget
from ranks import GROUP_TIMEOUT, end_world, start_world
from sglang_target import SGLangTarget
world = start_world()
path = sys.argv[1] + "/testdata/golden/target"
target, want = SGLangTarget.from_pretrained(path, (1, 2, 4), page_size=16), HFTarget.from_pretrained(path, (1, 2, 4))
seed = world.rank // target.tp                   # the ranks of one target capture the same samples
ids = torch.randint(3, 90, (3, 37), generator=torch.Generator().manual_seed(seed))
got, ref = target.capture(ids), want.capture(ids)
assert (got.context - ref.context).abs().max() < 1e-5 and (got.final - ref.final).abs().max() < 1e-5
assert dist.get_world_size() == 2 and dist.get_rank() == world.rank
for group in dist.distributed_c10d._world.pg_map:
    assert group._get_backend(torch.device("cpu")).options._timeout >= GROUP_TIMEOUT
everyone = torch.tensor([world.rank + 1])
dist.all_reduce(everyone)
print("tp", target.tp, "sum", int(everyone))
end_world()
"""


@pytest.mark.parametrize("per_node", [2, 1], ids=["one target over two ranks", "two nodes with a target each"])
def test_two_processes(per_node, tmp_path):
    (tmp_path / "two.py").write_text(TWO_PROCESSES)
    with own_port() as port:
        shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
                               "LOCAL_WORLD_SIZE": str(per_node)}
        processes = [program(tmp_path / "two.py", HERE, env=shared | {
            "RANK": str(rank), "LOCAL_RANK": str(rank % per_node)}) for rank in range(2)]
        assert all(f"tp {per_node} sum 3" in output_of(process) for process in processes)


def test_wrong_layer_ids_and_arguments_are_refused(checkpoints):
    for layers, words in (((1, 5), "largest usable id is 4"), ((1, 1, 3), "without repeats"), ((3, 1), "increasing"),
                          (range(7), "reach layer 6"), ((1, 9), "6 layers"), ((), "strictly increasing")):
        with pytest.raises(ValueError, match=words):
            SGLangTarget.from_pretrained(checkpoints["qwen3"], layers)
    with pytest.raises(ValueError, match=r"no argument 'mem_fraction' \(near: .*mem_fraction_static"):
        SGLangTarget.from_pretrained(checkpoints["qwen3"], LAYERS, mem_fraction=0.5)


def test_another_version_is_refused(checkpoints, monkeypatch):
    monkeypatch.setattr(sglang_target, "version", lambda name: "0.5.21")
    sglang_target.import_engine.cache_clear()
    with pytest.raises(ValueError, match="SGLang 0.5.21 is installed.*this code knows 0.5.23"):
        SGLangTarget.from_pretrained(checkpoints["qwen3"], LAYERS)


def test_a_checkpoint_without_head_names_what_it_has(checkpoints, tmp_path):
    from safetensors.torch import load_file, save_file
    weights = load_file(checkpoints["llama"] / "model.safetensors")
    weights["output_head.weight"] = weights.pop("lm_head.weight")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoints["llama"] / "config.json").read_text())
    with pytest.raises(ValueError, match="no tensor 'lm_head.weight'.*model.embed_tokens.weight, output_head.weight"):
        SGLangTarget.from_pretrained(tmp_path, LAYERS)


# ---------------------------------------------------------------------------------------------------------------------
# The commands, on this engine


TRAIN = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
import train
from recipe import RECIPES
train.train(dataclasses.replace(RECIPES[sys.argv[2]], corpus="chats.jsonl", corpus_size=0, max_steps=3))
train.end_world()
"""


def test_training_and_evaluation_are_those_on_transformers(tmp_path):
    generator, text = torch.Generator().manual_seed(0), lambda: "".join(
        map(chr, torch.randint(97, 123, (60,), generator=generator)))
    chats = [{"id": i, "messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": text()}]}
             for i in range(24)]
    start = tmp_path / "start"
    (start / "eval_datasets").mkdir(parents=True)
    (start / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (start / "eval_datasets" / "words.jsonl").write_text("".join(
        json.dumps({"turns": [text()]}) + "\n" for _ in range(3)))
    (start / "train_it.py").write_text(TRAIN)

    losses, answers = [], []
    for name, processes in (("tiny", 0), ("tiny-sglang", 0), ("tiny-sglang", 2)):       # the last: one target over two
        folder = shutil.copytree(tmp_path / "start", tmp_path / f"{name}-{processes}")
        run = functools.partial(program, cwd=folder, processes=processes)
        output_of(run("train_it.py", HERE, name))
        losses.append([json.loads(line)["loss"] for line in (folder / f"out/{name}/metrics.jsonl").open()])
        output_of(run(HERE / "eval_deepspec.py", "--draft", f"out/{name}/latest", "--task", "words", "--max-new-tokens",
                      24, "--temperature", 1, "--out", "eval"))
        results = json.loads((folder / "eval" / "results.json").read_text())
        answers.append([[s[key] for key in ("new_ids", "acceptance_lengths")] for s in results["samples"]["words"]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert answers[1] == answers[0] and answers[2] == answers[0] and (len(losses[0]), len(answers[0])) == (3, 3)
