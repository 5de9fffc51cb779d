"""The picture of a run: `python report.py [recipe]` reads what training and evaluation left in out/<recipe>/.

Writes out/<recipe>/results.json (every evaluation with its per-sample lists, and the training's last metrics) and
out/<recipe>/report.png: loss, tau_probabilistic, accept rate by position, histogram of accept lengths.
"""
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")                            # no screen needed
import matplotlib.pyplot as plt  # noqa: E402

from data_glm import read_rows  # noqa: E402
from eval_deepspec import table, write_json  # noqa: E402
from recipe import Recipe, get_recipe  # noqa: E402
from targets import plain_errors  # noqa: E402

EVALUATIONS = ("eval-untrained", "eval-t0", "eval-t1")


def smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average without the start-up bias."""
    result, mean, norm = [], 0.0, 0.0
    for value in values:
        mean, norm = weight * mean + (1 - weight) * value, weight * norm + (1 - weight)
        result.append(mean / norm)
    return result


def collect(out: Path) -> tuple[list[dict], dict]:
    """(training lines, results of every evaluation present). FileNotFoundError with the mend when there is nothing,
    ValueError for a damaged file."""
    log = out / "metrics.jsonl"
    if not log.is_file():
        raise FileNotFoundError(f"{log} is not there; train first: bash run.sh train {out.name}")
    lines, found = list(read_rows(log)), {}
    for name in EVALUATIONS:
        path = out / name / "results.json"
        if path.exists():
            try:
                found[name] = json.loads(path.read_text())
            except ValueError as error:
                raise ValueError(f"{path} is damaged ({error}); delete it, then run: bash run.sh eval {out.name}"
                                 ) from error
    if not lines or not found:
        raise FileNotFoundError(f"{out} has {len(lines)} training lines and {len(found)} evaluations; "
                                f"run: bash run.sh train {out.name}, then bash run.sh eval {out.name}")
    return lines, found


def tau_key(lines: list[dict]) -> str:
    """DSpark logs the expected accept length under its teacher, DFlash the greedy one."""
    return "tau_probabilistic" if "tau_probabilistic" in lines[-1] else "tau_greedy"


def draw_acceptance(rates, histogram, runs: dict[str, tuple[dict, list[dict]]]) -> None:
    """Accept rate by position on one axis, histogram of accept lengths on the other; runs: (metrics, samples) by name,
    of which the histogram leaves out those without samples."""
    for name, (metrics, _) in runs.items():
        rates.plot(metrics["accept_rate"], marker="o", label=name)
    counted = {name: run for name, run in runs.items() if run[1]}
    for i, (name, (metrics, samples)) in enumerate(counted.items()):
        lengths = [n for s in samples for n in s["acceptance_lengths"]]
        places, width = range(1, len(metrics["accept_rate"]) + 2), 0.8 / len(counted)
        histogram.bar([n + (i + 0.5) * width - 0.4 for n in places],
                      [lengths.count(n) / max(len(lengths), 1) for n in places], width,
                      label=f"{name}: mean {metrics['accept_len']:.2f}")
    rates.set(xlabel="position in the block", ylim=(0, 1), title="accept rate by position")
    histogram.set(xlabel="accept length", ylabel="share of proposals", title="accept lengths")
    rates.legend(fontsize=8)
    histogram.legend(fontsize=8)


def draw(lines: list[dict], found: dict, title: str, path: Path) -> None:
    """The picture of a run: loss and tau above, below what its evaluations found on the first task."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7))
    for axis, key, color in ((axes[0, 0], "loss", "tab:blue"), (axes[0, 1], tau_key(lines), "tab:green")):
        steps, values = [line["step"] for line in lines], [line[key] for line in lines]
        axis.plot(steps, values, color=color, alpha=0.25)
        axis.plot(steps, smooth(values), color=color)
        axis.set(xlabel="optimizer step", title=key)
    task = next(iter(found[next(iter(found))]["samples"]))                        # what the draft was trained for
    draw_acceptance(*axes[1], {name.removeprefix("eval-"): (
        result["metrics"][task], [] if name == "eval-untrained" else result["samples"][task])
        for name, result in found.items()})
    save(figure, f"{title}; below: {task}", path)


def draw_evaluation(value: dict, path: Path) -> None:
    """The picture of one evaluation's results.json: accept rate by position and histogram of accept lengths, by task.
    """
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8))
    draw_acceptance(*axes, {name: (value["metrics"][name], samples) for name, samples in value["samples"].items()})
    save(figure, "", path)


def save(figure, title: str, path: Path) -> None:
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report(recipe: Recipe, out: Path) -> None:
    """Write and print the report of the run in `out`."""
    lines, found = collect(out)
    key = tau_key(lines)
    tau = smooth([line[key] for line in lines])
    training = {"steps": lines[-1]["step"], f"{key}_first": tau[0], f"{key}_last": tau[-1], "last": lines[-1]}
    write_json(out / "results.json", {"recipe": recipe.name, "training": training, "evaluations": found})
    draw(lines, found, f"{recipe.name}: a {recipe.draft} draft for {recipe.target}", out / "report.png")
    print(f"\ntraining: {training['steps']} steps, {key} {tau[0]:.3f} -> {tau[-1]:.3f} (smoothed)")
    for name, result in found.items():
        print(f"\n{name.removeprefix('eval-')}\n{table(result['metrics'])}")
    print(f"\n{out / 'report.png'}\n{out / 'results.json'}")


def main() -> None:
    if len(sys.argv) > 2 or sys.argv[1:] in (["-h"], ["--help"]):
        raise SystemExit("usage: python report.py [recipe]")
    recipe = get_recipe(*sys.argv[1:])
    with plain_errors(ValueError):
        report(recipe, Path("out") / recipe.name)


if __name__ == "__main__":
    main()
