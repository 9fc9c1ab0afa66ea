"""Lets torchvision be imported beside the CPU build of torch, in servers that Headrace starts on a CPU.

The wheel's compiled part is linked against CUDA and does not load, so the two operators that torchvision's Python wants to describe at its
import do not exist. They are declared just before that import, without a body: SGLang imports torchvision for image models and a text model
never calls them. Python runs this file by itself at its start, in a server's children too.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

OPERATORS = ("nms", "qnms")


class DeclareFirst(MetaPathFinder):
    """Finds nothing; it only notices that torchvision is about to be imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        # Declarations live as long as their library object.
        self.library = torch.library.Library("torchvision", "DEF")
        for operator in OPERATORS:
            self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        keep.append(self)


keep: list[DeclareFirst] = []
sys.meta_path.insert(0, DeclareFirst())
