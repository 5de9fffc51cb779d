"""How many drafted tokens to verify when many requests share one target.

Verifying a token costs little while the target waits for memory and much once it computes. `schedule` is the paper's
greedy rule: over all requests, admit drafted tokens in the order of their survival probability as long as expected
tokens per step times steps per second does not drop. It stops at the first drop, so that no decision looks at a later
token of its own request: what is verified stays independent of what it will turn out to be.

    python schedule.py profile DRAFT [--json FILE]              steps/s of its target against tokens verified at once
    python schedule.py simulate RESULTS --costs FILE            throughput over a recorded evaluation, and a picture

Read next: calibrate.py (survival probabilities worth acting on), eval_deepspec.py (what records RESULTS).
"""
import argparse
import heapq
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from calibrate import observations, survival
from targets import plain_errors

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)       # tokens per verification that are measured, about
TURNS = 10
CONCURRENCY = (1, 2, 4, 8, 16, 32)
CONTEXT = 128                                    # committed tokens of every measured row


def schedule(survivals: list[list[float]], steps_per_second: Callable[[int], float]) -> list[int]:
    """Tokens to verify for each request. survivals[r][t]: probability that request r's draft is accepted up to slot t
    (does not rise with t); steps_per_second(n): of the target when n tokens are verified in all.

    A step yields one token per request and every admitted one with its survival probability. Ties: lower request first.
    The result is the best of all prefix lengths when the time of a step is convex in n (DSpark paper, scheduler).
    """
    lengths, n = [0] * len(survivals), len(survivals)
    expected, best = float(n), n * steps_per_second(n)
    heap = [(-row[0], r) for r, row in enumerate(survivals) if len(row)]
    heapq.heapify(heap)
    while heap:
        loss, r = heapq.heappop(heap)
        value = (expected - loss) * steps_per_second(n + 1)
        if value < best:
            break
        expected, n, best = expected - loss, n + 1, value
        lengths[r] += 1
        if lengths[r] < len(survivals[r]):
            heapq.heappush(heap, (-survivals[r][lengths[r]], r))
    return lengths


# ---------------------------------------------------------------------------------------------------------------------
# What a step costs


@torch.inference_mode()
def profile(target, draft) -> dict:
    """The cost table {"verify": [[tokens, seconds], ...], "draft": [[requests, seconds], ...]}: a pass of the target
    with its head over so many tokens in equal rows of up to one block, and a proposal for so many requests.

    All sizes in turns, the fastest of TURNS of each: what a machine does beside it only adds. For the same reason a
    size never costs more than a larger one.
    """
    from decode import propose
    K = draft.config.slots + 1

    def measured(sizes, prepare):
        sizes, runs = zip(*map(prepare, sizes), strict=True)
        best = [float("inf")] * len(sizes)
        for _ in range(TURNS):
            for i, run in enumerate(runs):
                start = time.perf_counter()
                run()
                target.drain()
                best[i] = min(best[i], time.perf_counter() - start)
        best = np.minimum.accumulate(best[::-1])[::-1].tolist()
        for size, seconds in zip(sizes, best, strict=True):
            print(f"{size:>6} {1000 * seconds:>9.1f} ms", flush=True)
        return [list(pair) for pair in zip(sizes, best, strict=True)]

    def open_sessions(rows):
        session, drafting = target.session(max(rows, 2)), draft.session(max(rows, 2))
        for _ in range(rows):
            drafting.admit(session.admit(torch.randint(target.vocab_size, (1, CONTEXT), device=target.device)).context)
        return session, drafting

    def verify(size):
        rows = -(-size // K)
        ids = torch.randint(target.vocab_size, (rows, -(-size // rows)), device=target.device)
        session, _ = open_sessions(rows)

        def run():
            target.lm_head(session.extend(ids).final).argmax(-1)
            session.rollback(CONTEXT)
        return ids.numel(), run                  # `size`, or a little more where it does not split into equal rows

    def drafted(size):
        _, drafting = open_sessions(size)
        last = torch.zeros(size, 1, dtype=torch.long, device=target.device)
        return size, lambda: propose(draft, drafting, last, 0.0, 0.0, [None] * size)

    print("tokens verified at once")
    table = {"verify": measured(SIZES, verify)}
    print("requests drafted for at once")
    return table | {"draft": measured(CONCURRENCY, drafted), "threads": torch.get_num_threads()}


def seconds_for(rows: list[list[float]], size: float) -> float:
    """From a cost table, linear between its entries and beyond the last two."""
    x, y = np.array(rows).T
    if size <= x[-1]:
        return float(np.interp(size, x, y))
    return float(y[-1] + (size - x[-1]) * (y[-1] - y[-2]) / (x[-1] - x[-2]))


# ---------------------------------------------------------------------------------------------------------------------
# A load made of recorded proposals


POLICIES = ("plain", "fixed", "threshold", "scheduled")      # no draft, all K slots, survival >= THRESHOLD, `schedule`
THRESHOLD, STEPS = 0.5, 400


def simulate(claimed: np.ndarray, accepted: np.ndarray, costs: dict, requests: int, policy: str) -> float:
    """Tokens per second of `requests` that always have work, each walking through recorded proposals.

    claimed [P, K]: survival probabilities; accepted [P]: drafted tokens that the target accepted when all K were
    verified. A proposal cut to n yields min(accepted, n) + 1 tokens. policy: one of POLICIES.
    """
    P, K = claimed.shape
    draft = 0.0 if policy == "plain" else seconds_for(costs["draft"], requests)

    def seconds(n):
        return draft + seconds_for(costs["verify"], n)

    tokens = clock = 0.0
    for step in range(STEPS):
        rows = (np.arange(requests) * P // requests + step) % P
        if policy == "scheduled":
            lengths = np.array(schedule(claimed[rows].tolist(), lambda n: 1 / seconds(n)))
        elif policy == "threshold":
            lengths = (claimed[rows] >= THRESHOLD).sum(1)        # survival never rises along a row
        else:
            lengths = np.full(requests, K if policy == "fixed" else 0)
        tokens += (np.minimum(accepted[rows], lengths) + 1).sum()
        clock += seconds(requests + int(lengths.sum()))
    return float(tokens / clock)


def compare(samples: list[dict], temperatures, costs: dict, path: Path) -> dict:
    """Throughput of every policy at every concurrency, printed and drawn."""
    from report import plt
    logits, accepted, _ = observations(samples)
    claimed, accepted = survival(logits, temperatures), accepted.sum(1)
    result = {p: [simulate(claimed, accepted, costs, n, p) for n in CONCURRENCY] for p in POLICIES}
    print(f"{'requests':>10}" + "".join(f"{n:>8}" for n in CONCURRENCY))
    figure, axis = plt.subplots(figsize=(5.5, 3.8))
    for policy, values in result.items():
        label = f"fixed {logits.shape[1]}" if policy == "fixed" else policy
        print(f"{label:>10}" + "".join(f"{v:>8.1f}" for v in values))
        axis.plot(CONCURRENCY, values, marker="o", markersize=4, label=label)
    axis.set(xscale="log", xlabel="requests at once", ylabel="tokens/s", title="verified tokens per proposal")
    axis.set_xticks(CONCURRENCY, CONCURRENCY)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return result | {"requests": list(CONCURRENCY)}


def main() -> None:
    from eval_deepspec import open_draft, write_json
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("profile", help="measure the cost table")
    one.add_argument("draft", type=Path, help="checkpoint folder")
    one.add_argument("--target", help="for a draft without recipe.json")
    one.add_argument("--json", type=Path, help="default: costs.json in the checkpoint")
    two = commands.add_parser("simulate", help="throughput over a recorded evaluation")
    two.add_argument("results", type=Path, help="results.json of eval_deepspec.py at --confidence-threshold 0")
    two.add_argument("--costs", type=Path, required=True, help="a cost table")
    two.add_argument("--calibration", type=Path, help="calibration.json; default: the confidences as they are")
    args = parser.parse_args()
    with plain_errors(ValueError, code=2):
        if args.command == "profile":
            from capture import load_target
            draft, recipe = open_draft(args.draft, args.target)
            target = load_target(recipe)
            if not draft.attached:
                draft.attach(target.embed_tokens, target.lm_head)
            path = args.json or args.draft / "costs.json"
            write_json(path, profile(target, draft))
        else:
            found, path = json.loads(args.results.read_text()), args.results.with_name("schedule.png")
            if cut := found["settings"]["confidence_threshold"]:
                raise ValueError(f"{args.results} was recorded at --confidence-threshold {cut}: what its cuts lost "
                                 "is unknown; evaluate again without a threshold")
            heat = json.loads(args.calibration.read_text())["temperatures"] if args.calibration else 1.0
            result = compare([s for part in found["samples"].values() for s in part], heat,
                             json.loads(args.costs.read_text()), path)
            write_json(path.with_suffix(".json"), result)
        print(path)


if __name__ == "__main__":
    main()
