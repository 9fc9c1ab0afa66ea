"""Figures, each a script: `python -m benchmarks.NAME [--quick] [--json FILE]`. Side by side in one run, medians and ratios."""
