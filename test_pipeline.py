"""The whole story on the tiny target: corpus, training, evaluation, report; and what is left on disk adds up."""
import json
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

import data_glm
import eval_deepspec
import report
from conftest import program
from recipe import TINY, load_recipe
from targets import target_path
from train import train

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder in which every stage of the tiny recipe ran."""
    folder = tmp_path_factory.mktemp("a run with spaces in its path")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        data_glm.prepare(TINY)
        data_glm.build_tasks(("gsm_symbolic",))
        train(TINY)
        for name, draft, temperature in (("eval-untrained", "step_0", 0.0), ("eval-t0", "latest", 0.0),
                                         ("eval-t1", "latest", 1.0)):
            evaluate(f"out/tiny/{draft}", f"out/tiny/{name}", temperature=temperature)
        patch.setattr(sys, "argv", ["report.py", "tiny"])
        report.main()
    return folder


def evaluate(draft, out, **changes):
    options = {"draft": draft, "target": None, "task": ["gsm_symbolic"], "limit": 3, "temperature": None,
               "max_new_tokens": 24, "confidence_threshold": None, "datasets": "eval_datasets", "out": out}
    return eval_deepspec.run(Namespace(**options | changes))


def test_every_number_of_results_follows_from_the_per_sample_lists(finished):
    results = json.loads((finished / "out/tiny/results.json").read_text())
    assert set(results["evaluations"]) == {"eval-untrained", "eval-t0", "eval-t1"}
    for evaluation in results["evaluations"].values():
        assert evaluation["settings"]["seed"] == 980406 and evaluation["draft"] and evaluation["tasks"]["gsm_symbolic"]
        for name, metrics in evaluation["metrics"].items():
            samples = [s for task, part in evaluation["samples"].items() if name in (task, "overall") for s in part]
            gained = [n for s in samples for n in s["acceptance_lengths"]]
            proposed = [n for s in samples for n in s["proposal_lengths"]]
            drafted = [n for s in samples for n in s["accepted_draft_lengths"]]
            assert len(samples) == metrics["num_samples"] == 3
            assert len(gained) == len(proposed) == len(drafted) == metrics["num_proposals"] > 0
            assert metrics["accept_len"] == sum(gained) / len(gained)
            assert metrics["draft_tokens_per_proposal"] == sum(proposed) / len(gained)
            assert metrics["verify_rate"] == sum(gained) / (sum(proposed) + len(gained))
            for k, rate in enumerate(metrics["accept_rate"]):
                offered = sum(1 for n in proposed if n >= k + 1)
                assert rate == sum(1 for n in drafted if n >= k + 1) / max(offered, 1)
            assert metrics["new_tokens"] == sum(len(s["new_ids"]) for s in samples)
            seconds = sum(s["seconds"] for s in samples)
            assert metrics["tokens_per_s"] == pytest.approx(metrics["new_tokens"] / seconds)
    lines = [json.loads(line) for line in (finished / "out/tiny/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, results["training"]["steps"] + 1))
    assert results["training"]["last"] == lines[-1]


def test_the_picture_and_the_checkpoint_are_there(finished):
    assert (finished / "out/tiny/report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert load_recipe(finished / "out/tiny/latest/recipe.json") == TINY


def test_corpus_answers_are_the_targets_own_at_their_seed(finished):
    from transformers import AutoTokenizer
    rows = list(data_glm.read_rows(finished / data_glm.corpus_path(TINY)))
    folder = target_path(TINY)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), data_glm.load_model(folder, TINY.dtype)
    for row in (rows[0], rows[1], rows[7]):
        prompt = data_glm.encode_prompt(row["messages"][0]["content"], tokenizer, TINY.chat_family)[0].tolist()
        [(_, new, reason)] = data_glm.generate(model, [prompt], TINY.corpus_max_new_tokens, [row["temperature"]],
                                               [row["seed"]], list(TINY.stop_token_ids))
        text = tokenizer.decode(new[:-1] if reason == "stop" else new, clean_up_tokenization_spaces=False)
        assert (text, reason) == (row["messages"][1]["content"], row["messages"][1]["finish_reason"])


def test_a_killed_evaluation_goes_on_and_ends_the_same(finished, monkeypatch):
    monkeypatch.chdir(finished)
    process = program(HERE / "eval_deepspec.py", "--draft", "out/tiny/latest", "--task", "gsm_symbolic", "--limit", 12,
                      "--temperature", 1, "--max-new-tokens", 48, "--out", "out/killed")
    while process.poll() is None and not any(p.stat().st_size for p in Path("out/killed").glob("samples-*")):
        time.sleep(0.02)
    process.kill()
    said = process.communicate()[0]
    journal = next(Path("out/killed").glob("samples-*"), None)
    assert journal, said
    before = journal.read_text()
    journal.write_text(before + '{"task": "gsm_sy')                                # and its last line is torn
    whole = evaluate("out/tiny/latest", "out/whole", limit=12, temperature=1.0, max_new_tokens=48)
    again = evaluate("out/tiny/latest", "out/killed", limit=12, temperature=1.0, max_new_tokens=48)
    assert journal.read_text().startswith(before)                                  # finished samples were not repeated
    strip = lambda value: [{k: v for k, v in s.items() if k != "seconds"} for s in value["samples"]["gsm_symbolic"]]  # noqa: E731
    assert strip(again) == strip(whole) and len(strip(whole)) == 12


@pytest.mark.parametrize("changes, sentence", [
    ({"task": ["nonsense"]}, "nonsense"), ({"draft": "out/nothing"}, "config.json"),
    ({"temperature": -1.0}, "temperature"), ({"out": "/proc/nothing"}, "/proc/nothing"),
    ({"limit": -1}, "limit must be at least 1"), ({"max_new_tokens": 0}, "max-new-tokens must be at least 1"),
    ({"confidence_threshold": float("nan")}, "threshold must lie"), ({"target": "out"}, "config.json"),
])
def test_what_a_person_gets_wrong_is_an_error_of_one_sentence(finished, monkeypatch, changes, sentence):
    monkeypatch.chdir(finished)
    with pytest.raises((ValueError, OSError), match=sentence):
        evaluate(**{"draft": "out/tiny/latest", "out": "out/wrong"} | changes)
