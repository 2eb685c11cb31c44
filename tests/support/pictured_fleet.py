"""A fleet as the web page's events, made up: for tests and pictures of the page in a browser."""

import json

import numpy as np

BEGAN_S = 1_790_000_000.0


class PicturedFleet:
    """Stands for `PageState`: pools by name, each with its `pool` and `heat` events."""

    def __init__(self, *pools):
        self.pools = {pool["pool"]: (pool, heat) for pool, heat in pools}
        self.leads = True
        self.latent_forms = {}
        """Those of pools; of others, all are the same."""

    async def events(self, name):
        fleet = {"leads": self.leads, "words": "", "leader": "", "pools": []}
        for pool, _ in self.pools.values():
            forms = self.latent_forms.get(pool["pool"], ["2 layers of 576"])
            summary = {"ranks_serving": pool["num_ranks"], "latent_forms": forms}
            fleet["pools"].append({**pool, **summary})
        events = {"fleet": json.dumps(fleet)}
        chosen = name or next(iter(self.pools), "")
        if chosen in self.pools:
            pool, heat = self.pools[chosen]
            events["pool"] = json.dumps(pool)
            if heat:
                events["heat"] = json.dumps(heat)
        return events


_HANDOVERS = {
    "prefill": {"held_prompts": 1951, "held_tokens": 12_288},
    "decode": {"handed_over_prompts": 1947, "handed_over_tokens": 10**6, "missing_tokens": 70},
}


def pictured_pool(
    name="decode", *, phase="decode", ranks=320, layers=58, windows=60, seed=7, silent=True
):
    """A pool that was balanced once, with one `silent` rank, or none; returns its two events."""
    random = np.random.default_rng(seed)
    load = random.lognormal(0, 0.03, (layers, ranks))
    load[0, ranks // 3] = 1.7
    percent = (100 * load / load.mean(axis=1, keepdims=True)).round().astype(int)
    shares = load.sum(axis=0) / load.sum()
    nodes = [(first, f"node-{first // 8:02}") for first in range(0, ranks, 8)]
    members = [_rank(name, rank, float(shares[rank])) for rank in range(ranks)]
    trouble = f"rank {ranks // 2} sent nothing for 26 s"
    if silent:
        members[ranks // 2] |= {"state": "silent"}
    of_layer = load.mean(axis=1) / load.max(axis=1)
    settled = np.maximum(np.arange(windows) - windows // 3, 0) / 1.5
    values = of_layer.mean() - (of_layer.mean() - 0.68) * np.exp(-settled)
    values += random.normal(0, 0.004, windows)
    values[-1] = of_layer.mean()
    closed = [_window(number, float(value), windows) for number, value in enumerate(values)]
    pool = {
        "pool": name, "phase": phase, "epoch": 3,
        "health": "degraded" if silent else "serving", "health_reason": trouble if silent else "",
        "generation": 12, "model": {"num_layers": layers, "num_experts": 256},
        "ranks": members, "num_ranks": ranks, "intended_ranks": ranks,
        "windows": closed, "interval_s": 10.0,
        "balancedness": float(values[-1]), "balancedness_min_layer": float(of_layer.min()),
        "rollout": {"state": "staging", "generation": 13, "moves": 212},
        "rollouts_completed": 11, "rollouts_aborted": 1,
        "handovers": {
            **dict.fromkeys(("handed_over_prompts", "handed_over_tokens", "missing_tokens"), 0),
            **dict.fromkeys(("held_prompts", "held_tokens"), 0), **_HANDOVERS.get(phase, {}),
        },
        "switches": [
            {"generation": 12, "step": 48_120, "max_stall_us": 4100, "moves": 640,
             "staging_s": 3.2, "time_unix_s": closed[windows // 3]["closed_unix_s"]}
        ],
        "gains": [], "audit": [], "rejections": [], "hold": None,
        "quarantined": [], "poison_requests": 0,
        "policy": {"hash": "7f08adebb286", "rejection": "", "is_paused": False},
        "timeouts": [{"name": "report", "timeout_s": 5.0, "reached": int(silent),
                      "latest": f"rank {ranks // 2} sent nothing for 5 s"}],
        "epochs": [{"epoch": 3, "workers": [one["worker"] for one in members],
                    "reason": f"{ranks} workers are connected", "opened_unix_s": BEGAN_S,
                    "serving_after_s": 41.5}],
        "decisions": [
            {"sequence": 41, "kind": "plan", "accepted": True, "time_unix_s": BEGAN_S + 205,
             "reason": "incremental plan raises balancedness on the latest window from 0.682 to "
             "0.941: it raises throughput by at most 38.0% (no step times are reported); it takes "
             "640 moves of 26.2 GiB in total, which cost 0.364 s of serving and pay back after "
             "1.32 s",
             "balancedness_current": 0.682, "balancedness_proposed": 0.941, "moves": 640,
             "bytes": 28_160_000_000, "plan_ms": 1840.0},
            {"sequence": 40, "kind": "plan", "accepted": False, "time_unix_s": BEGAN_S + 195,
             "reason": "the latest window has 1204 assignments per layer, but a decision needs "
             "2000",
             "balancedness_current": 0.68, "balancedness_proposed": 0.68, "moves": 0, "bytes": 0,
             "plan_ms": 210.0},
            *({"sequence": number, "kind": "plan", "accepted": False,
               "time_unix_s": BEGAN_S + 5 * number - 10, "reason": "nothing to move: found no "
               "better layout than the current one, at 0.682", "balancedness_current": 0.682,
               "balancedness_proposed": 0.682, "moves": 0, "bytes": 0, "plan_ms": 240.0}
              for number in range(39, 33, -1)),
        ],
    }  # fmt: skip
    heat = {
        "window": windows, "generation": 12, "num_ranks": ranks, "ranks_per_column": 1,
        "percent": percent.tolist(), "nodes": nodes,
    }  # fmt: skip
    return pool, heat


def empty_pool(name="new"):
    """A pool whose first worker has just connected."""
    pool, _ = pictured_pool(name, ranks=8, layers=3)
    nothing = ("ranks", "windows", "switches", "timeouts", "epochs", "decisions")
    pool |= {one: [] for one in nothing}
    pool |= {"balancedness": None, "balancedness_min_layer": None, "rollout": None, "phase": ""}
    pool |= {"health": "waiting", "health_reason": "1 of 8 workers is connected", "num_ranks": 0}
    return pool, None


def _rank(pool, rank, share):
    return {
        "rank": rank, "worker": f"{pool}-equipoise-worker-{rank}", "node": f"node-{rank // 8:02}",
        "state": "connected", "trouble": "", "idle": False, "generation": 12,
        "staged_generation": 0, "median_step_us": 41_000 + 7 * rank, "active_requests": 96,
        "queued_requests": rank % 3, "load_share": share, "engine": "",
    }  # fmt: skip


def _window(number, value, windows):
    return {
        "window": number, "closed_unix_s": BEGAN_S + 10 * number, "balancedness": value,
        "assignments": 96_000_000, "generation": 11 if number <= windows // 3 else 12,
        "shift_detected": number == windows // 3 - 1, "max_over_mean": 1 / value,
    }  # fmt: skip
