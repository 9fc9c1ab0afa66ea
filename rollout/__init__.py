"""Generation: talk to SGLang engines in tokens, spread requests over them, and turn conversations into training rows.

Nothing here imports torch, except the embedded engine in `rollout.engine`, which runs as a process of its own.
"""
