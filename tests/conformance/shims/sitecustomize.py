"""Lets torchvision be imported beside a CPU build of torch: it declares operators that its own library, linked to CUDA, cannot.

Python imports this module at start when its directory is on PYTHONPATH, in the server's child processes too.
"""

import importlib.abc
import sys


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Once, right before torchvision is first looked for."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch.headrace_operators = library  # what is declared lives as long as this object


sys.meta_path.insert(0, DeclareOperators())
