"""`Expected`: what the reader of a file knows that the file may not say."""

from dataclasses import dataclass

from equipoise.formats.errors import FormatError
from equipoise.formats.placement import Placement
from equipoise.planning.arrays import ExpertTable, ShareTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a file must agree with; None where nothing is known.

    `first_moe_layer` is the layer of the model that the first MoE layer is, so also the number of
    dense layers at the start.
    """

    num_layers: int | None = None
    num_experts: int | None = None
    num_ranks: int | None = None
    first_moe_layer: int | None = None

    def placement(
        self,
        table: ExpertTable,
        *,
        num_experts: int | None = None,
        num_ranks: int | None = None,
        first_moe_layer: int | None = None,
        share_of_slot: ShareTable | None = None,
    ) -> Placement:
        """What a file says, [layers, slots], completed by what is expected, and held against it.

        A file that does not say how many experts there are has as many as its ids need.

        Raises:
            FormatError: the file disagrees, or is no valid placement.
        """
        self._check("ranks", num_ranks, self.num_ranks)
        self._check("experts", num_experts, self.num_experts)
        if first_moe_layer is not None:
            self._check_first_layer(first_moe_layer)
        experts = num_experts or self.num_experts or int(table.max(initial=0)) + 1
        placement = Placement(
            expert_of_slot=table,
            num_experts=experts,
            num_ranks=num_ranks or self.num_ranks,
            first_moe_layer=self.first_moe_layer if first_moe_layer is None else first_moe_layer,
            share_of_slot=share_of_slot,
        )
        if self.num_layers is not None and placement.num_layers != self.num_layers:
            raise FormatError(
                f"it has {placement.num_layers} MoE layers, expected are {self.num_layers}; if it "
                f"counts dense layers too, say --first-moe-layer"
            )
        return placement

    def _check(self, what: str, found: int | None, expected: int | None) -> None:
        if found is not None and expected is not None and found != expected:
            raise FormatError(f"it has {found} {what}, expected are {expected}")

    def _check_first_layer(self, found: int) -> None:
        if self.first_moe_layer is not None and found != self.first_moe_layer:
            raise FormatError(
                f"its first MoE layer is layer {found} of the model, expected is layer "
                f"{self.first_moe_layer}"
            )
