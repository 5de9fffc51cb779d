"""What a training run writes down while it goes: the time of its phases, metrics.jsonl, TensorBoard, wandb, the bar.

Read next: train.py, which fills it.
"""
import contextlib
import json
import time
from collections import defaultdict
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm import tqdm

from data_glm import drop_torn_line, read_rows
from recipe import Recipe

SHOWN_PHASES = ("capture", "forward", "backward")                # whose shares of the time stand beside the bar


class Clock:
    """Seconds by phase since the last reset: `with clock("capture"): ...`."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.start, self.seconds = time.perf_counter(), defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def shares(self) -> dict[str, float]:
        return {f"share_{phase}": round(seconds / self.elapsed(), 4) for phase, seconds in self.seconds.items()}


def cut_lines(path: Path, step: int) -> None:
    """Drop the lines of a jsonl file that lie past `step` or were cut short, so that every step stands in it once."""
    if not path.exists():
        return
    drop_torn_line(path)
    try:
        rows = [row for row in read_rows(path) if row["step"] <= step]
    except ValueError as error:
        raise SystemExit(str(error)) from error
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(path)


class Journal:
    """metrics.jsonl, TensorBoard's event file, wandb where the recipe names a project, the progress bar; on rank 0.

    Events are written here and now: TensorBoard's own writer does it in a thread, whose errors nobody catches.
    """

    def __init__(self, out: Path, recipe: Recipe, step: int, total_steps: int):
        cut_lines(out / "metrics.jsonl", step)
        cut_lines(out / "evals.jsonl", step)
        self.log_every, self.total_steps = recipe.log_every, total_steps
        self.file = (out / "metrics.jsonl").open("a")
        (out / "tensorboard").mkdir(exist_ok=True)
        self.board = RecordWriter((out / "tensorboard" / f"events.out.tfevents.{time.time_ns()}").open("wb"))
        self.event(file_version="brain.Event:2")
        self.event(step=step + 1, session_log=SessionLog(status=SessionLog.START))  # void: what lies past it
        self.run = None
        if recipe.wandb:
            import wandb
            identity = out / "wandb_id"                                               # the same run after a resume
            if not identity.exists():
                identity.write_text(f"{recipe.name}-{time.time_ns()}")
            self.run = wandb.init(project=recipe.wandb, name=recipe.name, id=identity.read_text(), resume="allow",
                                  dir=out, config=vars(recipe))
            self.run.define_metric("*", step_metric="step")
        self.bar = tqdm(total=total_steps, initial=step, desc=recipe.name, unit="step", dynamic_ncols=True)

    def event(self, **fields) -> None:
        self.board.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def write(self, line: dict) -> None:
        self.bar.update()
        tau = line.get("tau_probabilistic", line.get("tau_greedy"))
        shares = "/".join(f"{100 * line.get(f'share_{phase}', 0):.0f}" for phase in SHOWN_PHASES)
        self.bar.set_postfix_str(
            f"loss {line['loss']:.3f}, tau {tau:.3f}, {line['tokens_per_s']:.0f} tokens/s, "
            f"{line['samples_per_s']:.1f} samples/s, {shares}% {'/'.join(SHOWN_PHASES)}")
        if line["step"] % self.log_every and line["step"] != self.total_steps:
            return
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        values = [Summary.Value(tag=key, simple_value=value) for key, value in line.items()]
        self.event(step=line["step"], summary=Summary(value=values))
        self.board.flush()
        if self.run:
            self.run.log(line)

    def close(self) -> None:
        self.bar.close()
        self.file.close()
        self.board.close()
        if self.run:
            self.run.finish()
