"""torch.compile(backend="flambeau")."""
