"""The kill matrix: processes of a real run killed and stopped at chosen moments, and the accounts afterwards.

The product has no hook for this. `tests.chaos.driver` and `tests.chaos.trainer` are the product's own programs, started with some of
their functions wrapped before `main` is called: so every moment can be hit exactly, and the hot path that users run is untouched.
"""
