"""Experts whose bytes tell them apart: two matrices, and a scale that names expert and layer."""

import torch


def expert_tensors(layer, num_experts, dim):
    """The tensors of all experts of a layer, [experts, ...] each."""

    def drawn(rows, salt):
        seeds = [1_000_003 * layer + 101 * expert + salt for expert in range(num_experts)]
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        return torch.stack([torch.randn(rows, dim, generator=draw) for draw in draws])

    marks = torch.tensor([[float(expert), float(layer)] for expert in range(num_experts)])
    return [drawn(2 * dim, 1).to(torch.bfloat16), drawn(dim, 2).to(torch.bfloat16), marks]


def wrong_slot(tensors, whole, experts):
    """Which of a rank's slots does not hold its expert, byte for byte; empty if all do."""
    for number, (held, every) in enumerate(zip(tensors, whole, strict=True)):
        wanted = every[experts]
        if torch.equal(_bytes(held), _bytes(wanted)):
            continue
        slots = (_bytes(held) != _bytes(wanted)).any(dim=1).nonzero().flatten().tolist()
        return f"slots {slots} differ from experts {experts[slots].tolist()} in tensor {number}"
    return ""


def _bytes(tensor):
    return tensor.reshape(len(tensor), -1).view(torch.uint8)
