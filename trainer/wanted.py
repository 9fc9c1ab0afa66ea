"""Logits of the wanted tokens alone.

Of a micro-batch's tokens only the trained ones need logits, and a row of logits is the widest thing a model computes. So the hidden states
of the wanted positions are picked out before the output layer, and it, the loss and their backward see nothing else.

The positions are those of the forward at hand: they are set before it and read inside it. A pipeline stage has several micro-batches in
flight, but one forward at a time, and a backward that recomputes does so for decoder layers, which end before this.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


class Wanted:
    """Stands before the output layer of a pipeline's last stage, and changes no parameter. On other stages it does nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.positions: torch.Tensor | None = None
        """[n] int64 of this rank's t tokens; none of them, for a micro-batch that wants nothing, is well too"""
        layer: Any = getattr(model, "output_layer", None)
        if layer is None:
            return
        self._gathers = layer.sequence_parallel
        if self._gathers:
            # The layer would gather the tokens itself and scatter their gradients. Those are picked between the two, so both happen here,
            # and the layer sums its gradients over tensor-parallel ranks as it does without sequence parallelism.
            layer.sequence_parallel = False
            layer.allreduce_dgrad = True
        layer.register_forward_pre_hook(self._pick)

    def _pick(self, layer: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        """[t, 1, h], or [t / tp, 1, h] with sequence parallelism -> [n, 1, h]."""
        assert self.positions is not None
        hidden = inputs[0]
        if self._gathers:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return (hidden.index_select(0, self.positions),)
