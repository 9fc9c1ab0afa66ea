"""Mixture of experts: the layer without TransformerEngine, and the replay of the engine's routing.

Experts sit under TransformerEngine's names (`linear_fc1.weight0` ...), so checkpoints and mbridge's mappings fit both. They are split over
`ep` ranks, never inside an expert; no load-balancing loss is added (mbridge's default for reinforcement learning).

Replay: a row may carry which experts its tokens went to when it was sampled. These choices travel with the micro-batch, in the argument
that describes its packing, so that every forward pass of a layer, a recomputed one in the middle of a pipeline too, sees its own
micro-batch's. The router takes them where they are known and its own top-k elsewhere, and weighs the chosen experts by its live logits:
its gradient flows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from trainer.routes import LIVE

_ROUTED_AGAIN = {"moe", "mlp"}
"""Megatron's selective recomputation of these runs the router outside its layer's forward."""


class GroupedLinear(torch.nn.Module):
    """One linear for each local expert, weights [out, in] each; the tokens come sorted by expert."""

    def __init__(self, experts: int, input_size: int, output_size: int, *, config: Any, init_method: Any, bias: bool, **_: Any) -> None:
        super().__init__()
        assert not bias and config.expert_tensor_parallel_size == 1
        for number in range(experts):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(weight)
            # Its gradient is summed over the ranks that have this expert, not over all. And its norm counts on each of them: Megatron
            # drops what is not "tensor parallel" on all tensor-parallel ranks but the first, where other experts live.
            weight.allreduce = False  # type: ignore[attr-defined]
            weight.tensor_model_parallel = config.expert_model_parallel_size > 1  # type: ignore[attr-defined]
            weight.partition_dim = 0  # type: ignore[attr-defined]
            weight.partition_stride = 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: torch.Tensor, tokens_per_expert: list[int]) -> tuple[torch.Tensor, None]:
        """x [t, in] -> [t, out], and no bias. An expert without tokens takes part too: its gradient is 0, not missing."""
        parts = zip(x.split(tokens_per_expert), self.parameters(), strict=True)
        return torch.cat([F.linear(tokens, weight) for tokens, weight in parts]), None


class Replay:
    """What Megatron's router asks for its top-k, in place of Megatron's own replay, which forces all tokens or none."""

    def __init__(self) -> None:
        self.chosen: torch.Tensor | None = None
        """[t, k] of the micro-batch at hand; LIVE where the router is to choose"""

    def get_replay_topk(self, scores: torch.Tensor, k: int, groups: Any, group_k: Any, top_k: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """scores [t, experts] -> scores [t, k] and numbers [t, k] of the chosen experts."""
        live_scores, live = top_k(scores, k, groups, group_k)
        if self.chosen is None:
            return live_scores, live
        chosen = torch.where(self.chosen == LIVE, live, self.chosen)
        return scores.gather(1, chosen), chosen


class ReplayRouter(TopKRouter):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = Replay()


class MoETransformerLayer(TransformerLayer):
    """Gives the router its micro-batch's choices, before anything else of each forward pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        modules = self.config.recompute_modules if self.config.recompute_granularity == "selective" else ()
        assert not _ROUTED_AGAIN & set(modules or ()), "the router would run again without its micro-batch's choices"

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams, **kwargs: Any) -> Any:
        self.mlp.router.router_replay.chosen = self._choices(packed_seq_params)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def _choices(self, packing: PackedSeqParams) -> torch.Tensor | None:
        """[t, k] of this layer's tokens on this rank; None when no token's are known."""
        routes = packing.routes if isinstance(packing, RoutedPacking) else None
        if routes is None:
            return None
        chosen = routes[:, self.layer_number - 1].long()
        if self.config.sequence_parallel:
            chosen = chosen.chunk(self.config.tensor_model_parallel_size)[parallel_state.get_tensor_model_parallel_rank()]
        return chosen


def mlp_spec() -> ModuleSpec:
    """Router, dispatch and experts of one layer. The norm before it is a module of its own, for the router reads it too."""
    experts = ModuleSpec(module=TEGroupedMLP, submodules=MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear))
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=ReplayRouter))


@dataclass
class RoutedPacking(PackedSeqParams):
    """How a micro-batch is packed, and where its tokens go."""

    lengths: tuple[int, ...] = ()
    """whole and padded, of its sequences: as numbers, so that no layer has to fetch `cu_seqlens_q` from a GPU"""
    routes: torch.Tensor | None = None
    """[t, layers, k] int32, of all the model's layers; LIVE where nothing is known"""
