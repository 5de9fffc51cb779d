"""How a global batch is cut over processes, and what the run will need: `python plan.py glm-5.2 --nnodes 4 --nproc 4`.

Nothing is started and nothing is read but the recipe. train.py prints the same before its first step. Read next:
train.py.
"""
import argparse
from dataclasses import dataclass

from recipe import Recipe, get_recipe


@dataclass(frozen=True)
class Plan:
    """How a global batch is cut: into micro-steps of `micro` consecutive samples of the epoch's order, each of which is
    split over `replicas` targets, and each target's part over the `tp` ranks that share it."""
    micro: int
    accumulation: int                            # micro-steps per optimizer step
    replicas: int
    tp: int
    scatter: bool                                # False: all ranks of a target train on its whole part
    steps_per_epoch: int                         # whole global batches; 0 while the size of the corpus is unknown
    total_steps: int

    def part(self, rank: int, samples: list[int]) -> tuple[list[int], slice]:
        """(the samples of a micro-step that this rank's target captures, the slice of them this rank trains on)."""
        replica, lane = divmod(rank, self.tp)
        held = self.micro // self.replicas
        own = held // self.tp if self.scatter else held
        first = lane * own if self.scatter else 0
        return samples[replica * held:(replica + 1) * held], slice(first, first + own)


def make_plan(recipe: Recipe, num_samples: int, world_size: int, tp: int = 1) -> Plan:
    """Derive the accumulation; SystemExit with the numbers when something does not divide.

    With tp > 1 every target takes `micro_batch` samples. With tp = 1 all ranks together do, so that a micro-step holds
    the same samples at any world size; where there are more ranks than samples, each rank takes one.
    """
    replicas = world_size // tp
    micro = recipe.micro_batch * replicas if tp > 1 else max(recipe.micro_batch, world_size)
    if micro % replicas:
        fitting = [n for n in range(1, micro + 1) if micro % n == 0]
        raise SystemExit(f"{recipe.name}: micro_batch {recipe.micro_batch} does not split over {world_size} processes; "
                         f"start one of {fitting}, or change micro_batch in recipe.py")
    if recipe.global_batch % micro:
        raise SystemExit(f"{recipe.name}: global_batch {recipe.global_batch} is not a multiple of {micro}, the samples "
                         f"of one micro-step ({world_size} processes, micro_batch {recipe.micro_batch}); change one of "
                         "them in recipe.py, or the number of processes")
    steps_per_epoch = num_samples // recipe.global_batch
    if num_samples and steps_per_epoch == 0:
        raise SystemExit(f"{recipe.name}: {num_samples} samples do not fill one global batch of {recipe.global_batch}; "
                         "use a larger corpus or a smaller global_batch (recipe.py)")
    return Plan(micro, recipe.global_batch // micro, replicas, tp, micro // replicas % tp == 0, steps_per_epoch,
                recipe.max_steps or recipe.epochs * steps_per_epoch)


def describe(recipe: Recipe, plan: Plan, num_samples: int) -> str:
    """The plan in words and numbers."""
    node_batch, ranks = plan.micro // plan.replicas, plan.replicas * plan.tp
    streams = ranks if plan.scatter else plan.replicas
    lines = {
        "target": f"{plan.replicas} replica(s) over {plan.tp} process(es) each, {node_batch} samples per forward",
        "streams": f"{streams} unique, {plan.micro // streams} sample(s) per forward of the draft" + (
            "" if plan.tp == 1 else " after scatter" if plan.scatter else
            f": NOT scattered, {node_batch} samples do not divide by the {plan.tp} ranks of a target"),
        "global batch": f"{recipe.global_batch} = {plan.micro} samples x {plan.accumulation} accumulated micro-steps",
        "steps": f"{plan.total_steps}, {plan.steps_per_epoch} per epoch of {num_samples} samples" if num_samples else
                 f"{recipe.epochs} epochs of a corpus of unknown size (--samples N)",
        "checkpoints": f"every {recipe.save_every} steps ({recipe.save_every * plan.accumulation} micro-steps), the "
                       f"newest {recipe.keep_checkpoints} and the best are kept"}
    return "\n".join([f"{recipe.name} on {ranks} process(es)"] + [f"  {key:<13}{text}" for key, text in lines.items()])


def count_parameters(recipe: Recipe) -> tuple[int, int]:
    """(parameters that training changes, those of the target's embedding and head that the draft borrows)."""
    import torch

    from dflash2 import new_draft
    with torch.device("meta"):
        trained = sum(p.numel() for p in new_draft(recipe).parameters())
    return trained, recipe.vocab_size * recipe.hidden_size * (1 if recipe.head_key == recipe.embed_key else 2)


def memory_plan(recipe: Recipe, gpus: int, tp: int = 1) -> dict[str, int]:
    """Bytes per GPU of a training run on `gpus` GPUs with the target spread over `tp` of them, by what needs them.

    bf16 compute, fp32 masters and moments in equal shards; between the micro-steps of an optimizer step the weights
    stay gathered and the gradients unreduced in fp32. Activations are those that one micro-step keeps for its backward
    at full length and with every anchor taken; the objective is DSpark's. The engine's own memory (weights, its cache)
    comes on top.
    """
    from objective import buffer_rows, slice_rows
    H, S, V, K, r = recipe.hidden_size, recipe.max_length, recipe.vocab_size, recipe.block_size, recipe.markov_rank
    queries, keys = recipe.num_attention_heads * recipe.head_dim, recipe.num_key_value_heads * recipe.head_dim
    trained, frozen = count_parameters(recipe)
    taps, rows = len(recipe.target_layer_ids), recipe.num_anchors * K
    held = recipe.micro_batch if tp > 1 else max(1, recipe.micro_batch // gpus)      # samples that a target captures
    own = held // tp if held % tp == 0 else held                                     # samples that a GPU trains on
    layer = rows * (4 * H + 3 * queries + 3 * keys + 4 * recipe.intermediate_size) + S * 3 * keys
    outside = S * (taps + 2) * H + rows * 2 * H
    slices = slice_rows([K] * recipe.num_anchors * own, None, V, K, "cuda")
    widest = max(b - a for a, b in slices)
    draft_rows, teacher_rows, scratch = buffer_rows(slices, [widest], V, "cuda")
    return {
        "embedding and head, bf16": 2 * frozen,
        "gathered weights, bf16": 2 * trained,
        "gradients, fp32": 4 * trained + 4 * trained // gpus,
        "masters, fp32": 4 * trained // gpus,
        "Adam's moments, fp32": 8 * trained // gpus,
        "captured states, bf16": 2 * (held + own) * S * (taps + 1) * H,
        "activations, bf16": 2 * own * (recipe.num_draft_layers * layer + outside),
        "objective": 4 * (draft_rows + teacher_rows + 2 * scratch) * V + 2 * draft_rows * V     # and a bf16 copy
                     + 2 * own * rows * 2 * (H + r) + 6 * V * r,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a training run would do and need; nothing is started.")
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--nproc", type=int, default=1, help="processes per node, one per GPU")
    parser.add_argument("--samples", type=int, default=0, help="size of the corpus, for the number of steps")
    options = parser.parse_args()
    if min(options.nnodes, options.nproc) < 1:
        parser.error("--nnodes and --nproc are at least 1")
    recipe, ranks = get_recipe(options.recipe), options.nnodes * options.nproc
    tp = options.nproc if recipe.engine == "sglang" else 1
    samples = options.samples or recipe.corpus_size
    print(describe(recipe, make_plan(recipe, samples, ranks, tp), samples))
    needs = memory_plan(recipe, ranks, tp)
    print(f"  memory       {sum(needs.values()) / 1e9:.1f} GB per GPU beside the target: "
          + ", ".join(f"{name} {size / 1e9:.1f}" for name, size in needs.items()))


if __name__ == "__main__":
    main()
