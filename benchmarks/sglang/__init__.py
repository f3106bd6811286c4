"""SGLang's real pools and connectors, side by side with Statelink behind the same calls."""
