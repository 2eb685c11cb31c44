"""`Expected`: facts known to the reader that a file must agree with."""

from dataclasses import dataclass

from equipoise.formats.errors import FormatError
from equipoise.formats.placement import ExpertPlacement, check_ids
from equipoise.planning.arrays import ExpertTable, ShareTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Facts that a file must agree with; None if unknown."""

    num_layers: int | None = None
    num_experts: int | None = None
    num_ranks: int | None = None
    first_moe_layer: int | None = None
    """Number of the first MoE layer in the model: the number of leading dense layers."""

    def placement(
        self,
        table: ExpertTable,
        *,
        num_experts: int | None = None,
        num_ranks: int | None = None,
        first_moe_layer: int | None = None,
        share_of_slot: ShareTable | None = None,
        may_be_empty: bool = False,
    ) -> ExpertPlacement:
        """Build a file's placement, [layers, slots]; unknown facts come from here.

        Without a number of experts, there are as many as the ids need. Slots may be empty (-1) if
        the format `may_be_empty`.

        Raises:
            FormatError: the file disagrees, or the placement is not valid.
        """
        self._check("ranks", num_ranks, self.num_ranks)
        self._check("experts", num_experts, self.num_experts)
        if first_moe_layer is not None and self.first_moe_layer not in {None, first_moe_layer}:
            raise FormatError(
                f"its first MoE layer is layer {first_moe_layer} of the model, expected layer "
                f"{self.first_moe_layer}"
            )
        experts = num_experts or self.num_experts or int(table.max(initial=0)) + 1
        if not may_be_empty:
            check_ids(table, num_experts=experts, first_layer=self.first_moe_layer or 0, least=0)
        placement = ExpertPlacement(
            expert_of_slot=table,
            num_experts=experts,
            num_ranks=num_ranks or self.num_ranks,
            first_moe_layer=self.first_moe_layer if first_moe_layer is None else first_moe_layer,
            share_of_slot=share_of_slot,
        )
        if self.num_layers is not None and placement.num_layers != self.num_layers:
            raise FormatError(
                f"it has {placement.num_layers} MoE layers, expected {self.num_layers}; if it "
                f"counts dense layers too, set --first-moe-layer"
            )
        return placement

    def _check(self, what: str, found: int | None, expected: int | None) -> None:
        if found is not None and expected is not None and found != expected:
            raise FormatError(f"it has {found} {what}, expected {expected}")
