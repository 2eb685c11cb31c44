"""A trained router's loads on held-out text, per domain, and how specialised its experts are.

Owns `loads.json`, a recorded trace of a few KB that planning tests use without a model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from equipoise_model.plain.transformer import Transformer
from equipoise_model.train.bias import expert_load
from equipoise_model.train.data import DOMAINS, Domain, text
from equipoise_model.train.losses import next_token_loss

Assignments = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadTrace:
    """Recorded loads on held-out text."""

    window_tokens: int
    top_k: int
    assignments_of: dict[Domain, Assignments]
    """Per domain, each window's assignments to each logical expert, int64 [windows, layers,
    experts]. Windows are disjoint; a row sums to window_tokens * top_k."""

    def max_over_mean(self, domain: Domain | None = None) -> npt.NDArray[np.float64]:
        """Most loaded expert against the mean per layer, [layers]; all domains mixed by default."""
        chosen = DOMAINS if domain is None else (domain,)
        load_LE = np.stack([self.load(name) for name in chosen]).mean(axis=0)
        ratio: npt.NDArray[np.float64] = load_LE.max(axis=1) / load_LE.mean(axis=1)
        return ratio

    def cosine(self, one: Domain, other: Domain) -> npt.NDArray[np.float64]:
        """Cosine between two domains' loads per layer, [layers]; 1 for the same mix of experts."""
        a_LE, b_LE = self.load(one), self.load(other)
        norms_L = np.linalg.norm(a_LE, axis=1) * np.linalg.norm(b_LE, axis=1)
        return np.asarray((a_LE * b_LE).sum(axis=1) / norms_L)

    def load(self, domain: Domain) -> npt.NDArray[np.float64]:
        """Each expert's share of a domain's assignments, [layers, experts]; rows sum to 1."""
        load_LE = self.assignments_of[domain].sum(axis=0).astype(np.float64)
        return np.asarray(load_LE / load_LE.sum(axis=1, keepdims=True))

    def write(self, path: Path) -> None:
        """Write as JSON, one line per layer."""
        domains = ",\n".join(
            f"{json.dumps(name)}: [{','.join(_window_json(window) for window in windows)}\n]"
            for name, windows in self.assignments_of.items()
        )
        path.write_text(
            f'{{"window_tokens": {self.window_tokens}, "top_k": {self.top_k}, '
            f'"domains": {{\n{domains}\n}}}}\n',
            encoding="utf-8",
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            window_tokens=values["window_tokens"],
            top_k=values["top_k"],
            assignments_of={
                name: np.array(windows, dtype=np.int64)
                for name, windows in values["domains"].items()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heldout:
    """Mean next-token loss per domain in nats, and the loads of the same run."""

    loss_of: dict[Domain, float]
    trace: LoadTrace


@torch.no_grad()
def measure(
    model: Transformer,
    *,
    seed: int,
    num_windows: int = 4,
    window_sequences: int = 12,
    sequence_tokens: int = 256,
) -> Heldout:
    """Run held-out text of each domain through `model`; reproducible by seed.

    Raises:
        CorpusError: this Python installation has too little text.
    """
    loss_of: dict[Domain, float] = {}
    assignments_of: dict[Domain, Assignments] = {}
    for domain in DOMAINS:
        losses, windows = [], []
        sequences = _disjoint_sequences(
            domain, num=num_windows * window_sequences, num_tokens=sequence_tokens, seed=seed
        )
        for tokens_BT in sequences.split(window_sequences):
            output = model.forward_train(tokens_BT)
            losses.append(next_token_loss(output.logits_BTV, tokens_BT).item())
            windows.append(
                [
                    expert_load(r.expert_ids_TK, num_experts=model.config.n_routed_experts).tolist()
                    for r in output.routings
                ]
            )
        loss_of[domain] = float(np.mean(losses))
        assignments_of[domain] = np.array(windows, dtype=np.int64)
    trace = LoadTrace(
        window_tokens=window_sequences * sequence_tokens,
        top_k=model.config.num_experts_per_tok,
        assignments_of=assignments_of,
    )
    return Heldout(loss_of=loss_of, trace=trace)


def _disjoint_sequences(domain: Domain, *, num: int, num_tokens: int, seed: int) -> torch.Tensor:
    """Sequences from all over a domain's held-out text, int64 [num, num_tokens]."""
    source = text(domain, "heldout")
    rng = np.random.default_rng([seed, DOMAINS.index(domain)])
    starts = rng.permutation(source.size // num_tokens)[:num] * num_tokens
    return torch.from_numpy(
        np.stack([source[start : start + num_tokens] for start in starts]).astype(np.int64)
    )


def _window_json(window_LE: Assignments) -> str:
    rows = ",\n".join(json.dumps(row.tolist(), separators=(",", ":")) for row in window_LE)
    return f"\n[{rows}]"
