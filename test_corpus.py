"""Corpora: rows of every form, broken ones by reason, doubles, samples; the task builders on rows with the data sets'
own columns. Expected values are literals. Read next: corpus.py, tasks.py.
"""
import hashlib
import json
import random
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub.utils import filter_repo_objects

import tasks
from corpus import Rejected, collect, normalise, read_rows, records, source_files

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}


def normalised(row):
    counts = Counter()
    return normalise(row, counts), dict(counts)


def test_sharegpt_and_openai_rows_become_the_same():
    share = {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"},
                               {"from": "gpt", "value": "Hello."}]}
    openai = {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "User", "content": "Hi", "x": None},
                           {"role": "model", "content": [{"type": "text", "text": "Hel"}, "lo."], "x": None}]}
    expected = {"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER]}
    assert normalised(share) == normalised(openai) == (expected, {})


def test_tools_are_parsed_from_strings_and_kept_as_lists():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": 1}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 2}'}}
    for tools in (json.dumps([tool]), [tool], [json.dumps(tool)]):
        row = {"tools": tools, "messages": [
            USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "observation", "content": "3"},
            {"role": "assistant", "content": "3"}]}
        assert normalised(row) == ({"tools": [tool], "messages": [
            USER, {"role": "assistant", "content": "", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 2}}}]},
            {"role": "tool", "content": "3"}, {"role": "assistant", "content": "3"}]}, {})


def test_reasoning_comes_through_as_a_field_or_as_parts():
    parts = [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "Hello."}]
    assert normalised({"messages": [USER, {"role": "assistant", "content": parts}]})[0]["messages"][1] == {
        "role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Hello."}]}
    message = {"role": "assistant", "content": None, "reasoning": "hm", "finish_reason": "length"}
    assert normalised({"messages": [USER, message]})[0]["messages"][1] == {
        "role": "assistant", "content": "", "reasoning_content": "hm", "finish_reason": "length"}


def test_conversations_are_cut_where_they_break():
    again = {"role": "user", "content": "More?"}
    for turns, kept, note in (
            ([ANSWER, USER, ANSWER], [USER, ANSWER], "leading assistant turns dropped"),
            ([USER, ANSWER, ANSWER], [USER, ANSWER], "cut where the turns do not alternate"),
            ([USER, ANSWER, again, again, ANSWER], [USER, ANSWER], "cut where the turns do not alternate"),
            ([USER, ANSWER, {"role": "system", "content": "x"}, again], [USER, ANSWER],
             "cut where the turns do not alternate"),
            ([USER, ANSWER, again], [USER, ANSWER], "turns without an answer cut off")):
        row, notes = normalised({"messages": turns})
        assert row["messages"] == kept and notes[note] == 1


def chat(*contents, **fields):
    roles = ("user", "assistant") * len(contents)
    return json.dumps({"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]} | fields)


# Broken lines of a jsonl file and the reason that each is counted under.
BROKEN = [
    (b'{"messages": [{"role": "user", "content": "truncat', "broken JSON"),
    (b"{'messages': []}", "broken JSON"),
    (chat("q", "a").encode()[:-1] + b"} trailing", "broken JSON"),
    (chat("na\u00efve", "a").replace("\\u00ef", "\u00ef").encode("latin-1"), "not UTF-8"),
    (chat("q", "a").encode("utf-16"), "not UTF-8"),
    (b"<!doctype html><html><body>404</body></html>", "HTML, not JSON"),
    (b"   ", "a blank line"),
    (b"[" * 100_000, "nested too deep"),
    (b"[[[1, 2], [3]], []]", "no object"),
    (b'"a string"', "no object"),
    (b"{}", "no list of messages"),
    (b'{"text": "plain text"}', "no list of messages"),
    (b'{"messages": "Hi"}', "no list of messages"),
    (b'{"messages": []}', "no messages"),
    (b'{"messages": [["user", "Hi"], ["assistant", "Hello."]]}', "a message that is no object"),
    (b'{"messages": [{"role": "narrator", "content": "x"}]}', "a role that is not known"),
    (b'{"messages": [{"role": 7, "content": "x"}]}', "a role that is not known"),
    (chat("q", None).encode(), "null content"),
    (chat("q", 42).encode(), "content that is no text"),
    (chat("q", [{"type": "image_url", "image_url": {"url": "x"}}]).encode(), "a part of the content is no text"),
    (chat("q", "x" * 1_000_000).encode(), "a turn of more than 400000 characters"),
    (b'{"messages": [{"role": "system", "content": "only"}]}', "no answer"),
    (chat("only a question").encode(), "no answer"),
    (chat(" \n", "a").encode(), "an empty question"),
    (chat("q", "").encode(), "only empty answers"),
    (chat("q", "a", tools={"no": "list"}).encode(), "tools that are no list"),
    (chat("q", "\ud83d half").encode(), "half a surrogate pair"),
    (chat([{"type": "thinking", "thinking": "hm"}], "a").encode(), "thinking outside an answer"),
    (chat("q", "a", tools="[" * 100_000).encode(), "nested too deep"),
    (b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": "f(x)"}]}',
     "tool calls that are no list"),
]


def test_broken_rows_are_counted_listed_and_never_fatal(tmp_path, capsys):
    good = [chat("one", "1", id=5).encode(), chat("two", "2", id=5).encode(), chat("TWO ", "2").encode()]
    lines = [good[0]] + [line for line, _ in BROKEN] + good[1:]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))                       # the last line has no newline
    (tmp_path / "list.json").write_bytes(b"[" + good[0] + b",\n {\"messages\": [" + b"}]")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 is not enough")
    (tmp_path / "notes.txt").write_text("not a corpus")
    path = tmp_path / "out" / "train.jsonl"
    collect(str(tmp_path), path, 0, 42)
    rows, rejected = list(read_rows(path)), list(read_rows(path.with_name("rejected.jsonl")))
    assert sorted(row["messages"][0]["content"] for row in rows) in (["TWO ", "one"], ["one", "two"])
    expected = Counter(reason for _, reason in BROKEN)
    expected["broken JSON: the rest of the list is not read"] = 1
    found = Counter(row["reason"] for row in rejected)
    [parquet] = [reason for reason in found if reason.startswith("not a parquet file")]
    assert found == expected | {parquet: 1} and len(expected) >= 18
    table = capsys.readouterr().out
    for reason, number in (*expected.items(), ("a double of another row", 2)):
        assert any(f"left out: {reason} " in x and f" {number} " in x + " " for x in table.splitlines()), reason
    assert "first: rows.jsonl:2" in table and "kept, ids that name several contents" in table
    assert len(BROKEN) >= 20
    assert {row["place"] for row in rejected} >= {"rows.jsonl:2", "list.json:2", "bad.parquet"}


def test_a_corpus_without_a_usable_row_says_so(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"no row of .* can be used; .*rejected.jsonl says why for each"):
        collect(str(tmp_path), tmp_path / "out" / "train.jsonl", 0, 42)
    with pytest.raises(ValueError, match="holds no corpus; expected .jsonl, .json, .parquet"):
        (tmp_path / "empty").mkdir()
        source_files(str(tmp_path / "empty"))


def some_rows(n):
    rng = random.Random(0)
    return [{"id": i, "conversations": [{"from": "human", "value": f"Question {i}: {rng.random()}"},
                                        {"from": "gpt", "value": f"Answer {i} – {'é' * (i % 7)}"}]} for i in range(n)]


def test_formats_order_and_file_names_do_not_matter_and_a_sample_is_a_prefix(tmp_path):
    rows = some_rows(300)
    for name, order in (("a", rows), ("b", rows[::-1] + rows[:40]), ("c", rows[150:] + rows[:150])):
        (tmp_path / name).mkdir()
        half = len(order) // 2
        (tmp_path / name / f"{name}2.json").write_text(json.dumps(order[half:], indent=1, ensure_ascii=name == "b"))
        if name == "c":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(order[:half]), tmp_path / name / "z.parquet")
        else:
            (tmp_path / name / "z.jsonl").write_text("\n".join(map(json.dumps, order[:half])))
        collect(str(tmp_path / name), tmp_path / f"{name}.jsonl", 0, 42)
        collect(str(tmp_path / name), tmp_path / f"{name}-50.jsonl", 50, 42)
    a = (tmp_path / "a.jsonl").read_bytes()
    assert a == (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "c.jsonl").read_bytes() and a.count(b"\n") == 300
    small = (tmp_path / "a-50.jsonl").read_bytes()
    assert small == (tmp_path / "b-50.jsonl").read_bytes() and small.count(b"\n") == 50 and a.startswith(small)
    assert [row["source_id"] for row in read_rows(tmp_path / "a-50.jsonl")][:5] != [0, 1, 2, 3, 4]
    collect(str(tmp_path / "a"), tmp_path / "other.jsonl", 50, 43)
    assert (tmp_path / "other.jsonl").read_bytes() != small
    assert len({row["id"] for row in read_rows(tmp_path / "a.jsonl")}) == 300


def test_doubles_differ_in_space_case_and_unicode_form_only(tmp_path):
    pairs = [("Caf\u00e9  here?", "Yes.\n"), ("cafe\u0301 here?", "yes."), ("Cafe here?", "Yes."),
             ("CAFÉ HERE?", "YES."), ("Café here?", "Yes!")]
    (tmp_path / "x.jsonl").write_text("\n".join(chat(*pair) for pair in pairs))
    collect(str(tmp_path / "x.jsonl"), tmp_path / "train.jsonl", 0, 1)
    assert {row["messages"][0]["content"][:4].lower() for row in read_rows(tmp_path / "train.jsonl")} <= {
        "café", "cafe"} and sum(1 for _ in read_rows(tmp_path / "train.jsonl")) == 3


def test_lists_are_read_piece_by_piece(tmp_path):
    """Rows of a list that lie across the pieces of 1 MB, with what makes pieces hard to cut: quotes, brackets, é."""
    rows = [{"n": i, "text": '[{"é", \\' * (i % 50) * 200} for i in range(400)]
    flat, deep = json.dumps(rows, ensure_ascii=False), "\ufeff" + json.dumps(rows, indent=3)
    for name, text in (("flat.json", flat), ("deep.json", deep)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert [row for _, row in records(tmp_path / name)] == rows and len(text) > 3 << 20
    (tmp_path / "one.json").write_text('{"a": 1}\n{"a": 2}\n')                     # jsonl under another name
    assert [row for _, row in records(tmp_path / "one.json")] == [{"a": 1}, {"a": 2}]


def test_a_line_that_never_ends_costs_only_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("corpus.MAX_LINE", 1000)
    (tmp_path / "x.jsonl").write_bytes(b"y" * 5000 + b"\n" + b'{"a": 1}\n' + b"z" * 1500)
    found = [(place, str(row)) for place, row in records(tmp_path / "x.jsonl")]
    assert found == [("x.jsonl:1", "a line over 0 MB"), ("x.jsonl:2", "{'a': 1}"), ("x.jsonl:3", "a line over 0 MB")]
    assert all(isinstance(row, Rejected | dict) for _, row in records(tmp_path / "x.jsonl"))


# ---- tasks ---------------------------------------------------------------------------------------------------------

SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ROWS = {
    "gsm8k": ({"question": "1+1?", "answer": "2\n#### 2"}, "1+1?" + SUFFIX),
    "math500": ({"problem": "Find $x$.", "solution": "s", "answer": "1", "subject": "Algebra", "level": 1,
                 "unique_id": "test/1"}, "Find $x$." + SUFFIX),
    "aime25": ({"problem_idx": 1, "problem": "Find $n$.", "answer": 70, "problem_type": ["NT"]}, "Find $n$." + SUFFIX),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "",
                   "test": ""}, "Write a solution to the following problem and make sure that it passes the tests:\n"
                                "```python\ndef f():\n\n```"),
    "mbpp": ({"source_file": "x", "task_id": 2, "prompt": "Write a function to add.", "code": "", "test_imports": [],
              "test_list": []}, "Write a function to add."),
    "mt-bench": ({"prompt_id": 81, "category": "writing", "prompt": ["Write a post.", "Rewrite it."], "reference": []},
                 "Write a post."),
    "alpaca": ({"instruction": "Add.", "input": "1 and 2", "output": "3", "text": "x"}, "Add.\n\nInput:\n1 and 2"),
    "arena-hard-v2": ({"uid": "0", "category": "hard_prompt", "subcategory": "coding", "prompt": "Write Rust."},
                      "Write Rust."),
    "gsm_symbolic": ("ready made", "ready made"),
    "livecodebench": ({"question_title": "A", "question_content": "Print 1.", "platform": "atcoder", "starter_code": "",
                       "public_test_cases": "[]"},
                      "You are an expert Python programmer. You will be given a question (problem specification) and "
                      "will generate a correct Python program that matches the specification and passes all tests. You "
                      "will NOT return anything except for the program\n\n### Question:\nPrint 1.\n\n### Format: Write "
                      "your code in the following format:\n```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the "
                      "provided format with backticks)"),
}


def test_each_builder_turns_a_row_into_its_prompt():
    assert set(ROWS) == set(tasks.BUILDERS) == set(tasks.CAPS)
    for name, (row, expected) in ROWS.items():
        assert tasks.BUILDERS[name][0](row) == [expected], name
    assert tasks.alpaca({"instruction": "Tell a joke.", "input": "", "output": ""}) == ["Tell a joke."]
    starter = tasks.livecodebench(ROWS["livecodebench"][0] | {"starter_code": "class A:\n    pass"})[0]
    assert "\n\n### Format: Use the following code structure:\n```python\nclass A:\n    pass\n```\n\n### An" in starter


def test_humaneval_is_the_reference_file_and_hashes_are_noted(tmp_path):
    tasks.build_tasks(("humaneval",), tmp_path)
    known = "7aaed6a3987007ecee4851ee4572fde214aa2a36ae83fa21be9c5f443aa71675"
    assert hashlib.sha256((tmp_path / "humaneval.jsonl").read_bytes()).hexdigest() == known
    assert json.loads((tmp_path / "hashes.json").read_text()) == {"humaneval": known}


def test_a_task_that_cannot_be_fetched_names_the_command_and_costs_nothing_else(tmp_path, monkeypatch, capsys):
    def offline(*args, **kwargs):
        raise ConnectionError("no network\nsecond line")
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    monkeypatch.setitem(tasks.BUILDERS, "mbpp", (tasks.prompt, "x", lambda: [{"text": "another column"}]))
    assert tasks.build_tasks(("math500", "mbpp", "humaneval"), tmp_path) == ["math500", "mbpp"]
    said = capsys.readouterr().out
    assert "task math500: could not be fetched (the dataset HuggingFaceH4/MATH-500" in said
    assert "`python data_glm.py tasks math500` tries again, or put" in said and "no column 'prompt'" in said
    assert [p.name for p in sorted(tmp_path.glob("*.jsonl"))] == ["humaneval.jsonl"]


def test_fetched_rows_come_in_the_order_of_the_files(tmp_path, monkeypatch):
    """The hub's folder as it would be: parquet parts under the data set's own names, and no name is left out."""
    def snapshot(repo, ignore_patterns, **kwargs):
        assert list(filter_repo_objects(["original/a.parquet"], ignore_patterns=ignore_patterns))
        return str(tmp_path)
    (tmp_path / "main").mkdir()
    for part, name in enumerate(("b", "a")):
        rows = [{"question": f"q{name}{i}", "answer": "x"} for i in range(2)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "main" / f"test-0000{1 - part}.parquet")
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    tasks.build_tasks(("gsm8k",), tmp_path / "out")
    assert tasks.load_task("gsm8k", tmp_path / "out") == [q + SUFFIX for q in ("qa0", "qa1", "qb0", "qb1")]
