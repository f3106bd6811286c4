"""The clauses of the contract, by theme."""
