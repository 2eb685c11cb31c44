"""One rank of vLLM's `EplbState` on a CPU: its real planner, mover, tables and counters."""

import importlib
import inspect
import time
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from vllm import logger
from vllm.config.parallel import EPLBConfig
from vllm.distributed import parallel_state
from vllm.distributed.eplb import eplb_communicator, eplb_state
from vllm.distributed.eplb.eplb_state import EplbLayerState, EplbState
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.model_executor.models.interfaces import MixtureOfExperts
from vllm.plugins import load_general_plugins
from vllm.v1.worker import gpu_worker

from tests.engines.rank_main import prepare
from tests.engines.weights import expert_tensors, wrong_slot

KNUTH = 2654435769


def set_up_logs(_rank):
    """As vLLM does in each process."""
    if hasattr(logger, "configure_logging"):  # Releases before 0.33 do when they are imported.
        config = importlib.import_module("vllm.config.logging")
        logger.configure_logging(config.LoggingConfig())


def dispatch(state, topk):
    """Slots of logical experts [tokens, k], counted: what vLLM's kernel does, which needs a GPU.

    `tests.engines.dispatch_main` compares the two.
    """
    row = torch.arange(len(topk))[:, None].expand_as(topk)
    pick = ((row * KNUTH) & 0xFFFFFFFF) % state.logical_replica_count[topk]
    slot = state.logical_to_physical_map[topk, pick]
    enabled = getattr(state, "should_record_tensor", None)  # Some releases always count.
    if enabled is None or enabled:
        one = torch.ones(slot.numel(), dtype=state.expert_load_view.dtype)
        state.expert_load_view.scatter_add_(0, slot.flatten(), one)
    return slot


class Group:
    """What `EplbState` asks of a `GroupCoordinator`."""

    device_communicator = None

    def __init__(self, options, rank):
        self.world_size, self.device = options.stage_ranks, torch.device("cpu")
        stage, self.rank_in_group = divmod(rank, options.stage_ranks)
        self.cpu_group, self.device_group = (self.groups(options)[stage] for _ in range(2))

    @staticmethod
    def groups(options):
        num = options.stage_ranks
        firsts = range(0, options.ranks, num)
        return [dist.new_group(range(first, first + num), backend="gloo") for first in firsts]


class Event:
    """CPU events cannot be timed."""

    def __init__(self, *_args, **_options):
        self.at = 0.0

    def record(self, *_args):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    wait = synchronize

    def query(self):
        return True

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


class Layer:
    def __init__(self, layer, num_experts, own, dim):
        self.eplb_state = EplbLayerState()
        self.whole = expert_tensors(layer, num_experts, dim)
        self.w13, self.w2, self.scale = (tensor[own].clone() for tensor in self.whole)

    def get_expert_weights(self):
        slots = len(self.scale)
        return [self.w13.view(slots, -1), self.w2.view(slots, -1), self.scale]

    def set_eplb_state(
        self, moe_layer_idx, expert_load_view, logical_to_physical_map, logical_replica_count
    ):
        tables = (expert_load_view, logical_to_physical_map, logical_replica_count)
        if hasattr(self.eplb_state, "set_layer_state"):
            self.eplb_state.set_layer_state(moe_layer_idx, *tables)
            return
        names = ("expert_load_view", "logical_to_physical_map", "logical_replica_count")
        for name, table in zip(names, tables, strict=True):  # As releases before 0.30 do.
            setattr(self.eplb_state, name, table[moe_layer_idx])


class Model(MixtureOfExperts):
    num_expert_groups, num_shared_experts = 1, 0

    def __init__(self, options, rank):
        stage, rank = divmod(rank, options.stage_ranks)
        self.expert_weights = []
        # Some models count those of all stages, so that tables have more rows than are used.
        self.num_moe_layers = options.layers * options.stages
        self.num_logical_experts = self.num_routed_experts = options.experts
        self.num_redundant_experts = options.redundant
        self.num_physical_experts = options.experts + options.redundant
        self.num_local_physical_experts = num = self.num_physical_experts // options.stage_ranks
        first = EplbState.build_initial_global_physical_to_logical_map(
            options.experts, options.redundant
        )
        own = first[rank * num : (rank + 1) * num]
        first_layer = stage * options.layers
        self.moe_layers = [
            Layer(first_layer + layer, options.experts, own, options.dim)
            for layer in range(options.layers)
        ]


class Rank:
    def __init__(self, options, rank):
        self.options, self.rank, self.record = options, rank, None
        self.reports = []
        parallel_state._EP, parallel_state._EPLB = Group(options, rank), Group(options, rank)
        parallel_state._PP = SimpleNamespace(rank_in_group=rank // options.stage_ranks)
        parallel_state._NODE_COUNT = 1
        eplb_state.get_node_count = lambda: 1
        eplb_communicator.is_local_first_rank = lambda: False
        eplb_state.PIN_MEMORY = False
        torch.Event = torch.cuda.Event = eplb_state.torch.Event = Event
        torch.accelerator.synchronize = lambda *_: None  # The mover of older releases calls it.
        ours = options.planner == "equipoise"
        if options.planner != "engine":
            load_general_plugins()
            assert hasattr(EplbState.step, "equipoise"), "the plugin was not loaded"
        config = EPLBConfig(
            window_size=1 if ours else 50,
            step_interval=10**9 if ours else 100,
            num_redundant_experts=options.redundant,
            use_async=False,
            communicator="torch_nccl",
        )
        parallel = SimpleNamespace(
            eplb_config=config,
            enable_elastic_ep=False,
            num_ubatches=0,
            enable_eplb=True,
            pipeline_parallel_size=options.stages,
        )
        self.state = EplbState(parallel, torch.device("cpu"))
        self.model = Model(options, rank)
        self.state.add_model(
            self.model, SimpleNamespace(model="fake-moe", compute_hash=lambda: "h")
        )
        if ours:  # As after a month of fast passes: its planner is due while the plugin balances.
            self.state.expert_rearrangement_step = config.step_interval - 300
        (self.model_state,) = self.state.model_states.values()
        self.draws = np.random.default_rng(7 + rank)
        self.weights = [
            np.random.default_rng(100 + phase).dirichlet(
                np.full(options.experts, 0.25), size=options.layers
            )
            for phase in range(2)
        ]
        rearrange = self.state.rearrange

        def counted(*args, **named):
            self.record.planner_runs += 1
            return rearrange(*args, **named)

        self.state.rearrange = counted
        self._watched = False

    def seat(self):
        """The plugin's, once this process's one engine has taken it."""
        return next(iter(getattr(EplbState.step, "equipoise", ())), None)

    def route(self, phase, tokens=32, k=4):
        """Logical top-k by a skewed draw, then vLLM's rule; returns what the slots received."""
        options, counts = self.options, []
        for layer, weights in enumerate(self.weights[phase]):
            state = self.model.moe_layers[layer].eplb_state
            topk = torch.from_numpy(self.draws.choice(options.experts, size=(tokens, k), p=weights))
            slot = dispatch(state, topk)
            assert torch.equal(self.model_state.physical_to_logical_map[layer][slot], topk)
            counts.append(slot.flatten().bincount(minlength=options.experts + options.redundant))
        return torch.stack(counts)

    def step(self):
        self.state.step()
        seat = self.seat()
        if seat is not None and not self._watched and seat.is_ready:
            self._watched = True
            prepare(self, seat)

    def update(self, *, announced):
        """New weights for all experts, by vLLM's worker or behind its back."""

        def write():
            for layer in self.model.moe_layers:
                layer.w13.add_(1.0)
                layer.whole[0].add_(1.0)

        if not announced:
            write()
            return
        worker = object.__new__(gpu_worker.Worker)
        worker.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(mode=None, enabled_custom_ops={}), model_config=None
        )
        worker.model_runner = SimpleNamespace(reload_weights=write)
        worker.reload_weights()

    def fault(self):
        num = self.model.num_local_physical_experts
        rank = self.rank % self.options.stage_ranks
        own = self.tables()[0][:, rank * num : (rank + 1) * num]
        for layer, one in enumerate(self.model.moe_layers):
            if wrong := wrong_slot((one.w13, one.w2, one.scale), one.whole, own[layer]):
                return f"layer {layer}: {wrong}"
        return ""

    def whole_tables(self):
        """The tables that vLLM reads; first the experts of the slots, last the replica counts."""
        state = self.model_state
        return [
            state.physical_to_logical_map,
            state.logical_to_physical_map,
            state.logical_replica_count,
        ]

    def tables(self):
        """What of them is in use."""
        layers, most = slice(self.options.layers), self.options.experts + self.options.redundant
        experts, slots, counts = self.whole_tables()
        return [experts[layers], slots[layers, :, :most], counts[layers]]

    def compare(self, before, after, copies):
        """Compare a switch with vLLM's own mover and maps."""
        known = {
            "old_global_expert_indices": before,
            "new_global_expert_indices": after,
            "expert_weights": copies,
            "expert_buffer": [torch.empty_like(tensor) for tensor in copies[0]],
            "ep_group": parallel_state._EP.device_group,
            "communicator": self.model_state.communicator,
        }
        wanted = inspect.signature(rearrange_expert_weights_inplace).parameters
        rearrange_expert_weights_inplace(**{n: known[n] for n in wanted if n in known})
        maps, counts = eplb_state.compute_logical_maps(after, self.options.experts)
        padded = torch.full_like(self.model_state.logical_to_physical_map, -1)
        padded[:, :, : maps.shape[2]] = maps
        ours = [tensor for layer in self.model.expert_weights for tensor in layer]
        theirs = [tensor for layer in copies for tensor in layer]
        return {
            "weights": all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True)),
            "tables": torch.equal(self.model_state.logical_to_physical_map, padded)
            and torch.equal(self.model_state.physical_to_logical_map, after),
            "counts": torch.equal(self.model_state.logical_replica_count, counts),
        }

    def copies(self):
        return [[tensor.clone() for tensor in layer] for layer in self.model.expert_weights]
