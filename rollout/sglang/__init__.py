"""The real SGLang server as an engine: where it is installed, how it is started, and in which form it takes weights.

SGLang lives in an environment of its own (`make sglang`), because its pins and ours do not meet; nothing here imports it, or torch.
`shims/` is Python for that environment alone: the few names without which a stock SGLang cannot be imported on a CPU.
"""
