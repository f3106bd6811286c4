"""The clauses, by what they are about."""
