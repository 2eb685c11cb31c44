"""One rank of SGLang's expert balancing on a CPU: its real recorder, dispatch, tables and mover."""

import importlib
import inspect
import os
import pkgutil
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.eplb import (
    eplb_manager,
    expert_distribution,
    expert_location,
    expert_location_updater,
)
from sglang.srt.eplb.expert_location_dispatch import (
    ExpertLocationDispatchInfo,
    topk_ids_logical_to_physical,
)
from sglang.srt.plugins import load_plugins
from sglang.srt.utils import configure_logger

from equipoise.engines import sglang
from tests.engines.rank_main import prepare
from tests.engines.weights import expert_tensors, wrong_slot

DENSE = 1
"""Dense layers before the MoE layers, which SGLang counts too."""

TABLES = (
    "physical_to_logical_map",
    "physical_to_logical_map_cpu",
    "logical_to_all_physical_map",
    "logical_to_all_physical_map_cpu",
)
COUNTS = "logical_to_all_physical_map_num_valid"

PLACE = ExitStack()
"""Keeps the rank's place in SGLang's context."""


def configure(place, **options):
    """Publish SGLang's options and a rank's place, as its release does; returns the options."""
    try:
        context = importlib.import_module("sglang.srt.runtime_context")
        override = context.get_context().override_server_args
    except (ImportError, AttributeError):  # Before 0.5.16, its manager has the place.
        server_args = importlib.import_module("sglang.srt.server_args")
        known = dict.fromkeys(server_args.ServerArgs.__dataclass_fields__) | options
        server_args.set_global_server_args_for_scheduler(SimpleNamespace(**known))
        return server_args.get_global_server_args()
    PLACE.enter_context(context.get_parallel().override(**place))
    return override(**options).install()


def set_up_logs(rank):
    """As SGLang does in each process."""
    configure_logger(SimpleNamespace(log_level="info"), prefix=f" EP{rank}")


def updater_of_this_release():
    """The class whose methods write weights in place."""
    return pkgutil.resolve_name(
        next(sglang._places_of("update_weights_from_disk")).rpartition(".")[0]
    )


class Rank:
    def __init__(self, options, rank):
        self.options, self.rank, self.record = options, rank, None
        self.reports = []
        ours = options.planner == "equipoise"
        total, slots = options.layers * options.stages + DENSE, options.experts + options.redundant
        stage, in_stage = divmod(rank, options.stage_ranks)
        first_layer = DENSE + stage * options.layers
        self.layers = list(range(first_layer, first_layer + options.layers))
        self.place = {
            "tp_rank": in_stage,
            "moe_ep_rank": in_stage,
            "moe_ep_size": options.stage_ranks,
            "pp_rank": stage,
            "pp_size": options.stages,
        }
        self.server_args = configure(
            self.place,
            device="cpu",
            enable_eplb=True,
            ep_num_redundant_experts=options.redundant,
            ep_size=options.stage_ranks,
            tp_size=options.stage_ranks,
            pp_size=options.stages,
            nnodes=1,
            moe_a2a_backend="none",
            deepep_mode="normal",
            ep_dispatch_algorithm="dynamic",
            expert_distribution_recorder_mode="stat",
            expert_distribution_recorder_buffer_size=1 if ours else 50,
            eplb_rebalance_num_iterations=10**9 if ours else 100,
        )
        if not hasattr(torch.cpu, "empty_cache"):
            torch.cpu.empty_cache = lambda: None
        torch.cpu.is_current_stream_capturing = lambda: False
        expert_location.ModelConfigForExpertLocation.from_model_config = staticmethod(
            lambda _config: expert_location.ModelConfigForExpertLocation(
                num_layers=total, num_logical_experts=options.experts, num_groups=None
            )
        )
        expert_distribution.get_device = lambda: "cpu"
        self.config = SimpleNamespace(hf_config=None)
        first = (torch.arange(slots) % options.experts).repeat(total, 1)
        expert_location.set_global_expert_location_metadata(self.metadata_of(first))
        self.metadata = expert_location.get_global_expert_location_metadata()
        expert_distribution.set_global_expert_distribution_recorder(
            self.call(
                expert_distribution.ExpertDistributionRecorder.init_new,
                expert_location_metadata=self.metadata,
                rank=rank,
            )
        )
        self.recorder = expert_distribution.get_global_expert_distribution_recorder()
        self.num_own = slots // options.stage_ranks
        self.own = slice(in_stage * self.num_own, (in_stage + 1) * self.num_own)
        own = first[0, self.own].tolist()
        self.whole = {
            layer: expert_tensors(layer, options.experts, options.dim) for layer in self.layers
        }
        self.weights = {
            layer: [tensor[own].clone() for tensor in whole] for layer, whole in self.whole.items()
        }
        self.hooks = None if options.planner == "engine" else self.load_plugin()
        model = SimpleNamespace(routed_experts_weights_of_layer=self.weights)
        updater = expert_location_updater.ExpertLocationUpdater()
        self.manager = self.call(
            eplb_manager.EPLBManager,
            model_config=self.config,
            ps=None,
            get_model=lambda: model,
            get_expert_location_updater=lambda: updater,
            get_expert_backup_client=lambda: None,
            get_weight_updater=lambda: SimpleNamespace(update_weights_from_disk=None),
            model_runner=SimpleNamespace(
                server_args=self.server_args,
                model_config=self.config,
                model=model,
                update_expert_location=lambda to, update_layer_ids: updater.update(
                    self.weights, to, update_layer_ids=update_layer_ids, nnodes=1, rank=rank
                ),
                **self.place,
            ),
        )
        rebalance = self.manager.rebalance

        def counted():
            self.record.planner_runs += 1
            return rebalance()

        self.manager.rebalance = counted
        self.draws = np.random.default_rng(7 + rank)
        self.skews = [
            np.random.default_rng(100 + phase).dirichlet(
                np.full(options.experts, 0.25), size=options.layers
            )
            for phase in range(2)
        ]
        self.number = 0
        self._watched = False

    @staticmethod
    def load_plugin():
        """Load the plugin as SGLang does; returns the hooks that it registers."""
        made = []
        register = sglang.Hooks.register
        sglang.Hooks.register = lambda hooks: made.append(hooks) or register(hooks)
        load_plugins()
        (hooks,) = made
        return hooks

    def metadata_of(self, table):
        return self.call(
            expert_location.ExpertLocationMetadata.init_by_mapping,
            model_config=self.config,
            physical_to_logical_map=table,
            moe_ep_rank=None,
        )

    def call(self, function, **named):
        """Call with those arguments that this release takes."""
        wanted = inspect.signature(function).parameters
        named["server_args"] = self.server_args
        return function(**{name: value for name, value in named.items() if name in wanted})

    def seat(self):
        return self.hooks.seat if self.hooks else None

    def route(self, phase, tokens=32, k=4):
        self.number += 1
        counts = torch.zeros(self.options.layers, self.num_own * self.options.stage_ranks)
        with self.recorder.with_forward_pass(self.number, None):
            for row, layer in enumerate(self.layers):
                skew = self.skews[phase][row]
                topk = torch.from_numpy(
                    self.draws.choice(self.options.experts, size=(tokens, k), p=skew)
                )
                slot = topk_ids_logical_to_physical(
                    topk, ExpertLocationDispatchInfo.init_new(layer)
                )
                assert torch.equal(self.metadata.physical_to_logical_map[layer][slot], topk)
                with self.recorder.with_current_layer(layer):
                    self.recorder.on_select_experts(topk_ids=slot)
                counts[row].scatter_add_(0, slot.flatten(), torch.ones(slot.numel()))
        return counts

    def step(self):
        self.manager.on_forward_pass_end()
        seat = self.seat()
        if seat is not None and not self._watched and seat.is_ready:
            self._watched = True
            prepare(self, seat)

    def update(self, *, announced):
        """New weights for all experts, by SGLang's scheduler or behind its back."""

        def write(*_args, **_named):
            for layer in self.layers:
                self.weights[layer][0].add_(1.0)
                self.whole[layer][0].add_(1.0)
            return True, "done"

        if not announced:
            write()
            return
        request = SimpleNamespace(
            model_path="",
            load_format="",
            recapture_cuda_graph=False,
            weight_version=None,
            flush_cache=True,
            torch_empty_cache=False,
        )
        worker = SimpleNamespace(
            update_weights_from_disk=write,
            weight_update_runners=lambda: [
                (
                    "target",
                    SimpleNamespace(weight_updater=SimpleNamespace(update_weights_from_disk=write)),
                )
            ],
        )
        updater = updater_of_this_release()
        manager = object.__new__(updater)
        manager.tp_worker, manager.draft_worker = worker, None
        manager.flush_cache = lambda **_named: True
        if hasattr(updater, "_observe_weight_load"):
            manager.metrics_collector = None
            manager.scheduler = SimpleNamespace(record_weight_version_change=lambda **_named: None)
        manager.update_weights_from_disk(request)

    def fault(self):
        for layer in self.layers:
            own = self.metadata.physical_to_logical_map[layer, self.own]
            if wrong := wrong_slot(self.weights[layer], self.whole[layer], own):
                return f"layer {layer}: {wrong}"
        return ""

    def whole_tables(self):
        """The tables that SGLang reads; first the experts of the slots, last the replica counts."""
        return [getattr(self.metadata, name) for name in (*TABLES, COUNTS)]

    def tables(self):
        """What of them is in use, the same on all ranks."""
        return [table[self.layers] for table in self.whole_tables()]

    def copies(self):
        return {layer: [tensor.clone() for tensor in self.weights[layer]] for layer in self.layers}

    def compare(self, before, after, copies):
        """Compare a switch with SGLang's own mover, canary on, and with its own tables."""
        os.environ["SGLANG_EXPERT_LOCATION_UPDATER_CANARY"] = "1"

        def metadata(table):
            full = self.metadata.physical_to_logical_map_cpu.clone()
            full[self.layers] = table
            return self.metadata_of(full)

        theirs = metadata(after)
        expert_location_updater._update_expert_weights(
            routed_experts_weights_of_layer=copies,
            old_expert_location_metadata=metadata(before),
            new_expert_location_metadata=theirs,
            update_layer_ids=self.layers,
            nnodes=1,
            rank=self.rank,
        )
        return {
            "weights": all(
                torch.equal(*pair)
                for layer in self.layers
                for pair in zip(self.weights[layer], copies[layer], strict=True)
            ),
            "tables": all(
                torch.equal(getattr(self.metadata, name), getattr(theirs, name)) for name in TABLES
            ),
            "counts": torch.equal(getattr(self.metadata, COUNTS), getattr(theirs, COUNTS)),
        }
