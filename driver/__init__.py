"""The control plane: the one process that holds state. Ledger, batches, weight pushes, processes, REST and the terminal. No torch."""
