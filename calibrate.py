"""What a draft's confidence head is worth, and what a temperature per slot makes of it.

The head's sigmoid at slot t claims the probability that slot t is accepted given that the slots before it were; the
cumulative product over slots claims that the proposal survives up to t, which is what a threshold or a scheduler acts
on. Here that product is held against what the target accepted: expected calibration error (ECE), AUROC and Brier score
by position, a reliability diagram, and sequential temperature scaling, fitted on one half of the samples and reported
on the other. `python eval_deepspec.py --calibrate` runs it; schedule.py uses the result.
"""
import json
from pathlib import Path

import numpy as np

BINS = 20                                        # of equal width
# Temperatures that are tried, from 1 outwards: among equals, and where nothing was observed, the nearest to 1 is taken.
GRID = np.array(sorted(np.geomspace(0.05, 20, 241), key=lambda t: abs(np.log(t))))


def observations(samples: list[dict]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Over the proposals P of decoded samples: confidence logits [P, K], accepted [P, K] (the slot and all before it),
    observed [P, K]. An accepted stop token ends a proposal: what would have followed it is not observed.

    Raises ValueError when the samples hold no whole proposals.
    """
    logits = [row for s in samples for row in s.get("confidence_logits", ())]
    if not logits or not all(logits):
        raise ValueError("no confidences were recorded: this draft has no confidence head")
    logits = np.array(logits)
    accepted, proposed = (np.array([n for s in samples for n in s[name]]) for name in
                          ("accepted_draft_lengths", "proposal_lengths"))
    slots = np.arange(logits.shape[1])
    return logits, accepted[:, None] > slots, proposed[:, None] > slots


def survival(logits: np.ndarray, temperatures=1.0) -> np.ndarray:
    """Claimed probability [P, K] that the proposal is accepted up to and including slot t."""
    return np.cumprod(1 / (1 + np.exp(-logits / np.asarray(temperatures))), 1)


def ece(claimed: np.ndarray, happened: np.ndarray) -> float:
    """Expected calibration error of probabilities [n] for events [n]: mean |claimed - frequency| over bins by size."""
    bins = np.minimum((claimed * BINS).astype(int), BINS - 1)
    gap = np.bincount(bins, claimed - happened, BINS)
    return float(np.abs(gap).sum() / max(len(claimed), 1))


def auroc(claimed: np.ndarray, happened: np.ndarray) -> float:
    """Probability that an event was given more than a non-event, ties half (NaN when one of them is missing)."""
    _, place, counts = np.unique(claimed, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[place]                # mean rank, from 1
    yes = int(happened.sum())
    no = len(happened) - yes
    return float((rank[happened].sum() - yes * (yes + 1) / 2) / (yes * no)) if yes and no else float("nan")


def scores(logits: np.ndarray, accepted: np.ndarray, observed: np.ndarray, temperatures=1.0) -> list[dict]:
    """ECE, AUROC and Brier score of the survival probability by position, over the observed proposals."""
    claimed, result = survival(logits, temperatures), []
    for t in range(logits.shape[1]):
        p, y = claimed[observed[:, t], t], accepted[observed[:, t], t]
        result.append({"proposals": len(p), "accepted": float(y.mean()), "claimed": float(p.mean()), "ece": ece(p, y),
                       "auroc": auroc(p, y), "brier": float(((p - y) ** 2).mean())})
    return result


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray, observed: np.ndarray) -> list[float]:
    """Sequential temperature scaling: slot by slot from the left, the temperature that minimises the ECE of the
    cumulative product, those of the slots before it fixed. Each slot's own ordering does not change."""
    temperatures, before = [], np.ones(len(logits))
    for t in range(logits.shape[1]):
        seen = observed[:, t]
        products = before[seen] / (1 + np.exp(-logits[seen, t] / GRID[:, None]))          # [temperatures, n]
        errors = [ece(p, accepted[seen, t]) for p in products]
        temperatures.append(float(GRID[int(np.argmin(errors))]))
        before = before / (1 + np.exp(-logits[:, t] / temperatures[-1]))
    return temperatures


def calibrate(samples: list[dict], out: Path) -> dict:
    """Fit on every other sample, report on the rest: {temperatures, before, after}; draws out/calibration.png.

    Raises ValueError when the samples are too few to be halved.
    """
    fitted, held_out = samples[::2], samples[1::2]
    if not held_out:
        raise ValueError(f"calibration fits on half of the samples and reports on the rest; there is only "
                         f"{len(samples)}, raise --limit")
    temperatures, test = fit_temperatures(*observations(fitted)), observations(held_out)
    result = {"temperatures": temperatures, "samples": [len(fitted), len(held_out)], "before": scores(*test),
              "after": scores(*test, temperatures)}
    draw(test, temperatures, out / "calibration.png")
    return result


def mean_ece(rows: list[dict]) -> float:
    return sum(row["ece"] for row in rows) / len(rows)


def table(result: dict) -> str:
    """By position, before -> after, on the held-out half."""
    names = "".join(f"{name:>17}" for name in ("claimed", "ECE", "AUROC", "Brier"))
    lines = [f"slot proposals  accepted{names}      T"]
    for t, (a, b) in enumerate(zip(result["before"], result["after"], strict=True)):
        pairs = " ".join(f"{a[key]:.3f} -> {b[key]:.3f}".rjust(16) for key in ("claimed", "ece", "auroc", "brier"))
        lines.append(f"{t:>4} {a['proposals']:>9} {a['accepted']:>9.3f} {pairs} {result['temperatures'][t]:>6.2f}")
    return "\n".join([*lines, f"mean ECE {mean_ece(result['before']):.4f} -> {mean_ece(result['after']):.4f}"])


def draw(data, temperatures: list[float], path: Path) -> None:
    """Reliability diagram of the survival probability, as it is and scaled, one line per position."""
    from report import plt
    logits, accepted, observed = data
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True)
    for axis, heat, title in zip(axes, (1.0, temperatures), ("as trained", "temperature-scaled"), strict=True):
        claimed = survival(logits, heat)
        axis.plot((0, 1), (0, 1), color="gray", linewidth=0.8)
        for t in range(logits.shape[1]):
            p, y = claimed[observed[:, t], t], accepted[observed[:, t], t]
            bins = np.minimum((p * 10).astype(int), 9)                  # coarser than the ECE's: less noise to look at
            full = np.bincount(bins, minlength=10) >= 10
            x, height = (np.bincount(bins, w, 10)[full] / np.bincount(bins, minlength=10)[full] for w in (p, y))
            axis.plot(x, height, marker="o", markersize=3, label=f"slot {t}: ECE {ece(p, y):.3f}")
        axis.set(xlabel="claimed survival probability", title=title, xlim=(0, 1), ylim=(0, 1))
        axis.legend(fontsize=7)
    axes[0].set(ylabel="accepted")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def load_temperatures(folder: Path, slots: int, draft: list[str], temperature: float) -> list[float]:
    """What --calibrate stored beside a checkpoint; FileNotFoundError or ValueError with the mend when there is nothing,
    or when it was fitted on other weights (draft: hashes of the files) or at another decoding temperature."""
    path = folder / "calibration.json"
    again = f"python eval_deepspec.py --calibrate --draft {folder} --temperature {temperature:g}"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; {again} writes it")
    stored = json.loads(path.read_text())
    found = {"slots": len(stored.get("temperatures", [])), "draft": stored.get("draft"),
             "temperature": stored.get("settings", {}).get("temperature")}
    for name, value in {"slots": slots, "draft": draft, "temperature": temperature}.items():
        if found[name] != value:
            raise ValueError(f"{path} was fitted for {name} {found[name]}, this evaluation has {value}; {again} fits "
                             "anew")
    return stored["temperatures"]
