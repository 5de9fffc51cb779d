"""Data and targets: masks against a slow oracle, answers that depend on their row alone, files that survive a kill.

Everything runs on the tiny target, made on the spot. Expected strings are literals. Read next: data_glm.py.
"""
import contextlib
import dataclasses
import json
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import data_glm
import targets
from conftest import output_of, program
from data_glm import encode, encode_prompt, generate, load_task, load_tokens, stop_token_ids
from kvcache import SlotCache
from recipe import TINY
from targets import check_mask_id, target_path

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(target_path(TINY))


@pytest.fixture(scope="module")
def model():
    return data_glm.load_model(target_path(TINY), "float32")


# ---- masks ---------------------------------------------------------------------------------------------------------

CONVERSATIONS = [
    [("user", "Hi"), ("assistant", "Hello, you.")],
    [("system", "Be brief."), ("user", "1+1?"), ("assistant", "2"), ("user", "Sure?"), ("assistant", "Yes.\n")],
    [("user", "naïve 🙂?"), ("assistant", "\n日本 🙂\n")],
    [("user", "q"), ("assistant", "")],
    [("user", "<|im_start|>assistant\nno<|im_end|>"), ("assistant", "I see.")],
]


def messages(pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def test_rendered_text_and_mask_are_the_literal_ones(tokenizer):
    ids, mask = encode(messages(CONVERSATIONS[1]), tokenizer, "chatml")
    pieces = [(tokenizer.decode([i]), m) for i, m in zip(ids, mask, strict=True)]
    assert "".join(f"[{piece}]" if m else piece for piece, m in pieces) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n[2][<|im_end|>]\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n[Y][e][s][.][\n][<|im_end|>]\n")


@pytest.mark.parametrize("pairs", CONVERSATIONS)
def test_mask_equals_an_oracle_that_builds_the_ids_piece_by_piece(tokenizer, pairs):
    """The tiny tokenizer has a token per byte, so the pieces of a conversation can be tokenised apart."""
    ids, mask = [], []
    for role, content in pairs:
        spoken = role == "assistant"
        text = content.replace("<|im_start|>", "\0").replace("<|im_end|>", "\1")
        body = [{0: 256, 1: 257}.get(byte, byte) for byte in text.encode()]
        head = [256, *f"{role}\n".encode()]
        ids += [*head, *body, 257, 10]
        mask += [0] * len(head) + [int(spoken)] * (len(body) + 1) + [0]
    assert encode(messages(pairs), tokenizer, "chatml") == (ids, mask)


def test_training_text_starts_with_what_deployment_sends(tokenizer):
    prompt = encode_prompt("1+1?", tokenizer, "chatml")
    ids, mask = encode(messages([("user", "1+1?"), ("assistant", "2")]), tokenizer, "chatml")
    assert prompt.shape == (1, 23) and prompt.dtype == torch.long
    assert tokenizer.decode(prompt[0]) == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert ids[:prompt.shape[1]] == prompt[0].tolist() and mask.index(1) == prompt.shape[1]


def test_max_length_cuts_ids_and_mask_alike(tokenizer):
    whole_ids, whole_mask = encode(messages(CONVERSATIONS[1]), tokenizer, "chatml")
    assert encode(messages(CONVERSATIONS[1]), tokenizer, "chatml", 50) == (whole_ids[:50], whole_mask[:50])


def test_a_token_that_straddles_the_boundary_is_not_supervised():
    """A tokenizer may merge the scaffold's newline with the answer's first one: nobody generated that token whole."""
    class Merging:
        chat_template, name_or_path = targets.CHATML, "merging"

        def apply_chat_template(self, rows, tokenize, add_generation_prompt):
            text = "".join(f"<|im_start|>{r['role']}\n{r['content']}<|im_end|>\n" for r in rows)
            return text + "<|im_start|>assistant\n" * add_generation_prompt

        def __call__(self, text, add_special_tokens, return_offsets_mapping):
            cut = text.index("assistant\n\n") + len("assistant")
            spans = [(0, cut), (cut, cut + 2), (cut + 2, len(text) - 11), (len(text) - 11, len(text) - 1),
                     (len(text) - 1, len(text))]
            return {"input_ids": list(range(5)), "offset_mapping": spans}

    ids, mask = encode(messages([("user", "q"), ("assistant", "\nabc")]), Merging(), "chatml")
    assert mask == [0, 0, 1, 1, 0]


def test_a_template_whose_prompt_is_no_prefix_is_refused(tokenizer):
    strange = AutoTokenizer.from_pretrained(target_path(TINY))
    strange.chat_template = targets.CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant: ' }}")
    with pytest.raises(ValueError, match="does not render the training text as the prompt that deployment sends"):
        encode(messages(CONVERSATIONS[0]), strange, "chatml")


def test_stop_ids_come_from_the_first_place_that_knows():
    def config(ids):
        return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ids))
    tok = SimpleNamespace(eos_token_id=7)
    assert stop_token_ids(config([5, 6]), tok, None) == [5, 6]
    assert stop_token_ids(config(5), tok, None) == [5]
    assert stop_token_ids(config(None), tok, None) == [7]
    assert stop_token_ids(None, SimpleNamespace(eos_token_id=None), {"stop_token_ids": [8, 9]}) == [8, 9]
    assert stop_token_ids(None, SimpleNamespace(eos_token_id=None), SimpleNamespace(stop_token_ids=(8,))) == [8]
    assert stop_token_ids(target_path(TINY), tok, None) == [257]
    with pytest.raises(ValueError, match="set stop_token_ids in the recipe"):
        stop_token_ids(None, SimpleNamespace(eos_token_id=None), None)


# ---- generation ----------------------------------------------------------------------------------------------------


def some_prompts(tokenizer, n):
    words = "apples pears coins books cars trains".split()
    rng = random.Random(0)
    return [encode_prompt(" ".join(rng.choices(words, k=rng.randint(1, 9))), tokenizer, "chatml")[0].tolist()
            for _ in range(n)]


def test_greedy_answers_equal_generate_of_transformers(model, tokenizer):
    prompts = some_prompts(tokenizer, 9)
    plain = AutoModelForCausalLM.from_pretrained(target_path(TINY), dtype=torch.float32)
    ours = {i: (ids, why) for i, ids, why in generate(model, prompts, 24, [0.0] * 9, list(range(9)), [257], slots=4)}
    assert sorted(ours) == list(range(9))
    for i, prompt in enumerate(prompts):
        theirs = plain.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt):].tolist()
        assert ours[i] == (theirs, "stop" if theirs[-1] == 257 else "length")


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_an_answer_does_not_depend_on_its_neighbours(model, tokenizer, slots):
    """Greedy and sampled rows side by side; a stop id that comes often, so that rows leave and enter all the time."""
    prompts = some_prompts(tokenizer, 12)
    heat, seeds, stops = [0.0, 1.0, 0.7] * 4, [100 + i for i in range(12)], [257, 32, 101, 60, 75]
    batch = {i: (ids, why) for i, ids, why in generate(model, prompts, 20, heat, seeds, stops, slots)}
    assert {why for _, why in batch.values()} == {"stop", "length"}
    for i in range(12):
        [(_, ids, why)] = generate(model, [prompts[i]], 20, [heat[i]], [seeds[i]], stops)
        assert batch[i] == (ids, why)
    [(_, other, _)] = generate(model, [prompts[1]], 20, [1.0], [7], [])
    assert other != batch[1][0]


def test_sampling_follows_the_target_distribution(model, tokenizer):
    """2000 one-token answers at temperature 1 against softmax: the total variation is that of a fair sample."""
    prompt = some_prompts(tokenizer, 1)[0]
    with torch.no_grad():
        exact = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double(), -1)
    rows = generate(model, [prompt] * 2000, 1, [1.0] * 2000, list(range(2000)), [], slots=100)
    counts = torch.bincount(torch.tensor([ids[0] for _, ids, _ in rows]), minlength=320) / 2000
    fair = np.random.default_rng(0).multinomial(2000, (exact / exact.sum()).numpy(), size=50) / 2000
    allowed = max(np.abs(row - exact.numpy()).sum() / 2 for row in fair)
    assert float((counts - exact).abs().sum() / 2) <= 1.1 * allowed


def test_cache_refuses_what_does_not_fit(model):
    cache = SlotCache(4, slots=1, max_length=8)
    with pytest.raises(ValueError, match="holds 8 tokens per sequence and 9 are needed"):
        model.model(torch.zeros(1, 9, dtype=torch.long), position_ids=cache.positions(9), past_key_values=cache)
    with pytest.raises(ValueError, match="cannot truncate slot 0 to 3 tokens: it holds 0"):
        cache.truncate(3)


def test_rolled_back_cache_equals_a_fresh_pass(model):
    ids = torch.randint(0, 256, (1, 30), generator=torch.Generator().manual_seed(1))
    cache = SlotCache(4, slots=1, max_length=64)
    with torch.no_grad():
        whole = model.model(ids).last_hidden_state
        model.model(ids[:, :12], position_ids=cache.positions(12), past_key_values=cache)
        cache.advance(12)
        model.model(ids[:, 3:9], position_ids=cache.positions(6), past_key_values=cache)       # a refused proposal
        cache.advance(6)
        cache.truncate(10)
        part = model.model(ids[:, 10:], position_ids=cache.positions(20), past_key_values=cache).last_hidden_state
    torch.testing.assert_close(part, whole[:, 10:], rtol=0, atol=2e-5)


# ---- corpus and cache ----------------------------------------------------------------------------------------------


def run(folder, *args):
    return program(HERE / "data_glm.py", *args, cwd=folder)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder where `prepare tiny` ran undisturbed."""
    folder = tmp_path_factory.mktemp("prepared")
    output_of(run(folder, "prepare", "tiny"))
    return folder


CORPUS = Path("data/tiny-gsm_symbolic/train.jsonl")


def test_rows_are_complete_and_half_of_them_greedy(prepared):
    rows = [json.loads(line) for line in (prepared / CORPUS).read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(32))
    assert [row["temperature"] for row in rows] == [0.0, 1.0] * 16 and len({row["seed"] for row in rows}) == 32
    assert {row["messages"][1]["finish_reason"] for row in rows} <= {"stop", "length"}
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in rows)


def test_three_rows_decoded_again_at_batch_one_are_equal(prepared, model, tokenizer):
    rows = [json.loads(line) for line in (prepared / CORPUS).read_text().splitlines()]
    for row in rows[3:6]:
        prompt = encode_prompt(row["messages"][0]["content"], tokenizer, "chatml")[0].tolist()
        length, heat, seed = TINY.corpus_max_new_tokens, row["temperature"], row["seed"]
        [(_, ids, why)] = generate(model, [prompt], length, [heat], [seed], [257])
        assert tokenizer.decode(ids[:-1] if why == "stop" else ids) == row["messages"][1]["content"]
        assert why == row["messages"][1]["finish_reason"]


def size(path: Path) -> int:
    """Bytes in a file that another process may make or remove."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def test_killed_and_restarted_prepare_gives_the_same_file(prepared, tmp_path):
    answers = tmp_path / CORPUS.parent / "answers.jsonl"
    process = run(tmp_path, "prepare", "tiny")
    while process.poll() is None and not size(answers):
        time.sleep(0.005)
    process.kill()
    process.communicate()
    # Whatever moment the kill met: keep three finished rows and half of a fourth, as a kill inside a write leaves them.
    lines = (prepared / CORPUS).read_bytes().splitlines(keepends=True)
    (tmp_path / CORPUS).unlink(missing_ok=True)
    answers.write_bytes(lines[9] + lines[2] + lines[30] + lines[4][:50])
    assert "3 rows there, the target answers 29 more" in output_of(run(tmp_path, "prepare", "tiny"))
    assert (tmp_path / CORPUS).read_bytes() == (prepared / CORPUS).read_bytes() and not answers.exists()


def test_a_bigger_corpus_only_appends(prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(prepared / "data")
    before = (prepared / CORPUS).read_bytes()
    small = load_tokens(TINY)
    data_glm.prepare(dataclasses.replace(TINY, corpus_size=35))
    after = (prepared / CORPUS).read_bytes()
    assert after.startswith(before) and after.count(b"\n") == 35
    assert load_tokens(TINY).key == small.key                # the smaller recipe still reads its own rows
    (prepared / CORPUS).write_bytes(before)


def test_another_temperature_does_not_mix_into_a_corpus(prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    with pytest.raises(ValueError, match=r"made with other settings \(temperature\); move that folder away"):
        data_glm.prepare(dataclasses.replace(TINY, corpus_temperature=0.5))


def test_tokens_are_the_encoded_rows(prepared, tokenizer, monkeypatch):
    monkeypatch.chdir(prepared)
    tokens = load_tokens(TINY)
    rows = [json.loads(line) for line in CORPUS.read_text().splitlines()]
    kept = 0
    for row in rows:
        ids, mask = encode(row["messages"], tokenizer, "chatml", TINY.max_length)
        cut = row["messages"][-1]["finish_reason"] == "length"       # then it ends as the target left it
        assert (ids[-1], mask[-1]) != (257, 1) if cut else ids[-2:] == [257, 10] and mask[-2:] == [1, 0]
        if sum(mask) >= TINY.min_supervised:
            got_ids, got_mask = tokens[kept]
            assert got_ids.tolist() == ids and got_mask.tolist() == mask
            assert got_ids.dtype == np.int32 and got_mask.dtype == np.uint8
            kept += 1
    assert len(tokens) == kept and tokens.dropped == {"fewer than 8 supervised tokens": 32 - kept}


def test_second_load_rebuilds_nothing_and_any_change_makes_a_new_key(prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    key = load_tokens(TINY).key
    with monkeypatch.context() as patch:
        patch.setattr(data_glm, "build_cache", None)
        assert load_tokens(TINY).key == key
    assert load_tokens(dataclasses.replace(TINY, max_length=703)).key != key
    text = CORPUS.read_text()
    CORPUS.write_text(text.replace("students", "Students", 1))
    changed = load_tokens(TINY).key
    CORPUS.write_text(text)
    template = target_path(TINY) / "chat_template.jinja"
    original = template.read_text()
    template.write_text(original.replace("message[", "massage[").replace("for message in", "for massage in"))
    other = load_tokens(TINY).key
    template.write_text(original)
    assert len({key, changed, other}) == 3 and load_tokens(TINY).key == key


def test_half_built_cache_is_built_again(prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    tokens = load_tokens(TINY)
    folder = Path("data/cache") / tokens.key
    expected = [tokens[i][0].tolist() for i in range(len(tokens))]
    (folder / "complete.json").unlink()
    for damaged in ("ids.bin", "starts.bin"):        # the second time complete.json is there, a file is too short
        (folder / damaged).write_bytes((folder / damaged).read_bytes()[:40])
        again = load_tokens(TINY)
        assert [again[i][0].tolist() for i in range(len(again))] == expected


def test_low_retention_aborts_and_shows_a_sample(prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    with pytest.raises(ValueError, match=r"(?s) have at least 50 supervised tokens; expected 90%.*im_start.*\[\["):
        load_tokens(dataclasses.replace(TINY, min_supervised=50))


def test_missing_corpus_names_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="`python data_glm.py prepare tiny` makes it"):
        load_tokens(TINY)


# ---- tasks ---------------------------------------------------------------------------------------------------------


def test_task_files(prepared):
    """gsm_symbolic is disjoint from the corpus; humaneval is wrapped in DeepSpec's instruction."""
    prompts = load_task("gsm_symbolic", prepared / "eval_datasets")
    rows = [json.loads(line) for line in (prepared / CORPUS).read_text().splitlines()]
    assert len(prompts) == len(set(prompts)) == 256 and not set(prompts) & {r["messages"][0]["content"] for r in rows}
    assert all(p.endswith("\nPlease reason step by step, and put your final answer within \\boxed{}.") for p in prompts)
    code = load_task("humaneval", prepared / "eval_datasets")
    assert len(code) == 164 and code[2] == (
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\n\n\n"
        "def truncate_number(number: float) -> float:\n"
        '    """ Given a positive floating point number, it can be decomposed into\n'
        "    and integer part (largest integer smaller than given number) and decimals\n"
        "    (leftover part always smaller than 1).\n\n    Return the decimal part of the number.\n"
        '    >>> truncate_number(3.5)\n    0.5\n    """\n\n```')


def test_more_prompts_of_a_seed_only_append():
    assert data_glm.gsm_symbolic(42, 60)[:25] == data_glm.gsm_symbolic(42, 25)
    first = data_glm.gsm_symbolic(42, 3)
    assert data_glm.gsm_symbolic(42, 2, frozenset(first[:1])) == first[1:]


def test_long_tasks_are_shuffled_and_cut_and_a_limit_is_a_prefix(tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text("".join(f'{{"turns": ["q{i}", "later turn"]}}\n' for i in range(1319)))
    (tmp_path / "mine.jsonl").write_text("".join(f'{{"turns": ["m{i}"]}}\n' for i in range(40)))
    full = load_task("gsm8k", tmp_path)
    order = [f"q{i}" for i in range(1319)]
    random.Random(980406).shuffle(order)
    assert full == order[:500] and full[:3] == ["q435", "q902", "q303"]
    assert load_task("gsm8k", tmp_path, limit=32) == full[:32]
    assert load_task("mine", tmp_path, limit=5) == ["m0", "m1", "m2", "m3", "m4"]
    assert len(load_task("mine", tmp_path)) == 40


def test_missing_or_broken_task_files_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not there; `python data_glm.py tasks humaneval` builds it, or put"):
        load_task("humaneval", tmp_path)
    with pytest.raises(FileNotFoundError, match="arena-hard-v2; for another one put a file there by hand"):
        load_task("mine", tmp_path)
    (tmp_path / "x.jsonl").write_text('{"turns": ["a"]}\n{"turns": "a"}\n')
    with pytest.raises(ValueError, match="line 2 has no \"turns\""):
        load_task("x", tmp_path)
    for broken in (b'{"turns": ["a"}', b"17", b'{"turns": ["\xff\xfe"]}'):
        (tmp_path / "x.jsonl").write_bytes(b'{"turns": ["a"]}\n' + broken + b"\n")
        with pytest.raises(ValueError, match="x.jsonl, line 2 is .*mend that line, then run the same command again"):
            load_task("x", tmp_path)


# ---- targets -------------------------------------------------------------------------------------------------------


def test_incomplete_target_is_made_again(capsys):
    folder = target_path(TINY)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])                   # a copy that stopped half-way
    assert target_path(TINY) == folder and (folder / "model.safetensors").read_bytes() == weights
    assert "is incomplete (interrupted earlier?): making it again" in capsys.readouterr().out


def test_target_that_cannot_be_written_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "nanospec").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(OSError, match="about 1 GB of free space and write permission there, or set XDG_CACHE_HOME"):
        target_path(TINY)

    def full(recipe, folder):
        raise Exception("No space left on device (os error 28)")     # as the tokenizers library reports it

    (tmp_path / "nanospec").unlink()
    monkeypatch.setattr(targets, "make_tiny", full)
    with pytest.raises(OSError, match=r"No space left on device \(os error 28\)\); it needs about 1 GB"):
        target_path(TINY)
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("error, sentence", [
    (OSError(28, "No space left on device"), "error: No space left on device: while writing in data/"),
    (PermissionError(13, "Permission denied", "out/lock"), "error: Permission denied: out/lock; make room there"),
    (OSError("a sentence (os error 28) of ours"), "^error: a sentence .os error 28. of ours$"),
    (ValueError("another"), "^error: another$"), (KeyboardInterrupt(), "130"),
])
def test_what_a_person_can_mend_ends_with_a_sentence(error, sentence):
    with pytest.raises(SystemExit, match=sentence), targets.plain_errors(ValueError):
        raise error


def test_recipe_that_does_not_describe_its_target_is_refused():
    wrong = dataclasses.replace(TINY, target=str(target_path(TINY)), hidden_size=128)
    with pytest.raises(ValueError, match="hidden_size = 128, but .*hidden_size = 64; correct the recipe or its target"):
        target_path(wrong)


def test_mask_id_must_be_a_row_that_no_text_yields(tokenizer):
    check_mask_id(TINY, tokenizer)
    with pytest.raises(ValueError, match=r"no row of the target's embedding \(0..319\)"):
        check_mask_id(dataclasses.replace(TINY, mask_token_id=320), tokenizer)
    for produced in (65, 256):
        with pytest.raises(ValueError, match="which text can contain"):
            check_mask_id(dataclasses.replace(TINY, mask_token_id=produced), tokenizer)


def test_two_processes_make_a_target_once(tmp_path):
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    both = [program(HERE / "targets.py", "tiny", env=env) for _ in range(2)]
    places = [output_of(process).splitlines()[-1].rpartition(" (")[0] for process in both]
    assert places[0] == places[1] and str(tmp_path) in places[0]
    assert not list(tmp_path.rglob("*.partial"))


def test_any_rank_makes_a_target_whole(tmp_path):
    """With a disk on every node it is not rank 0 alone that makes them."""
    (tmp_path / "last.py").write_text(f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport ranks, recipe, targets\n"
                                      "if ranks.start_world().rank == 1:\n    print(targets.target_path(recipe.TINY))\n"
                                      "ranks.end_world()\n")
    output_of(program(tmp_path / "last.py", processes=2, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}))
    assert len(list(tmp_path.glob("nanospec/targets/tiny-*/model.safetensors"))) == 1
