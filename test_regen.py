"""Regeneration, verification and the token cache under kills, on the tiny target.

Read next: regen.py, verify.py.
"""
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import data_glm
import regen
from chat import family_rule, render
from conftest import own_port
from data_glm import load_tokens, read_rows
from recipe import TINY
from targets import target_path
from test_data import size
from verify import answer_kind, verify

RECIPE = dataclasses.replace(TINY, corpus="regen:chats.jsonl", corpus_size=0, corpus_max_new_tokens=10, max_length=2048)
TRAIN = Path("data/tiny-chats/train.jsonl")
GIVEN = {"temperature": None, "top_p": None, "top_k": None}


def source(folder, conversations=16, turns=2):
    """chats.jsonl: questions of two turns with answers that the target never gave."""
    rng = random.Random(1)
    words = "apples pears coins books cars trains".split()
    rows = [{"id": f"c{i}", "messages": [
        {"role": role, "content": " ".join(rng.choices(words, k=rng.randint(2, 8)))}
        for _ in range(turns) for role in ("user", "assistant")]} for i in range(conversations)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder where prepare, regen and tokenize ran once, whole."""
    folder = tmp_path_factory.mktemp("undisturbed")
    source(folder)
    with contextlib.chdir(folder):
        data_glm.prepare(RECIPE)
        data_glm.regen(RECIPE, [], **GIVEN)
        load_tokens(RECIPE)
    return folder


def test_second_turns_are_conditioned_on_the_regenerated_first_ones(undisturbed, monkeypatch):
    monkeypatch.chdir(undisturbed)
    before = {row["id"]: row["messages"] for row in read_rows(data_glm.source_path(RECIPE))}
    rows = list(read_rows(TRAIN))
    assert [row["id"] for row in rows] == list(before) and len(rows) == 16
    model = data_glm.load_model(target_path(RECIPE), "float32")
    tokenizer = AutoTokenizer.from_pretrained(target_path(RECIPE))
    for row in rows[:4]:
        old, new = before[row["id"]], row["messages"]
        assert [m["role"] for m in new] == ["user", "assistant"] * 2 and [new[0], new[2]] == [old[0], old[2]]
        assert {m["finish_reason"] for m in new[1::2]} <= {"stop", "length"}
        for turn in (1, 3):                      # each answer again, at batch one, from the new history
            ids = tokenizer(render(new[:turn], tokenizer, "chatml", True), add_special_tokens=False)["input_ids"]
            seed = seed_of(row["id"], turn // 2)
            [(_, answer, reason)] = regen.generate(model, [ids], 10, [1.0], [seed], [257])
            assert (tokenizer.decode(answer[:-1] if reason == "stop" else answer), reason) == (
                new[turn]["content"], new[turn]["finish_reason"])


def seed_of(name, turn):
    digest = hashlib.blake2b(f"{RECIPE.seed} {name} {turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def forked(work) -> int:
    """Process id of a fork of this process that does `work` and ends with 0 if that ended well."""
    if child := os.fork():
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def killed_runs(folder, work, done, half_done, kills, rng):
    """Run `work` in forks of this process and kill them, `kills` times, at random moments and in turn when something is
    half done; then let it end. Returns how many kills met half-done work."""
    met = 0
    with contextlib.chdir(folder):
        for n in range(kills):
            child = forked(work)
            ended = functools.partial(os.waitid, os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            while n % 2 and not (half_done() or done() or ended()):
                time.sleep(0.002)
            time.sleep(rng.random() * (0.02 if n % 2 else 0.4))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            met += half_done()
            if done():                           # it was faster than the kill: start over
                done().unlink()
        assert os.waitpid(forked(work), 0)[1] == 0
    return met


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_regen_ends_with_the_same_rows(undisturbed, tmp_path, kills):
    source(tmp_path)
    with contextlib.chdir(tmp_path):
        data_glm.prepare(RECIPE)
    def done():
        return (tmp_path / TRAIN) if (tmp_path / TRAIN).is_file() else None
    answers = (tmp_path / TRAIN).with_name("answers.jsonl")
    met = killed_runs(tmp_path, lambda: data_glm.regen(RECIPE, [], **GIVEN), done,
                      lambda: size(answers) > 0, kills, random.Random(kills))
    assert met >= kills // 10, f"only {met} of {kills} kills met half-done work"
    assert (tmp_path / TRAIN).read_bytes() == (undisturbed / TRAIN).read_bytes()
    assert sorted(p.name for p in (tmp_path / TRAIN).parent.iterdir()) == ["lock", "settings.json", "train.jsonl"]


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_tokenize_ends_with_the_same_cache(undisturbed, tmp_path, kills, monkeypatch):
    """A corpus of 1600 rows: some 0.4 s of work, all in one process."""
    monkeypatch.setattr(data_glm, "CHUNK", 100_000)
    rows = (undisturbed / TRAIN).read_bytes() * 100
    (tmp_path / TRAIN).parent.mkdir(parents=True)
    (tmp_path / TRAIN).write_bytes(rows)
    with contextlib.chdir(tmp_path):
        whole = load_tokens(RECIPE)
        key = whole.key
        before = {p.name: p.read_bytes() for p in sorted(Path("data/cache", key).iterdir())}
        shutil.rmtree("data/cache")
    def done():
        return next((tmp_path / "data/cache").glob("*/complete.json"), None)
    met = killed_runs(tmp_path, lambda: load_tokens(RECIPE), done,
                      lambda: any((tmp_path / "data/cache").glob("*.partial")), kills, random.Random(kills))
    assert met >= kills // 10, f"only {met} of {kills} kills met half-done work"
    assert {p.name: p.read_bytes() for p in sorted((tmp_path / "data/cache" / key).iterdir())} == before
    assert len(before) == 6 and not list((tmp_path / "data/cache").glob("*.partial"))


def test_many_processes_and_two_at_once_make_the_same_cache(undisturbed, tmp_path, monkeypatch):
    rows = (undisturbed / TRAIN).read_bytes() * 20
    caches = []
    for name, chunk in (("one", 100_000), ("pool", 100)):
        monkeypatch.setattr(data_glm, "CHUNK", chunk)
        (tmp_path / name / TRAIN).parent.mkdir(parents=True)
        (tmp_path / name / TRAIN).write_bytes(rows)
        with contextlib.chdir(tmp_path / name):
            if name == "one":                    # two processes prepare one key
                child = forked(lambda: load_tokens(RECIPE))
            key = load_tokens(RECIPE).key
            if name == "one":
                assert os.waitpid(child, 0)[1] == 0
            caches.append({p.name: p.read_bytes() for p in sorted(Path("data/cache", key).iterdir())})
    assert caches[0] == caches[1] and len(caches[0]["starts.bin"]) == 8 * (320 + 1)


def test_rows_that_cannot_be_rendered_are_counted(undisturbed, tmp_path, monkeypatch):
    rows = (undisturbed / TRAIN).read_bytes().splitlines(keepends=True)
    (tmp_path / "x.jsonl").write_bytes(b"".join(rows) * 2 + b'{"conversations": []}\n')
    monkeypatch.chdir(tmp_path)
    recipe = dataclasses.replace(RECIPE, corpus="x.jsonl")
    tokens = load_tokens(recipe)
    assert len(tokens) == 32 and tokens.dropped == {"not rendered: 'messages'": 1,
                                                    "fewer than 8 supervised tokens": 0}
    (tmp_path / "x.jsonl").write_bytes(rows[0] + b"{}\n" * 9)
    with pytest.raises(ValueError, match="only 1 of 10 samples .* Left out: {\"not rendered: 'messages'\": 9"):
        load_tokens(recipe)


# ---- servers -------------------------------------------------------------------------------------------------------


class Scripted(BaseHTTPRequestHandler):
    """A server whose faults are scripted: `faults` pops one per request, `answer(body)` is what a well one says."""

    def do_GET(self):
        self.reply(200, {"data": [{"id": "scripted"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "hang up":
            self.connection.close()
        elif fault == "half":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
        elif isinstance(fault, int):
            self.reply(fault, {"error": f"fault {fault}"})
        else:
            status, message, reason = self.server.answer(body)
            self.reply(status, {"choices": [{"message": message, "finish_reason": reason}],
                                "usage": {"completion_tokens": 3}})

    def reply(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def scripted(answer, faults=()):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.answer, server.faults, server.bodies, server.lock = answer, list(faults), [], threading.Lock()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def echo(body):
    return 200, {"content": "re: " + " | ".join(m["content"] for m in body["messages"])}, "stop"


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(regen, "BACK_OFF", 0.01)
    source(tmp_path, conversations=12)
    monkeypatch.chdir(tmp_path)
    data_glm.prepare(RECIPE)
    return tmp_path


def test_faults_of_a_server_cost_time_and_no_row(prepared, capsys):
    faults = [503, "hang up", 429, "half", 500]              # fewer than a request has tries
    with scripted(echo, faults) as sick, scripted(echo) as well:
        data_glm.regen(RECIPE, [sick.url, well.url + "/"], concurrency=4, temperature=0.7, top_p=0.9, top_k=None)
    rows = list(read_rows(TRAIN))
    assert len(rows) == len({row["id"] for row in rows}) == 12 and len(sick.faults) < 5
    for row in rows:
        one, first, two, second = (m["content"] for m in row["messages"])
        assert first == f"re: {one}" and second == f"re: {one} | {first} | {two}"
    assert well.bodies and {(b["model"], b["temperature"], b["top_p"], b["max_tokens"]) for b in well.bodies} == {
        ("scripted", 0.7, 0.9, 10)}
    assert all("top_k" not in b and set(m) == {"role", "content"} for b in well.bodies for m in b["messages"])
    assert "12 of 12 conversations" in capsys.readouterr().out


@pytest.mark.parametrize("fault", [503, "hang up", 429, "half", 500])
def test_each_fault_is_asked_again(prepared, fault, capsys):
    with scripted(echo, [fault] * 2) as server:
        data_glm.regen(RECIPE, [server.url], concurrency=1, **GIVEN)
    assert not server.faults and "12 of 12 conversations" in capsys.readouterr().out


def test_a_refused_conversation_is_written_apart_and_asked_again(prepared, capsys):
    bad = next(read_rows(data_glm.source_path(RECIPE)))["messages"][0]["content"]

    def picky(body):
        return (400, {"content": "too long"}, "stop") if body["messages"][0]["content"] == bad else echo(body)
    with scripted(picky) as server:
        data_glm.regen(RECIPE, [server.url], concurrency=3, **GIVEN)
    [failure] = read_rows(TRAIN.with_name("failures.jsonl"))
    assert "answers 400" in failure["error"] and "11 of 12 conversations" in capsys.readouterr().out
    with scripted(echo) as server:
        data_glm.regen(RECIPE, [server.url], concurrency=3, **GIVEN)
    assert len(server.bodies) == 2 and len({row["id"] for row in read_rows(TRAIN)}) == 12
    assert not list(read_rows(TRAIN.with_name("failures.jsonl")))


def test_dead_servers_and_other_settings_end_with_a_sentence(prepared):
    sentence = "does not list its model .* start it and give its address up to /v1"
    with own_port() as nobody, pytest.raises(OSError, match=sentence):
        data_glm.regen(RECIPE, [f"http://127.0.0.1:{nobody}/v1"], **GIVEN)
    with scripted(lambda body: (500, {}, "stop")) as server, pytest.raises(OSError, match="the last with: no answer"):
        data_glm.regen(RECIPE, [server.url], concurrency=1, **GIVEN)
    with pytest.raises(ValueError, match=r"made with other settings \(temperature\)"):
        data_glm.regen(RECIPE, [], temperature=0.1, top_p=None, top_k=None)
    TRAIN.with_name("settings.json").write_text("")
    with pytest.raises(ValueError, match=r"settings.json is damaged .* delete it if"):
        data_glm.regen(RECIPE, [], **GIVEN)
    with pytest.raises(ValueError, match="regen writes corpora named \"regen:SOURCE\""):
        data_glm.regen(TINY, [], **GIVEN)


def test_answers_of_thinking_targets_say_that_they_think(prepared):
    """GLM's prompt opens the reasoning, so its answers come without the tag; a reasoning parser's field is put back."""
    rule = family_rule("glm-5.2")
    assert regen.as_written("hm</think>Two.", "stop", rule)["content"] == "<think>hm</think>Two."
    assert regen.as_written("hm", "length", rule)["content"] == "<think>hm"
    assert regen.as_written("Two.", "stop", rule, "hm")["content"] == "<think>hm</think>Two."
    assert regen.as_written("<think>\nhm\n</think>\n\nTwo.", "stop", family_rule("qwen3-thinking"))["content"] == (
        "<think>\nhm\n</think>\n\nTwo.")
    assert regen.as_written("Two.", "stop", family_rule("chatml"))["content"] == "Two."


def test_a_recorded_tool_does_not_answer_a_new_call():
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "tool", "assistant")]
    assert regen.turns_before({"messages": turns}, []) == turns[:1]
    assert regen.turns_before({"messages": turns}, turns[:2]) is None
    assert regen.turns_before({"messages": turns[:2]}, turns[:2]) is None


def test_top_k_and_top_p_cut_the_tail():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]))
    regen.cut_tail(logits, [(2, 1.0), (0, 0.65), (0, 1.0)])
    assert torch.isfinite(logits).tolist() == [[True, True, False, False], [False, False, True, True], [True] * 4]


# ---- verify --------------------------------------------------------------------------------------------------------


def test_the_think_tag_contract():
    kinds = {"<think>a</think>b": "well formed", "a</think>b</think>c": "several </think>",
             "<think>a": "no </think>: truncated, or a reasoning parser took it", "a</think>\n": "an empty answer"}
    assert {text: answer_kind(text, True) for text in kinds} == kinds
    assert answer_kind("Hello.", False) == "well formed" and answer_kind(" ", False) == "an empty answer"
    assert answer_kind("a</think>b", False) == "a think tag, thinking is off"


def test_verify_passes_the_target_s_own_answers(undisturbed, monkeypatch, capsys):
    monkeypatch.chdir(undisturbed)
    assert verify(RECIPE)
    said = capsys.readouterr().out
    assert said.count("\033[32m") >= 3 and "of 16 source ids, missing" in said and said.endswith("all gates passed\n")


def test_verify_fails_on_what_is_wrong(undisturbed, tmp_path, monkeypatch, capsys):
    rows = [json.loads(line) for line in (undisturbed / TRAIN).read_text().splitlines()]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chats").symlink_to(undisturbed / "data" / "chats")
    monkeypatch.chdir(tmp_path)

    def failures(change):
        changed = [json.loads(json.dumps(row)) for row in rows]
        changed = change(changed) or changed
        TRAIN.parent.mkdir(exist_ok=True)
        TRAIN.write_text("".join(json.dumps(row) + "\n" for row in changed))
        assert not verify(RECIPE)
        return capsys.readouterr().out.splitlines()[-1]

    def others_words(changed):
        for row in changed:
            row["messages"][-1] |= {"content": "The quick brown fox jumps over the lazy dog.", "finish_reason": "stop"}

    def tags(changed):
        for row in changed[:2]:
            row["messages"][1]["content"] += "</think>"

    def tags_everywhere(changed):
        for message in (m for row in changed for m in row["messages"][1::2]):
            message["content"] += "</think>"
    assert "of 16 source ids, missing" in failures(lambda rows: rows[:12])
    assert "ids more than once" in failures(lambda rows: rows + rows[:1])
    assert "well formed" in failures(tags)
    assert "well formed" in failures(tags_everywhere)
    assert "with a special token's name" in failures(lambda rows: rows[0]["messages"][1].update(content="a<|pad|>b"))
    assert "NLL of 16 answers" in failures(others_words)
