"""A tiny hybrid model served by a prefill engine and a decode engine, to show Statelink at work."""
