"""AdamW, and Muon for the matrices where a recipe asks for it; both keep their state in shards, as FSDP2 does its
parameters. Read next: train.py, which steps them.
"""
import torch
from torch.distributed.tensor import DTensor, Replicate

from ranks import whole
from recipe import Recipe


class Muon(torch.optim.Optimizer):
    """Momentum whose update is replaced by the nearest orthogonal matrix (K. Jordan, 2024).

    torch's own Muon iterates in bf16, which is ten times slower on a CPU without AMX. A sharded gradient is gathered,
    every rank iterates on the whole matrix and keeps its own rows, so the update does not depend on the world size.
    """

    def __init__(self, matrices, lr: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = split_like(orthogonalise(whole(p.grad.lerp(buffer, group["momentum"]))), p)   # Nesterov
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def split_like(tensor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A tensor that every rank holds whole, sharded as the parameter p is."""
    if not isinstance(p, DTensor):
        return tensor
    return DTensor.from_local(tensor, p.device_mesh, [Replicate()]).redistribute(placements=p.placements)


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """About U V' of matrix = U S V': five Newton-Schulz steps in fp32 bring singular values to between 0.7 and 1.2."""
    x = matrix.float()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def make_optimizers(draft: torch.nn.Module, recipe: Recipe) -> dict[torch.optim.Optimizer, float]:
    """{optimizer: its learning rate at the schedule's peak}. Muon takes `fc` and the layers' matrices, AdamW the rest.

    The moments are made here rather than in the first step, so that a checkpoint finds them to write and to load into.
    """
    if recipe.optimizer not in ("adamw", "muon"):
        raise SystemExit(f"{recipe.name}: optimizer {recipe.optimizer!r} is neither adamw nor muon; mend recipe.py")
    matrices, rest = [], []
    for name, p in draft.named_parameters():
        for_muon = recipe.optimizer == "muon" and p.ndim == 2 and name.startswith(("fc.", "layers."))
        (matrices if for_muon else rest).append(p)
    adamw = torch.optim.AdamW(rest, lr=recipe.lr, weight_decay=recipe.weight_decay)
    for p in rest:
        adamw.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p.data),
                          "exp_avg_sq": torch.zeros_like(p.data)}
    if not matrices:
        return {adamw: recipe.lr}
    muon = Muon(matrices, recipe.muon_lr)
    for p in matrices:
        muon.state[p] = {"momentum_buffer": torch.zeros_like(p.data)}
    return {adamw: recipe.lr, muon: recipe.muon_lr}
