"""A policy loss of one's own. Check it: headrace selfcheck loss examples/own_loss/loss.py:soft_clip"""

import torch


def soft_clip(tokens, spec):
    """-A w tanh((r - 1) / w): PPO's gain near r = 1, then a gradient that fades over `width` where a clip would cut it off."""
    width = spec.params.get("width", 0.2)
    ratio = torch.exp(tokens.log_probs - tokens.old)
    loss = -tokens.advantage * width * torch.tanh((ratio - 1.0) / width)
    return loss, (ratio - 1.0).abs() > width
