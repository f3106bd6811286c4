"""vLLM's own NIXL connector, side by side with Statelink in engines of vLLM."""
