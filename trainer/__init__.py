"""The trainer: one program, the same on every rank, that turns rows into the next weights.

`spec`, `wire`, `client` and `checkpoints` are light and meant for the driver; everything else imports torch.
"""
